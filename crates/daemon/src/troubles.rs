//! Problems of this host, as those have found who look after it.

use std::collections::{BTreeMap, BTreeSet};
use understudy_protocol::{GroupName, VmName};

/// All of it, but what is asked for at the moment of the question.
#[derive(Default)]
pub(crate) struct Troubles {
    /// Reason why the arbiter cannot be used.
    pub arbiter: Option<String>,
    /// VMs that ran here, and that nothing brings up again.
    pub lost: BTreeSet<VmName>,
    /// Reasons why cards of VMs that run here are on no bridge, by VM and address.
    pub cards: BTreeMap<(VmName, String), String>,
    /// Reasons why a cluster's last scheduled snapshot does not exist, or old ones still do.
    pub snapshots: BTreeMap<GroupName, String>,
}

impl Troubles {
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
        let mut troubles = Troubles::default();
        let shop = literal("shop");
        troubles.note_snapshot(&shop, Some("cannot be taken: no store".to_owned()));
        troubles.note_snapshot(&shop, Some("cannot be taken: no room".to_owned()));
        assert_eq!(
            troubles.of_snapshots(),
            ["scheduled snapshots of shop cannot be taken: no room"]
        );
        troubles.note_snapshot(&shop, None);
        assert!(troubles.of_snapshots().is_empty());
    }
}
