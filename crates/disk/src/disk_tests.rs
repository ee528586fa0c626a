use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

/// Remembers what it was told.
#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, Told)>>);

#[derive(Debug, PartialEq)]
enum Told {
    Write(Vec<u8>),
    Zero(u64),
}

impl WriteSink for Recorder {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}

    fn write(&self, _: DiskIndex, offset: u64, data: &[u8]) {
        self.0.lock().unwrap().push((offset, Told::Write(data.into())));
    }

    fn zero(&self, _: DiskIndex, offset: u64, len: u64) {
        self.0.lock().unwrap().push((offset, Told::Zero(len)));
    }
}

impl Recorder {
    fn told(&self) -> Vec<(u64, Told)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

const MIB: u64 = 1 << 20;

fn image(dir: &tempfile::TempDir, content: &[u8]) -> PathBuf {
    let path = dir.path().join("image");
    fs::write(&path, content).unwrap();
    path
}

fn read(disk: &Disk, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xaa; len];
    disk.read(offset, &mut bytes).unwrap();
    let mut cached = vec![0xbb; len];
    if disk.read_if_cached(offset, &mut cached).unwrap() {
        assert_eq!(bytes, cached, "both ways of reading agree");
    }
    bytes
}

#[test]
fn beyond_the_end_of_the_file_is_zero_until_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, b"abc");
    let disk = Disk::open(DiskIndex(0), &path, MIB).unwrap();
    assert_eq!(read(&disk, 0, 6), b"abc\0\0\0");
    assert_eq!(read(&disk, 4096, 4), [0; 4]);
    disk.write(5000, b"xyz").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 5003);
    assert_eq!(read(&disk, 4999, 6), b"\0xyz\0\0");
}

#[test]
fn nothing_is_read_or_written_outside_the_export() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, b""), 4096).unwrap();
    for (offset, len) in [(4096, 1), (4095, 2), (u64::MAX, 1), (0, 4097)] {
        let kinds = [
            disk.write(offset, &vec![0; len]).unwrap_err().kind(),
            disk.read(offset, &mut vec![0; len]).unwrap_err().kind(),
            disk.zero(offset, len as u64).unwrap_err().kind(),
            disk.zero_reserved(offset, len as u64).unwrap_err().kind(),
            disk.trim(offset, len as u64).unwrap_err().kind(),
        ];
        assert_eq!(kinds, [io::ErrorKind::InvalidInput; 5], "{len} bytes at {offset}");
    }
}

/// One host's file system can punch holes, the other's cannot.
#[test]
fn in_lockstep_a_trimmed_range_reads_the_same_on_any_file_system() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paths = [&here, &there].map(|dir| image(dir, &[7; 16384]));
    let disks = [0, 1].map(|n| Disk::open(DiskIndex(0), &paths[n], MIB).unwrap());
    fail::cfg("punch-disk", &format!("return({})", paths[1].display())).unwrap();
    disks.iter().for_each(|disk| disk.trim(0, 4096).unwrap());
    assert_eq!([0, 1].map(|n| read(&disks[n], 0, 1)), [[0], [7]], "so it is without lockstep");
    let told = Arc::new(Recorder::default());
    for disk in &disks {
        disk.set_reads(Reads::Copied);
        disk.set_sink(Some(told.clone()));
        disk.trim(8192, 4096).unwrap();
    }
    fail::remove("punch-disk");
    let [punched, written] = [0, 1].map(|n| read(&disks[n], 4096, 12288));
    assert_eq!(punched, written);
    assert_eq!(written[4096..8192], [0; 4096]);
    assert_eq!(told.told(), [(8192, Told::Zero(4096)), (8192, Told::Zero(4096))]);
}

#[test]
fn zeroing_releases_space_unless_it_is_to_be_reserved() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, &vec![7; MIB as usize]);
    let disk = Disk::open(DiskIndex(0), &path, 2 * MIB).unwrap();
    let blocks = || {
        disk.sync().unwrap();
        fs::metadata(&path).unwrap().blocks()
    };
    let full = blocks();
    disk.zero_reserved(0, MIB / 4).unwrap();
    assert!(blocks() >= full, "reserved");
    disk.zero(MIB / 4, MIB / 4).unwrap();
    let punched = blocks();
    assert!(punched < full, "{punched} < {full}");
    disk.trim(MIB / 2, MIB).unwrap();
    assert!(blocks() < punched);
    assert_eq!(read(&disk, 0, MIB as usize / 2), vec![0; MIB as usize / 2]);
    assert_eq!(read(&disk, MIB / 2, MIB as usize / 2), vec![0; MIB as usize / 2]);
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB, "holes do not grow the file");
    disk.zero_reserved(MIB, MIB).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 2 * MIB);
}

