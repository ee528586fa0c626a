//! End of a keeper that does not answer, by its operator's word: its guest ends with it, as by a power cut.
//!
//! Without its keeper a guest has neither disks nor network, so that no copy of it lives here from then on; a backup may
//! take it over, as after any failure, unless this host gives it up at the arbiter first.

use super::{Keeper, conflict, ending};
use crate::arrivals::Arrival;
use crate::host::{Host, internal};
use crate::lifecycle::RELEASED_WITHIN;
use std::os::fd::{AsFd, OwnedFd};
use tracing::warn;
use understudy_protocol::validity::{ArbiterWord, ImageRole};
use understudy_protocol::{Generation, HostName, Ownership, VmName};
use understudy_qemu::process::{children_of, kill, pidfd_of};
use understudy_report::error::HostError;
use understudy_report::events::EventKind;

/// The process that is to end with a VM whose keeper does not answer; not one that has other VMs, too, or is not known.
fn process_to_end(vm: &VmName, pid: Option<u32>, others: &[VmName]) -> Result<u32, HostError> {
    let Some(pid) = pid else {
        return Err(conflict(format!(
            "the keeper of {vm} has not said which process it is: try again"
        )));
    };
    if others.is_empty() {
        return Ok(pid);
    }
    Err(conflict(format!(
        "the keeper of {vm} does not answer, and it has {}, too: nothing of them was ended; `kill -9 {pid}` ends all of \
         them as by a power cut: protected ones go on at their backups, and those with `autostart` come up again",
        others.join(", ")
    )))
}

/// Words on who may have a VM that has ended here, by the arbiter's word; none if nobody has, nor can take it over.
fn left_to(
    word: &ArbiterWord,
    here: &HostName,
    backup: Option<&HostName>,
    vm: &VmName,
) -> Option<String> {
    match word {
        ArbiterWord::Says(Some(Ownership { host: Some(host), .. })) if host != here => Some(format!(
            "host {host} has taken it over: `understudy vm stop {vm}` there ends it"
        )),
        ArbiterWord::Says(_) => None,
        ArbiterWord::Silent => backup.map(|host| {
            format!(
                "the arbiter does not answer, so that host {host} may take it over: `understudy status {vm}` there says \
                 whether it has"
            )
        }),
    }
}

/// The processes that a process has started, held by their descriptors.
fn hold_children_of(pid: u32) -> Vec<(u32, OwnedFd)> {
    let children = children_of(pid).into_iter();
    let opened: Vec<(u32, OwnedFd)> =
        children.filter_map(|child| Some((child, pidfd_of(child).ok()?))).collect();
    // Of one that has ended meanwhile the number may be another process's by now.
    let still = children_of(pid);
    opened.into_iter().filter(|(child, _)| still.contains(child)).collect()
}

impl Host {
    /// Ends a keeper that does not answer, and the guest with it, which has neither disks nor network any more when this
    /// returns; that is on record. An error if it has other VMs, too, or if another host has the VM then.
    pub fn end_hung_keeper(&self, keeper: &Keeper) -> Result<(), HostError> {
        let vm = &keeper.vm;
        keeper.reachable()?;
        let pid = process_to_end(vm, keeper.pid, &self.others_in(keeper))?;
        // Nobody starts it meanwhile, and nobody takes its end for a failure.
        let _place = self.expect_its_end(keeper)?;
        let found = ending::keeper_of(&vm.below(&self.config.state_dir)).map_err(internal)?;
        let Some((_, process)) = found.filter(|(found, _)| found.pid == pid) else {
            let message =
                format!("the keeper of {vm} has ended meanwhile: see `understudy status {vm}`");
            return Err(conflict(message));
        };
        self.note_its_end(vm)?;
        let children = hold_children_of(pid);
        warn!(%vm, "its keeper (process {pid}) does not answer, and is ended: its operator ends the VM");
        kill(process.as_fd());
        // QEMU ends by itself with the last copy of its agent's socket.
        children.iter().for_each(|(_, child)| kill(child.as_fd()));
        self.note_ended_with(vm, pid)
    }

    /// Notes that a VM is to end: whatever fails from here on, nobody has it come up again.
    fn note_its_end(&self, vm: &VmName) -> Result<(), HostError> {
        if self.record(vm)?.is_none_or(|record| record.image.ran_at().is_none()) {
            return Ok(());
        }
        self.records.change(vm, |record| record.wanted = false).map_err(internal)
    }

