use super::*;
use crate::disk::Disk;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::slice::from_ref;
use std::sync::Arc;
use tempfile::TempDir;
use understudy_protocol::DiskIndex;

const DISK_BYTES: u64 = 100 * GRANULE_BYTES + 512;

/// A directory with an image, and where its map goes.
fn image() -> (TempDir, PathBuf, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let (image, map) = (directory.path().join("disk.img"), directory.path().join("disk.changes"));
    File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
    (directory, image, map)
}

fn create(map: &Path, image: &Path) -> ChangeMap {
    ChangeMap::create(map, DISK_BYTES, image).unwrap()
}

fn reopen(map: &Path, image: &Path) -> Result<ChangeMap, String> {
    ChangeMap::open(map, DISK_BYTES, image).unwrap()
}

/// The rounds of a session that has begun.
fn rounds_of(map: &ChangeMap) -> Rounds {
    let rounds = Rounds::of_new_session();
    map.begin_rounds(rounds);
    rounds
}

/// All that are marked.
fn granules(map: &ChangeMap) -> Vec<u64> {
    map.runs().into_iter().flatten().collect()
}

#[test]
fn marks_outlive_a_map_that_was_not_closed() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    map.unseal().unwrap();
    map.mark(0, 1).unwrap();
    map.mark(3 * GRANULE_BYTES - 1, 2).unwrap();
    map.mark(DISK_BYTES - 1, 1).unwrap();
    map.mark(7, 0).unwrap();
    assert_eq!(map.runs(), [0..1, 2..4, 100..101]);
    std::mem::forget(map);
    assert_eq!(reopen(&path, &image).unwrap().runs(), [0..1, 2..4, 100..101]);
}

/// Before, a map that its killed process had left open was believed whatever had become of its image.
#[test]
fn what_somebody_changes_after_a_process_was_killed_is_found_out() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    assert!(!ChangeMap::is_open_at(&path) && !ChangeMap::seal_left(&path, &image).unwrap());
    map.unseal().unwrap();
    map.mark(0, 1).unwrap();
    drop(map);
    let disk = Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap();
    assert!(!ChangeMap::seal_left(&path, &image).unwrap(), "somebody has the image");
    drop(disk);
    assert!(ChangeMap::is_open_at(&path) && ChangeMap::seal_left(&path, &image).unwrap());
    assert!(!ChangeMap::is_open_at(&path) && !ChangeMap::seal_left(&path, &image).unwrap());
    assert_eq!(
        reopen(&path, &image).unwrap().runs(),
        from_ref(&(0..1)),
        "all that was marked counts"
    );
    std::thread::sleep(std::time::Duration::from_millis(20));
    let others = OpenOptions::new().write(true).open(&image).unwrap();
    others.write_all_at(b"changed", GRANULE_BYTES).unwrap();
    let doubt = reopen(&path, &image).unwrap_err();
    assert!(doubt.contains("changed by other means"), "{doubt}");
    // Of an image that has taken its place nothing is said.
    reopen(&path, &image).unwrap_err();
    create(&path, &image).unseal().unwrap();
    fs::copy(&image, image.with_extension("other")).unwrap();
    fs::rename(image.with_extension("other"), &image).unwrap();
    assert!(!ChangeMap::seal_left(&path, &image).unwrap());
}

#[test]
fn a_round_forgets_what_was_marked_before_it_and_no_more() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    let rounds = rounds_of(&map);
    map.unseal().unwrap();
    map.mark(0, 2 * GRANULE_BYTES).unwrap();
    map.begin_round(rounds);
    map.mark(GRANULE_BYTES, 1).unwrap();
    map.mark(9 * GRANULE_BYTES, 1).unwrap();
    assert_eq!(reopen(&path, &image).unwrap().runs(), [0..2, 9..10]);
    map.end_round(rounds).unwrap();
    assert_eq!(map.runs(), [1..2, 9..10]);
    assert_eq!(reopen(&path, &image).unwrap().runs(), [1..2, 9..10]);
    // A round that never ends keeps all.
    map.begin_round(rounds);
    map.begin_round(rounds);
    assert_eq!(reopen(&path, &image).unwrap().runs(), [1..2, 9..10]);
}

