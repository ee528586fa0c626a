//! All parts together, without VMs: members that pass money to each other are snapshotted while
//! they run, at random moments, into a real store; some snapshots are cancelled half-way. Each
//! snapshot is restored: every member's memory is what it was at its pause, byte by byte, and no
//! money is lost or doubled, wherever it was.

mod group;
#[path = "../../src/random.rs"]
mod random;
mod restored;
mod saving;

use group::{Group, START_BALANCE};
use understudy_protocol::literal;
use understudy_snapshot::{SnapshotNumber, Store, Swept};

const MEMBERS: usize = 3;

#[test]
fn every_snapshot_of_a_running_group_restores_to_one_moment() {
    let (mut snapshots, mut cancelled, mut in_flight, mut moved) = (0, 0, 0, 0);
    for seed in 1..=4 {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let mut group = Group::new(seed, &store);
        for _ in 0..7 {
            group.run_for(400);
            let number = group.snapshot();
            cancelled += u32::from(number.is_none());
        }
        for listed in store.snapshots(&literal("bank")).unwrap() {
            let manifest = listed.manifest.unwrap();
            assert!(store.verify(&manifest).unwrap().problems.is_empty());
            let truth = group.truth(listed.number);
            let restored = restored::restore(&store, &manifest);
            for (member, (memory, truth)) in restored.memories.iter().zip(truth).enumerate() {
                assert!(memory == truth, "seed {seed}, {}, member {member}", listed.number);
            }
            assert_eq!(restored.money(), MEMBERS as u64 * START_BALANCE, "seed {seed}");
            in_flight += restored.frames.iter().map(Vec::len).sum::<usize>();
            moved += u32::from(manifest.crossings.iter().any(|crossing| crossing.data > 0));
            snapshots += 1;
        }
        // What is left when all are deleted is nothing.
        let numbers: Vec<SnapshotNumber> =
            store.snapshots(&literal("bank")).unwrap().iter().map(|listed| listed.number).collect();
        for number in numbers {
            assert!(matches!(
                store.remove(&literal("bank"), number, group::NOW),
                Ok(Swept::Removed(_))
            ));
        }
        assert_eq!(files(&directory.path().join("chunks")), 0);
        assert_eq!(files(&directory.path().join("writing")), 0);
    }
    assert!(snapshots > 12 && cancelled > 1, "{snapshots} taken, {cancelled} cancelled");
    assert!(in_flight > 20 && moved > 5, "{in_flight} frames in flight, {moved} with an order");
}

fn files(below: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(below).into_iter().flatten().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}
