//! Tests of how keepers are ended.

use super::super::note::Claim;
use super::*;
use std::process::{Child, Command};
use std::sync::atomic::AtomicUsize;
use understudy_protocol::literal;

const LONG: Duration = Duration::from_secs(60);

fn patience(end: Duration) -> Patience<impl Fn(&VmName, &Path) -> Heard + Sync> {
    Patience { end, silence: LONG, hears: |_: &VmName, _: &Path| Heard::Answers }
}

fn end(state_dir: &Path) -> Left {
    end_all(state_dir, &patience(LONG), || ()).unwrap()
}

/// A process in a keeper's place, which is not this one. It writes down that it was told, and ends a moment after
/// the first time.
fn counting(counted: &Path) -> Child {
    let script = format!(
        "trap 'echo told >> {0}; ends=1' TERM; echo > {0}; while [ -z $ends ]; do sleep 0.1; done; sleep 1",
        counted.display()
    );
    let keeper = Command::new("sh").args(["-c", &script]).spawn().unwrap();
    while !counted.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    keeper
}

// Before, the keeper of a group was told once for each of its VMs: the second time its guests were cut.
#[test]
fn all_that_live_are_told_to_end_once_and_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    assert_eq!(end(directory), Left::default(), "nobody is there");
    assert_eq!(end(&directory.join("nowhere")), Left::default());
    let (db, cache): (VmName, VmName) = (literal("db"), literal("cache"));
    let counted = directory.join("counted");
    let mut keeper = counting(&counted);
    let claims = [&db, &cache].map(|vm| claimed_by(keeper.id(), directory, vm));
    let calls = AtomicUsize::new(0);
    let left = end_all(directory, &patience(LONG), || {
        calls.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(left.unwrap(), Left::default());
    assert_eq!(calls.into_inner(), 2, "time was asked for at the beginning, and with its end");
    assert!(keeper.wait().unwrap().success());
    assert_eq!(fs::read_to_string(&counted).unwrap(), "\ntold\n", "once for both");
    fs::write(db.below(directory).join("keeper.json"), "{}").unwrap();
    fs::remove_file(cache.below(directory).join("keeper.json")).unwrap();
    let left = Left { untold: vec![db], ..Left::default() };
    assert_eq!(end(directory), left, "nobody knows whose lock it is");
    drop(claims);
    // What another test starts at this moment has the locks, too, until it is another program.
    let until = Instant::now() + LONG;
    while end(directory) != Left::default() {
        assert!(Instant::now() < until, "it is locked for good");
        thread::sleep(Duration::from_millis(5));
    }
}

// Before, it ran on: its daemon's release alone was told of it.
#[test]
fn a_keeper_of_another_release_is_told_too() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let db: VmName = literal("db");
    let counted = directory.join("counted");
    let mut keeper = counting(&counted);
    let _claim = claimed_by(keeper.id(), directory, &db);
    let note = format!("{{\"protocol\":99,\"pid\":{}}}", keeper.id());
    fs::write(db.below(directory).join("keeper.json"), note).unwrap();
    assert_eq!(end(directory), Left::default());
    assert!(keeper.wait().unwrap().success());
}

// Before, its guests were cut: the second signal means that.
#[test]
fn a_keeper_that_ends_already_is_not_told_again_and_not_waited_for_without_end() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let db: VmName = literal("db");
    let counted = directory.join("counted");
    let mut keeper = counting(&counted);
    let mut claim = claimed_by(keeper.id(), directory, &db);
    // As the keeper's.
    claim.note_ending().unwrap();
    let file = db.below(directory).join("keeper.json");
    fs::write(&file, said_by(keeper.id(), &file)).unwrap();
    let goes_on = || assert!(is_under_way(directory));
    let left = end_all(directory, &patience(Duration::ZERO), goes_on).unwrap();
    assert_eq!(left, Left { unended: vec![db], ..Left::default() });
    assert!(!is_under_way(directory));
    assert_eq!(fs::read_to_string(&counted).unwrap(), "\n", "it was told");
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    drop(claim);
}

/// A process that hangs; it does not outlive the test, whatever becomes of that.
struct Stopped(Child);

