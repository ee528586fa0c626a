//! Guests that outlived the last daemon of this host: found when the daemon starts, and taken
//! back, or ended.

mod register;

pub(crate) use register::{Between, Orphans, Waiting};

use crate::containment;
use crate::host::Host;
use crate::keeper;
use crate::snapshot::RestoreNote;
use crate::vm::{FencedVm, Vm};
use nix::poll::PollTimeout;
use register::Former;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_machine::NotUnderstood;
use understudy_machine::custody::{Custody, OF_RESTORE, Unfound};
use understudy_protocol::LeaseAnswer;
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_qemu::process::{self, has_ended};
use understudy_report::{Protection, Role, VmStatus};

/// Pause before what failed is tried again: the arbiter, or the store, may answer later.
const AGAIN: Duration = Duration::from_secs(1);
/// Time after which whoever waits for the end of an orphan looks again.
const LOOK: Duration = Duration::from_millis(20);

/// A guest that stands still.
pub(crate) struct Orphan {
    /// Note on what is known of it.
    pub note: RestoreNote,
    /// All descriptors that its daemon had of it. QEMU's pidfd comes first.
    pub descriptors: Vec<OwnedFd>,
    /// Custodian that keeps it.
    pub custody: Custody,
    /// Time since which it stands still.
    pub since: Instant,
}

impl Orphan {
    fn qemu(&self) -> BorrowedFd<'_> {
        self.descriptors[0].as_fd()
    }

    fn has_ended(&self) -> bool {
        has_ended(self.qemu(), PollTimeout::ZERO).unwrap_or(true)
    }
}

/// Reason why a guest was not taken back.
enum Failure {
    /// Another try may succeed.
    Later(String),
    /// The guest is not this host's any more, or has ended.
    Lost(String),
}

