//! Parts that nobody has saved: few bytes in the store that stand for more than a host has.

use super::*;
use understudy_protocol::DiskIndex;

/// The error about a member's part, when it is read and when its snapshot is verified, that is like
/// one that was saved but for this.
fn refused(change: impl Fn(&Store, &mut MemberManifest)) -> String {
    let bench = Bench::new();
    let writing = bench.begin();
    let (mut member, _) = bench.member(&AreaMap::zeros(UNITS), &[1], 1);
    change(&bench.store, &mut member);
    let manifest = bench.manifest(&writing, &member);
    let verified = bench.store.verify(&manifest).unwrap();
    let [problem] = &verified.problems[..] else { panic!("{verified:?}") };
    let member = bench.store.member(&manifest.members[0]);
    let queue = member.and_then(|member| bench.store.working_set(&member));
    assert_eq!(queue.unwrap_err().to_string(), problem.error.to_string());
    problem.error.to_string()
}

fn zeros(store: &Store, area: Area, bytes: u64) -> AreaEntry {
    let map = AreaMap::zeros(bytes.div_ceil(UNIT_BYTES as u64)).encode();
    let map = store.put_blob(&map, Compression::None).unwrap();
    AreaEntry { area, name: "an area".into(), bytes, map }
}

/// The daemon that restored it was once aborted as it allocated a bit for each block of a disk.
#[test]
fn areas_are_as_long_as_those_of_machines() {
    let disks = |bytes: &'static [u64]| {
        refused(move |store, member| {
            let disk =
                |(at, bytes): (usize, &u64)| zeros(store, Area::Disk(DiskIndex(at as u16)), *bytes);
            member.areas.extend(bytes.iter().enumerate().map(disk));
        })
    };
    for bytes in [&[1 << 62][..], &[1 << 46, 1], &[1 << 63, 1 << 63]] {
        let why = disks(bytes);
        assert!(why.contains("its disks are longer than any machine's"), "{why}");
    }
    let why = refused(|store, member| {
        member.areas.push(zeros(store, Area::Memory(BlockId(1)), 1 << 62));
    });
    assert!(why.contains("its RAM blocks are longer"), "{why}");
    for machine in [UNITS * UNIT_BYTES as u64, 1 << 62] {
        let why = refused(move |store, member| {
            member.areas[0] = zeros(store, Area::Memory(BlockId(0)), 1 << 62);
            member.machine.memory = machine;
        });
        assert!(why.contains("its main memory is not as long"), "{why}");
    }
    let why = refused(|_, member| member.areas.push(member.areas[0].clone()));
    assert!(why.contains("twice"), "{why}");
    let why = refused(|_, member| member.areas.clear());
    assert!(why.contains("no main memory"), "{why}");
}

/// A process that ordered a restore of it, or verified it, was once aborted as it made the queue.
#[test]
fn queues_are_no_longer_than_the_memory() {
    let queue = |size: u64, count: u32| {
        let run = [&[0; 10][..], &count.to_le_bytes()].concat();
        [&size.to_le_bytes()[..], &run].concat()
    };
    let with = |memory: u64, queue: &[u8]| {
        refused(|store, member| {
            member.areas[0] = zeros(store, Area::Memory(BlockId(0)), memory);
            member.machine.memory = memory;
            member.working_set = store.put_blob(queue, Compression::None).unwrap();
        })
    };
    let why = with(1 << 44, &queue(1, u32::MAX));
    assert!(why.contains("the queue has more pages"), "{why}");
    let why = with(64 << 20, &queue(u64::MAX / 2, 1));
    assert!(why.contains("the working set is larger"), "{why}");
    let why = refused(|_, member| member.sampled = Some(u64::MAX));
    assert!(why.contains("its working set is larger"), "{why}");
}

