//! Recovery after both hosts were lost: ask everybody, name the valid images, start the
//! VM on them.

mod inquiry;

use crate::admission::LOST;
use crate::boot::Past;
use crate::bounded;
use crate::host::Host;
use crate::lease::Awaited;
use crate::repair::Wish;
use crate::vm::Vm;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_machine::tpm::{TpmStateAt, has_tpm_state};
use understudy_protocol::validity::{ArbiterWord, Finding, ImageRole, judge};
use understudy_protocol::wire::Kind;
use understudy_protocol::{Generation, Ownership};
use understudy_protocol::{GroupName, HostName, VmName};
use understudy_replication::handshake::Purpose;
use understudy_replication::records::Record;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::{RecoverReport, RecoverRequest};
use understudy_session::hand_back::may_go_on;
use understudy_snapshot::SnapshotNumber;

pub(crate) use inquiry::Inquiry;

/// Hosts that are asked at the same time, at most.
const ASKED_AT_ONCE: usize = 32;

/// Answer of a host when it is asked about its images of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImagesAnswer {
    /// The host.
    pub host: HostName,
    /// Its record, if it has images.
    pub record: Option<Record>,
    /// Work that it does on the VM at this moment, if anything.
    pub busy: Option<String>,
    /// Whether it keeps a guest of it that it has lost, and goes on with once the VM is its own again.
    #[serde(default)]
    pub keeps: bool,
    /// Bytes of the VM's memory, if it runs there.
    #[serde(default)]
    pub runs: Option<u64>,
    /// The last number of each group's snapshots that the host has heard of.
    #[serde(default)]
    pub snapshots: BTreeMap<GroupName, SnapshotNumber>,
}

/// Images that are to be started here.
pub(crate) struct Recovery {
    report: RecoverReport,
    pub(crate) record: Record,
    /// The newest generation that anybody knows of.
    newest: Generation,
    /// The operator wants these images, which may not be the valid ones.
    insisted: bool,
}

impl Host {
    /// Answer of this host on its images of a VM.
    pub(crate) fn images_answer(&self, vm: &VmName) -> Result<ImagesAnswer, HostError> {
        let mut runs = None;
        // In this order: what is started is in one of them at any moment.
        let starts = self.arrivals.is_claimed(vm);
        let present = self.vms.get(vm);
        let mut keeps = false;
        let mut busy = match present {
            // A copy that is kept runs nothing, yet.
            Some(Vm::Primary(vm)) if vm.kept().is_some() => {
                keeps = true;
                None
            }
            Some(Vm::Primary(vm)) if vm.machine().is_alive() => {
                runs = Some(vm.machine().definition().memory.bytes());
                Some("runs it".to_owned())
            }
            Some(Vm::Backup(session)) => Some(session.describe()),
            _ if starts => Some("is about to start it".to_owned()),
            _ => self.orphans.why(vm).map(|why| format!("has a QEMU of it, which {why}")),
        };
        let (host, record) = (self.config.name.clone(), self.record(vm)?);
        if self.keeper_of(vm).is_some() {
            // Until it has ended nothing else is known of it: it may run at any moment.
            let ran = |record: &&Record| record.image.role == ImageRole::Active;
            runs = record.as_ref().filter(ran).map(|record| record.definition.memory.bytes());
            busy = Some("has a keeper of it".to_owned());
        }
        let snapshots = self.snapshots.last_numbers();
        Ok(ImagesAnswer { host, record, busy, keeps, runs, snapshots })
    }

    /// Record that this host has of a VM.
    pub(crate) fn record(&self, vm: &VmName) -> Result<Option<Record>, HostError> {
        self.records
            .read(vm)
            .map_err(|error| HostError::new(ErrorKind::Internal, error.to_string()))
    }

    /// Names the valid images of a VM and, unless told not to, starts it on them if they
    /// are this host's.
    pub fn recover(
        self: &Arc<Self>,
        name: &VmName,
        request: RecoverRequest,
    ) -> Result<RecoverReport, HostError> {
        self.recover_wanting(name, request, None)
    }

