//! The `file` arbiter: VMware FT's own test-and-set, in a directory that both
//! hosts reach (shared or third-party storage).
//!
//! A VM's ownership at generation *g* is the file `VM/g`. Making it is a hard
//! link of a finished file to that name: atomic on every file system that has
//! hard links, and it fails when somebody was first. Which arbiter it is stands
//! in the file `.identity`, which is made in the same way. `VM/g.lease` is the owner's last proof
//! that it lives, replaced as a whole.

use crate::arbiter::{judge, judge_hand_back, stands};
use crate::{ArbiterId, Key, Unreachable};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use understudy_protocol::HostName;
use understudy_protocol::{Generation, Ownership, Renewal, Verdict};

/// No VM's and no group's records are there.
const IDENTITY: &str = ".identity";
/// What the names of leases end with.
const LEASE: &str = ".lease";

#[derive(Serialize, Deserialize)]
struct Record {
    host: Option<HostName>,
}

/// The records in one directory.
#[derive(Clone, Debug)]
pub struct FileArbiter {
    directory: PathBuf,
    host: HostName,
}

impl FileArbiter {
    pub fn new(directory: &Path, host: &HostName) -> FileArbiter {
        FileArbiter { directory: directory.to_owned(), host: host.to_owned() }
    }

    pub fn current(&self, key: Key<'_>) -> Result<Option<Ownership>, Unreachable> {
        self.newest(key).map_err(|error| self.explain(&error))
    }

    pub fn acquire(
        &self,
        key: Key<'_>,
        from: Generation,
        strict: bool,
    ) -> Result<Verdict, Unreachable> {
        if strict {
            let owner = self.current(key)?;
            // Beyond `from` the contest is over, one way or the other.
            if owner.as_ref().is_none_or(|owner| owner.generation <= from) {
                stands(key, owner.as_ref(), from)?;
            }
        }
        self.swap(key, from, Some(&self.host)).map_err(|error| self.explain(&error))
    }

    pub fn hand_back(
        &self,
        key: Key<'_>,
        from: Generation,
        to: &HostName,
    ) -> Result<Verdict, Unreachable> {
        let found = self.current(key)?;
        if let Some(verdict) = judge_hand_back(found.as_ref(), (from, &self.host), to) {
            return Ok(verdict);
        }
        stands(key, found.as_ref(), from)?;
        self.swap(key, from, Some(to)).map_err(|error| self.explain(&error))
    }

    pub fn release(&self, key: Key<'_>, from: Generation) -> Result<(), Unreachable> {
        self.swap(key, from, None).map(drop).map_err(|error| self.explain(&error))
    }

