//! Containment of panics: one ends the VM that the thread belongs to, or one request; never the
//! daemon.
//!
//! Of a VM that runs here nothing leaves any more, its QEMU ends, and its connections do: the backup
//! takes over. Of one that is backed up here the copy ends, and its primary hears why. Members of
//! its group share its fate, as in any failure, but for those that nobody else has yet, in their first
//! copy. What several VMs share ends the daemon, should a thread panic with it: `understudy_threads`
//! has the rules.

use crate::host::Host;
use crate::vm::{FencedVm, PrimaryVm, Vm};
use crossbeam_channel::{Receiver, Sender};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::error;
use understudy_protocol::{BackupPhase, VmName};
use understudy_replication::{backup, primary};
use understudy_threads::{Owner, Scope, spawn, within};

/// Time for a backup's own end, which a thread that has panicked may have been to see to.
const PATIENCE: Duration = Duration::from_secs(4);
/// Time between two looks.
const GLANCE: Duration = Duration::from_millis(20);

/// A panic in a thread of a VM.
pub(crate) struct Panic {
    vm: VmName,
    words: String,
}

/// Sender to which panics are told.
pub(crate) type Panics = Sender<Panic>;

/// The owner of a VM's threads.
struct OfVm {
    panics: Panics,
    vm: VmName,
}

impl Owner for OfVm {
    fn panicked(&self, words: &str) {
        die_in_a_test(words);
        // The other end lives as long as the host.
        let _ = self.panics.send(Panic { vm: self.vm.clone(), words: words.to_owned() });
    }

    fn only_looks(&self) -> bool {
        false
    }
}

/// The owner of threads that see to one request, a connection or an order, and are all that ends.
struct OfRequest;

impl Owner for OfRequest {
    fn panicked(&self, words: &str) {
        die_in_a_test(words);
    }

    fn only_looks(&self) -> bool {
        true
    }
}

/// A fail point that panics stands for the death of the whole daemon.
fn die_in_a_test(_words: &str) {
    #[cfg(feature = "fail-points")]
    if _words.starts_with("failpoint ") {
        std::process::abort();
    }
}

/// Scope that the threads of a VM belong to.
pub(crate) fn of_vm(host: &Host, vm: &VmName) -> Scope {
    Scope::new(OfVm { panics: host.panics.clone(), vm: vm.clone() })
}

/// Scope that the threads of one request belong to.
pub fn of_request() -> Scope {
    Scope::new(OfRequest)
}

/// Starts a thread of a VM, whoever asks for it.
pub(crate) fn spawn_for(
    host: &Host,
    vm: &VmName,
    role: &str,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    within(&of_vm(host, vm), || spawn(format!("{role}-{vm}"), body)).map(drop)
}

/// Starts a thread that sees to a request and is waited for with a bound, or whose absence its
/// request notices: that there is no thread for it is only said.
pub(crate) fn spawn_for_request(role: &str, body: impl FnOnce() + Send + 'static) {
    if let Err(error) = within(&of_request(), || spawn(role, body)) {
        error!("cannot start the thread {role}: {error}");
    }
}

/// Carries a request out. None if it panicked, which is reported already.
pub fn request<T>(carry_out: impl FnOnce() -> T) -> Option<T> {
    let contained = AssertUnwindSafe(|| within(&of_request(), carry_out));
    catch_unwind(contained).ok()
}

/// Ends VMs whose threads panicked, for as long as the host lives.
pub(crate) fn start(host: &Arc<Host>, panics: Receiver<Panic>) -> io::Result<()> {
    let host = Arc::downgrade(host);
    // Not a VM's thread: without it nobody would contain anything.
    thread::Builder::new().name("containment".to_owned()).spawn(move || run(&host, &panics))?;
    Ok(())
}

fn run(host: &Weak<Host>, panics: &Receiver<Panic>) {
    for Panic { vm, words } in panics {
        let Some(host) = host.upgrade() else { return };
        let reason = format!("a thread of {vm} panicked on host {}: {words}", host.config.name);
        error!(%vm, "{reason}; it ends here, and nothing else does");
        // On a thread of its own: a peer that does not listen holds up no other VM's end.
        let ending = (host.clone(), vm.clone(), reason.clone());
        let end = move || ending.0.end_after_panic(&ending.1, &ending.2);
        if thread::Builder::new().name(format!("end-{vm}")).spawn(end).is_err() {
            host.end_after_panic(&vm, &reason);
        }
    }
}

