use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::thread;
use understudy_protocol::DiskIndex;

/// Size of the disk, with a short block at the end.
const DISK: u64 = 300 * BLOCK_BYTES + 512;

fn disk(dir: &tempfile::TempDir) -> Arc<Disk> {
    let path = dir.path().join("image");
    fs::write(&path, b"").unwrap();
    Arc::new(Disk::open(DiskIndex(0), &path, DISK).unwrap())
}

fn content(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0; DISK as usize];
    disk.read(0, &mut bytes).unwrap();
    bytes
}

const BASE: BaseId = BaseId(7);

fn prepare(disk: &Arc<Disk>, dir: &tempfile::TempDir, since_base: bool) -> PreparedCapture {
    PreparedCapture::new(disk, dir.path(), since_base.then_some(BASE), BASE).unwrap()
}

/// Content that the store would have: the base with what was captured on top.
#[derive(Clone, Default)]
struct Stored(BTreeMap<u64, Vec<u8>>);

impl Stored {
    /// Reads some; false at the end.
    fn read(&mut self, capture: &mut Capture) -> bool {
        let mut bytes = Vec::new();
        let Some(run) = capture.read(&mut bytes).unwrap() else { return false };
        assert_eq!(bytes.len() as u64, (run.end - run.start) * BLOCK_BYTES);
        let blocks = bytes.chunks(BLOCK_BYTES as usize).map(<[u8]>::to_vec);
        self.0.extend(run.zip(blocks));
        true
    }

    fn image(&self) -> Vec<u8> {
        let mut image = vec![0; 301 * BLOCK_BYTES as usize];
        for (block, content) in &self.0 {
            image[(block * BLOCK_BYTES) as usize..][..BLOCK_BYTES as usize]
                .copy_from_slice(content);
        }
        image.truncate(DISK as usize);
        image
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: u64, byte: u8 },
    Zero { offset: u64, len: u64 },
    Trim { offset: u64, len: u64 },
    Copy,
    Snapshot { commit: bool, finish: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![0..DISK, (0..300u64).prop_map(|block| block * BLOCK_BYTES)];
    let len = prop_oneof![1..9000u64, (1..90u64).prop_map(|blocks| blocks * BLOCK_BYTES)];
    (offset, len, any::<u8>(), 0..12u8, any::<bool>()).prop_map(
        |(offset, len, byte, kind, commit)| {
            let len = len.min(DISK - offset);
            match kind {
                0..=4 => Step::Write { offset, len, byte },
                5 => Step::Zero { offset, len },
                6 => Step::Trim { offset, len },
                7..=9 => Step::Copy,
                _ => Step::Snapshot { commit, finish: byte > 60 },
            }
        },
    )
}

/// A snapshot that is being taken.
struct Taking {
    capture: Capture,
    truth: Vec<u8>,
    stored: Stored,
}

impl Taking {
    fn begin(disk: &Arc<Disk>, dir: &tempfile::TempDir, base: &Stored) -> Taking {
        let capture = prepare(disk, dir, true).take();
        let stored = if capture.is_incremental() { base.clone() } else { Stored::default() };
        Taking { capture, truth: content(disk), stored }
    }