#[test]
fn zeroing_hits_odd_ranges_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, &[7; 20_000]), MIB).unwrap();
    disk.zero(1000, 9001).unwrap();
    disk.zero_reserved(15_001, 333).unwrap();
    let mut expected = vec![7; 20_000];
    expected[1000..10_001].fill(0);
    expected[15_001..15_334].fill(0);
    assert_eq!(read(&disk, 0, 20_000), expected);
}

#[test]
fn the_sink_hears_of_changes_in_their_order_and_only_while_set() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(3), image(&dir, &[7; 8192]), MIB).unwrap();
    let sink = Arc::new(Recorder::default());
    disk.write(0, b"before").unwrap();
    disk.set_sink(Some(sink.clone()));
    disk.write(10, b"one").unwrap();
    disk.zero(0, 4096).unwrap();
    disk.write(11, b"two").unwrap();
    disk.trim(4096, 8192).unwrap();
    disk.zero_reserved(1, 2).unwrap();
    disk.zero(5, 0).unwrap();
    assert!(disk.write(MIB, b"outside").is_err(), "not mirrored either");
    disk.set_sink(None);
    disk.write(0, b"after").unwrap();
    let expected = vec![
        (10, Told::Write(b"one".into())),
        (0, Told::Zero(4096)),
        (11, Told::Write(b"two".into())),
        (4096, Told::Zero(8192)),
        (1, Told::Zero(2)),
    ];
    assert_eq!(sink.told(), expected);
    assert_eq!(Arc::strong_count(&sink), 1, "let go");
}

/// Sink of a session that is over.
struct Closed;

impl WriteSink for Closed {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}
    fn write(&self, _: DiskIndex, _: u64, _: &[u8]) {}
    fn zero(&self, _: DiskIndex, _: u64, _: u64) {}
    fn is_closed(&self) -> bool {
        true
    }
}

#[test]
fn a_late_removal_takes_no_sink_that_has_come_since() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, &[7; 8192]), MIB).unwrap();
    let closed = Arc::new(Closed);
    disk.set_sink(Some(closed.clone()));
    disk.remove_closed_sink();
    assert_eq!(Arc::strong_count(&closed), 1, "let go");
    let next = Arc::new(Recorder::default());
    disk.set_sink(Some(next.clone()));
    disk.remove_closed_sink();
    disk.write(0, b"one").unwrap();
    assert_eq!(next.told(), [(0, Told::Write(b"one".into()))]);
}

#[test]
fn a_local_error_is_returned_and_not_mirrored() {
    let full = Path::new("/dev/full");
    assert!(matches!(
        Disk::open(DiskIndex(0), full, MIB).unwrap_err(),
        DiskError::NotAnImage { .. }
    ));
    // The largest file that ext4, xfs or tmpfs take is smaller than off_t allows.
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, b""), i64::MAX as u64).unwrap();
    let sink = Arc::new(Recorder::default());
    disk.set_sink(Some(sink.clone()));
    let refused = disk.write(i64::MAX as u64 - 10, b"too far");
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    assert_eq!(sink.told(), []);
}

#[test]
fn the_guest_of_a_read_only_disk_is_refused_but_not_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, b""), MIB).unwrap();
    disk.set_read_only(true);
    let refused = disk.ordered_for_guest().err().unwrap();
    assert_eq!(refused.raw_os_error(), Some(Errno::EPERM as i32));
    disk.write(0, b"epoch").unwrap();
    disk.set_read_only(false);
    disk.ordered_for_guest().unwrap().write(0, b"guest").unwrap();
    assert_eq!(read(&disk, 0, 5), b"guest");
}

/// A peer names it: it got whatever root can read, and a FIFO was waited for.
#[test]
fn another_host_names_only_what_everybody_may_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, b"medium");
    let open = |path: &Path| Disk::open_public_medium(DiskIndex(0), path);
    let readable_by = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    readable_by(0o644);
    assert_eq!(read(&open(&path).unwrap(), 0, 6), b"medium");
    readable_by(0o640);
    assert!(matches!(open(&path), Err(DiskError::NotPublic { .. })));
    Disk::open_medium(DiskIndex(0), &path).unwrap();
    let fifo = dir.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o644)).unwrap();
    for nothing in [&fifo, Path::new("/dev/zero"), dir.path()] {
        assert!(matches!(open(nothing), Err(DiskError::NotPublic { .. })), "{nothing:?}");
    }
}

#[test]
fn wrong_images_are_refused_with_the_path() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| Disk::open(DiskIndex(0), path, 4096).unwrap_err();
    let missing = dir.path().join("missing");
    assert!(matches!(open(&missing), DiskError::Missing { .. }));
    assert!(open(&missing).to_string().contains(missing.to_str().unwrap()));
    assert!(matches!(open(dir.path()), DiskError::NotAnImage { .. }));
    let large = image(&dir, &[0; 4097]);
    assert!(matches!(open(&large), DiskError::ExportTooSmall { image_bytes: 4097, .. }));
    let huge = Disk::open(DiskIndex(0), &large, u64::MAX);
    assert!(matches!(huge, Err(DiskError::ExportTooLarge { .. })));
}