    /// The last renewal of the lease of that generation's owner.
    pub fn renewal(&self, key: Key<'_>, of: Generation) -> Result<Option<Renewal>, Unreachable> {
        let path = self.lease(key, of);
        let read = || match fs::read(&path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(renewal) => Ok(Some(renewal)),
                Err(error) => Err(io::Error::other(format!(
                    "{} cannot be read ({error}): see that who owned {key} at generation {of} is off, then \
                     remove it",
                    path.display()
                ))),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::metadata(&self.directory).map(|_| None)
            }
            Err(error) => Err(error),
        };
        read().map_err(|error: io::Error| self.explain(&error))
    }

    /// The generations whose owners keep a lease.
    pub fn tenures(&self, key: Key<'_>) -> Result<Vec<Generation>, Unreachable> {
        let list = || {
            let entries = match fs::read_dir(key.below(&self.directory)) {
                Ok(entries) => entries,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return fs::metadata(&self.directory).map(|_| Vec::new());
                }
                Err(error) => return Err(error),
            };
            let mut generations = Vec::new();
            for entry in entries {
                let name = entry?.file_name();
                let number = name.to_str().and_then(|name| name.strip_suffix(LEASE));
                generations.extend(number.and_then(|number| number.parse().ok()).map(Generation));
            }
            Ok(generations)
        };
        list().map_err(|error: io::Error| self.explain(&error))
    }

    pub fn renew(&self, key: Key<'_>, of: Generation, to: &Renewal) -> Result<(), Unreachable> {
        let renewed = || {
            let draft = Draft::synced(key.below(&self.directory).join(self.own_name()?), to)?;
            draft.put_at(&self.lease(key, of))
        };
        renewed().map_err(|error| self.explain(&error))
    }

    pub fn withdraw(&self, key: Key<'_>, of: Generation) -> Result<(), Unreachable> {
        match fs::remove_file(self.lease(key, of)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.explain(&error)),
            _ => Ok(()),
        }
    }

    /// No generation's record has a dot in its name.
    fn lease(&self, key: Key<'_>, of: Generation) -> PathBuf {
        key.below(&self.directory).join(format!("{of}{LEASE}"))
    }

    pub fn identity(&self) -> Result<Option<ArbiterId>, Unreachable> {
        self.read_identity().map_err(|error| self.explain(&error))
    }

    /// Gives the arbiter this identity, unless somebody was first; the one that it has then.
    pub fn name_it(&self, id: ArbiterId) -> Result<ArbiterId, Unreachable> {
        let named = || {
            let draft = Draft::synced(self.directory.join(self.own_name()?), &id)?;
            let linked = draft.link_to(&self.directory.join(IDENTITY));
            draft.remove()?;
            match linked {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => fs::File::open(&self.directory)?.sync_all()?,
            }
            Ok(self.read_identity()?.unwrap_or(id))
        };
        named().map_err(|error| self.explain(&error))
    }

    /// Does what a take-over does, up to names that count for nothing, and removes it: a directory
    /// that is full or can only be read says so here. Nothing is synced: that is what takes time.
    pub fn rehearse(&self, key: Key<'_>) -> Result<Option<Ownership>, Unreachable> {
        let rehearsed = || {
            let Some(owner) = self.newest(key)? else { return Ok(None) };
            let folder = key.below(&self.directory);
            let record = Record { host: Some(self.host.clone()) };
            let (draft, _) = Draft::write(folder.join(self.own_name()?), &record)?;
            let name = folder.join(self.own_name()?);
            let linked = draft.link_to(&name);
            // All is removed, whatever was made; the first error is the one that counts.
            let unlinked = fs::remove_file(&name);
            linked.and(unlinked).and(draft.remove()).map(|()| Some(owner))
        };
        rehearsed().map_err(|error| self.explain(&error))
    }

    /// A name for a file that no other call of any host makes, nor has made: one that did not come to
    /// its end may have left a file, which may be a record under its other name.
    fn own_name(&self) -> io::Result<String> {
        Ok(format!(".{}.{}", self.host, ArbiterId::fresh()?))
    }

    /// None only if the arbiter's own directory is there.
    fn read_identity(&self) -> io::Result<Option<ArbiterId>> {
        match fs::read(self.directory.join(IDENTITY)) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::metadata(&self.directory).map(|_| None)
            }
            Err(error) => Err(error),
        }
    }

    fn explain(&self, error: &io::Error) -> Unreachable {
        let directory = self.directory.display();
        Unreachable(format!("the arbiter's directory {directory} cannot be used: {error}"))
    }

    fn newest(&self, key: Key<'_>) -> io::Result<Option<Ownership>> {
        let entries = match fs::read_dir(key.below(&self.directory)) {
            Ok(entries) => entries,
            // The arbiter's own directory must be there, or it is out of reach.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return fs::metadata(&self.directory).map(|_| None);
            }
            Err(error) => return Err(error),
        };
        let mut newest = None;
        for entry in entries {
            let name = entry?.file_name();
            newest = newest.max(name.to_str().and_then(|name| name.parse::<u64>().ok()));
        }
        newest.map(|generation| self.read(key, Generation(generation))).transpose()
    }

    fn swap(&self, key: Key<'_>, from: Generation, host: Option<&HostName>) -> io::Result<Verdict> {
        if let Some(owner) = self.newest(key)? {
            if owner.generation > from {
                return Ok(judge(owner, from, host));
            }
        }
        let folder = key.below(&self.directory);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let target = folder.join(from.next().to_string());
        let record = Record { host: host.cloned() };
        let draft = Draft::synced(folder.join(self.own_name()?), &record)?;
        let linked = draft.link_to(&target);
        draft.remove()?;
        match linked {
            Ok(()) => {
                fs::File::open(&folder)?.sync_all()?;
                Ok(Verdict::Granted(from.next()))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Ok(judge(self.read(key, from.next())?, from, host))
            }
            Err(error) => Err(error),
        }
    }

    fn read(&self, key: Key<'_>, generation: Generation) -> io::Result<Ownership> {
        let text = fs::read(key.below(&self.directory).join(generation.to_string()))?;
        let record: Record = serde_json::from_slice(&text)?;
        Ok(Ownership { host: record.host, generation })
    }
}

/// A file that is to have another name. It goes with this: one that could not be written whole, too, since the file system
/// is full.
struct Draft(Option<PathBuf>);

impl Draft {
    /// Writes a file that there is not yet.
    fn write(path: PathBuf, record: &impl Serialize) -> io::Result<(Draft, fs::File)> {
        let mut file = fs::File::create_new(&path)?;
        let draft = Draft(Some(path));
        file.write_all(&serde_json::to_vec(record)?)?;
        Ok((draft, file))
    }

    fn synced(path: PathBuf, record: &impl Serialize) -> io::Result<Draft> {
        let (draft, file) = Draft::write(path, record)?;
        file.sync_all()?;
        Ok(draft)
    }

    fn path(&self) -> &Path {
        self.0.as_deref().expect("it is there until it is put elsewhere, or removed")
    }

    /// Gives it a second name, which nothing has.
    fn link_to(&self, name: &Path) -> io::Result<()> {
        fs::hard_link(self.path(), name)
    }

    /// Gives it another name, whatever had that.
    fn put_at(mut self, name: &Path) -> io::Result<()> {
        fs::rename(self.path(), name)?;
        self.0 = None;
        Ok(())
    }

    fn remove(mut self) -> io::Result<()> {
        self.0.take().map_or(Ok(()), fs::remove_file)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

/// Does in a directory what the arbiter does: writes a file and links it to a new name. Leaves nothing.
pub fn try_directory(directory: &Path) -> io::Result<()> {
    let written = directory.join(format!(".try-{}", std::process::id()));
    let linked = written.with_extension("link");
    let result = fs::File::create_new(&written)
        .and_then(|file| file.sync_all())
        .and_then(|()| fs::hard_link(&written, &linked));
    // All is removed, whatever was made; the first error is the one that counts.
    let unlinked = fs::remove_file(&linked);
    let removed = fs::remove_file(&written);
    result.and(unlinked).and(removed)
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            a.acquire(Key::Vm(&literal("db")), Generation(0), true),
            Ok(Verdict::Taken(taken))
        );
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
}
