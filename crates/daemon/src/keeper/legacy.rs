//! What a keeper leaves to the next one of its VM, beside the descriptors that a custodian keeps.
//!
//! It is read by another release than the one that wrote it. So it has a version, which the next
//! keeper must read before anything is left to it, and every field that came later has a default.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use understudy_machine::MachineNote;
use understudy_machine::custody::OF_KEEPER;
use understudy_protocol::{Generation, HostName};
use understudy_report::error::{ErrorKind, HostError};

/// The version that this program leaves.
pub const VERSION: u32 = 1;

/// What must be known of a VM, beside its descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Legacy {
    /// See [`VERSION`].
    version: u32,
    /// The process that left it.
    pub keeper: u32,
    /// The generation at which this host has the VM.
    pub generation: Generation,
    /// The host that backed it up until then.
    pub protected_to: Option<HostName>,
    /// The machine.
    pub machine: MachineNote,
}

impl Legacy {
    /// Of a VM that this process has.
    pub fn new(
        generation: Generation,
        protected_to: Option<HostName>,
        machine: MachineNote,
    ) -> Legacy {
        Legacy { version: VERSION, keeper: std::process::id(), generation, protected_to, machine }
    }
}

/// The versions that a keeper reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readable {
    least: u32,
    highest: u32,
}

impl Readable {
    /// What this program reads.
    pub const OWN: Readable = Readable { least: VERSION, highest: VERSION };

    /// Refuses to leave something to a keeper that would not understand it.
    pub fn check(self) -> Result<(), HostError> {
        let Readable { least, highest } = self;
        if (least..=highest).contains(&VERSION) {
            return Ok(());
        }
        let message = format!(
            "the next keeper would not understand what this one leaves (version {VERSION}; it reads \
             {least} to {highest}): install a release between the two first, or hand the VM to its backup"
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }
}

/// Where it is found, in the VM's directory.
pub fn socket(vm_directory: &Path) -> PathBuf {
    vm_directory.join(OF_KEEPER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_to_a_keeper_that_does_not_understand_it() {
        assert!(Readable::OWN.check().is_ok());
        assert!(Readable { least: 0, highest: VERSION + 1 }.check().is_ok());
        for (least, highest) in [(VERSION + 1, VERSION + 2), (0, VERSION - 1)] {
            let error = Readable { least, highest }.check().unwrap_err();
            assert!(error.message.contains("would not understand"), "{error}");
        }
    }
}