/// Regression: twice a second the whole map of an idle disk was written anew.
#[test]
fn a_round_in_which_nothing_was_set_aside_writes_nothing() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    let rounds = rounds_of(&map);
    map.unseal().unwrap();
    map.mark(0, 1).unwrap();
    map.begin_round(rounds);
    map.end_round(rounds).unwrap();
    // What nobody but this test writes there.
    map.lock().file.write_all_at(&[0xff], BITS_AT).unwrap();
    map.begin_round(rounds);
    map.end_round(rounds).unwrap();
    let mut byte = [0];
    map.lock().file.read_exact_at(&mut byte, BITS_AT).unwrap();
    assert_eq!(byte, [0xff]);
}

/// Regression: the round after a write that failed half-way forgot it, and it had gone to no other
/// host.
#[test]
fn what_a_failed_change_may_have_left_behind_is_never_forgotten() {
    let (_directory, image, path) = image();
    let map = Arc::new(create(&path, &image));
    let rounds = rounds_of(&map);
    map.unseal().unwrap();
    // It cannot be written.
    let disk = Disk::open_medium(DiskIndex(0), &image).unwrap();
    disk.set_changes(Some(map.clone()));
    disk.write(2 * GRANULE_BYTES, b"w").unwrap_err();
    disk.zero(4 * GRANULE_BYTES, 1).unwrap_err();
    disk.trim(6 * GRANULE_BYTES, GRANULE_BYTES).unwrap_err();
    for _ in 0..2 {
        disk.begin_round(rounds);
        map.end_round(rounds).unwrap();
        assert_eq!(map.runs(), [2..3, 4..5, 6..7]);
        assert_eq!(reopen(&path, &image).unwrap().runs(), [2..3, 4..5, 6..7]);
    }
}

/// Regression: a thread of a session that had ended forgot what the next one was about to copy:
/// none of both hosts' lists had it any more, and after a third session a guest began on blocks
/// that were old.
#[test]
fn a_session_that_is_over_forgets_nothing_that_is_the_next_ones() {
    let (_directory, image, path) = image();
    let map = Arc::new(create(&path, &image));
    map.unseal().unwrap();
    let disk = Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap();
    disk.set_changes(Some(map.clone()));
    let (former, next) = (Rounds::of_new_session(), Rounds::of_new_session());
    disk.begin_rounds(former);
    disk.begin_round(former);
    assert!(!map.has_other_rounds(former));
    // It is over; nobody gets this write before the next one begins.
    disk.write(2 * GRANULE_BYTES, b"w").unwrap();
    disk.begin_rounds(next);
    disk.begin_round(next);
    assert!(map.has_other_rounds(former) && !map.has_other_rounds(next));
    for _ in 0..2 {
        // Its thread wakes up.
        map.end_round(former).unwrap();
        disk.begin_round(former);
        assert_eq!(granules(&map), [2]);
        assert_eq!(granules(&reopen(&path, &image).unwrap()), [2]);
    }
    disk.write(4 * GRANULE_BYTES, b"w").unwrap();
    disk.begin_round(former);
    map.end_round(next).unwrap();
    assert_eq!(granules(&map), [4], "nobody has set it aside");
    assert_eq!(granules(&reopen(&path, &image).unwrap()), [4]);
}

/// Puts a file to which nothing can be written in the place of the map's, and returns that.
fn fill_up(map: &ChangeMap) -> Durable {
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    std::mem::replace(&mut map.lock().file, Durable::new(full))
}

