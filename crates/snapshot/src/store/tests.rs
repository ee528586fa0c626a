//! A store in a directory: snapshots go in and come out, damage is named, and what nobody needs
//! is removed, never more.

use super::*;
use crate::format::{
    AreaEntry, AreaMap, Blob, Compression, InFlightFrame, Machine, Manifest, MemberEntry,
    MemberManifest, Page, WorkingSet,
};
use crate::pack::{Lane, NewChunk, Packer};
use crate::{Area, ChunkId, Incarnation, Member, SnapshotNumber, UNIT_BYTES};
use std::path::PathBuf;
use tempfile::TempDir;
use understudy_protocol::{BlockId, CardIndex, PageIndex};
use understudy_protocol::{GroupName, literal};

const UNITS: u64 = 300;
const NOW: u64 = 1_790_000_000;

#[path = "hostile_tests.rs"]
mod hostile;
#[path = "lost_answers_tests.rs"]
mod lost_answers;

struct Bench {
    directory: TempDir,
    store: Store,
}

/// The content of a page in a version of the memory; every 5th is zero.
fn content(unit: u64, version: u64) -> Vec<u8> {
    match unit % 5 {
        0 => vec![0; UNIT_BYTES],
        _ => blake3::hash(&[unit, version].map(u64::to_le_bytes).concat())
            .as_bytes()
            .repeat(UNIT_BYTES / 32),
    }
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        Bench { directory, store }
    }

    /// Stores one member whose changed pages have the content of `version`.
    fn member(&self, base: &AreaMap, changed: &[u64], version: u64) -> (MemberManifest, AreaMap) {
        let (mut packer, store, packing) = (Packer::new(), &self.store, Compression::Lz4);
        for &unit in changed {
            let full = packer.put(unit, &content(unit, version), Lane::Rest);
            store.put_chunks(full.as_slice(), packing).unwrap();
        }
        let (last, map, _) = packer.finish(base);
        store.put_chunks(&last, packing).unwrap();
        let blob = |bytes: &[u8]| store.put_blob(bytes, packing).unwrap();
        let frame = InFlightFrame { from: Member(0), card: CardIndex(0), bytes: vec![9; 70] };
        let queue = vec![Page { block: BlockId(0), index: PageIndex(7) }];
        let member = MemberManifest {
            name: literal("db"),
            machine: Machine {
                qemu: "10.0.2".into(),
                machine_type: "pc-i440fx-10.0".into(),
                vcpus: 1,
                memory: UNITS * UNIT_BYTES as u64,
            },
            definition: serde_json::json!({ "name": "db" }),
            firmware: None,
            kernel: None,
            initrd: None,
            areas: vec![AreaEntry {
                area: Area::Memory(BlockId(0)),
                name: "pc.ram".into(),
                bytes: UNITS * UNIT_BYTES as u64,
                map: blob(&map.encode()),
            }],
            device_state: blob(&version.to_le_bytes().repeat(300_000)),
            in_flight: store.put_frames(&[frame], packing).unwrap(),
            working_set: blob(&WorkingSet { queue, size: 3 }.encode()),
            recent: None,
            clock: None,
            sampled: None,
            pause_us: 0,
            base: None,
        };
        (member, map)
    }

    fn manifest(&self, writing: &Writing, member: &MemberManifest) -> Manifest {
        let part = self.store.put_member(member, Compression::Lz4).unwrap();
        Manifest {
            group: writing.group.clone(),
            number: writing.number,
            label: None,
            taken_at: NOW,
            incarnation: Incarnation(1),
            compression: Compression::Lz4,
            members: vec![MemberEntry {
                name: literal("db"),
                host: literal("host-a"),
                memory: member.machine.memory,
                part,
            }],
            crossings: vec![],
        }
    }

    fn begin(&self) -> Writing {
        self.store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap()
    }

    /// Takes a snapshot of what changed in a version.
    fn take(&self, base: &AreaMap, changed: &[u64], version: u64) -> (Manifest, AreaMap) {
        let writing = self.begin();
        let (member, map) = self.member(base, changed, version);
        let manifest = self.manifest(&writing, &member);
        self.store.publish(writing, &manifest).unwrap();
        (manifest, map)
    }

    fn files(&self, below: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        let mut directories = vec![self.directory.path().join(below)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() { directories.push(path) } else { files.push(path) }
            }
        }
        files.sort();
        files
    }

    fn file(&self, id: ChunkId) -> PathBuf {
        self.directory.path().join(self.store.chunk_path(id).as_ref())
    }

    /// Reads a snapshot's memory and compares each page with the version that it should have.
    fn check_memory(&self, manifest: &Manifest, version: impl Fn(u64) -> u64) {
        let member = self.store.member(&manifest.members[0]).unwrap();
        let map = self.store.area(&member.areas[0]).unwrap();
        for unit in 0..UNITS {
            let read = match map.find(unit) {
                None => vec![0; UNIT_BYTES],
                Some(place) => {
                    let chunk = self.store.chunk(place.chunk).unwrap();
                    let from = usize::from(place.slot) * UNIT_BYTES;
                    chunk[from..from + UNIT_BYTES].to_vec()
                }
            };
            assert!(read == content(unit, version(unit)), "page {unit}");
        }
    }
}