    /// The same of a VM that is to be protected like this.
    pub(crate) fn recover_wanting(
        self: &Arc<Self>,
        name: &VmName,
        request: RecoverRequest,
        wish: Option<Wish>,
    ) -> Result<RecoverReport, HostError> {
        // Before anything is held: this may take as long as a lease.
        let awaited = match request.dry_run {
            true => None,
            false => self.await_former_owner(name, &request)?,
        };
        let adding = self.adding.lock();
        let inquiry = self.inquire_of_images(name)?;
        if request.dry_run {
            return Ok(inquiry.report(name, &judge(&inquiry.evidence())));
        }
        let newly_silent = inquiry.newly_silent(&self.config.name, awaited.as_ref());
        let Recovery { mut report, record, newest, insisted } =
            self.recovery(name, &request, inquiry)?;
        if let Some(contender) = newly_silent {
            return conflict(format!(
                "{contender} may run {name}, and fell silent just now: ask again, so that this host \
                 waits until it lets nothing out any more"
            ));
        }
        self.drop_kept(name, "`recover` has another image")?;
        self.check_free(&record.definition)?;
        let definition = record.definition.clone();
        let lease = awaited.map(|awaited| awaited.lease).unwrap_or_default();
        let past = Past::of(Some(record), newest).insisted(insisted).after(lease).wanting(wish);
        report.status = Some(self.boot(definition, past, adding)?);
        Ok(report)
    }

    /// Asks everybody about a VM's images; an error if nobody has any.
    pub(crate) fn inquire_of_images(&self, name: &VmName) -> Result<Inquiry, HostError> {
        let inquiry = self.inquire(name)?;
        if inquiry.answers.iter().all(|answer| answer.record.is_none()) {
            let message = format!("no host that answers has images of {name}; {LOST}");
            return Err(HostError::new(ErrorKind::NotFound, message));
        }
        Ok(inquiry)
    }

    /// Recovery that follows here from all that was answered; an error if nothing is.
    pub(crate) fn recovery(
        &self,
        name: &VmName,
        request: &RecoverRequest,
        inquiry: Inquiry,
    ) -> Result<Recovery, HostError> {
        let finding = judge(&inquiry.evidence());
        let mut report = inquiry.report(name, &finding);
        info!(vm = %name, "asked for the valid images: {}", report.reason);
        if let Some(answer) = inquiry.answers.iter().find(|answer| answer.busy.is_some()) {
            let busy = answer.busy.clone().unwrap_or_default();
            return conflict(format!(
                "there is nothing to recover of {name}: host {} {busy}",
                answer.host
            ));
        }
        let here = &self.config.name;
        let mut insisted = false;
        match &finding {
            Finding::Valid { host, .. } if host == here => {}
            _ if request.force => {
                insisted = true;
                warn!(vm = %name, "starting on this host's images as the operator insists");
                report.reason = format!("forced onto host {here}'s images; {}", report.reason);
            }
            Finding::Valid { host, .. } => {
                return conflict(format!(
                    "the valid images of {name} are on host {host}: {}; run `understudy recover \
                     {name}` there; if that is another name of this host, or it is gone for good and older \
                     images will do, --force starts it on this host's; {LOST}",
                    report.reason
                ));
            }
            Finding::Undecided(why) => {
                return conflict(format!(
                    "the valid images of {name} cannot be told: {why}; --force starts it on this \
                     host's images all the same, and may lose what was acknowledged; {LOST}"
                ));
            }
        }
        // Not only of what starts here: the operator may insist on images that are not the newest.
        let newest = inquiry.newest();
        let record = inquiry.answers.into_iter().find(|answer| answer.host == *here);
        let record = record.and_then(|answer| answer.record).ok_or_else(|| {
            let message = format!("host {here} has no images of {name}; {LOST}");
            HostError::new(ErrorKind::NotFound, message)
        })?;
        if record.image.role == ImageRole::Syncing {
            return conflict(format!(
                "the images of {name} on host {here} are a mirror whose synchronisation was not \
                 completed: nothing can start on them"
            ));
        }
        self.check_tpm(&record)?;
        Ok(Recovery { report, record, newest, insisted })
    }