/// Regression: a guest's write was refused, and made when it came again, without a mark in the
/// file.
#[test]
fn a_mark_that_could_not_be_written_is_written_at_the_next_try() {
    let (_directory, image, path) = image();
    let map = Arc::new(create(&path, &image));
    map.unseal().unwrap();
    let disk = Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap();
    disk.set_changes(Some(map.clone()));
    let file = fill_up(&map);
    disk.write(9 * GRANULE_BYTES, b"first").unwrap_err();
    map.lock().file = file;
    disk.write(9 * GRANULE_BYTES, b"second").unwrap();
    assert_eq!(granules(&reopen(&path, &image).unwrap()), [9]);
}

#[test]
fn what_could_not_be_written_goes_along_with_whatever_is() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    let rounds = rounds_of(&map);
    map.unseal().unwrap();
    let file = fill_up(&map);
    map.mark_all().unwrap_err();
    assert_eq!(granules(&map).len(), 101, "this daemon knows, whatever its file says");
    map.lock().file = file;
    map.begin_round(rounds);
    map.end_round(rounds).unwrap();
    map.mark(0, 1).unwrap();
    assert_eq!(granules(&reopen(&path, &image).unwrap()).len(), 101);

    let map = create(&path, &image);
    let file = fill_up(&map);
    map.mark(0, 1).unwrap_err();
    map.lock().file = file;
    map.seal(&image).unwrap();
    assert_eq!(granules(&reopen(&path, &image).unwrap()), [0]);
}

#[test]
fn a_map_in_doubt_says_why() {
    let (_directory, image, path) = image();
    assert!(reopen(&path, &image).unwrap_err().contains("no list"));
    let map = create(&path, &image);
    map.unseal().unwrap();
    // As after a power failure: another run of the kernel.
    map.lock().file.write_all_at(b"00000000-0000-0000-0000-000000000000", BOOT_ID_AT).unwrap();
    assert!(reopen(&path, &image).unwrap_err().contains("restarted"));
    map.seal(&image).unwrap();
    assert!(reopen(&path, &image).is_ok(), "sealed, it outlives the kernel");
    // As fsck would.
    change_by_other_means(&image);
    assert!(reopen(&path, &image).unwrap_err().contains("other means"));
    let smaller = ChangeMap::open(&path, DISK_BYTES - 512, &image).unwrap();
    assert!(smaller.unwrap_err().contains("size"));
    // A raw one that was made larger.
    let longer = OpenOptions::new().write(true).open(&image).unwrap();
    longer.set_len(DISK_BYTES + GRANULE_BYTES).unwrap();
    let larger = ChangeMap::open(&path, DISK_BYTES + GRANULE_BYTES, &image).unwrap();
    assert!(larger.unwrap_err().contains("size"));
}

fn change_by_other_means(image: &Path) {
    std::thread::sleep(std::time::Duration::from_millis(20));
    let file = OpenOptions::new().write(true).open(image).unwrap();
    file.write_all_at(b"changed", 0).unwrap();
}

/// The room that a qcow2 image is shown with is measured anew at each start, and all was copied.
#[test]
fn a_map_goes_on_where_its_disk_is_shown_with_more_room() {
    const MORE: u64 = DISK_BYTES + 50 * GRANULE_BYTES;
    let (_directory, image, path) = image();
    assert_eq!(ChangeMap::disk_bytes_at(&path), None);
    let map = create(&path, &image);
    map.unseal().unwrap();
    map.mark(9 * GRANULE_BYTES, 1).unwrap();
    drop(map);
    assert_eq!(ChangeMap::disk_bytes_at(&path), Some(DISK_BYTES));
    let map = ChangeMap::open(&path, MORE, &image).unwrap().unwrap();
    assert_eq!(granules(&map), [9]);
    map.mark(MORE - 1, 1).unwrap();
    drop(map);
    assert_eq!(ChangeMap::disk_bytes_at(&path), Some(MORE));
    let map = ChangeMap::open(&path, MORE, &image).unwrap().unwrap();
    assert_eq!(granules(&map), [9, 150]);
    // Half of one is none.
    OpenOptions::new().write(true).open(&path).unwrap().set_len(BITS_AT + 5).unwrap();
    assert_eq!(ChangeMap::disk_bytes_at(&path), None);
    fs::write(&path, b"").unwrap();
    assert_eq!(ChangeMap::disk_bytes_at(&path), None);
}

