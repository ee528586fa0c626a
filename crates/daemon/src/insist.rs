//! A VM whose images are lost with their host: its operator starts it on others, a backup's say. From then on they are
//! its newest.
//!
//! They are put on record as images that the guest has run on, long ago; what there is to wait for, and who must not
//! run it, is then as with `recover --force`.

use crate::admission::open_disks;
use crate::host::{Host, internal};
use std::sync::Arc;
use tracing::warn;
use understudy_protocol::validity::{ArbiterWord, ImageRole};
use understudy_protocol::{Generation, HostName, VmName};
use understudy_qemu::{CheckedDefinition, VmDefinition};
use understudy_replication::records::{InsteadOf, Record};
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::{RecoverRequest, StartRequest, VmStatus};

impl Host {
    /// Starts a VM on the images of this definition, whoever it belongs to; not while a host that answers has it.
    pub fn vm_start_on_other_images(
        self: &Arc<Self>,
        definition: &CheckedDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, HostError> {
        let name = &definition.name;
        self.note_other_images(definition)?;
        let StartRequest { other_host_is_off, .. } = request;
        let request = RecoverRequest { dry_run: false, force: true, other_host_is_off };
        let started = self.recover_in_its_place(name, request);
        if started.is_err()
            && let Err(error) = self.forget_other_images(name)
        {
            warn!(vm = %name, "{error}");
        }
        started?.status.ok_or_else(|| {
            let message = format!("{name} runs, and nothing is said of how");
            HostError::new(ErrorKind::Internal, message)
        })
    }

    /// Notes them as this host's; what was on record before is kept with that.
    fn note_other_images(&self, definition: &VmDefinition) -> Result<(), HostError> {
        let name = &definition.name;
        let adding = self.adding.lock();
        // Whoever notices it later would take this for what that keeper was to start.
        self.notice_end_of_keeper(name);
        self.check_free(definition)?;
        let inquiry = self.inquire(name)?;
        if let Some((host, busy)) = inquiry.busy() {
            let message = format!("{name} is not started on other images: host {host} {busy}");
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        let former = self.record(name)?.and_then(Record::before_insistence);
        check_no_mirror(definition, former.as_ref())?;
        let directory = name.below(&self.config.state_dir);
        let open = || open_disks(definition, None, &directory).map(drop);
        let (_arrival, ()) = self.open_aside(adding, definition, open)?;
        let _adding = self.adding.lock();
        let mut record = self.records.of(ImageRole::Stale, Generation(0), definition);
        record.peer = other_owner(&inquiry.arbiter, &self.config.name);
        record.instead_of = Some(InsteadOf { former: former.map(Box::new) });
        self.vm_directory(name)?;
        self.records.write(&record).map_err(internal)
    }

    /// The record is again what it was, unless the VM has run on those images meanwhile.
    fn forget_other_images(&self, name: &VmName) -> Result<(), HostError> {
        let _adding = self.adding.lock();
        self.records.undo_insistence(name).map(drop).map_err(internal)
    }

    /// The same of all VMs, as the daemon that was to start them has ended; not of those that live in a keeper.
    pub(crate) fn forget_dead_insistence(&self) {
        for record in self.records.all().iter().filter(|record| record.instead_of.is_some()) {
            let vm = &record.definition.name;
            if self.keeper_of(vm).is_none() {
                self.forget_insistence(vm);
            }
        }
    }

    /// The same of a VM, as whoever was to start it has ended.
    pub(crate) fn forget_insistence(&self, vm: &VmName) {
        match self.records.undo_insistence(vm) {
            Ok(false) => {}
            Ok(true) => self.events.of(vm).note(
                "its start on other images ended with whoever was to start it: on this host it is what it was before",
            ),
            Err(error) => warn!(%vm, "its former images are not on record again: {error}"),
        }
    }
}

/// Another host that may have a copy of the VM.
fn other_owner(arbiter: &ArbiterWord, here: &HostName) -> Option<HostName> {
    let ArbiterWord::Says(Some(owner)) = arbiter else { return None };
    owner.host.clone().filter(|host| host != here)
}

/// Refuses the images of a mirror: what they are is known, and it may be nothing whole.
fn check_no_mirror(definition: &VmDefinition, former: Option<&Record>) -> Result<(), HostError> {
    let mirror = former.filter(|record| record.image.ran_at().is_none());
    let images = mirror.map_or_else(Vec::new, Record::images);
    let Some(image) = definition.disks.iter().map(|disk| &disk.path).find(|it| images.contains(it))
    else {
        return Ok(());
    };
    let name = &definition.name;
    let message = format!(
        "{} is a mirror that {name} never ran on: `understudy recover {name}` says what it is worth",
        image.display()
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{Ownership, literal};

    #[test]
    fn a_mirror_is_none_of_the_operators_images() {
        let definition: VmDefinition = toml::from_str(
            "name = 'db'\nmemory = '64M'\nvcpus = 1\n[[disk]]\npath = '/s/db/disk0.img'\nformat = 'raw'",
        )
        .unwrap();
        let record = |role| {
            let records =
                understudy_replication::records::Records::new("/s".as_ref(), &literal("b"));
            records.of(role, Generation(3), &definition)
        };
        for role in [ImageRole::Mirror, ImageRole::Syncing] {
            let refused = check_no_mirror(&definition, Some(&record(role))).unwrap_err();
            assert!(refused.message.contains("/s/db/disk0.img is a mirror"), "{refused}");
        }
        assert!(check_no_mirror(&definition, Some(&record(ImageRole::Stale))).is_ok());
        assert!(check_no_mirror(&definition, None).is_ok());
    }

    #[test]
    fn whoever_had_the_vm_may_have_a_copy() {
        let says = |host| ArbiterWord::Says(Some(Ownership { host, generation: Generation(3) }));
        let here = literal("a");
        assert_eq!(other_owner(&says(Some(literal("b"))), &here), Some(literal("b")));
        assert_eq!(other_owner(&says(Some(literal("a"))), &here), None);
        assert_eq!(other_owner(&ArbiterWord::Silent, &here), None);
    }
}
