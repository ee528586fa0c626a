use super::*;
use crate::disk::Disk;
use crossbeam_channel::{Sender, unbounded};
use std::thread;
use std::time::Duration;
use understudy_protocol::DiskIndex;

const BLOCKS: u64 = 64;
const DISK: u64 = BLOCKS * BLOCK_BYTES;

struct Asked(Sender<u64>);

impl Fetcher for Asked {
    fn wanted(&self, block: u64) {
        let _ = self.0.send(block);
    }
}

fn restored(dir: &tempfile::TempDir, fetcher: Arc<dyn Fetcher>) -> Arc<Disk> {
    let mut absent = BlockSet::all(DISK);
    // The last eight are zeros in the snapshot.
    absent.remove(BLOCKS - 8..BLOCKS);
    let path = dir.path().join("image");
    Arc::new(Disk::create_restored(DiskIndex(0), &path, DISK, absent, fetcher).unwrap())
}

fn block(number: u64) -> Vec<u8> {
    vec![number as u8 + 1; BLOCK_BYTES as usize]
}

fn read(disk: &Disk, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xaa; len];
    disk.read(offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn who_reads_what_is_not_there_waits_until_it_was_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    assert_eq!(read(&disk, DISK - BLOCK_BYTES, 10), [0; 10], "nothing to wait for");
    assert!(!disk.read_if_cached(0, &mut [0; 10]).unwrap());
    let reader = thread::spawn({
        let disk = disk.clone();
        move || read(&disk, 3 * BLOCK_BYTES - 1, 2)
    });
    assert_eq!(asks.recv().unwrap(), 2);
    disk.fill(2, &block(2)).unwrap();
    assert_eq!(asks.recv().unwrap(), 3);
    assert!(!reader.is_finished());
    disk.fill(3, &[block(3), block(4)].concat()).unwrap();
    assert_eq!(reader.join().unwrap(), [3, 4]);
    assert_eq!(disk.absent_blocks(), BLOCKS - 8 - 3);
}

#[test]
fn what_the_guest_wrote_is_not_overwritten_by_what_comes() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    disk.write(5 * BLOCK_BYTES, &block(100)).unwrap();
    disk.zero(6 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    disk.trim(7 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    assert!(asks.is_empty(), "whole blocks need not be there");
    let writer = thread::spawn({
        let disk = disk.clone();
        move || disk.write(9 * BLOCK_BYTES + 100, b"a part").unwrap()
    });
    assert_eq!(asks.recv().unwrap(), 9);
    (0..BLOCKS - 8).for_each(|number| disk.fill(number, &block(number)).unwrap());
    writer.join().unwrap();
    let bytes = read(&disk, 0, DISK as usize);
    let at = |number: u64| bytes[(number * BLOCK_BYTES) as usize];
    assert_eq!([4, 5, 6, 7, 8, 60].map(at), [5, 101, 0, 8, 9, 0]);
    let ninth = &bytes[9 * BLOCK_BYTES as usize..][..107];
    assert!(ninth[..100] == [10; 100] && &ninth[100..] == b"a part\x0a");
    assert_eq!(disk.absent_blocks(), 0);
    disk.trim(0, BLOCK_BYTES).unwrap();
    assert_eq!(read(&disk, 0, 3), [0; 3], "as ever");
}

#[test]
fn a_first_copy_of_a_disk_that_is_being_restored_waits_for_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    let fetcher = thread::spawn({
        let disk = disk.clone();
        move || {
            while disk.absent_blocks() > 0 {
                let number = asks.recv().unwrap();
                disk.fill(number, &block(number)).unwrap();
            }
        }
    });
    let other = Disk::create(DiskIndex(0), &dir.path().join("mirror"), DISK).unwrap();
    let sink = Arc::new(Into(other));
    disk.set_sink(Some(sink.clone()));
    crate::copy_out(&disk, &*sink, &mut |_| {}, &AtomicBool::new(false)).unwrap();
    assert_eq!(read(&sink.0, 0, DISK as usize), read(&disk, 0, DISK as usize));
    assert_eq!(read(&sink.0, 40 * BLOCK_BYTES, 1), [41]);
    fetcher.join().unwrap();
}

struct Into(Disk);

impl crate::WriteSink for Into {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}
    fn write(&self, _: DiskIndex, offset: u64, data: &[u8]) {
        self.0.write(offset, data).unwrap();
    }
    fn zero(&self, _: DiskIndex, offset: u64, len: u64) {
        self.0.zero(offset, len).unwrap();
    }
}