#[test]
fn an_image_has_one_user() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, b"");
    let disk = Disk::open(DiskIndex(0), &path, 4096).unwrap();
    let second = Disk::open(DiskIndex(1), &path, 4096);
    assert!(matches!(second, Err(DiskError::InUse { .. })), "{second:?}");
    drop(disk);
    Disk::open(DiskIndex(1), &path, 4096).unwrap();
}

/// A program that is being started has it for a moment when it is closed here: the test of a device that is opened
/// again met that.
#[test]
fn an_image_that_is_about_to_be_free_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, b"");
    let disk = Disk::open(DiskIndex(0), &path, 4096).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(disk);
        });
        Disk::open(DiskIndex(1), &path, 4096).unwrap();
    });
}

#[test]
fn data_bytes_leaves_out_holes() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), image(&dir, b""), 64 * MIB).unwrap();
    assert_eq!(disk.data_bytes().unwrap(), 0);
    disk.write(32 * MIB, &vec![1; MIB as usize]).unwrap();
    let data = disk.data_bytes().unwrap();
    assert!((MIB..2 * MIB).contains(&data), "{data}");
}

/// Takes a write when it is told to.
struct Stalled {
    begun: crossbeam_channel::Sender<()>,
    go_on: crossbeam_channel::Receiver<()>,
}

impl WriteSink for Stalled {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}

    fn write(&self, _: DiskIndex, _: u64, _: &[u8]) {
        self.begun.send(()).unwrap();
        self.go_on.recv().unwrap();
    }

    fn zero(&self, _: DiskIndex, _: u64, _: u64) {}
}

#[test]
fn who_reports_of_changes_does_not_wait_for_a_write_that_waits_for_the_link() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir, b"");
    let disk = Disk::open(DiskIndex(0), &path, MIB).unwrap();
    let map = ChangeMap::create(&dir.path().join("changes"), MIB, &path).unwrap();
    disk.set_changes(Some(Arc::new(map)));
    let (begun, wait_begun) = crossbeam_channel::bounded(1);
    let (go_on, wait_go_on) = crossbeam_channel::bounded(1);
    disk.set_sink(Some(Arc::new(Stalled { begun, go_on: wait_go_on })));
    std::thread::scope(|scope| {
        scope.spawn(|| disk.write(0, b"x").unwrap());
        wait_begun.recv().unwrap();
        let (said, hear) = crossbeam_channel::bounded(1);
        let asked = &disk;
        scope.spawn(move || said.send(asked.changes().unwrap().changed_bytes()).unwrap());
        let heard = hear.recv_timeout(std::time::Duration::from_secs(20));
        go_on.send(()).unwrap();
        assert!(heard.expect("an answer while the write waits") > 0);
    });
}

#[test]
fn a_proof_that_a_disk_can_be_written_changes_nothing_and_tells_nobody() {
    let dir = tempfile::tempdir().unwrap();
    for content in [&b""[..], b"abc", &[7; 10_000]] {
        let path = image(&dir, content);
        let disk = Disk::open(DiskIndex(0), &path, MIB).unwrap();
        let recorder = Arc::new(Recorder::default());
        disk.set_sink(Some(recorder.clone()));
        disk.set_read_only(true);
        let written = || fs::metadata(&path).unwrap().modified().unwrap();
        let before = written();
        std::thread::sleep(std::time::Duration::from_millis(20));
        disk.prove_writable().unwrap();
        assert_eq!(written() > before, !content.is_empty(), "{} bytes", content.len());
        assert_eq!(fs::read(&path).unwrap(), content);
        assert_eq!(recorder.told(), []);
    }
    // Nobody writes a medium.
    let path = image(&dir, b"medium");
    Disk::open_medium(DiskIndex(0), &path).unwrap().prove_writable().unwrap();
}

#[test]
fn an_image_outgrows_its_device_and_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("device.img");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let device = crate::loop_device::LoopDevice::on(&file);
    let disk = Disk::open(DiskIndex(0), device.path(), 2 << 20).unwrap();
    disk.write(0, b"fits").unwrap();
    // What reads as zeroes needs no room.
    disk.zero((1 << 20) + 4096, 4096).unwrap();
    let error = disk.write(1 << 20, b"does not").unwrap_err();
    assert!(disk.is_outgrown(&error), "{error}");
    assert!(!disk.is_outgrown(&Errno::EIO.into()));
    let other = Disk::create(DiskIndex(0), &dir.path().join("file.img"), 2 << 20).unwrap();
    assert!(!other.is_outgrown(&error), "its file system may have room again");
}
