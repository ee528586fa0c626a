//! Findings of those who look after this host: each of these threads puts its own there, whoever is
//! asked looks them up.

use crate::membership::Member;
use crate::peers::Peers;
use std::collections::BTreeMap;
use understudy_protocol::{HostName, VmName};

/// All of it, but what is asked for at the moment of the question.
#[derive(Default)]
pub(crate) struct Findings {
    /// The other hosts that the configuration names.
    pub peers: Peers,
    /// The other hosts, as etcd last told; empty without etcd.
    pub members: BTreeMap<HostName, Member>,
    /// Reason why the arbiter cannot be used.
    pub arbiter: Option<String>,
    /// Reasons why cards of VMs that run here are on no bridge, by VM and address.
    pub cards: BTreeMap<(VmName, String), String>,
}
