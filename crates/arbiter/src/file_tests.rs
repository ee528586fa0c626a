use super::*;
use std::collections::BTreeSet;
use std::process::Command;
use understudy_protocol::{VmName, literal};

#[test]
fn one_of_many_wins_each_generation() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..20 {
        let wins: usize = std::thread::scope(|scope| {
            let contest = |name: String| {
                let arbiter = FileArbiter::new(directory.path(), &name.parse().unwrap());
                scope.spawn(move || {
                    matches!(
                        arbiter.acquire(Key::Vm(&literal("db")), Generation(round), true),
                        Ok(Verdict::Granted(_))
                    )
                })
            };
            let threads: Vec<_> = (0..4).map(|i| contest(format!("host-{i}"))).collect();
            threads.into_iter().map(|t| usize::from(t.join().unwrap())).sum()
        });
        assert_eq!(wins, 1, "generation {round}");
    }
}

#[test]
fn asking_again_is_granted_and_an_old_generation_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let a = FileArbiter::new(directory.path(), &literal("a"));
    let b = FileArbiter::new(directory.path(), &literal("b"));
    assert_eq!(
        a.acquire(Key::Vm(&literal("db")), Generation(0), true),
        Ok(Verdict::Granted(Generation(1)))
    );
    assert_eq!(
        a.acquire(Key::Vm(&literal("db")), Generation(0), true),
        Ok(Verdict::Granted(Generation(1)))
    );
    assert_eq!(
        b.acquire(Key::Vm(&literal("db")), Generation(1), true),
        Ok(Verdict::Granted(Generation(2)))
    );
    let taken = Ownership { host: Some(literal("b")), generation: Generation(2) };
    assert_eq!(
        a.acquire(Key::Vm(&literal("db")), Generation(1), true),
        Ok(Verdict::Taken(taken.clone()))
    );
    assert_eq!(a.acquire(Key::Vm(&literal("db")), Generation(0), true), Ok(Verdict::Taken(taken)));
    b.release(Key::Vm(&literal("db")), Generation(2)).unwrap();
    assert_eq!(b.current(Key::Vm(&literal("db"))).unwrap().unwrap().host, None);
}

#[test]
fn a_missing_directory_is_no_verdict() {
    let arbiter = FileArbiter::new(Path::new("/nonexistent/arbiter"), &literal("a"));
    assert!(
        arbiter
            .acquire(Key::Vm(&literal("db")), Generation(0), true)
            .unwrap_err()
            .0
            .contains("/nonexistent/arbiter")
    );
}

#[test]
fn a_rehearsal_reads_the_record_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let a = FileArbiter::new(directory.path(), &literal("a"));
    let b = FileArbiter::new(directory.path(), &literal("b"));
    assert_eq!(b.rehearse(Key::Vm(&literal("db"))), Ok(None));
    a.acquire(Key::Vm(&literal("db")), Generation(0), true).unwrap();
    let owner = Ownership { host: Some(literal("a")), generation: Generation(1) };
    assert_eq!(b.rehearse(Key::Vm(&literal("db"))), Ok(Some(owner.clone())));
    assert_eq!(a.current(Key::Vm(&literal("db"))), Ok(Some(owner)));
    let left = fs::read_dir(directory.path().join("db")).unwrap().count();
    assert_eq!(left, 1, "the record alone");
    // What looks like a record and cannot be written beside: a file system at its end.
    let finished = directory.path().join("full");
    fs::write(&finished, "").unwrap();
    assert!(b.rehearse(Key::Vm(&literal("full"))).is_err());
}

// Before, a process that had the number of one that had died wrote over the record.
#[test]
fn what_a_call_has_left_behind_is_not_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let a = FileArbiter::new(directory.path(), &literal("a"));
    a.acquire(Key::Vm(&literal("db")), Generation(0), true).unwrap();
    let record = directory.path().join("db/1");
    let written = fs::read_to_string(&record).unwrap();
    for call in 0..10_000 {
        let left = format!("db/.a.{}.{call}", std::process::id());
        fs::hard_link(&record, directory.path().join(left)).unwrap();
    }
    a.release(Key::Vm(&literal("db")), Generation(1)).unwrap();
    assert_eq!(fs::read_to_string(&record).unwrap(), written);
}

