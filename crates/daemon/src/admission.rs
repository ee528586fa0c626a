//! Admission: everything that speaks against a VM, found before anything is changed.

mod disks;
mod emulator;

pub(crate) use disks::{open_disks, open_disks_in_use};

use crate::boot::Past;
use crate::host::{Host, prepare_directory};
use crate::vm::Vm;
use std::net::SocketAddr;
use std::path::PathBuf;
use understudy_arbiter::Key;
use understudy_arbiter::Unreachable;
use understudy_network::{NetworkError, bridge_exists, filters_vlans};
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::validity::{ArbiterWord, may_start};
use understudy_protocol::{Generation, Verdict};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::CardDefinition;
use understudy_replication::handshake::Offer;
use understudy_replication::records::Record;
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

#[cfg(test)]
mod tests {
    use super::*;

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
