//! Admission: everything that speaks against a VM, found before anything is changed.

use crate::boot::Past;
use crate::host::{Host, PEER_TIMEOUT, prepare_directory};
use crate::protection::refused;
use crate::vm::{PrimaryVm, Vm};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::{info, warn};
use understudy_arbiter::Key;
use understudy_arbiter::Unreachable;
use understudy_disk::{
    Disk, DiskError, ImageFormat, Tables, changes_path, export_bytes, export_bytes_as_listed,
};
use understudy_machine::Machine;
use understudy_network::{NetworkError, bridge_exists, filters_vlans};
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::validity::{ArbiterWord, ImageRole, may_start};
use understudy_protocol::wire::Kind;
use understudy_protocol::{DiskIndex, Generation, Verdict};
use understudy_qemu::definition::{CardDefinition, DiskDefinition, DiskFormat};
use understudy_qemu::lockstep::{LogRole, obstacles};
use understudy_qemu::{Accelerator, Capabilities, Release, VmDefinition, build_id, peer_obstacle};
use understudy_replication::handshake::{Offer, Purpose, Welcome};
use understudy_replication::records::Record;
use understudy_report::Mode;
use understudy_report::error::{ErrorKind, HostError};

/// Remedy that is left where a VM's newest images are lost.
pub(crate) const LOST: &str = "if they are lost for good, `understudy vm start FILE --force` starts it \
                               on FILE's, of a backup say (docs/runbook.md)";