fn all() -> Vec<u64> {
    (0..UNITS).collect()
}

#[test]
fn a_snapshot_comes_back_and_the_next_one_stores_what_changed() {
    let bench = Bench::new();
    let (first, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let before = bench.files("chunks").len();
    let changed: Vec<u64> = (20..40).collect();
    let (second, map) = bench.take(&map, &changed, 2);
    // One chunk of pages, the map, the part, the device state: three pieces, two of them alike.
    assert_eq!(bench.files("chunks").len() - before, 5);
    bench.check_memory(&first, |_| 1);
    bench.check_memory(&second, |unit| if changed.contains(&unit) { 2 } else { 1 });
    let found = bench.store.snapshot(&literal("shop"), None).unwrap();
    assert_eq!((&found, found.number), (&second, SnapshotNumber(2)));
    let member = bench.store.member(&found.members[0]).unwrap();
    assert_eq!(bench.store.area(&member.areas[0]).unwrap(), map);
    assert_eq!(bench.store.frames(&member).unwrap()[0].bytes, [9; 70]);
    let set = bench.store.working_set(&member).unwrap();
    assert_eq!(set.size, 3);
    assert_eq!(bench.store.by_sampling(&member).unwrap(), set, "nobody has sampled");
    let sampled = MemberManifest { sampled: Some(2), ..member.clone() };
    let by_sampling = bench.store.by_sampling(&sampled).unwrap();
    assert_eq!((by_sampling.size, by_sampling.queue), (2, set.queue));
    let verified = bench.store.verify(&second).unwrap();
    assert!(verified.problems.is_empty() && verified.chunks > 5, "{verified:?}");
    assert_eq!(bench.store.groups().unwrap(), ["shop"]);
    // The same store, opened again.
    let again = Store::open(bench.directory.path().to_str().unwrap()).unwrap();
    assert_eq!(again.snapshots(&literal("shop")).unwrap().len(), 2);
    assert!(bench.files("writing").is_empty());
}

#[test]
fn what_is_there_is_not_written_again_unless_it_is_damaged() {
    let bench = Bench::new();
    let (manifest, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let mut packer = Packer::new();
    let mut chunks: Vec<_> =
        all().iter().filter_map(|&unit| packer.put(unit, &content(unit, 1), Lane::Rest)).collect();
    chunks.extend(packer.finish(&AreaMap::zeros(UNITS)).0);
    assert_eq!(bench.store.put_chunks(&chunks, Compression::None).unwrap(), 0);
    std::fs::write(bench.file(map.chunks()[0]), "").unwrap();
    assert!(bench.store.put_chunks(&chunks, Compression::None).unwrap() > 0);
    assert!(bench.store.verify(&manifest).unwrap().problems.is_empty());
}

#[test]
fn without_its_manifest_there_is_no_snapshot_and_giving_up_leaves_nothing() {
    let bench = Bench::new();
    let (first, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let before = bench.files("");
    let writing = bench.begin();
    assert_eq!(writing.number, SnapshotNumber(2));
    let (member, _) = bench.member(&map, &[1, 2, 3], 2);
    bench.manifest(&writing, &member);
    assert_eq!(bench.store.snapshot(&literal("shop"), None).unwrap(), first);
    assert!(bench.files("").len() > before.len());
    assert_eq!(bench.store.abandon(writing, NOW).unwrap(), Swept::Removed(5));
    assert_eq!(bench.files(""), before);
}

#[test]
fn a_manifest_is_not_written_while_a_chunk_is_missing() {
    let bench = Bench::new();
    let writing = bench.begin();
    let (member, map) = bench.member(&AreaMap::zeros(UNITS), &all(), 1);
    let manifest = bench.manifest(&writing, &member);
    let missing = map.chunks()[1];
    std::fs::remove_file(bench.file(missing)).unwrap();
    let error = bench.store.publish(writing, &manifest).unwrap_err();
    assert!(matches!(error, StoreError::MissingChunk(id) if id == missing), "{error}");
    assert!(matches!(
        bench.store.snapshot(&literal("shop"), None),
        Err(StoreError::NoSnapshots(_))
    ));
}

#[test]
fn a_missing_chunk_is_found_among_few_and_among_many_of_a_folder() {
    let bench = Bench::new();
    let content = |at: u64| at.to_le_bytes().to_vec();
    let in_folder = |folder: &str| {
        let ids = (0..).map(|at| (at, ChunkId::of(&content(at))));
        let wanted = ids.filter(|(_, id)| id.to_string().starts_with(folder));
        wanted.take(super::snapshots::FEW + 1).collect::<Vec<_>>()
    };
    let (few, many) = (&in_folder("00")[1..], in_folder("01"));
    let all: Vec<_> = [few, &many].concat();
    let chunk = |&(at, id): &(u64, ChunkId)| NewChunk { id, content: content(at) };
    bench.store.put_chunks(&all.iter().map(chunk).collect::<Vec<_>>(), Compression::None).unwrap();
    let needed = || all.iter().map(|(_, id)| *id).collect();
    bench.store.check_there(needed()).unwrap();
    for missing in [few[3].1, many[3].1] {
        let (file, away) = (bench.file(missing), bench.file(missing).with_extension("away"));
        std::fs::rename(&file, &away).unwrap();
        let error = bench.store.check_there(needed()).unwrap_err();
        assert!(matches!(error, StoreError::MissingChunk(id) if id == missing), "{error}");
        std::fs::rename(away, file).unwrap();
    }
    std::fs::remove_dir_all(bench.file(many[0].1).parent().unwrap()).unwrap();
    let error = bench.store.check_there(needed()).unwrap_err();
    assert!(matches!(error, StoreError::MissingChunk(_)), "{error}");
}

#[test]
fn deleting_keeps_what_other_snapshots_need() {
    let bench = Bench::new();
    let (_, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let (second, _) = bench.take(&map, &[7, 8], 2);
    let swept = bench.store.remove(&literal("shop"), SnapshotNumber(1), NOW).unwrap();
    // Its map, its part, its device state; each page of it is still needed but for two.
    assert_eq!(swept, Swept::Removed(4));
    bench.check_memory(&second, |unit| if [7, 8].contains(&unit) { 2 } else { 1 });
    assert!(bench.store.verify(&second).unwrap().problems.is_empty());
    assert!(matches!(
        bench.store.remove(&literal("shop"), SnapshotNumber(2), NOW),
        Ok(Swept::Removed(_))
    ));
    assert_eq!(bench.files("chunks"), Vec::<PathBuf>::new());
    let told =
        bench.store.remove(&literal("shop"), SnapshotNumber(2), NOW).unwrap_err().to_string();
    assert!(told.starts_with("shop has no snapshots"), "{told}");
}

/// A guest whose memory was still to come once lost it for good.
#[test]
fn what_is_being_restored_is_not_deleted() {
    let bench = Bench::new();
    let (first, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    bench.take(&map, &[7, 8], 2);
    let (group, number): (GroupName, _) = (literal("shop"), SnapshotNumber(1));
    let reading = |vm, id: &str| {
        let (group, id) = (group.clone(), id.to_owned());
        Reading { group, number, vm: literal(vm), id }
    };
    bench.store.begin_reading(&reading("db", "1"), &literal("host-b"), NOW).unwrap();
    bench.store.begin_reading(&reading("web", "1"), &literal("host-c"), NOW).unwrap();
    let before = bench.files("");
    let error = bench.store.remove(&group, number, NOW + 9).unwrap_err();
    assert!(matches!(error, StoreError::BeingRead { .. }), "{error}");
    let words = "host host-b began 9 s ago to restore db from it, host host-c";
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(bench.files(""), before);
    bench.store.remove(&group, SnapshotNumber(2), NOW).unwrap();
    assert!(bench.store.verify(&first).unwrap().problems.is_empty());

    // A former restore of it ends late.
    bench.store.end_reading(&reading("db", "0")).unwrap();
    bench.store.end_reading(&reading("web", "1")).unwrap();
    bench.store.remove(&group, number, NOW).unwrap_err();
    bench.store.forget_readers(&group, number).unwrap();
    assert!(matches!(bench.store.remove(&group, number, NOW), Ok(Swept::Removed(_))));
    bench.store.end_reading(&reading("db", "1")).unwrap();
    assert!(bench.files("reading").is_empty() && bench.files("chunks").is_empty());
}

/// A deletion and a restore may begin at once: what the one has just removed comes back.
#[test]
fn nothing_is_swept_while_what_is_restored_is_not_there() {
    let bench = Bench::new();
    let (first, _) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let (group, vm, id) = (literal("shop"), literal("db"), "1".to_owned());
    let reading = Reading { group, number: first.number, vm, id };
    bench.store.begin_reading(&reading, &literal("host-b"), NOW).unwrap();
    let manifest = bench.directory.path().join("snapshots/shop/1.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::remove_file(&manifest).unwrap();
    assert_eq!(bench.store.sweep(NOW + 9).unwrap(), Swept::Later);
    std::fs::write(&manifest, text).unwrap();
    assert!(bench.store.verify(&first).unwrap().problems.is_empty());
    std::fs::remove_file(&manifest).unwrap();
    // Its host has died before it has seen that there is no such snapshot.
    assert!(matches!(bench.store.sweep(NOW + 90_000), Ok(Swept::Removed(count)) if count > 0));
    assert!(bench.files("reading").is_empty());
}

#[test]
fn nothing_is_swept_while_a_snapshot_is_written_and_none_begins_during_a_sweep() {
    let bench = Bench::new();
    bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let writing = bench.begin();
    let (member, _) = bench.member(&AreaMap::zeros(UNITS), &all(), 3);
    assert_eq!(bench.store.remove(&literal("shop"), SnapshotNumber(1), NOW).unwrap(), Swept::Later);
    let manifest = bench.manifest(&writing, &member);
    bench.store.publish(writing, &manifest).unwrap();
    assert!(bench.store.verify(&manifest).unwrap().problems.is_empty());
    // A sweep under way elsewhere.
    let mark = bench.directory.path().join("sweeping");
    std::fs::write(&mark, NOW.to_string()).unwrap();
    let begun = bench.store.begin(&literal("shop"), SnapshotNumber(0), NOW + 9);
    let told = begun.unwrap_err().to_string();
    assert!(told.contains(" 9 s ago") && told.contains("in 591 s if"), "{told}");
    assert!(bench.files("writing").is_empty());
    assert_eq!(bench.store.sweep(NOW + 9).unwrap(), Swept::Later);
    // Its host has died: after ten minutes nobody waits for it.
    let begun = bench.store.begin(&literal("shop"), SnapshotNumber(0), NOW + 600).unwrap();
    assert_eq!(bench.store.abandon(begun, NOW + 600).unwrap(), Swept::Later);
    assert!(matches!(bench.store.sweep(NOW + 600), Ok(Swept::Removed(count)) if count > 0));
}

#[test]
fn a_snapshot_taken_for_dead_is_not_published() {
    let bench = Bench::new();
    let writing = bench.begin();
    let (member, _) = bench.member(&AreaMap::zeros(UNITS), &all(), 1);
    let manifest = bench.manifest(&writing, &member);
    assert_eq!(bench.store.sweep(NOW + 3600).unwrap(), Swept::Later);
    assert!(matches!(bench.store.sweep(NOW + 90_000), Ok(Swept::Removed(count)) if count > 0));
    assert!(bench.store.publish(writing, &manifest).is_err());
    let writing = bench.begin();
    std::fs::remove_dir_all(bench.directory.path().join("writing")).unwrap();
    let (member, _) = bench.member(&AreaMap::zeros(UNITS), &all(), 1);
    let manifest = bench.manifest(&writing, &member);
    let error = bench.store.publish(writing, &manifest).unwrap_err();
    assert!(matches!(error, StoreError::Overtaken(_)), "{error}");
}

#[test]
fn numbers_grow_and_two_coordinators_never_share_one() {
    let bench = Bench::new();
    let begin =
        |after| bench.store.begin(&literal("shop"), SnapshotNumber(after), NOW).unwrap().number.0;
    assert_eq!((begin(0), begin(0), begin(7), begin(3)), (1, 2, 8, 9));
    // No such group can be asked for.
    assert!("../shop".parse::<GroupName>().is_err());
}

#[test]
fn damage_is_named_and_found_by_verification() {
    let bench = Bench::new();
    let (manifest, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let [first, second, third] = map.chunks()[..3] else { panic!("too few chunks") };
    std::fs::remove_file(bench.file(first)).unwrap();
    let mut bytes = std::fs::read(bench.file(second)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(bench.file(second), &bytes).unwrap();
    std::fs::write(bench.file(third), "").unwrap();
    let verified = bench.store.verify(&manifest).unwrap();
    assert_eq!(verified.problems.len(), 3, "{verified:?}");
    for problem in &verified.problems {
        assert_eq!(problem.part, "pc.ram of db");
    }
    assert!(matches!(bench.store.chunk(first), Err(StoreError::MissingChunk(_))));
    let told = bench.store.chunk(second).unwrap_err().to_string();
    assert!(told.starts_with(&format!("chunk {second} is damaged")), "{told}");
}

#[test]
fn a_damaged_or_newer_manifest_is_named_and_its_chunks_are_kept() {
    let bench = Bench::new();
    let (manifest, map) = bench.take(&AreaMap::zeros(UNITS), &all(), 1);
    let (_, _) = bench.take(&map, &[1], 2);
    let path = bench.directory.path().join("snapshots/shop/1.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let told = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let error =
            bench.store.snapshot(&literal("shop"), Some(manifest.number)).unwrap_err().to_string();
        // The other one is offered as before.
        assert_eq!(bench.store.snapshot(&literal("shop"), None).unwrap().number, SnapshotNumber(2));
        let listed = bench.store.snapshots(&literal("shop")).unwrap();
        assert_eq!(
            listed.iter().map(|one| one.manifest.is_ok()).collect::<Vec<_>>(),
            [false, true]
        );
        error
    };
    let damaged = told(&text.replace("host-a", "host-b"));
    assert!(damaged.starts_with("snapshot 1 of shop in "), "{damaged}");
    assert!(damaged.contains("its checksum is wrong"), "{damaged}");
    let newer = told(&text.replacen("snapshot 1 ", "snapshot 2 ", 1));
    assert!(newer.contains("has version 2 of the format"), "{newer}");
    let chunks = bench.files("chunks");
    let removed = bench.store.remove(&literal("shop"), SnapshotNumber(2), NOW).unwrap();
    assert!(matches!(removed, Swept::Kept(_)), "{removed:?}");
    assert_eq!(bench.files("chunks"), chunks);
    let told =
        bench.store.snapshot(&literal("shop"), Some(SnapshotNumber(5))).unwrap_err().to_string();
    assert_eq!(told, "shop has no snapshot 5 in this store; there is 1");
}

#[test]
fn what_is_no_store_is_said_to_be_none() {
    let directory = tempfile::tempdir().unwrap();
    let open = |location: &str| Store::open(location).unwrap_err();
    let path = directory.path().to_str().unwrap();
    assert!(matches!(open(path), StoreError::Unknown(_)), "an empty directory");
    assert!(matches!(open(&format!("{path}/none")), StoreError::Unknown(_)));
    assert!(matches!(open("ftp://somewhere/else"), StoreError::Location(_)));
    assert!(matches!(open(""), StoreError::Location(_)));
    Store::create(&format!("file://{path}/new")).unwrap();
    Store::open(&format!("{path}/new")).unwrap();
    std::fs::write(format!("{path}/new/store"), "something").unwrap();
    assert!(matches!(open(&format!("{path}/new")), StoreError::Damaged { .. }));
    let file = format!("{path}/new/store");
    assert!(matches!(Store::create(&file), Err(StoreError::Failed { .. })));
}

/// Threads that end while they are detached may take the process with them.
#[test]
fn the_threads_of_stores_are_shared_and_stay() {
    let bench = Bench::new();
    let other = Bench::new();
    assert!(Arc::ptr_eq(&bench.store.runtime, &other.store.runtime));
    let runtime = Arc::downgrade(&bench.store.runtime);
    drop((bench, other));
    assert!(runtime.upgrade().is_some(), "they end with the last store");
}

#[test]
fn a_blob_of_any_length_comes_back_and_an_impossible_one_is_refused() {
    let bench = Bench::new();
    for length in [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 5] {
        let bytes: Vec<u8> = (0..length).map(|at: usize| (at / 1000) as u8).collect();
        let blob = bench.store.put_blob(&bytes, Compression::Lz4).unwrap();
        assert!(bench.store.blob(&blob).unwrap() == bytes, "{length}");
        assert!(blob.holds(&bytes) && !blob.holds(&[&bytes[..], &[0]].concat()), "{length}");
        let last_changed = bytes.split_last().map(|(last, rest)| [rest, &[last ^ 1]].concat());
        assert!(!last_changed.is_some_and(|other| blob.holds(&other)), "{length}");
        let wrong = Blob { bytes: blob.bytes + 1, ..blob };
        assert!(matches!(bench.store.blob(&wrong), Err(StoreError::Damaged { .. })));
    }
    let endless = Blob { bytes: u64::MAX, chunks: vec![] };
    assert!(bench.store.blob(&endless).is_err());
}