impl Host {
    /// The guests that outlived the last daemon, and those whose custodians do not answer yet. From here on nobody
    /// starts them.
    pub(crate) fn find_orphans(&self) -> (Vec<Orphan>, Vec<VmName>) {
        let (mut orphans, mut silent) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.config.state_dir).into_iter().flatten().flatten() {
            let directory = entry.path();
            if !directory.join(OF_RESTORE).exists() || keeper::note::lives_in(&directory) {
                continue;
            }
            match find(&directory) {
                Ok(orphan) => {
                    self.orphans.add(orphan.note.task.vm());
                    orphans.push(orphan);
                }
                Err(error) => {
                    warn!("no VM is taken back in {}: {error:#}", directory.display());
                    let name = directory.file_name().and_then(|name| name.to_str());
                    let vm = name.and_then(|name| name.parse::<VmName>().ok());
                    match (Unfound::of(&error), vm) {
                        (Unfound::Ended, _) => drop(fs::remove_file(directory.join(OF_RESTORE))),
                        (Unfound::Never, Some(vm)) => self.leave_to_custodian(&vm, &error),
                        (Unfound::Later, Some(vm)) => {
                            self.orphans.insert(&vm, &silent_words(&vm, &error), Former::Silent);
                            silent.push(vm);
                        }
                        (_, None) => {}
                    }
                }
            }
        }
        (orphans, silent)
    }

    /// Takes a guest back as soon as its custodian answers.
    pub(crate) fn take_back_silent(self: &Arc<Self>, vm: &VmName) -> io::Result<()> {
        self.look_until(vm, AGAIN, Host::has_found_silent)
    }

    /// Looks at a guest again and again, after such pauses, until `is_done` says so.
    fn look_until(
        self: &Arc<Self>,
        vm: &VmName,
        pause: Duration,
        is_done: fn(&Arc<Host>, &VmName) -> bool,
    ) -> io::Result<()> {
        let (host, name) = (Arc::downgrade(self), vm.clone());
        let look = move || {
            while let Some(host) = host.upgrade() {
                if is_done(&host, &name) {
                    return;
                }
                drop(host);
                thread::sleep(pause);
            }
        };
        containment::spawn_for(self, vm, "orphan", look)
    }

    /// Asks a custodian that has not answered; returns whether somebody else sees to the guest from here on, or nobody
    /// need any more.
    fn has_found_silent(self: &Arc<Self>, vm: &VmName) -> bool {
        let directory = vm.below(&self.config.state_dir);
        if self.orphans.is_given_up(vm) {
            return self.has_left_custodian(vm);
        }
        let error = match find(&directory) {
            Ok(orphan) => {
                self.orphans.add(vm);
                self.take_back(orphan);
                return true;
            }
            Err(error) => error,
        };
        match Unfound::of(&error) {
            Unfound::Later => {
                self.orphans.note(vm, silent_words(vm, &error));
                false
            }
            Unfound::Ended => {
                let _ = fs::remove_file(directory.join(OF_RESTORE));
                self.has_left_custodian(vm)
            }
            Unfound::Never => {
                self.leave_to_custodian(vm, &error);
                match self.look_after(vm) {
                    Ok(()) => true,
                    Err(error) => {
                        warn!(%vm, "cannot start a thread: {error}");
                        false
                    }
                }
            }
        }
    }

    /// A guest of which this version cannot read what there is stands still until one that can is started, or nobody
    /// wants it.
    fn leave_to_custodian(&self, vm: &VmName, error: &anyhow::Error) {
        let why = format!(
            "what is known of it cannot be read by this version of Understudy ({error:#}): start the one that left it, or \
             end it with `understudy vm stop {vm} --force`"
        );
        self.orphans.insert(vm, &why, Former::Other);
    }

    /// Ends those that are left to custodians if nobody wants them, and forgets them once they have ended.
    pub(crate) fn look_after_unread(self: &Arc<Self>) -> io::Result<()> {
        self.orphans.unread().iter().try_for_each(|vm| self.look_after(vm))
    }

    fn look_after(self: &Arc<Self>, vm: &VmName) -> io::Result<()> {
        self.look_until(vm, LOOK, |host, vm| host.has_left_custodian(vm))
    }

    fn has_left_custodian(&self, vm: &VmName) -> bool {
        let socket = vm.below(&self.config.state_dir).join(OF_RESTORE);
        let given_up = self.orphans.is_given_up(vm);
        if socket.exists() && !given_up {
            return false;
        }
        if given_up {
            let told = Custody::end(&socket);
            let had_ended = |error: &anyhow::Error| Unfound::of(error) == Unfound::Ended;
            // It removes its socket once it has ended, and QEMU with it.
            if socket.exists() && !told.as_ref().is_err_and(had_ended) {
                let why = "its custodian was told to end it, and has not yet: if that lasts, kill the custodian";
                self.orphans.note(vm, why.to_owned());
                return false;
            }
        }
        let generation = self.record(vm).ok().flatten().map(|record| record.image.generation);
        self.end_dead_restore(vm);
        if let Some(generation) = generation {
            self.release_own(vm, generation);
        }
        self.orphans.remove(vm);
        true
    }

    /// What is wrong with the host for the sake of those that it cannot take back.
    pub(crate) fn problems_of_orphans(&self) -> Vec<String> {
        let told = |vm: &VmName| Some(format!("{vm} {}", self.orphans.why(vm)?));
        self.orphans.problems().iter().filter_map(told).collect()
    }

    /// Whether a VM is between two keepers: either may be there, and the next may have the VM's place without having the
    /// guest.
    pub fn is_between_keepers(&self, vm: &VmName) -> bool {
        self.orphans.between_keepers().contains(vm)
    }

    /// The status of a VM of which nobody else tells, since it stands still and may for long; none if it is not one.
    pub fn status_of_untold(&self, vm: &VmName) -> Option<VmStatus> {
        let reason = format!("the guest {}", self.orphans.why(vm)?);
        let protection = Protection::Degraded { reason };
        Some(VmStatus { protection, ..VmStatus::new(vm, Role::Primary) })
    }

    /// Goes on with a guest, or ends it; this may take as long as the arbiter and the store are
    /// silent.
    pub(crate) fn take_back(self: &Arc<Self>, orphan: Orphan) {
        let (host, vm) = (self.clone(), orphan.note.task.vm().clone());
        let started = containment::spawn_for(self, &vm, "orphan", move || {
            let vm = orphan.note.task.vm().to_owned();
            let lost = loop {
                if host.orphans.is_given_up(&vm) {
                    break None;
                }
                match host.try_to_take_back(&orphan) {
                    Ok(()) => return host.finish_taking_back(orphan),
                    Err(Failure::Later(why)) => host.orphans.note(&vm, why),
                    Err(Failure::Lost(why)) => break Some(why),
                }
                thread::sleep(AGAIN);
            };
            host.end_orphan(orphan, lost);
        });
        if let Err(error) = started {
            self.orphans
                .note(&vm, format!("cannot be taken back: no thread can be started: {error}"));
        }
    }

    fn try_to_take_back(self: &Arc<Self>, orphan: &Orphan) -> Result<(), Failure> {
        if orphan.has_ended() {
            return Err(Failure::Lost("its QEMU, which outlived a daemon, has ended".into()));
        }
        let later = |error: anyhow::Error| Failure::Later(format!("{error:#}"));
        self.check_ours(&orphan.note)?;
        let remaining = self.remaining(&orphan.note).map_err(later)?;
        // The store may have taken long.
        self.check_ours(&orphan.note)?;
        self.resume_restore(orphan, remaining).map_err(|error| match orphan.has_ended() {
            true => Failure::Lost(format!("its QEMU, which outlived a daemon, ended: {error:#}")),
            false => later(error),
        })
    }

    /// Whether the VM is still this host's, as it was when its daemon died.
    fn check_ours(&self, note: &RestoreNote) -> Result<(), Failure> {
        let (vm, generation) = (note.task.vm(), note.generation);
        let record = self.record(vm).map_err(|error| Failure::Later(error.to_string()))?;
        let image = record.map(|record| record.image);
        let runs = image
            .is_some_and(|image| image.role == ImageRole::Active && image.generation == generation);
        if !runs {
            return Err(lost("by this host's own record"));
        }
        match self.ask_for_owner(vm, generation) {
            LeaseAnswer::Own => Ok(()),
            LeaseAnswer::Unreachable(why) => Err(Failure::Later(why)),
            LeaseAnswer::Moved { why, .. } => Err(lost(&why)),
        }
    }

    fn finish_taking_back(&self, orphan: Orphan) {
        let vm = orphan.note.task.vm();
        let Ok(primary) = self.primary(vm) else { return self.orphans.remove(vm) };
        let still = orphan.since.elapsed().as_secs_f64();
        let words = format!("stood still for {still:.1} s: this host's daemon had ended");
        primary.events.note(words);
        orphan.custody.goes_on();
        self.orphans.remove(vm);
        primary.machine().set_custody(orphan.custody);
    }

    /// `lost` is why, if nobody has asked for it.
    fn end_orphan(&self, orphan: Orphan, lost: Option<String>) {
        let RestoreNote { task, generation, .. } = &orphan.note;
        let vm = task.vm();
        process::kill(orphan.qemu());
        let (stale, released) = (lost.is_some(), lost.is_none());
        let noted = self.records.change(vm, |record| {
            record.image.role = if stale { ImageRole::Stale } else { ImageRole::Cut };
        });
        if let Err(error) = noted {
            warn!(%vm, "{error}");
        }
        self.end_dead_restore(vm);
        if released {
            self.release(vm, *generation);
        }
        if let Some(reason) = lost {
            warn!(%vm, "{reason}");
            let fenced =
                FencedVm { name: vm.to_owned(), generation: *generation, reason, elsewhere: false };
            self.vms.put(vm, Vm::Fenced(Arc::new(fenced)));
        }
        self.orphans.remove(vm);
    }
}

fn lost(how: &str) -> Failure {
    Failure::Lost(format!("while this host's daemon was away the VM was lost: {how}"))
}

fn silent_words(vm: &VmName, error: &anyhow::Error) -> String {
    format!(
        "its custodian is asked again and again, and does not answer ({error:#}): wait, or end it with \
         `understudy vm stop {vm} --force`"
    )
}

fn find(directory: &Path) -> anyhow::Result<Orphan> {
    let (custody, estate, descriptors) = Custody::of_another(&directory.join(OF_RESTORE))?;
    let note = match serde_json::from_value(estate.note) {
        Ok(note) => note,
        Err(error) => {
            custody.leave();
            let why = NotUnderstood("it is of another version".to_owned());
            return Err(anyhow::Error::from(error).context(why));
        }
    };
    let still = Duration::from_millis(estate.still_ms);
    let since = Instant::now().checked_sub(still).unwrap_or_else(Instant::now);
    Ok(Orphan { note, descriptors, custody, since })
}
