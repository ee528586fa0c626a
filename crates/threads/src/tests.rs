use super::*;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};

/// Says that a test is in a process of its own, whose panics are its own.
const ALONE: &str = "UNDERSTUDY_TEST_ALONE";

/// An owner that tells.
struct Telling(Sender<String>);

impl Owner for Telling {
    fn panicked(&self, words: &str) {
        self.0.send(words.to_owned()).unwrap();
    }

    fn only_looks(&self) -> bool {
        false
    }
}

/// Runs the test of that name again in a process of its own; whether that ended well.
fn alone(name: &str, body: impl FnOnce()) -> Option<bool> {
    if std::env::var_os(ALONE).is_some() {
        contain_panics();
        body();
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    Some(output.status.success())
}

#[test]
fn a_panic_is_told_to_the_owner_of_a_threads_threads() {
    let ended_well = alone("tests::a_panic_is_told_to_the_owner_of_a_threads_threads", || {
        let (told, words) = channel();
        let scope = Scope::new(Telling(told));
        let outer = within(&scope, || spawn("outer", || spawn("inner", || panic!("oh"))));
        outer.unwrap().join().unwrap().unwrap().join().unwrap_err();
        let words = words.recv().unwrap();
        assert!(words.starts_with("oh (") && words.contains("tests.rs"), "{words}");
        assert!(current().is_none());
    });
    assert_ne!(ended_well, Some(false));
}

#[test]
fn a_panic_that_belongs_to_nothing_ends_the_process() {
    let ended_well = alone("tests::a_panic_that_belongs_to_nothing_ends_the_process", || {
        let _ = spawn("lonely", || panic!("oh")).unwrap().join();
    });
    assert_ne!(ended_well, Some(true));
}

#[test]
fn who_only_tries_a_common_lock_does_not_wait_for_it() {
    let common = Common::new(1);
    let tried = || {
        let trying = || common.try_lock().map(|value| *value);
        std::thread::scope(|scope| scope.spawn(trying).join().unwrap())
    };
    let held = common.lock();
    assert_eq!(tried(), None);
    drop(held);
    assert_eq!(tried(), Some(1));
}

#[test]
fn a_panic_with_a_common_lock_ends_the_process() {
    let ended_well = alone("tests::a_panic_with_a_common_lock_ends_the_process", || {
        let scope = Scope::new(Telling(channel().0));
        let common = std::sync::Arc::new(Common::new(1));
        let theirs = common.clone();
        let holds = move || {
            let _held = theirs.lock();
            panic!("oh");
        };
        let _ = within(&scope, || spawn("holds", holds)).unwrap().join();
        drop(common.lock());
    });
    assert_ne!(ended_well, Some(true));
}

#[test]
fn what_a_panic_left_half_done_is_for_onlookers_only() {
    let ended_well = alone("tests::what_a_panic_left_half_done_is_for_onlookers_only", || {
        let (told, words) = channel();
        let scope = Scope::new(Telling(told));
        let shared = std::sync::Arc::new(Mutex::new(1));
        let half_done = |shared: &std::sync::Arc<Mutex<i32>>| {
            let shared = shared.clone();
            within(&scope, || {
                spawn("acts", move || {
                    *lock(&shared) = 2;
                    let _held = lock(&shared);
                    panic!("oh");
                })
            })
        };
        half_done(&shared).unwrap().join().unwrap_err();
        assert_eq!(*lock(&shared), 2, "an onlooker");
        half_done(&shared).unwrap().join().unwrap_err();
        assert!(words.recv().unwrap().starts_with("oh"));
        assert!(words.recv().unwrap().starts_with("another thread panicked"));
    });
    assert_ne!(ended_well, Some(false));
}

/// The panic's words are looked for elsewhere, so they are proven here.
#[cfg(feature = "lock-order")]
#[test]
#[should_panic(expected = "Found cycle in mutex dependency graph")]
fn two_locks_in_both_orders_are_a_panic_whether_or_not_threads_meet() {
    let (one, other) = (Mutex::new(()), Mutex::new(()));
    {
        let _one = lock(&one);
        let _other = lock(&other);
    }
    let _other = lock(&other);
    let _one = lock(&one);
}