#[test]
fn who_waits_for_a_restore_that_is_given_up_gets_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    let reader = thread::spawn({
        let disk = disk.clone();
        move || disk.read(0, &mut [0; 10])
    });
    asks.recv().unwrap();
    // It may not yet wait.
    thread::sleep(Duration::from_millis(1));
    disk.give_up_restore();
    assert!(reader.join().unwrap().unwrap_err().to_string().contains("given up"));
}

#[test]
fn random_writes_and_fetches_end_in_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    let background = thread::spawn({
        let disk = disk.clone();
        move || {
            for number in (0..BLOCKS - 8).rev() {
                for wanted in asks.try_iter() {
                    disk.fill(wanted, &block(wanted)).unwrap();
                }
                disk.fill(number, &block(number)).unwrap();
            }
        }
    });
    let mut expected: Vec<u8> = (0..BLOCKS).flat_map(block).collect();
    expected[(DISK - 8 * BLOCK_BYTES) as usize..].fill(0);
    for at in 0..400u64 {
        let offset = at * 7_919 * 61 % (DISK - 9000);
        let data = vec![at as u8; (at * 37 % 9000) as usize];
        disk.write(offset, &data).unwrap();
        expected[offset as usize..][..data.len()].copy_from_slice(&data);
    }
    background.join().unwrap();
    assert!(read(&disk, 0, DISK as usize) == expected);
}

#[test]
fn a_daemon_that_goes_on_for_another_fetches_what_is_not_there_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, _asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    let path = disk.path();
    disk.fill(0, &[block(0), block(1)].concat()).unwrap();
    disk.write(5 * BLOCK_BYTES, &block(100)).unwrap();
    disk.zero(6 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
    drop(disk);

    let absent = crate::absent_blocks(&path, DISK).unwrap();
    let runs: Vec<_> = absent.runs(0..BLOCKS).collect();
    assert_eq!(runs, [2..5, 7..BLOCKS - 8]);
    let (asked, asks) = unbounded();
    let fetcher = Arc::new(Asked(asked));
    let resume = |absent| Disk::resume_restored(DiskIndex(0), &path, DISK, absent, fetcher.clone());
    let disk = Arc::new(resume(absent).unwrap());
    assert_eq!(read(&disk, 5 * BLOCK_BYTES, 1), [101]);
    let reader = thread::spawn({
        let disk = disk.clone();
        move || read(&disk, 2 * BLOCK_BYTES, 1)
    });
    assert_eq!(asks.recv().unwrap(), 2);
    (0..BLOCKS - 8).for_each(|number| disk.fill(number, &block(number)).unwrap());
    assert_eq!(reader.join().unwrap(), [3]);
    let bytes = read(&disk, 0, DISK as usize);
    let at = |number: u64| bytes[(number * BLOCK_BYTES) as usize];
    assert_eq!([0, 1, 4, 5, 6, 7, 55, 56].map(at), [1, 2, 5, 101, 0, 8, 56, 0]);
    disk.complete_restore().unwrap();
    drop(disk);

    // It died again, and other disks are still to come: this one is whole.
    let absent = crate::absent_blocks(&path, DISK).unwrap();
    assert_eq!(absent.count(), 0);
    let disk = resume(absent).unwrap();
    assert_eq!(disk.absent_blocks(), 0);
    disk.complete_restore().unwrap();
}

#[test]
fn a_mark_that_is_damaged_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, _asks) = unbounded();
    let path = restored(&dir, Arc::new(Asked(asked))).path();
    std::fs::write(crate::incomplete_mark(&path), [0; 7]).unwrap();
    let error = crate::absent_blocks(&path, DISK).unwrap_err().to_string();
    assert!(error.contains("a bit for each block"), "{error}");
}

#[test]
fn half_an_image_is_not_opened_as_a_whole_one() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, _asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    let path = disk.path();
    disk.fill(0, &block(0)).unwrap();
    assert!(disk.complete_restore().unwrap_err().to_string().contains("not all of it"));
    drop(disk);
    let opened = Disk::open(DiskIndex(0), &path, DISK);
    assert!(matches!(opened, Err(crate::DiskError::Incomplete { .. })), "{opened:?}");

    let (asked, _asks) = unbounded();
    let disk = restored(&dir, Arc::new(Asked(asked)));
    (0..BLOCKS - 8).for_each(|number| disk.fill(number, &block(number)).unwrap());
    disk.complete_restore().unwrap();
    drop(disk);
    let disk = Disk::open(DiskIndex(0), &path, DISK).unwrap();
    assert_eq!(read(&disk, 55 * BLOCK_BYTES, 1), [56]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the mark is gone");
}