impl Host {
    fn end_after_panic(self: &Arc<Self>, name: &VmName, reason: &str) {
        let known = self.vms.get(name);
        match known {
            Some(Vm::Primary(vm)) => self.end_primaries(&vm, reason),
            Some(Vm::Backup(session)) => self.end_backups(&session, reason),
            Some(Vm::Fenced(_)) | None => {}
        }
        self.say_why(name, reason);
    }

    /// Its own threads may have noticed the end first, without knowing why.
    fn say_why(&self, name: &VmName, reason: &str) {
        let Some(Vm::Fenced(fenced)) = self.vms.get(name) else { return };
        if fenced.reason.contains(primary::CONDEMNED) {
            let (name, generation) = (name.clone(), fenced.generation);
            let elsewhere = fenced.elsewhere;
            let told = FencedVm { name, generation, reason: reason.to_owned(), elsewhere };
            let is_same = |there: Option<&Vm>| matches!(there, Some(Vm::Fenced(there)) if Arc::ptr_eq(there, &fenced));
            self.vms.put_if(&fenced.name, Vm::Fenced(Arc::new(told)), is_same);
        }
    }

    /// Ends a VM that runs here, with the members of its group, whom the backup takes over. In their first copy it has
    /// none of them, and could win none: they go on here, and whatever they send needs nobody's word. A session that
    /// comes to its first checkpoint just then, or whose state may be half changed, halts them itself.
    fn end_primaries(self: &Arc<Self>, vm: &Arc<PrimaryVm>, reason: &str) {
        let mut vms = vec![vm.clone()];
        let session = vm.bound_session();
        let guards = |session: &Arc<primary::Session>| session.stance().guards_output;
        if session.as_ref().is_some_and(guards) {
            vms.extend(self.fellows(vm));
        }
        // Nothing leaves them from here on, whatever their state is in.
        vms.iter().for_each(|vm| vm.machine().halt());
        if let Some(session) = session {
            primary::end_after_panic(&session, reason);
        }
        self.dissolve_without(vm);
        vms.iter().for_each(|vm| self.fence(vm, reason.to_owned()));
    }

    /// Ends a copy, with those of its group; if this host owns the VM by now, it is said so.
    fn end_backups(self: &Arc<Self>, session: &Arc<backup::Session>, reason: &str) {
        let names: Vec<VmName> =
            session.membership().members.iter().map(|member| member.vm.clone()).collect();
        // At once: before they are told, others may have to be waited for.
        for fellow in names.iter().filter_map(|name| self.backup_beside(name, session)) {
            fellow.machine().halt();
        }
        session.end_after_panic(reason);
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline && names.iter().any(|name| self.is_backup(name, session)) {
            thread::sleep(GLANCE);
        }
        session.hang_up_after_panic();
        let won = session.phase() == BackupPhase::Live;
        for name in &names {
            if !self.is_backup(name, session) {
                continue;
            }
            if won {
                let (generation, _) = session.position();
                let reason = format!("won the VM and could not start it: {reason}");
                let fenced = FencedVm { name: name.clone(), generation, reason, elsewhere: false };
                self.vms.put(name, Vm::Fenced(Arc::new(fenced)));
            } else {
                self.vms.remove(name);
            }
        }
        // One that went live meanwhile did so in a machine that is halted.
        for name in &names {
            if let Ok(vm) = self.primary(name)
                && vm.machine().is_halted()
            {
                self.fence(&vm, reason.to_owned());
            }
        }
    }

    /// Whether the VM is backed up here in the group of that session.
    fn is_backup(&self, name: &VmName, session: &backup::Session) -> bool {
        self.backup_beside(name, session).is_some()
    }

    /// The session of a VM that is backed up in the same group.
    fn backup_beside(
        &self,
        name: &VmName,
        session: &backup::Session,
    ) -> Option<Arc<backup::Session>> {
        match self.vms.get(name) {
            Some(Vm::Backup(own)) if own.is_fellow(session) => Some(own),
            _ => None,
        }
    }
}