/// The next snapshot's number was 0: names in a store may be any numbers.
#[test]
fn a_name_with_which_nobody_can_count_on_is_no_snapshots_number() {
    let bench = Bench::new();
    for folder in ["writing", "snapshots"] {
        let folder = bench.directory.path().join(folder).join("shop");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(u64::MAX.to_string()), b"{}").unwrap();
    }
    let writing = bench.store.begin(&literal("shop"), SnapshotNumber(6), NOW).unwrap();
    assert_eq!(writing.number, SnapshotNumber(7));
}

/// Before, a file of that length was allocated whole, and the process aborted: a daemon with a schedule at each start.
#[test]
fn what_is_longer_than_anything_that_was_stored_is_not_read() {
    let bench = Bench::new();
    let (kept, _) = bench.take(&AreaMap::zeros(UNITS), &[1], 1);
    let lengthen = |file: std::path::PathBuf| {
        std::fs::File::options().write(true).open(file).unwrap().set_len(1 << 40).unwrap();
    };
    let blob = bench.store.put_blob(b"its own", Compression::None).unwrap();
    lengthen(bench.file(blob.chunks[0]));
    assert!(matches!(bench.store.blob(&blob), Err(StoreError::BadChunk { .. })));
    // It is written anew.
    bench.store.put_blob(b"its own", Compression::None).unwrap();
    assert_eq!(bench.store.blob(&blob).unwrap(), b"its own");
    let path = bench.store.snapshot_path(&literal("shop"), kept.number);
    lengthen(bench.directory.path().join(path.as_ref()));
    let Listed { manifest, .. } = bench.store.snapshots(&literal("shop")).unwrap().remove(0);
    let why = manifest.unwrap_err().to_string();
    assert!(why.contains("1099511627776 bytes"), "{why}");
}

/// A few KiB of a store had the daemon that verified it hold 20 GB.
#[test]
fn a_chunk_that_is_there_again_and_again_makes_nothing_longer_than_such_a_thing_is() {
    let bench = Bench::new();
    let (member, _) = bench.member(&AreaMap::zeros(UNITS), &[1], 1);
    let store = &bench.store;
    let chunk =
        store.put_blob(&[0; crate::format::BLOB_CHUNK_BYTES], Compression::Lz4).unwrap().chunks[0];
    let mib = |mib: usize| Blob { bytes: (mib as u64) << 20, chunks: vec![chunk; mib] };
    let frames = |blob| store.frames(&MemberManifest { in_flight: blob, ..member.clone() });
    let state = |blob| store.device_state(&MemberManifest { device_state: blob, ..member.clone() });
    let queue = |blob| store.working_set(&MemberManifest { working_set: blob, ..member.clone() });
    let area = |map| store.area(&AreaEntry { map, ..member.areas[0].clone() });
    let entry = |part| MemberEntry {
        name: member.name.clone(),
        host: literal("a"),
        memory: member.machine.memory,
        part,
    };
    for refused in [
        frames(mib(257)).map(drop),
        state(mib(65)).map(drop),
        queue(mib(1)).map(drop),
        area(mib(1)).map(drop),
        store.member(&entry(mib(65))).map(drop),
    ] {
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("its length is impossible"), "{why}");
    }
    assert_eq!(state(mib(64)).unwrap().len(), 64 << 20);
    // An empty frame, as one is stored, is a part of 8 bytes, and more in memory.
    assert_eq!(frames(mib(16)).unwrap().len(), 2 << 20);
    let why = frames(mib(17)).unwrap_err().to_string();
    assert!(why.contains("more frames than any snapshot has"), "{why}");
}

/// Regression: it was saved, and every restore refused it.
#[test]
fn no_more_frames_are_saved_than_are_read() {
    let bench = Bench::new();
    let frame = InFlightFrame { from: Member(0), card: CardIndex(0), bytes: vec![0; 100 << 20] };
    let frames = vec![frame; 3];
    let refused = bench.store.put_frames(&frames, Compression::Lz4).unwrap_err().to_string();
    assert!(refused.contains("frames that are on their way"), "{refused}");
}