/// A mirror's map was asked for nothing at all.
#[test]
fn a_mirrors_map_is_in_doubt_only_if_the_mirror_was_changed() {
    let (_directory, image, path) = image();
    let reopen = || ChangeMap::open_of_mirror(&path, DISK_BYTES, &image).unwrap();
    assert!(reopen().unwrap_err().contains("no list"));
    let map = create(&path, &image);
    map.unseal().unwrap();
    change_by_other_means(&image);
    assert!(reopen().is_ok(), "its primary goes on with it");
    map.lock().file.write_all_at(b"00000000-0000-0000-0000-000000000000", BOOT_ID_AT).unwrap();
    assert!(reopen().is_ok(), "what its host's power took is in its primary's map");
    map.seal(&image).unwrap();
    assert!(reopen().is_ok());
    change_by_other_means(&image);
    assert!(reopen().unwrap_err().contains("other means"));
}

/// A sealed map with another stamp than its image's.
fn restamp(path: &Path, stamp: Stamp) {
    let map = OpenOptions::new().write(true).open(path).unwrap();
    map.write_all_at(&stamp.encode(), STAMP_AT).unwrap();
}

#[test]
fn a_sealed_map_is_of_the_file_that_it_was_sealed_for() {
    let (_directory, image, path) = image();
    create(&path, &image);
    assert!(reopen(&path, &image).is_ok());
    // As `cp --preserve` makes it: the time is the same.
    let copy = image.with_extension("copy");
    fs::copy(&image, &copy).unwrap();
    let modified = fs::metadata(&image).unwrap().modified().unwrap();
    File::options().write(true).open(&copy).unwrap().set_modified(modified).unwrap();
    fs::rename(&copy, &image).unwrap();
    assert!(reopen(&path, &image).unwrap_err().contains("other means"));
    // A release that knew the time alone has sealed it.
    restamp(&path, Stamp::Time);
    assert!(reopen(&path, &image).is_ok());
}

/// The daemon was killed, and an operator has put an older image back: the list did not say what differs there.
#[test]
fn an_open_map_is_of_the_file_that_it_was_begun_for() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    map.unseal().unwrap();
    change_by_other_means(&image);
    assert!(reopen(&path, &image).is_ok(), "the guest's own changes are no other image");
    let copy = image.with_extension("copy");
    fs::copy(&image, &copy).unwrap();
    fs::rename(&copy, &image).unwrap();
    assert!(reopen(&path, &image).unwrap_err().contains("another image has taken the place"));
    let of_mirror = || ChangeMap::open_of_mirror(&path, DISK_BYTES, &image).unwrap();
    assert!(of_mirror().unwrap_err().contains("another image has taken the place"));
    // A release that knew the time alone has made it.
    restamp(&path, Stamp::Time);
    assert!(reopen(&path, &image).is_ok() && of_mirror().is_ok());
    restamp(&path, Stamp::Device { number: 1, sequence: 2, written: 3 });
    assert!(of_mirror().is_err(), "it is no device any more");
}

/// The node of a block device says nothing of its content: a sealed map was believed whatever was mounted meanwhile.
#[test]
fn a_sealed_map_of_a_device_is_believed_only_if_its_writes_are_counted() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    restamp(&path, Stamp::Uncounted);
    assert!(reopen(&path, &image).unwrap_err().contains("nothing tells"));
    restamp(&path, Stamp::Device { number: 1, sequence: 2, written: 3 });
    assert!(reopen(&path, &image).unwrap_err().contains("other means"));
    map.lock().file.write_all_at(b"00000000-0000-0000-0000-000000000000", BOOT_ID_AT).unwrap();
    assert!(reopen(&path, &image).unwrap_err().contains("the host was restarted"));
    assert!(ChangeMap::open_of_mirror(&path, DISK_BYTES, &image).unwrap().is_ok());
}

