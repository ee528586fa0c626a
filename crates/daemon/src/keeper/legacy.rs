//! Legacy that a keeper leaves to the next one of its VM, beside the descriptors that a custodian
//! keeps.
//!
//! It is read by another release than the one that wrote it. So it has a version, which the next
//! keeper must read before anything is left to it, and every field that came later has a default. The agent
//! inside QEMU has a version of its own, and stays what it is as long as that QEMU lives.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use understudy_machine::MachineNote;
use understudy_machine::custody::OF_KEEPER;
use understudy_memory::agent::ADOPTED_AGENTS;
use understudy_protocol::{Generation, HostName, Spoken};
use understudy_report::error::{ErrorKind, HostError};

/// The version that this program leaves, of a VM with a TPM.
pub const VERSION: u32 = 2;
/// The same of any other: releases before this one go on with that.
const WITHOUT_TPM: u32 = 1;

/// Facts that must be known of a VM, beside its descriptors.
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
    /// Legacy of a VM that this process has.
    pub fn new(
        generation: Generation,
        protected_to: Option<HostName>,
        machine: MachineNote,
    ) -> Legacy {
        let version = version_of(machine.has_tpm());
        Legacy { version, keeper: std::process::id(), generation, protected_to, machine }
    }

    /// Reads what the last keeper has written; an error says why this program does not understand
    /// it.
    pub fn read(note: Value) -> Result<Legacy, String> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } =
            Version::deserialize(&note).map_err(|error| format!("it has no version: {error}"))?;
        let version = another_in_a_test(version);
        if !READ.contains(version) {
            return Err(format!("it has version {version}, and this program reads {READ}"));
        }
        serde_json::from_value(note).map_err(|error| error.to_string())
    }
}

/// The version of what this program leaves of a VM.
fn version_of(has_tpm: bool) -> u32 {
    if has_tpm { VERSION } else { WITHOUT_TPM }
}

/// Versions that a keeper goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readable {
    /// The versions of a [`Legacy`] that it reads.
    #[serde(flatten)]
    legacies: Spoken,
    /// The versions of QEMU's agent that it speaks; none of a release that does not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    agents: Option<Spoken>,
}

/// The versions that this program reads.
const READ: Spoken = Spoken { least: WITHOUT_TPM, highest: VERSION };

/// The versions of the agent in QEMUs that are left by keepers which do not compare them.
const UNCOMPARED_AGENTS: [u32; 2] = [8, 9];

impl Readable {
    /// Versions of this program.
    pub fn own() -> Readable {
        let agents = Spoken { least: *ADOPTED_AGENTS.start(), highest: *ADOPTED_AGENTS.end() };
        fail::fail_point!("of-later-agents", |file| Readable {
            legacies: READ,
            agents: Some(match file.is_some_and(|file| Path::new(&file).exists()) {
                true => Spoken { least: agents.highest + 1, highest: agents.highest + 2 },
                false => agents,
            }),
        });
        Readable { legacies: READ, agents: Some(agents) }
    }

    /// Refuses to leave a VM to a keeper that would not understand what is left of it, or the agent, of this version, of
    /// its QEMU.
    pub fn check(self, has_tpm: bool, agent: u32) -> Result<(), HostError> {
        let Readable { legacies, agents } = self;
        let version = version_of(has_tpm);
        if !legacies.contains(version) {
            return Err(refused(format!(
                "what this one leaves (version {version}; it reads {legacies})"
            )));
        }
        match agents {
            Some(agents) if agents.contains(agent) => Ok(()),
            Some(agents) => Err(refused(format!(
                "the agent in the QEMU of this one (version {agent}; it speaks {agents})"
            ))),
            None => Err(refused(format!(
                "the agent in the QEMU of this one (version {agent}), as far as it says"
            ))),
        }
    }

    /// Refuses to have a keeper leave its VM that does not compare its agent with this.
    pub fn check_uncompared(self) -> Result<(), HostError> {
        let speaks = |agent: &u32| self.agents.is_some_and(|agents| agents.contains(*agent));
        match UNCOMPARED_AGENTS.iter().all(speaks) {
            true => Ok(()),
            false => Err(refused("the agent in the QEMU of this one".to_owned())),
        }
    }
}

fn refused(what: String) -> HostError {
    let message = format!(
        "the next keeper would not understand {what}: install a release between the two first, or hand the VM \
         to its backup"
    );
    HostError::new(ErrorKind::Conflict, message)
}

/// A test has it be of another version for as long as there is the file that the fail point names.
fn another_in_a_test(version: u32) -> u32 {
    fail::fail_point!("read-legacy", |file| {
        version + VERSION * u32::from(file.is_some_and(|file| Path::new(&file).exists()))
    });
    version
}

/// Path where it is found, in the VM's directory.
pub fn socket(vm_directory: &Path) -> PathBuf {
    vm_directory.join(OF_KEEPER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGENT: u32 = *ADOPTED_AGENTS.end();

    fn reads(legacies: (u32, u32), agents: Option<(u32, u32)>) -> Readable {
        let versions = |(least, highest)| Spoken { least, highest };
        Readable { legacies: versions(legacies), agents: agents.map(versions) }
    }

    #[test]
    fn nothing_is_left_to_a_keeper_that_does_not_understand_it() {
        let agents = Some((AGENT, AGENT + 1));
        for has_tpm in [false, true] {
            assert!(Readable::own().check(has_tpm, AGENT).is_ok());
            assert!(reads((0, VERSION + 1), agents).check(has_tpm, AGENT).is_ok());
        }
        // As a release before this says it.
        assert!(reads((1, 1), agents).check(false, AGENT).is_ok());
        for reads in [
            reads((VERSION + 1, VERSION + 2), agents),
            reads((1, 1), agents),
            reads((VERSION, VERSION), Some((AGENT + 1, AGENT + 2))),
            reads((VERSION, VERSION), Some((0, AGENT - 1))),
            reads((VERSION, VERSION), None),
        ] {
            let error = reads.check(true, AGENT).unwrap_err();
            assert!(error.message.contains("would not understand"), "{error}");
        }
    }

    /// Regression: they were asked for the version of what they leave alone.
    #[test]
    fn keepers_that_do_not_compare_their_agent_are_left_alone_once_that_is_not_spoken() {
        assert!(Readable::own().check_uncompared().is_ok());
        for agents in [Some((9, 10)), Some((10, 11)), None] {
            let error = reads((VERSION, VERSION), agents).check_uncompared().unwrap_err();
            assert!(error.message.contains("would not understand"), "{error}");
        }
    }

    #[test]
    fn what_a_release_before_this_says_that_it_reads_is_understood() {
        let silent: Readable = serde_json::from_str(r#"{"least":1,"highest":1}"#).unwrap();
        assert_eq!(silent, reads((1, 1), None));
        let said = serde_json::to_string(&reads((1, 2), Some((8, 9)))).unwrap();
        assert_eq!(said, r#"{"least":1,"highest":2,"agents":{"least":8,"highest":9}}"#);
    }

    #[test]
    fn what_another_version_has_left_is_not_guessed_at() {
        for (note, words) in [
            (serde_json::json!({ "version": VERSION + 1 }), "this program reads version"),
            (serde_json::json!({ "version": VERSION }), "missing field"),
            (serde_json::json!({}), "no version"),
        ] {
            let error = Legacy::read(note).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
