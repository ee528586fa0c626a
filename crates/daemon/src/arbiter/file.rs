//! The `file` arbiter: VMware FT's own test-and-set, in a directory that both
//! hosts reach (shared or third-party storage).
//!
//! A VM's ownership at generation *g* is the file `VM/g`. Making it is a hard
//! link of a finished file to that name: atomic on every file system that has
//! hard links, and it fails when somebody was first.

use super::{Unreachable, judge, stands};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use understudy_protocol::{Generation, Ownership, Verdict};

#[derive(Serialize, Deserialize)]
struct Record {
    host: Option<String>,
}

/// The records in one directory.
#[derive(Clone, Debug)]
pub struct FileArbiter {
    directory: PathBuf,
    host: String,
}

impl FileArbiter {
    pub fn new(directory: &Path, host: &str) -> FileArbiter {
        FileArbiter { directory: directory.to_owned(), host: host.to_owned() }
    }

    pub fn current(&self, vm: &str) -> Result<Option<Ownership>, Unreachable> {
        self.newest(vm).map_err(|error| self.explain(&error))
    }

    pub fn acquire(
        &self,
        vm: &str,
        from: Generation,
        strict: bool,
    ) -> Result<Verdict, Unreachable> {
        if strict {
            let owner = self.current(vm)?;
            // Beyond `from` the contest is over, one way or the other.
            if owner.as_ref().is_none_or(|owner| owner.generation <= from) {
                stands(vm, owner.as_ref(), from)?;
            }
        }
        self.swap(vm, from, Some(&self.host)).map_err(|error| self.explain(&error))
    }

    pub fn release(&self, vm: &str, from: Generation) -> Result<(), Unreachable> {
        self.swap(vm, from, None).map(drop).map_err(|error| self.explain(&error))
    }

    fn explain(&self, error: &io::Error) -> Unreachable {
        let directory = self.directory.display();
        Unreachable(format!("the arbiter's directory {directory} cannot be used: {error}"))
    }

    fn newest(&self, vm: &str) -> io::Result<Option<Ownership>> {
        let entries = match fs::read_dir(self.directory.join(vm)) {
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
        newest.map(|generation| self.read(vm, Generation(generation))).transpose()
    }

    fn swap(&self, vm: &str, from: Generation, host: Option<&str>) -> io::Result<Verdict> {
        if let Some(owner) = self.newest(vm)? {
            if owner.generation > from {
                return Ok(judge(owner, from, host));
            }
        }
        let folder = self.directory.join(vm);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let target = folder.join(from.next().to_string());
        let finished = folder.join(format!(".{}.{}", self.host, std::process::id()));
        write_synced(&finished, &Record { host: host.map(str::to_owned) })?;
        let linked = fs::hard_link(&finished, &target);
        fs::remove_file(&finished)?;
        match linked {
            Ok(()) => {
                fs::File::open(&folder)?.sync_all()?;
                Ok(Verdict::Granted(from.next()))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Ok(judge(self.read(vm, from.next())?, from, host))
            }
            Err(error) => Err(error),
        }
    }

    fn read(&self, vm: &str, generation: Generation) -> io::Result<Ownership> {
        let text = fs::read(self.directory.join(vm).join(generation.to_string()))?;
        let record: Record = serde_json::from_slice(&text)?;
        Ok(Ownership { host: record.host, generation })
    }
}

fn write_synced(path: &Path, record: &Record) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_wins_each_generation() {
        let directory = tempfile::tempdir().unwrap();
        for round in 0..20 {
            let wins: usize = std::thread::scope(|scope| {
                let contest = |name: String| {
                    let arbiter = FileArbiter::new(directory.path(), &name);
                    scope.spawn(move || {
                        matches!(
                            arbiter.acquire("db", Generation(round), true),
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
        let a = FileArbiter::new(directory.path(), "a");
        let b = FileArbiter::new(directory.path(), "b");
        assert_eq!(a.acquire("db", Generation(0), true), Ok(Verdict::Granted(Generation(1))));
        assert_eq!(a.acquire("db", Generation(0), true), Ok(Verdict::Granted(Generation(1))));
        assert_eq!(b.acquire("db", Generation(1), true), Ok(Verdict::Granted(Generation(2))));
        let taken = Ownership { host: Some("b".into()), generation: Generation(2) };
        assert_eq!(a.acquire("db", Generation(1), true), Ok(Verdict::Taken(taken.clone())));
        assert_eq!(a.acquire("db", Generation(0), true), Ok(Verdict::Taken(taken)));
        b.release("db", Generation(2)).unwrap();
        assert_eq!(b.current("db").unwrap().unwrap().host, None);
    }

    #[test]
    fn a_missing_directory_is_no_verdict() {
        let arbiter = FileArbiter::new(Path::new("/nonexistent/arbiter"), "a");
        assert!(
            arbiter
                .acquire("db", Generation(0), true)
                .unwrap_err()
                .0
                .contains("/nonexistent/arbiter")
        );
    }

    #[test]
    fn an_arbiter_that_lost_its_records_decides_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let a = FileArbiter::new(directory.path(), "a");
        let words = a.acquire("db", Generation(3), true).unwrap_err().0;
        assert!(words.contains("generation 0") && words.contains("it was 3"), "{words}");
        // A start is not a contest.
        assert_eq!(a.acquire("db", Generation(3), false), Ok(Verdict::Granted(Generation(4))));
        let older = a.acquire("db", Generation(7), true).unwrap_err().0;
        assert!(older.contains("generation 4"), "{older}");
    }
}