    /// The other VMs that a keeper has.
    fn others_in(&self, keeper: &Keeper) -> Vec<VmName> {
        let is_other = |other: &Keeper| other.pid == keeper.pid && other.vm != keeper.vm;
        self.keepers().into_iter().filter(is_other).map(|other| other.vm).collect()
    }

    /// Keeps the place of a VM whose keeper is about to be ended; none of one of which nothing is known.
    fn expect_its_end(&self, keeper: &Keeper) -> Result<Option<Arrival>, HostError> {
        let _adding = self.adding.lock();
        let vm = &keeper.vm;
        if self.arrivals.is_expected(vm) {
            return Err(conflict(format!(
                "{vm} is about to come into its keeper, or into another one: try again"
            )));
        }
        let definition = self.kept_definition(keeper);
        Ok(definition.map(|it| Arrival::expect(&self.arrivals, &self.config.name, &it)))
    }

    /// Notes that a VM has ended with its keeper, by its operator's word; an error if another host has it.
    fn note_ended_with(&self, vm: &VmName, pid: u32) -> Result<(), HostError> {
        let Some(generation) = self.put_end_on_record(vm, pid)? else { return Ok(()) };
        // Not before it is on record, and only what is this host's: its backup may have been quicker.
        self.release_own(vm, generation);
        let backup = self.record(vm)?.filter(|it| it.wish.is_some()).and_then(|it| it.peer);
        let word = self.ask_arbiter_within(RELEASED_WITHIN, vm);
        match left_to(&word, &self.config.name, backup.as_ref(), vm) {
            None => Ok(()),
            Some(words) => Err(conflict(format!(
                "the copy of {vm} on this host is ended, with its keeper (process {pid}), and {words}"
            ))),
        }
    }

    /// The same on this host; the generation at which it ran here, if it was not only backed up.
    fn put_end_on_record(&self, vm: &VmName, pid: u32) -> Result<Option<Generation>, HostError> {
        let _adding = self.adding.lock();
        let image = self.record(vm)?.map(|record| record.image);
        let events = self.events.of(vm);
        events
            .note(format!("its keeper (process {pid}) did not answer, and its operator ended it"));
        let Some(image) = image.filter(|image| image.ran_at().is_some()) else {
            self.clear_up_after_last(vm);
            events.record(EventKind::StoodDown);
            return Ok(None);
        };
        let noted = self.records.change(vm, |record| {
            if record.image.role == ImageRole::Active {
                record.image.role = ImageRole::Cut;
            }
        });
        noted.map_err(internal)?;
        self.clear_up_after_last(vm);
        events.record(EventKind::Stopped { cut: true });
        Ok(Some(image.generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use understudy_protocol::literal;

    #[test]
    fn a_keeper_is_ended_for_a_vm_that_it_has_alone() {
        let (db, web): (VmName, VmName) = (literal("db"), literal("web"));
        assert_eq!(process_to_end(&db, Some(4711), &[]).unwrap(), 4711);
        let error = process_to_end(&db, Some(4711), &[web]).unwrap_err();
        assert!(
            error.message.contains("web") && error.message.contains("`kill -9 4711`"),
            "{error}"
        );
        assert!(process_to_end(&db, None, &[]).is_err(), "nobody knows whom");
    }

    #[test]
    fn who_may_have_a_vm_that_was_given_up_here_is_told() {
        let says = |host: Option<&'static str>| {
            let host = host.map(literal);
            ArbiterWord::Says(Some(Ownership { host, generation: Generation(2) }))
        };
        let (here, backup, db): (HostName, HostName, VmName) =
            (literal("a"), literal("b"), literal("db"));
        let words = |word| left_to(&word, &here, Some(&backup), &db);
        assert!(words(says(Some("b"))).is_some_and(|it| it.contains("host b has taken it over")));
        assert!(
            words(ArbiterWord::Silent).is_some_and(|it| it.contains("host b may take it over"))
        );
        for nobody in [says(None), says(Some("a")), ArbiterWord::Says(None)] {
            assert_eq!(words(nobody), None);
        }
        assert_eq!(left_to(&ArbiterWord::Silent, &here, None, &db), None, "no other host had it");
    }

    #[test]
    fn what_a_process_has_started_is_found() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let found = hold_children_of(std::process::id());
        assert!(found.iter().any(|(pid, _)| *pid == child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