#[test]
fn a_lease_is_renewed_withdrawn_and_no_record_of_ownership() {
    let directory = tempfile::tempdir().unwrap();
    let a = FileArbiter::new(directory.path(), &literal("a"));
    let db: VmName = literal("db");
    let key = Key::Vm(&db);
    a.acquire(key, Generation(0), true).unwrap();
    let (one, two) = (Generation(1), Generation(2));
    assert_eq!(a.renewal(key, one), Ok(None));
    for mark in [1, 2] {
        let renewal = Renewal { host: literal("a"), length_ms: 15_000, mark };
        a.renew(key, one, &renewal).unwrap();
        assert_eq!(a.renewal(key, one), Ok(Some(renewal)));
    }
    assert_eq!(a.renewal(key, two), Ok(None), "each generation has its own");
    let later = Renewal { host: literal("b"), length_ms: 15_000, mark: 1 };
    a.renew(key, Generation(10), &later).unwrap();
    let all: BTreeSet<Generation> = a.tenures(key).unwrap().into_iter().collect();
    assert_eq!(all, [one, Generation(10)].into());
    fs::write(directory.path().join("db/10.lease"), "{\"host\":\"b\"").unwrap();
    let words = a.renewal(key, Generation(10)).unwrap_err().0;
    assert!(words.contains("db/10.lease") && words.contains("remove it"), "{words}");
    a.withdraw(key, Generation(10)).unwrap();
    assert_eq!(a.tenures(Key::Vm(&literal("other"))), Ok(Vec::new()));
    assert_eq!(a.current(key).unwrap().unwrap().generation, one);
    a.withdraw(key, one).unwrap();
    a.withdraw(key, one).unwrap();
    assert_eq!(a.renewal(key, one), Ok(None));
    let gone = FileArbiter::new(Path::new("/nonexistent/arbiter"), &literal("a"));
    assert!(gone.renewal(key, one).is_err(), "no directory is no word");
    assert!(gone.tenures(key).is_err());
    assert!(gone.withdraw(key, one).is_ok(), "the word comes from the reading after it");
}

/// A file system of its own, which can be filled.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> SmallDisk {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "arbiter"])
            .arg(directory.path())
            .status();
        assert!(mounted.unwrap().success());
        SmallDisk(directory)
    }

    fn fill(&self) {
        let mut filler = fs::File::create(self.0.path().join("filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

// Before, each try left a file.
#[test]
fn what_a_full_directory_does_not_take_is_not_left_there() {
    let disk = SmallDisk::new();
    let a = FileArbiter::new(disk.0.path(), &literal("a"));
    let db: VmName = literal("db");
    let key = Key::Vm(&db);
    a.acquire(key, Generation(0), true).unwrap();
    disk.fill();
    let renewal = Renewal { host: literal("a"), length_ms: 15_000, mark: 1 };
    for _ in 0..3 {
        let words = a.renew(key, Generation(1), &renewal).unwrap_err().0;
        assert!(words.contains("No space left"), "{words}");
        assert!(a.acquire(key, Generation(1), true).is_err());
        assert!(a.name_it(ArbiterId::fresh().unwrap()).is_err());
        assert!(a.rehearse(key).is_err());
    }
    let names = |path: &Path| -> Vec<_> {
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    assert_eq!(names(&disk.0.path().join("db")), ["1"]);
    assert_eq!(names(disk.0.path()).len(), 2, "the VM's records, and what fills it");
}

#[test]
fn an_arbiter_is_named_once() {
    let directory = tempfile::tempdir().unwrap();
    let named: Vec<ArbiterId> = std::thread::scope(|scope| {
        let name = |host: String| {
            let arbiter = FileArbiter::new(directory.path(), &host.parse().unwrap());
            scope.spawn(move || arbiter.name_it(ArbiterId::fresh().unwrap()).unwrap())
        };
        let threads: Vec<_> = (0..4).map(|i| name(format!("host-{i}"))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(named.iter().all(|id| *id == named[0]), "{named:?}");
    let arbiter = FileArbiter::new(directory.path(), &literal("late"));
    assert_eq!(arbiter.identity(), Ok(Some(named[0].clone())));
    assert!(FileArbiter::new(Path::new("/nonexistent"), &literal("a")).identity().is_err());
}

#[test]
fn an_arbiter_that_lost_its_records_decides_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let a = FileArbiter::new(directory.path(), &literal("a"));
    let words = a.acquire(Key::Vm(&literal("db")), Generation(3), true).unwrap_err().0;
    assert!(words.contains("generation 0") && words.contains("it was 3"), "{words}");
    // A start is not a contest.
    assert_eq!(
        a.acquire(Key::Vm(&literal("db")), Generation(3), false),
        Ok(Verdict::Granted(Generation(4)))
    );
    let older = a.acquire(Key::Vm(&literal("db")), Generation(7), true).unwrap_err().0;
    assert!(older.contains("generation 4"), "{older}");
}