#[test]
fn changes_of_the_other_host_are_checked() {
    let (_directory, image, path) = image();
    let map = create(&path, &image);
    map.merge(&[1..3, 50..101]).unwrap();
    assert_eq!(map.runs(), [1..3, 50..101]);
    assert_eq!(map.changed_bytes(), 53 * GRANULE_BYTES);
    for wrong in [100..102, 5..5, 0..u64::MAX] {
        assert!(map.merge(&[wrong]).is_err());
    }
}

#[test]
fn a_disk_marks_before_it_changes() {
    let (_directory, image, path) = image();
    let map = Arc::new(create(&path, &image));
    let disk = Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap();
    disk.write(0, b"before").unwrap();
    disk.set_changes(Some(map.clone()));
    disk.write(2 * GRANULE_BYTES, b"w").unwrap();
    disk.zero(4 * GRANULE_BYTES, 1).unwrap();
    disk.trim(6 * GRANULE_BYTES, 1).unwrap();
    disk.zero_reserved(8 * GRANULE_BYTES, 1).unwrap();
    assert_eq!(map.runs(), [2..3, 4..5, 6..7, 8..9]);
}

/// The list's directory hung, not the image's device: a guest in lockstep, or unprotected, waited for ever, and nobody
/// was told.
#[test]
fn a_write_that_waits_for_its_mark_waits_for_its_disk() {
    let (_directory, image, path) = image();
    let map = Arc::new(create(&path, &image));
    let rounds = rounds_of(&map);
    let disk = Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap();
    disk.set_changes(Some(map.clone()));
    let calls: [&(dyn Fn() + Sync); 2] =
        [&|| disk.write(0, b"w").unwrap(), &|| _ = disk.begin_round(rounds)];
    for call in calls {
        // As a round's end does that writes all of the list.
        let hangs = map.lock();
        std::thread::scope(|scope| {
            scope.spawn(call);
            let begun = std::time::Instant::now();
            while disk.longest_wait().is_none() {
                assert!(begun.elapsed().as_secs() < 60, "nobody knows that it waits");
                std::thread::yield_now();
            }
            drop(hangs);
        });
        assert!(disk.longest_wait().is_none());
    }
}

proptest! {
    /// Compares with a plain set of granules.
    #[test]
    fn the_map_holds_what_was_marked_since_the_last_ended_round(
        steps in proptest::collection::vec((0..3u8, 0..DISK_BYTES, 0..5 * GRANULE_BYTES), 0..60),
    ) {
        let (_directory, image, path) = image();
        let map = create(&path, &image);
        let rounds = rounds_of(&map);
        let (mut current, mut closing) = (BTreeSet::new(), BTreeSet::new());
        for (what, offset, len) in steps {
            let len = len.min(DISK_BYTES - offset);
            match what {
                0 => {
                    map.mark(offset, len).unwrap();
                    let end = (offset + len).div_ceil(GRANULE_BYTES);
                    current.extend((offset / GRANULE_BYTES..end).filter(|_| len > 0));
                }
                1 => {
                    map.begin_round(rounds);
                    closing.append(&mut current);
                }
                _ => {
                    map.end_round(rounds).unwrap();
                    closing.clear();
                }
            }
            let expected: BTreeSet<u64> = current.union(&closing).copied().collect();
            let found = |runs: Vec<Range<u64>>| runs.into_iter().flatten().collect::<BTreeSet<_>>();
            prop_assert_eq!(&found(map.runs()), &expected);
            prop_assert_eq!(&found(reopen(&path, &image).unwrap().runs()), &expected);
        }
    }
}
