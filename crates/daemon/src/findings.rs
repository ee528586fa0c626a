//! Findings of those who look after this host: each of these threads puts its own there, whoever is
//! asked looks them up.

use crate::membership::Member;
use crate::peers::Peers;
use std::collections::BTreeMap;
use understudy_protocol::{GroupName, HostName, VmName};

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
    /// Reasons why a cluster's last scheduled snapshot does not exist, or old ones still do.
    pub snapshots: BTreeMap<GroupName, String>,
    /// The VMs that have keepers, as last looked at.
    pub kept: Vec<VmName>,
    /// Reason why events are not posted.
    pub webhook: Option<String>,
}

impl Findings {
    /// What is wrong with a cluster's scheduled snapshots from now on, if something is.
    pub fn note_snapshot(&mut self, of: &GroupName, words: Option<String>) {
        match words {
            Some(words) => self.snapshots.insert(of.clone(), words),
            None => self.snapshots.remove(of),
        };
    }

    /// Problems of the host with scheduled snapshots.
    pub fn of_snapshots(&self) -> Vec<String> {
        let told = |(of, words)| format!("scheduled snapshots of {of} {words}");
        self.snapshots.iter().map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    /// A store that was not mounted was an event, and nothing that anybody is woken by.
    #[test]
    fn a_snapshot_that_fails_is_told_until_one_is_taken() {
        let mut findings = Findings::default();
        let shop = literal("shop");
        findings.note_snapshot(&shop, Some("cannot be taken: no store".to_owned()));
        findings.note_snapshot(&shop, Some("cannot be taken: no room".to_owned()));
        assert_eq!(
            findings.of_snapshots(),
            ["scheduled snapshots of shop cannot be taken: no room"]
        );
        findings.note_snapshot(&shop, None);
        assert!(findings.of_snapshots().is_empty());
    }
}
