//! Placement: who may be restored where, asked before anything is started.

use crate::host::Host;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use understudy_cluster::messages::{Question, SavedVm};
use understudy_protocol::Generation;
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::validity::ArbiterWord;
use understudy_protocol::wire::Kind;
use understudy_replication::handshake::Purpose;
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{MemberManifest, NoAddress, StoreAddress, StoreError, Unfit};

/// The answer of a host that could take the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Bytes a second that the host read from the store.
    pub bytes_per_second: u64,
}

impl Host {
    /// An error unless a peer may name this store.
    pub(crate) fn may_be_told(&self, store: &StoreAddress) -> Result<(), HostError> {
        self.config.stores.check(store)
    }

    /// An error unless somebody who may not do all on this host may name this store.
    pub fn may_name_store(&self, store: &str) -> Result<(), HostError> {
        let wrong = |error: NoAddress| HostError::new(ErrorKind::Invalid, error.to_string());
        self.may_be_told(&store.parse().map_err(wrong)?)
    }

    /// Answer of this host.
    pub(crate) fn may_restore(&self, question: &Question) -> Result<Answer, HostError> {
        let here = &self.config.name;
        if self.is_closing() {
            return refuse(ErrorKind::Conflict, format!("host {here} is shutting down"));
        }
        let store =
            self.config.store_keys.open(&question.store).map_err(|error| self.of_store(error))?;
        let manifest = store
            .snapshot(&question.group, Some(question.number))
            .map_err(|error| self.of_store(error))?;
        let wanted = |name: &VmName| question.vms.contains(name);
        let entries = manifest.members.iter().filter(|entry| wanted(&entry.name));
        let members: Vec<MemberManifest> = entries
            .map(|entry| store.member(entry))
            .collect::<Result<_, _>>()
            .map_err(|error| self.of_store(error))?;
        let types: Vec<String> =
            self.capabilities.machines.iter().map(|machine| machine.name.clone()).collect();
        let qemu = self.capabilities.version.to_string();
        Unfit::check(&members, &qemu, &types, self.free_memory())
            .map_err(|unfit| HostError::new(ErrorKind::Invalid, format!("host {here}: {unfit}")))?;
        for member in &members {
            let saved = SavedVm::of(member)
                .map_err(|error| HostError::new(ErrorKind::Invalid, format!("{error:#}")))?;
            self.check_unused(&saved.definition)?;
            self.check_bridges(&saved.definition.cards)?;
        }
        Ok(Answer { bytes_per_second: self.snapshots.speed() })
    }

    fn of_store(&self, error: StoreError) -> HostError {
        store_error(&format!("host {}: ", self.config.name), error)
    }

    /// Asks a host.
    pub(super) fn ask_to_restore(
        self: &Arc<Self>,
        host: &HostName,
        question: &Question,
    ) -> Result<Answer, HostError> {
        if *host == self.config.name {
            return self.may_restore(question);
        }
        let known = self.known_hosts();
        let Some(addresses) = known.get(host) else {
            let message = format!(
                "host {} does not know a host {host}; its configuration's [peers] has: {}",
                self.config.name,
                known.keys().map(HostName::as_str).collect::<Vec<_>>().join(", ")
            );
            return refuse(ErrorKind::Invalid, message);
        };
        let ask = || -> anyhow::Result<Answer> {
            let purpose = Purpose::MayRestore(question.clone());
            let (link, _) = self.identity.dial_first(host, addresses, |_| purpose.clone())?;
            link.expect_json(Kind::Welcome)
        };
        ask().map_err(|error| {
            let kind = match error.is::<understudy_link::link::Refused>() {
                true => ErrorKind::Refused,
                false => ErrorKind::Unreachable,
            };
            let place =
                if kind == ErrorKind::Refused { String::new() } else { format!("host {host}: ") };
            HostError::new(kind, format!("{place}{error:#}"))
        })
    }

    /// The newest generation of a VM that anybody knows; an error if it runs anywhere, or may.
    pub(super) fn check_runs_nowhere(
        &self,
        vm: &VmName,
        force: bool,
    ) -> Result<Generation, HostError> {
        let inquiry = self.inquire(vm)?;
        if let Some((host, busy)) = inquiry.busy() {
            return refuse(ErrorKind::Conflict, runs_elsewhere(vm, host, busy));
        }
        if let (ArbiterWord::Silent, true) = (&inquiry.arbiter, self.arbiter.is_some()) {
            let message = format!("the arbiter does not answer: {}", inquiry.arbiter_words);
            return refuse(ErrorKind::Unreachable, message);
        }
        if let (Some(why), false) = (inquiry.may_run(&self.config.name), force) {
            let message = format!(
                "{vm} may run on {why}; start the host, or, if it is down for good, use --force"
            );
            return refuse(ErrorKind::Conflict, message);
        }
        Ok(inquiry.newest())
    }
}

/// Reason why a VM is not restored that a host is busy with.
pub(super) fn runs_elsewhere(vm: &VmName, host: &str, busy: &str) -> String {
    format!(
        "{vm} is not to be restored: host {host} {busy}; run `understudy vm stop {vm}` there first"
    )
}

fn refuse<T>(kind: ErrorKind, message: String) -> Result<T, HostError> {
    Err(HostError::new(kind, message))
}

/// A store's error for the user, with the class that fits.
pub(super) fn store_error(place: &str, error: StoreError) -> HostError {
    let kind = match &error {
        StoreError::NoSnapshot { .. } | StoreError::NoSnapshots(_) | StoreError::Unknown(_) => {
            ErrorKind::NotFound
        }
        StoreError::Location(_) | StoreError::Name(_) | StoreError::Version { .. } => {
            ErrorKind::Invalid
        }
        StoreError::Sweeping { .. } | StoreError::Overtaken(_) | StoreError::BeingRead { .. } => {
            ErrorKind::Conflict
        }
        _ => ErrorKind::Internal,
    };
    HostError::new(kind, format!("{place}{error}"))
}
