//! What this host's QEMU can run, and go on with.

use crate::host::{Host, PEER_TIMEOUT};
use crate::keeper::places::Kept;
use crate::protection::refused;
use crate::vm::PrimaryVm;
use understudy_machine::Machine;
use understudy_protocol::wire::Kind;
use understudy_qemu::lockstep::{LogRole, obstacles};
use understudy_qemu::{Accelerator, Capabilities, Release, VmDefinition, build_id, peer_obstacle};
use understudy_replication::handshake::{Purpose, Welcome};
use understudy_report::Mode;
use understudy_report::error::{ErrorKind, HostError};

impl Host {
    /// Refuses a VM that cannot run in lockstep with this host's QEMU.
    pub(crate) fn check_lockstep(
        &self,
        definition: &VmDefinition,
        accelerator: Accelerator,
    ) -> Result<(), HostError> {
        let found = obstacles(definition, accelerator, Some(self.capabilities.version));
        if found.is_empty() {
            return Ok(());
        }
        let message = format!(
            "{} cannot run in lockstep on host {}: {}; `--mode checkpoint` protects it",
            definition.name,
            self.config.name,
            found.join("; ")
        );
        Err(HostError::new(ErrorKind::Invalid, message))
    }

    /// Refuses to execute the log of a primary whose QEMU is another build than this host's.
    pub(crate) fn check_build(&self, primarys: Option<&str>) -> Result<(), HostError> {
        let ours = self.installed_build()?;
        match peer_obstacle(ours.as_deref(), primarys) {
            None => Ok(()),
            Some(obstacle) => {
                let message = format!("{obstacle}; or use `--mode checkpoint`");
                Err(HostError::new(ErrorKind::Invalid, message))
            }
        }
    }

    /// Asks a host whether it could execute the log of this VM, before the VM is moved into a
    /// QEMU that records one.
    pub(crate) fn ask_to_follow(&self, vm: &PrimaryVm, to: &str) -> Result<(), HostError> {
        let (peer, addresses) = self.known_host(to)?;
        let build = self.recording_build(&vm.machine())?;
        let ask = || -> anyhow::Result<Welcome> {
            let purpose = |_| Purpose::MayFollow { build: build.clone() };
            let (link, _) = self.identity.dial_first(&peer, &addresses, purpose)?;
            link.set_read_timeout(Some(PEER_TIMEOUT))?;
            link.expect_json(Kind::Welcome)
        };
        let what = format!("cannot protect {} to {to}", vm.name());
        ask().map(drop).map_err(|error| refused(&what, &error))
    }

    /// Refuses a guest whose QEMU this host's cannot go on for.
    pub(crate) fn check_emulator(
        &self,
        theirs: &Release,
        machine_type: &str,
        processor: Option<&str>,
    ) -> Result<(), HostError> {
        self.check_installed()?;
        goes_on_for(&self.capabilities, theirs, machine_type, processor)
            .map_err(|message| HostError::new(ErrorKind::Invalid, message))
    }

    /// Refuses to start anything in a QEMU of which nothing is known.
    pub(crate) fn check_installed(&self) -> Result<(), HostError> {
        match self.qemu_obstacle() {
            None => Ok(()),
            Some(obstacle) => Err(HostError::new(ErrorKind::Invalid, obstacle)),
        }
    }

    /// The reason why nothing is started in QEMU, with what to do: nothing is known of the one that is installed.
    pub(crate) fn qemu_obstacle(&self) -> Option<String> {
        let obstacle = self.installed.obstacle()?;
        Some(format!("{obstacle}: {}", self.remedy_for_qemu()))
    }

    /// How another process than this one gets to start VMs here, which asks QEMU anew.
    pub(crate) fn remedy_for_qemu(&self) -> String {
        self.keeps.as_ref().map_or_else(|| "restart the daemon".to_owned(), Kept::remedy_for_qemu)
    }

    /// Build of the QEMU that would record a machine's log.
    pub(crate) fn recording_build(&self, machine: &Machine) -> Result<Option<String>, HostError> {
        let records = machine.lockstep().is_some_and(|own| own.role == LogRole::Record);
        // Else it goes on in the QEMU that is installed now.
        if records { Ok(machine.qemu_build()) } else { self.installed_build() }
    }

    fn installed_build(&self) -> Result<Option<String>, HostError> {
        let program = &self.capabilities.binary;
        build_id(program).map_err(|error| {
            let message = format!("cannot read {}: {error}", program.display());
            HostError::new(ErrorKind::Invalid, message)
        })
    }

    /// Refuses a mode that the machine is not made for.
    pub(crate) fn check_mode(&self, machine: &Machine, mode: Mode) -> Result<(), HostError> {
        if mode == Mode::Checkpoint {
            return Ok(());
        }
        self.check_lockstep(machine.definition(), machine.accelerator())?;
        match machine.lockstep_obstacle() {
            None => Ok(()),
            Some(obstacle) => {
                let message = format!(
                    "{}: {obstacle}; `--mode checkpoint` protects it",
                    machine.definition().name
                );
                Err(HostError::new(ErrorKind::Invalid, message))
            }
        }
    }

    pub(crate) fn machine_type(&self, definition: &VmDefinition) -> Result<String, HostError> {
        self.capabilities
            .machine_type(&definition.machine)
            .map(str::to_owned)
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))
    }
}

/// Why a QEMU cannot go on for another of this release, with such a machine and processor.
fn goes_on_for(
    ours: &Capabilities,
    theirs: &Release,
    machine_type: &str,
    processor: Option<&str>,
) -> Result<(), String> {
    if let Err(unlike) = ours.release().compare(theirs) {
        let (ours, theirs) = (ours.version, theirs.version);
        return Err(format!("its QEMU is {ours}, the primary's is {theirs}: {unlike}"));
    }
    if !ours.machines.iter().any(|machine| machine.name == machine_type) {
        return Err(format!("its QEMU has no machine type {machine_type}"));
    }
    ours.check_cpu(processor).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    // Such a host was taken for one that would have the VM, and a backup given up for it.
    #[test]
    fn a_qemu_goes_on_for_one_whose_state_machine_and_processor_it_has() {
        let machine = understudy_qemu::capabilities::Machine {
            name: "pc-q35-10.0".to_owned(),
            alias: Some("q35".to_owned()),
        };
        let ours = Capabilities {
            binary: PathBuf::from("/usr/bin/qemu-system-x86_64"),
            version: "10.0.2".parse().unwrap(),
            layout: None,
            machines: vec![machine],
            cpus: vec!["max".to_owned()],
            accelerators: vec![Accelerator::Tcg],
            processor: None,
        };
        let asked = |version: &str, machine, processor| {
            let theirs = Release { version: version.parse().unwrap(), layout: None };
            goes_on_for(&ours, &theirs, machine, processor)
        };
        assert_eq!(asked("10.0.2", "pc-q35-10.0", Some("max")), Ok(()));
        let series = asked("10.1.0", "pc-q35-10.0", None).unwrap_err();
        assert!(series.contains("10.0.2, the primary's is 10.1.0"), "{series}");
        let machine = asked("10.0.2", "pc-q35-9.2", None).unwrap_err();
        assert!(machine.contains("no machine type"), "{machine}");
        assert!(asked("10.0.2", "pc-q35-10.0", Some("Turin")).is_err());
    }
}
