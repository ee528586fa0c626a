//! The choice of a schedule's snapshots that are kept.

use crate::SnapshotNumber;
use crate::format::Manifest;

/// The retention of a group's snapshots. Those with a label are kept until they are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Number of the newest to keep, at least one.
    pub newest: usize,
    /// Age in seconds up to which all others are kept, too.
    pub seconds: u64,
}

impl Retention {
    /// The numbers of those to be deleted. `now` is in seconds since 1970.
    pub fn expired(&self, snapshots: &[Manifest], now: u64) -> Vec<SnapshotNumber> {
        let mut unlabelled: Vec<&Manifest> =
            snapshots.iter().filter(|manifest| manifest.label.is_none()).collect();
        unlabelled.sort_by_key(|manifest| std::cmp::Reverse(manifest.number));
        let old = |manifest: &&&Manifest| manifest.taken_at.saturating_add(self.seconds) <= now;
        let beyond = unlabelled.iter().skip(self.newest.max(1));
        beyond.filter(old).map(|manifest| manifest.number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Incarnation;
    use crate::format::Compression;
    use understudy_protocol::literal;

    #[test]
    fn the_newest_the_young_and_the_labelled_are_kept() {
        let snapshot = |number, label: Option<&str>| Manifest {
            group: literal("shop"),
            number: SnapshotNumber(number),
            label: label.map(str::to_owned),
            taken_at: number * 100,
            incarnation: Incarnation(0),
            compression: Compression::Lz4,
            members: vec![],
            crossings: vec![],
        };
        let all: Vec<_> = (1..=9).map(|n| snapshot(n, (n == 2).then_some("before"))).collect();
        let expired = |newest, seconds| -> Vec<u64> {
            let retention = Retention { newest, seconds };
            retention.expired(&all, 1000).into_iter().map(|number| number.0).collect()
        };
        assert_eq!(expired(3, 0), [6, 5, 4, 3, 1]);
        assert_eq!(expired(3, 500), [5, 4, 3, 1]);
        assert_eq!(expired(0, 0), [8, 7, 6, 5, 4, 3, 1], "never the last one");
        assert_eq!(expired(100, 0), Vec::<u64>::new());
    }
}