    /// Ends the capture; returns what was stored if it is committed.
    fn end(mut self, commit: bool) -> Option<Stored> {
        while self.stored.read(&mut self.capture) {}
        assert!(self.stored.image() == self.truth, "the image is that of the barrier");
        let changes = self.capture.finish();
        commit.then(|| {
            changes.commit();
            self.stored
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn a_capture_shows_the_disk_as_it_was(steps in proptest::collection::vec(step(), 1..120)) {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(&dir);
        let mut base = Stored::default();
        let mut taking: Option<Taking> = None;
        for step in steps {
            match step {
                Step::Write { offset, len, byte } => {
                    disk.write(offset, &vec![byte; len as usize]).unwrap();
                }
                Step::Zero { offset, len } => disk.zero(offset, len).unwrap(),
                Step::Trim { offset, len } => disk.trim(offset, len).unwrap(),
                Step::Copy => {
                    if let Some(taking) = &mut taking {
                        taking.stored.read(&mut taking.capture);
                    }
                }
                Step::Snapshot { commit, finish } => {
                    match taking.take() {
                        // Otherwise it is given up half-way.
                        Some(taken) if finish => {
                            base = taken.end(commit).unwrap_or(base);
                        }
                        _ => {}
                    }
                    taking = Some(Taking::begin(&disk, &dir, &base));
                }
            }
        }
        taking.map(|taking| taking.end(true));
    }
}

#[test]
fn writers_and_the_copier_do_not_wait_for_each_other() {
    for round in 0..20u8 {
        let dir = tempfile::tempdir().unwrap();
        let disk = disk(&dir);
        disk.write(0, &vec![round + 1; DISK as usize]).unwrap();
        let mut capture = prepare(&disk, &dir, false).take();
        let (mut stored, truth) = (Stored::default(), content(&disk));
        let writer = thread::spawn({
            let disk = disk.clone();
            move || {
                for at in 0..600u64 {
                    let block = (at * 7919 + u64::from(round) * 31) % 300;
                    disk.write(block * BLOCK_BYTES + at % 100, &[200; 3000]).unwrap();
                }
            }
        });
        while stored.read(&mut capture) {}
        writer.join().unwrap();
        assert!(stored.image() == truth, "round {round}");
    }
}

#[test]
fn only_what_changed_since_the_base_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    disk.write(0, &[1; 100_000]).unwrap();
    let first = prepare(&disk, &dir, true).take();
    assert!(!first.is_incremental(), "there was no base");
    disk.write(8 * BLOCK_BYTES + 5, b"later").unwrap();
    first.finish().commit();

    let second = prepare(&disk, &dir, true).take();
    assert_eq!((second.is_incremental(), second.blocks()), (true, 1));
    disk.write(0, b"later still").unwrap();
    drop(second);
    let third = prepare(&disk, &dir, true).take();
    assert_eq!(third.blocks(), 2, "what the second had taken, and what came then");
    third.finish().commit();

    let all = prepare(&disk, &dir, false).take();
    assert_eq!((all.is_incremental(), all.blocks()), (false, 301));
    drop(all);
    assert!(!prepare(&disk, &dir, true).take().is_incremental(), "its changes are lost");
    disk.set_base(BASE);
    assert_eq!(prepare(&disk, &dir, true).take().blocks(), 0);
}

/// Regression: a restore that was complete after a snapshot had been taken put its own in its place, and the next one
/// laid over it what had changed since the other.
#[test]
fn changes_are_those_since_the_base_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    let (restored, sixth, seventh) = (BaseId(5), BaseId(6), BaseId(7));
    disk.set_base(restored);
    disk.write(0, b"since the restore").unwrap();
    let capture =
        |since, next| PreparedCapture::new(&disk, dir.path(), Some(since), next).unwrap().take();
    capture(restored, sixth).finish().commit();
    let wrong = capture(restored, seventh);
    assert_eq!((wrong.is_incremental(), wrong.blocks()), (false, 301));
    wrong.finish().commit();
    drop(capture(seventh, BaseId(8)));
    assert!(
        capture(seventh, BaseId(9)).is_incremental(),
        "one that comes to nothing changes nothing"
    );
}

/// Regression: the first one's end detached the second, which then read what the guest wrote later.
#[test]
fn a_capture_that_ends_late_leaves_the_next_one_alone() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    disk.write(0, &[1; 100_000]).unwrap();
    let mut one = prepare(&disk, &dir, false).take();
    let mut two = prepare(&disk, &dir, false).take();
    let truth = content(&disk);
    disk.write(0, &[2; 50_000]).unwrap();
    let error = one.read(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("another snapshot"), "{error}");
    drop(one);
    disk.write(0, &[3; 100_000]).unwrap();
    let mut stored = Stored::default();
    while stored.read(&mut two) {}
    assert!(stored.image() == truth, "it is torn");
}

#[test]
fn a_capture_that_fails_does_not_fail_the_guests_write() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    disk.write(0, &[1; 100_000]).unwrap();
    let mut prepared = prepare(&disk, &dir, false);
    prepared.aside = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    let mut capture = prepared.take();
    disk.write(0, b"the guest goes on").unwrap();
    let error = capture.read(&mut Vec::new()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("put aside"), "{error}");
    drop(capture);
    disk.write(0, b"and on").unwrap();
    assert_eq!(&content(&disk)[..6], b"and on");
    let mut names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!((names.next(), names.next()), (Some("image".into()), None), "nothing is left");
}

/// What is put aside goes to the VM's directory: if that hung nobody knew what the guest waited for.
#[test]
fn a_write_that_waits_for_a_capture_waits_for_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let disk = disk(&dir);
    let capture = prepare(&disk, &dir, false).take();
    let hangs = capture.frozen.lock();
    thread::scope(|scope| {
        scope.spawn(|| disk.write(0, b"w").unwrap());
        let begun = std::time::Instant::now();
        while disk.longest_wait().is_none() {
            assert!(begun.elapsed().as_secs() < 60, "nobody knows that it waits");
            thread::yield_now();
        }
        drop(hangs);
    });
    assert!(disk.longest_wait().is_none());
}