    /// Refuses a VM that would begin with another TPM than it had: what a guest has locked with that it
    /// could not open.
    fn check_tpm(&self, record: &Record) -> Result<(), HostError> {
        let (name, here) = (&record.definition.name, &self.config.name);
        let at = match record.image.role {
            ImageRole::Mirror => TpmStateAt::Mirror,
            _ => TpmStateAt::Own,
        };
        let directory = self.vm_directory(name)?;
        if record.definition.tpm.is_none() || has_tpm_state(&directory, at) {
            return Ok(());
        }
        let kept = directory.join("tpm.kept");
        conflict(format!(
            "the state of {name}'s TPM is not on host {here}: it would begin with another TPM, and a disk \
             that is locked with its own stays locked; put that state, tpm2-00.permall of the host that \
             ran it, to {}, or an empty file for a new TPM",
            kept.display()
        ))
    }

    /// Waits for a host that may run the VM and does not answer, if there is one and the VM is
    /// about to be started here.
    fn await_former_owner(
        &self,
        name: &VmName,
        request: &RecoverRequest,
    ) -> Result<Option<Awaited>, HostError> {
        let inquiry = self.inquire(name)?;
        let here = &self.config.name;
        let own =
            matches!(judge(&inquiry.evidence()), Finding::Valid { host, .. } if host == *here);
        let starts = (own || request.force) && inquiry.busy().is_none();
        let contenders = if starts { inquiry.contenders(here) } else { Vec::new() };
        let lease = self.await_leases(name, &contenders, request.other_host_is_off)?;
        Ok(Some(Awaited { contenders, lease }))
    }

    /// Asks the arbiter, this host, and every peer at the same time. The arbiter comes first: whoever claims the VM after
    /// its word is in the way of a claim from the generation that it names, and who has done so before says so.
    pub(crate) fn inquire(&self, name: &VmName) -> Result<Inquiry, HostError> {
        let arbiter = self.ask_arbiter(name);
        let mut answers = vec![self.images_answer(name)?];
        let mut silent = Vec::new();
        let asked =
            self.ask_known(|peer, addresses| (peer.clone(), self.ask(peer, addresses, name)));
        for (peer, answer) in asked {
            match answer {
                Ok(answer) => answers.push(answer),
                Err(error) => silent.push((peer, format!("{error:#}"))),
            }
        }
        Ok(Inquiry::new(arbiter, answers, silent))
    }

    /// What comes of asking each known host, so many of them at the same time.
    pub(crate) fn ask_known<T: Send>(
        &self,
        ask: impl Fn(&HostName, &[SocketAddr]) -> T + Sync,
    ) -> Vec<T> {
        let known: Vec<_> = self.known_hosts().into_iter().collect();
        let ask = &ask;
        let ask_some = |some: &[(HostName, Vec<SocketAddr>)]| {
            thread::scope(|scope| {
                let asking: Vec<_> = some
                    .iter()
                    .map(|(host, addresses)| scope.spawn(move || ask(host, addresses)))
                    .collect();
                asking.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
            })
        };
        known.chunks(ASKED_AT_ONCE).flat_map(ask_some).collect()
    }

    fn ask(
        &self,
        peer: &HostName,
        addresses: &[SocketAddr],
        name: &VmName,
    ) -> anyhow::Result<ImagesAnswer> {
        let purpose = Purpose::Images { vm: name.to_owned() };
        let link = self.identity.dial_first(peer, addresses, |_| purpose.clone())?.0;
        let answer: ImagesAnswer = link.expect_json(Kind::Welcome)?;
        anyhow::ensure!(answer.host == *peer, "its address is that of host {}", answer.host);
        Ok(answer)
    }

