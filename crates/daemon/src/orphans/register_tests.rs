use super::super::AGAIN;
use super::*;
use std::time::Duration;
use understudy_protocol::literal;

// Before, a daemon that was to end waited for the store, or the arbiter, of such a guest without bound, and handed over
// nobody meanwhile.
#[test]
fn a_guest_whose_thread_hangs_delays_the_end_of_its_daemon_by_no_more_than_the_bound() {
    let (orphans, db, web) =
        (Orphans::of_inventory(&Inventory::default()), literal("db"), literal("web"));
    orphans.add(&db);
    let _between = orphans.expect_keeper(&web);
    orphans.give_up_all();
    assert!(orphans.is_given_up(&db), "its thread ends it when it comes back");
    assert!(!orphans.is_given_up(&web), "it is not the daemon's to end");
    let until = Instant::now() + Duration::from_millis(50);
    assert_eq!(orphans.await_given_up(until), std::slice::from_ref(&db));
    let ended = orphans.clone();
    let thread = thread::spawn(move || ended.remove(&db));
    assert!(orphans.await_given_up(Instant::now() + AGAIN * 60).is_empty());
    thread.join().unwrap();
}

// Before, the first one's end had removed the second, which took that for its operator's wish, and ended the guest.
#[test]
fn who_is_between_two_keepers_ends_nobody_elses_wait() {
    let (orphans, db) = (Orphans::of_inventory(&Inventory::default()), literal("db"));
    let first = orphans.expect_keeper(&db);
    let second = orphans.expect_keeper(&db);
    drop(first);
    assert!(!second.is_given_up());
    assert_eq!(orphans.between_keepers(), std::slice::from_ref(&db));
    assert!(orphans.mark_given_up(&db) && second.is_given_up());
    drop(second);
    assert!(orphans.between_keepers().is_empty());
}

// Before, one that was to be taken back was in no status, for as long as store or arbiter were silent.
#[test]
fn whoever_stands_still_is_told_of() {
    let orphans = Orphans::of_inventory(&Inventory::default());
    let [db, web]: [VmName; 2] = [literal("db"), literal("web")];
    orphans.add(&db);
    let _between = orphans.expect_keeper(&web);
    assert_eq!(orphans.untold(), [db.clone(), web]);
    assert_eq!(orphans.problems(), std::slice::from_ref(&db));
    assert_eq!(orphans.end_with_daemon(), [db]);
}