impl Host {
    /// Refuses names and MAC addresses that are in use on this host.
    pub(crate) fn check_free(&self, definition: &VmDefinition) -> Result<(), HostError> {
        self.check_unused(definition)?;
        if self.snapshots.is_restoring(&definition.name) {
            let message = format!("{} is being restored from a snapshot", definition.name);
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        self.await_former(&definition.name)
    }

    /// Refuses names and MAC addresses of VMs that there are.
    pub(crate) fn check_unused(&self, definition: &VmDefinition) -> Result<(), HostError> {
        if let Some(why) = self.orphans.why(&definition.name) {
            let message = format!("{} {why}", definition.name);
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        for expected in self.arrivals.all() {
            let (name, primary) = (&expected.definition.name, &expected.primary);
            if *name == definition.name {
                let here = &self.config.name;
                let message = match primary == here.as_str() {
                    true => format!("host {here} is about to bring {name:?} up"),
                    false => {
                        format!(
                            "host {here} is about to back up {name:?} already, for host {primary}"
                        )
                    }
                };
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            check_cards(definition, &expected.definition)?;
        }
        self.check_kept_name(&definition.name)?;
        self.check_keepers(definition)?;
        for (name, vm) in &self.vms.all() {
            let machine = match vm {
                Vm::Primary(vm) => &vm.machine(),
                Vm::Backup(session) => &session.machine(),
                Vm::Fenced(_) => continue,
            };
            if *name == definition.name {
                let message =
                    format!("there is a VM {name:?} on host {} already", self.config.name);
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            check_cards(definition, machine.definition())?;
        }
        Ok(())
    }

    fn check_keepers(&self, definition: &VmDefinition) -> Result<(), HostError> {
        // Asked for by name: what cannot be listed for want of descriptors may be there all the same.
        if let Some(keeper) = self.keeper_of(&definition.name) {
            let message = format!(
                "there is a VM {:?} on host {} already, in a keeper of its own",
                keeper.vm, self.config.name
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        for keeper in self.keepers() {
            if let Some(other) = self.kept_definition(&keeper) {
                check_cards(definition, &other)?;
            }
        }
        Ok(())
    }

    /// Refuses cards whose bridge is not there, or cannot keep them in their VLANs.
    pub(crate) fn check_bridges(&self, cards: &[CardDefinition]) -> Result<(), HostError> {
        let internal = |error: NetworkError| HostError::new(ErrorKind::Internal, error.to_string());
        for card in cards {
            let exists = bridge_exists(&card.bridge).map_err(internal)?;
            if !exists {
                let message = format!(
                    "bridge {} does not exist on host {}: make it with that host's network configuration, \
                     the uplink as a port of it, so that it is there after a reboot",
                    card.bridge, self.config.name
                );
                return Err(HostError::new(ErrorKind::Invalid, message));
            }
            if !card.vlans().is_empty() && !filters_vlans(&card.bridge).map_err(internal)? {
                let message = format!(
                    "bridge {} on host {} does not filter VLANs, and card {} is in one: switch \
                     that on with `ip link set {} type bridge vlan_filtering 1`, and put the \
                     bridge's uplink into the VLAN with `bridge vlan add vid N dev UPLINK`",
                    card.bridge, self.config.name, card.mac, card.bridge
                );
                return Err(HostError::new(ErrorKind::Invalid, message));
            }
        }
        Ok(())
    }

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
        match self.installed.obstacle() {
            None => Ok(()),
            Some(obstacle) => Err(HostError::new(ErrorKind::Invalid, obstacle)),
        }
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

    /// A host that this one knows, with its addresses.
    pub(crate) fn known_host(&self, host: &str) -> Result<(HostName, Vec<SocketAddr>), HostError> {
        let (asked, host) = (host, &*host.to_ascii_lowercase());
        let mut known = self.known_hosts();
        let mut unasked = String::new();
        if !known.contains_key(host) {
            self.look_at_peers();
            if let Err(error) = self.look_for_members() {
                unasked = format!("; etcd could not be asked for others: {error:#}");
            }
            known = self.known_hosts();
        }
        let found = known.get_key_value(host);
        found.map(|(name, addresses)| (name.clone(), addresses.clone())).ok_or_else(|| {
            let known: Vec<&str> = known.keys().map(HostName::as_str).collect();
            let known = known.join(", ");
            let message = format!(
                "{asked:?} is not a peer of this host, which knows: {known}; add it to [peers], or \
                 give both hosts the same etcd{unasked}"
            );
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

    /// The directory of a VM's sockets, logs and mirrors.
    pub(crate) fn vm_directory(&self, name: &VmName) -> Result<PathBuf, HostError> {
        let directory = name.below(&self.config.state_dir);
        prepare_directory(&directory)?;
        Ok(directory)
    }

    /// Refuses to start a VM on images that are not its newest.
    pub(crate) fn check_images(&self, definition: &VmDefinition) -> Result<Past, HostError> {
        let name = &definition.name;
        let record = self.record(name)?;
        let word = match &self.arbiter {
            Some(arbiter) => ArbiterWord::Says(
                arbiter
                    .current(name)
                    .map_err(|error| HostError::new(ErrorKind::Unreachable, error.to_string()))?,
            ),
            None => ArbiterWord::Silent,
        };
        let own = record.as_ref().map(|record| &record.image);
        let refuse = |why: String| {
            let message = format!("{name} cannot be started here: {why}; {}", self.remedy(name));
            HostError::new(ErrorKind::Conflict, message)
        };
        may_start(&self.config.name, own, &word).map_err(refuse)?;
        if let Some(record) = &record {
            self.check_paths(definition, record)?;
        }
        let newest = word.generation().max(own.map_or(Generation(0), |own| own.generation));
        Ok(Past::of(record, newest))
    }

    /// Remedy: what to do about a VM that this host may not start.
    fn remedy(&self, name: &VmName) -> String {
        let runner = self.inquire(name).ok().and_then(|inquiry| inquiry.runner());
        match runner {
            Some((host, _)) => {
                format!("host {host} runs it now: `understudy status {name}` there shows it")
            }
            None => {
                format!(
                    "`understudy recover {name}` finds its valid images and starts it on them; {LOST}"
                )
            }
        }
    }

    /// Checks the paths of disks: after a take-over, or a restore, the newest images are in this
    /// host's own directory, whatever a definition from before says.
    fn check_paths(&self, definition: &VmDefinition, record: &Record) -> Result<(), HostError> {
        let name = &definition.name;
        // Of CD-ROM drives the definition counts: what it names is put in.
        let images = |definition: &VmDefinition| -> Vec<PathBuf> {
            let disks = definition.disks.iter().filter(|disk| !disk.cdrom);
            disks.map(|disk| disk.path.clone()).collect()
        };
        let (newest, named) = (images(&record.definition), images(definition));
        let mirrors = definition.name.below(&self.config.state_dir);
        if !replaces(&named, &newest) || !newest.iter().any(|image| image.starts_with(&mirrors)) {
            return Ok(());
        }
        let newest: Vec<String> = newest.iter().map(|path| path.display().to_string()).collect();
        let message = format!(
            "{name} cannot be started here from this definition: its newest images are {}, where it \
             ran last, and those of the definition are stale; `understudy vm start {name}` starts it \
             on the newest, `understudy recover {name}` asks the other hosts first; `understudy vm show \
             {name}` is a definition with the newest, to which a disk can be added; {LOST}",
            newest.join(", ")
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }

    /// Refuses to overwrite images that are newer than the offered VM.
    pub(crate) fn check_older(&self, offer: &Offer) -> Result<(), HostError> {
        let name = &offer.definition.name;
        let ran = self.record(name)?.and_then(|record| record.image.ran_at());
        let Some(ran) = ran.filter(|ran| *ran >= offer.generation) else { return Ok(()) };
        let message = format!(
            "its own images of {name} are of generation {ran}, not older than the offered ones of \
             generation {}: run `understudy recover {name}` to see which are valid",
            offer.generation
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }

    /// Refuses an offer of which this host could not prove that it may take the VM over: by the
    /// same arbiter's word, of this owner and generation.
    pub(crate) fn check_arbiter(&self, primary: &HostName, offer: &Offer) -> Result<(), HostError> {
        // What `examine` refuses is not asked about.
        let Some(arbiter) =
            self.arbiter.as_ref().filter(|_| offer.definition.validate().is_empty())
        else {
            return Ok(());
        };
        let name = &self.config.name;
        let unfit = |error: Unreachable| {
            let message = format!("it could not take over: {error}");
            HostError::new(ErrorKind::Unreachable, message)
        };
        let ours = arbiter.identify().map_err(unfit)?;
        if ours.id != offer.arbiter.id {
            let message = format!(
                "its arbiter is not that of {primary}: {name} has {ours}, {primary} has {theirs}; \
                 correct [arbiter] in the configuration of one of them, or mount what is missing, \
                 and restart its daemon",
                theirs = offer.arbiter
            );
            return Err(HostError::new(ErrorKind::Invalid, message));
        }
        // A group is taken over as one: no member of it may be somebody else's.
        for member in offer.group.iter().flat_map(|group| &group.membership.members) {
            arbiter.prove(&member.vm, primary, member.generation).map_err(unfit)?;
        }
        arbiter.prove(&offer.definition.name, primary, offer.generation).map_err(unfit)
    }

    pub(crate) fn take_ownership<'a>(
        &self,
        key: impl Into<Key<'a>>,
        from: Generation,
    ) -> Result<Generation, HostError> {
        let Some(arbiter) = &self.arbiter else { return Ok(Generation(0)) };
        let key = key.into();
        match arbiter.claim(key, from) {
            Verdict::Granted(generation) => Ok(generation),
            Verdict::Taken(owner) => {
                let (host, at) = (owner.host.as_deref(), owner.generation);
                let message = format!(
                    "{} took {key} just now, at generation {at}: ask again",
                    host.map_or_else(|| "another host".to_owned(), |host| format!("host {host}"))
                );
                Err(HostError::new(ErrorKind::Conflict, message))
            }
            Verdict::Returned(generation) => {
                let message = format!("this host owns {key} at generation {generation} already");
                Err(HostError::new(ErrorKind::Conflict, message))
            }
            Verdict::Unreachable(reason) => Err(HostError::new(ErrorKind::Unreachable, reason)),
        }
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

/// Whether images are named in the place of newer ones. Disks that are added to those, or left out of them, replace none.
fn replaces(named: &[PathBuf], newest: &[PathBuf]) -> bool {
    let lacks = |some: &[PathBuf], others: &[PathBuf]| others.iter().any(|it| !some.contains(it));
    lacks(named, newest) && lacks(newest, named)
}

/// Refuses MAC addresses of another VM on this host.
fn check_cards(definition: &VmDefinition, other: &VmDefinition) -> Result<(), HostError> {
    let taken = |mac| other.cards.iter().any(|other| other.mac == mac);
    let Some(card) = definition.cards.iter().find(|card| taken(card.mac)) else { return Ok(()) };
    let message = format!("MAC {} is in use by VM {:?} on this host", card.mac, other.name);
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// Refuses a qcow2 image whose guest could not find its disk.
fn check_tables(path: &Path) -> Result<(), DiskError> {
    let image = path.display();
    match understudy_disk::check_tables(path)? {
        Tables::Whole => {}
        Tables::Leaks(clusters) => {
            info!(%image, "{clusters} clusters of it are nobody's: they only take room");
        }
        Tables::Unchecked(why) => warn!(
            %image,
            "its qcow2 tables were not checked: {why}; if the guest does not find its disk, stop it, and \
             `qemu-img check -r all` on a copy says whether they are damaged"
        ),
    }
    Ok(())
}

/// Opens and locks the images of a VM's disks. An image that the VM has run on before, by its
/// record, is of the format that it was then: what it begins with may be the guest's own. `directory` is the VM's,
/// which has the lists of what has changed since.
pub(crate) fn open_disks(
    definition: &VmDefinition,
    former: Option<&Record>,
    directory: &Path,
) -> Result<Vec<Arc<Disk>>, HostError> {
    hang_in_a_test(&definition.name);
    let known = |disk: &DiskDefinition| {
        let same = |other: &DiskDefinition| other.path == disk.path && other.format == disk.format;
        former.is_some_and(|record| record.definition.disks.iter().any(same))
    };
    let is_listed = |i: usize, disk: &DiskDefinition| {
        former.is_some_and(|it| !it.sessions.is_empty() && it.images().get(i) == Some(&disk.path))
    };
    let open = |(i, disk): (usize, &DiskDefinition)| {
        let index = DiskIndex(i as u16);
        let format = match disk.format {
            DiskFormat::Raw => ImageFormat::Raw,
            DiskFormat::Qcow2 => ImageFormat::Qcow2,
        };
        if !known(disk) {
            understudy_disk::check_format(&disk.path, format)?;
        }
        if disk.cdrom {
            return Disk::open_medium(index, &disk.path).map(Arc::new);
        }
        let bytes = match is_listed(i, disk) {
            true => export_bytes_as_listed(&disk.path, format, &changes_path(directory, index))?,
            false => export_bytes(&disk.path, format)?,
        };
        let stopped = former.is_some_and(|record| record.image.role == ImageRole::Stopped);
        if format == ImageFormat::Qcow2 && !(stopped && known(disk)) {
            check_tables(&disk.path)?;
        }
        Disk::open(index, &disk.path, bytes).map(Arc::new)
    };
    definition.disks.iter().enumerate().map(open).collect::<Result<_, _>>().map_err(invalid)
}

/// A test has the images of a VM hang for as long as there is a file of its name in the directory that the fail point names.
fn hang_in_a_test(_vm: &VmName) {
    fail::fail_point!("open-disks", |directory| {
        let file = Path::new(&directory.unwrap_or_default()).join(_vm.as_str());
        while file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
}

/// The same of images that a QEMU has open, which are shown with so many bytes each: nothing is found out that takes
/// long, while its guest stands still.
pub(crate) fn open_disks_in_use(
    definition: &VmDefinition,
    bytes: &[u64],
) -> Result<Vec<Arc<Disk>>, HostError> {
    let open = |(i, (disk, bytes)): (usize, (&DiskDefinition, &u64))| {
        let index = DiskIndex(i as u16);
        match disk.cdrom {
            true => Disk::open_medium(index, &disk.path),
            false => Disk::open(index, &disk.path, *bytes),
        }
        .map(Arc::new)
    };
    let disks = definition.disks.iter().zip(bytes).enumerate();
    disks.map(open).collect::<Result<_, _>>().map_err(invalid)
}

fn invalid(error: DiskError) -> HostError {
    HostError::new(ErrorKind::Invalid, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Any change was refused once a VM had been taken over.
    #[test]
    fn a_disk_that_is_added_or_left_out_replaces_none() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let newest = paths(&["/state/db/disk0.img", "/state/db/disk1.img"]);
        let added = [newest.clone(), paths(&["/srv/new.img"])].concat();
        for named in [&newest, &added, &newest[..1].to_vec()] {
            assert!(!replaces(named, &newest), "{named:?}");
        }
        let before = paths(&["/srv/db.img", "/srv/data.img"]);
        let half = paths(&["/state/db/disk0.img", "/srv/data.img"]);
        for named in [before, half] {
            assert!(replaces(&named, &newest), "{named:?}");
        }
    }
}