    /// The owner of a VM, by the word of a host whose guest ran it.
    pub(crate) fn owner_by_its_own_word(&self, host: &HostName, vm: &VmName) -> Option<Ownership> {
        let answer = self.ask_one(host, vm)?;
        let image = answer.record?.image;
        let ran = image.ran_at()?;
        Some(Ownership { host: Some(host.to_owned()), generation: ran })
    }

    /// Word of a VM's owner, as the arbiter names it, on what it does with the VM.
    pub(crate) fn ask_owner(&self, vm: &VmName) -> OwnersWord {
        let record = match self.ask_arbiter(vm) {
            (ArbiterWord::Silent, why) if self.arbiter.is_some() => {
                return OwnersWord::Unknown(why);
            }
            (ArbiterWord::Silent, _) => None,
            (ArbiterWord::Says(record), _) => record,
        };
        let (owner, generation) = match &record {
            Some(Ownership { host: Some(owner), generation }) if *owner != self.config.name => {
                (owner.clone(), *generation)
            }
            _ => return OwnersWord::Idle(record),
        };
        match self.ask_one(&owner, vm) {
            Some(answer) => match answer.busy_by(record.as_ref()) {
                Some(busy) => OwnersWord::Busy(owner, busy),
                None => OwnersWord::Idle(record),
            },
            None => OwnersWord::Silent(owner, generation),
        }
    }

    /// What another host says of a VM; none if it does not answer, or is not known here.
    pub(crate) fn ask_one(&self, host: &HostName, vm: &VmName) -> Option<ImagesAnswer> {
        let addresses = self.known_hosts().remove(host)?;
        self.ask(host, &addresses, vm).ok()
    }

    /// What the arbiter says, if it does so within this time.
    pub(crate) fn ask_arbiter_within(&self, time: Duration, vm: &VmName) -> ArbiterWord {
        let Some(arbiter) = self.arbiter.clone() else { return ArbiterWord::Silent };
        let asked = vm.clone();
        let ask = move || {
            fail::fail_point!("ask-member");
            arbiter.current(&asked).ok()
        };
        let found = bounded::by(Instant::now() + time, format!("ask-{vm}"), ask);
        found.ok().flatten().flatten().map_or(ArbiterWord::Silent, ArbiterWord::Says)
    }

    pub(crate) fn ask_arbiter(&self, name: &VmName) -> (ArbiterWord, String) {
        let Some(arbiter) = &self.arbiter else {
            return (ArbiterWord::Silent, "none in this host's configuration".to_owned());
        };
        match arbiter.current(name) {
            Ok(ownership) => {
                let words = match &ownership {
                    None => "no host ever owned it".to_owned(),
                    Some(owner) => match &owner.host {
                        Some(host) => format!("host {host} owns generation {}", owner.generation),
                        None => format!("given back at generation {}", owner.generation),
                    },
                };
                (ArbiterWord::Says(ownership), words)
            }
            Err(error) => (ArbiterWord::Silent, error.to_string()),
        }
    }
}

impl ImagesAnswer {
    /// What the host does with the VM, if the arbiter says this of it now.
    fn busy_by(&self, now: Option<&Ownership>) -> Option<String> {
        let goes_on = self.keeps && may_go_on(&self.host, now);
        let words =
            || "keeps its guest, has been given the VM back, and goes on with it".to_owned();
        self.busy.clone().or_else(|| goes_on.then(words))
    }
}

/// What another host, which owns a VM, does with it.
pub(crate) enum OwnersWord {
    /// Nothing; or nobody owns it, or this host does. What the arbiter has on record, if anything, and there is one.
    Idle(Option<Ownership>),
    /// This.
    Busy(HostName, String),
    /// The owner does not answer, and owns it at this generation.
    Silent(HostName, Generation),
    /// Owner that the arbiter does not name, for this reason.
    Unknown(String),
}

fn conflict<T>(message: String) -> Result<T, HostError> {
    Err(HostError::new(ErrorKind::Conflict, message))
}