impl Stopped {
    fn begin() -> Stopped {
        let stopped = Stopped(Command::new("sleep").arg("600").spawn().unwrap());
        signal(stopped.pidfd().as_fd(), Signal::SIGSTOP).unwrap();
        // Until then a signal that comes later, and ends it, is taken first.
        let status = format!("/proc/{}/status", stopped.0.id());
        while !fs::read_to_string(&status).unwrap().contains("T (stopped)") {
            thread::sleep(Duration::from_millis(1));
        }
        stopped
    }

    fn pidfd(&self) -> OwnedFd {
        pidfd_of(self.0.id()).unwrap()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn heard(answers: bool) -> Heard {
    if answers { Heard::Answers } else { Heard::Silent }
}

// Before, a group that hung with one of its places closed was never found to hang.
#[test]
fn a_place_that_is_closed_says_nothing_of_the_others() {
    let process = Stopped::begin();
    let keeper = Keeper {
        process: process.pidfd(),
        ending: false,
        hangs: AtomicBool::new(false),
        vms: vec![literal("db"), literal("web")],
    };
    let with = |db, web| keeper.lives(|vm| if vm.as_str() == "db" { db } else { web });
    assert!(!with(Heard::Closed, Heard::Silent));
    assert!(!with(Heard::Silent, Heard::Closed));
    assert!(with(Heard::Closed, Heard::Closed), "it is about to end");
    assert!(with(Heard::Silent, Heard::Answers));
}

// Before, the host's shutdown waited for it as long as for one that hands its VMs over.
#[test]
fn a_keeper_that_answers_nothing_is_given_up_long_before_one_that_answers() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let (db, web): (VmName, VmName) = (literal("db"), literal("web"));
    let keepers = [Stopped::begin(), Stopped::begin()];
    let _claims = [(&keepers[0], &db), (&keepers[1], &web)]
        .map(|(it, vm)| claimed_by(it.0.id(), directory, vm));
    let hears =
        |vm: &VmName, socket: &Path| heard(vm.as_str() == "web" && socket.ends_with(SOCKET));
    let moment = Duration::from_secs(3);
    let patience = Patience { end: moment, silence: Duration::ZERO, hears };
    let left = end_all(directory, &patience, || ()).unwrap();
    assert_eq!(left, Left { unended: vec![web], silent: vec![db], ..Left::default() });
}

// Before, one that had been silent once was given up, and so was a group of which one VM's place was closed.
#[test]
fn one_vm_that_answers_again_takes_back_that_its_keeper_hangs() {
    let (process, directory) = (Stopped::begin(), tempfile::tempdir().unwrap());
    let keeper = Keeper {
        process: process.pidfd(),
        ending: false,
        hangs: AtomicBool::new(false),
        vms: vec![literal("db"), literal("web")],
    };
    let (answers, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let hears =
        |vm: &VmName, _: &Path| heard(vm.as_str() == "web" && answers.load(Ordering::Acquire));
    let patience = Patience { end: LONG, silence: Duration::ZERO, hears };
    let comes = |hangs: bool| {
        let until = Instant::now() + LONG;
        while keeper.hangs.load(Ordering::Acquire) != hangs && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        keeper.hangs.load(Ordering::Acquire) == hangs
    };
    let (told, taken_back) = thread::scope(|scope| {
        keeper.listen_in(scope, directory.path(), &patience, &over);
        let told = comes(true);
        answers.store(true, Ordering::Release);
        let taken_back = comes(false);
        over.store(true, Ordering::Release);
        (told, taken_back)
    });
    assert!(told, "it was silent");
    assert!(taken_back, "it answered");
}

/// A keeper's note of this process, as if it were another one's.
fn said_by(pid: u32, file: &Path) -> String {
    let of = |pid: u32| format!("\"pid\":{pid}");
    fs::read_to_string(file).unwrap().replace(&of(std::process::id()), &of(pid))
}

/// The lock of a VM's keeper, which is said to be another process.
fn claimed_by(pid: u32, state_dir: &Path, vm: &VmName) -> Claim {
    let directory = vm.below(state_dir);
    fs::create_dir(&directory).unwrap();
    let claim = Claim::take(&directory, &literal("a"), vm, None).unwrap();
    let file = directory.join("keeper.json");
    fs::write(&file, said_by(pid, &file)).unwrap();
    claim
}
