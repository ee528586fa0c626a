use super::*;
use crate::disk_fill::DiskFiller;
use crate::source::Source;
use std::fs;
use std::sync::atomic::AtomicBool;

const BLOCKS: u64 = 300;
const BASE: BaseId = BaseId(7);
const BYTES: u64 = BLOCKS * UNIT_BYTES as u64;

fn disk(directory: &Path) -> Arc<Disk> {
    let path = directory.join("image");
    fs::write(&path, b"").unwrap();
    Arc::new(Disk::open(DiskIndex(2), &path, BYTES).unwrap())
}

fn content(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    disk.read(0, &mut bytes).unwrap();
    bytes
}

/// Content that no other block has.
fn write(disk: &Disk, block: u64, salt: u64) {
    let content = (block * 1000 + salt + 1).to_le_bytes().repeat(UNIT_BYTES / 8);
    disk.write(block * UNIT_BYTES as u64, &content).unwrap();
}

fn snapshot(
    disk: &Arc<Disk>,
    store: &Store,
    directory: &Path,
    base: Option<&BTreeMap<DiskIndex, AreaMap>>,
) -> (Vec<u8>, SavedDisks) {
    let disks = [disk.clone()];
    let bases = (base.map(|_| BASE), BASE);
    let mut capture = DiskCapture::arm_disks(&disks, Compression::None, directory, bases).unwrap();
    capture.take();
    let truth = content(disk);
    (0..40).for_each(|block| write(disk, block * 7, 77));
    (truth, capture.save(store, base, &Stop::default()).unwrap())
}

#[test]
fn a_disk_is_saved_as_it_was_and_then_only_what_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let store = Arc::new(Store::create(path.join("store").to_str().unwrap()).unwrap());
    let disk = disk(path);
    (0..200).for_each(|block| write(&disk, block, 0));
    let (first_truth, first) = snapshot(&disk, &store, path, None);
    first.changes.into_iter().for_each(ChangesTaken::commit);
    write(&disk, 299, 5);
    let (second_truth, second) = snapshot(&disk, &store, path, Some(&first.areas));
    assert_eq!(second.packed.put, 41, "those written during the first, and one more");

    for (number, truth, saved) in [(1, first_truth, first.areas), (2, second_truth, second.areas)] {
        let image = path.join(format!("restored-{number}"));
        let map = saved[&DiskIndex(2)].clone();
        let filler = DiskFiller::create(
            Source::new(store.clone(), Default::default()),
            map,
            DiskIndex(2),
            BYTES,
            &image,
            BASE,
        )
        .unwrap();
        // On demand: nothing else is read before `complete`.
        let mut last = vec![0; UNIT_BYTES];
        filler.disk().read(199 * UNIT_BYTES as u64, &mut last).unwrap();
        assert!(last == truth[199 * UNIT_BYTES..][..UNIT_BYTES]);
        let (there, all) = filler.blocks();
        assert!(0 < there && there <= 64 && all >= 200, "{there} of {all}");
        filler.complete(&AtomicBool::new(false)).unwrap();
        assert!(content(filler.disk()) == truth && filler.is_complete(), "snapshot {number}");
    }
}

#[test]
fn a_reader_waits_for_a_store_that_is_gone_until_it_is_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let store = Arc::new(Store::create(path.join("store").to_str().unwrap()).unwrap());
    let disk = disk(path);
    (0..100).for_each(|block| write(&disk, block, 0));
    let (truth, saved) = snapshot(&disk, &store, path, None);
    fs::rename(path.join("store/chunks"), path.join("store/away")).unwrap();
    let map = saved.areas[&DiskIndex(2)].clone();
    let image = path.join("restored");
    let filler = DiskFiller::create(
        Source::new(store, Default::default()),
        map,
        DiskIndex(2),
        BYTES,
        &image,
        BASE,
    )
    .unwrap();
    let reader = thread::spawn({
        let disk = filler.disk().clone();
        move || content(&disk)
    });
    while filler.stalled().is_none() {
        assert!(!reader.is_finished());
        thread::sleep(Duration::from_millis(5));
    }
    assert!(filler.stalled().unwrap().contains("missing"), "{:?}", filler.stalled());
    fs::rename(path.join("store/away"), path.join("store/chunks")).unwrap();
    assert!(reader.join().unwrap() == truth);
    assert_eq!(filler.stalled(), None);
}

#[test]
fn a_save_that_is_stopped_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let store = Store::create(path.join("store").to_str().unwrap()).unwrap();
    let disk = disk(path);
    disk.set_base(BASE);
    write(&disk, 9, 0);
    let disks = [disk.clone()];
    let mut capture =
        DiskCapture::arm_disks(&disks, Compression::None, path, (Some(BASE), BASE)).unwrap();
    capture.take();
    let base = BTreeMap::from([(DiskIndex(2), AreaMap::zeros(BLOCKS))]);
    let stop = Stop::default();
    stop.say();
    let stopped = capture.save(&store, Some(&base), &stop);
    assert!(stopped.is_err());
    let (_, saved) = snapshot(&disk, &store, path, Some(&base));
    assert_eq!(saved.packed.put, 1, "it is still known what changed");
}

/// Regression: a store that was away for a second had a snapshot of hours given up.
#[test]
fn a_save_outlasts_a_store_that_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let store = Store::create(path.join("store").to_str().unwrap()).unwrap();
    let disk = disk(path);
    (0..100).for_each(|block| write(&disk, block, 0));
    // Nothing can be read or written where that is no directory.
    let chunks = path.join("store/chunks");
    fs::write(&chunks, "").unwrap();
    let back = thread::spawn({
        let chunks = chunks.clone();
        move || {
            thread::sleep(Duration::from_millis(1500));
            fs::remove_file(chunks).unwrap();
        }
    });
    let (_, saved) = snapshot(&disk, &store, path, None);
    back.join().unwrap();
    let all = saved.areas[&DiskIndex(2)].chunks();
    assert!(!all.is_empty() && all.iter().all(|&chunk| store.chunk(chunk).is_ok()));

    fs::remove_dir_all(&chunks).unwrap();
    fs::write(&chunks, "").unwrap();
    let disks = [disk];
    let mut capture =
        DiskCapture::arm_disks(&disks, Compression::None, path, (None, BASE)).unwrap();
    capture.take();
    let stop = Stop::default();
    thread::scope(|scope| {
        let saving = scope.spawn(|| capture.save(&store, None, &stop).map(drop));
        let gets_nowhere = |_| {
            let looks = stop.looks();
            thread::sleep(Duration::from_millis(1200));
            looks > 0 && stop.looks() == looks
        };
        assert!((0..10).any(gets_nowhere), "whoever waits does not see it");
        assert!(!saving.is_finished());
        stop.say();
        let error = format!("{:#}", saving.join().unwrap().unwrap_err());
        assert!(error.contains("it was stopped; before, the store at"), "{error}");
    });
}
