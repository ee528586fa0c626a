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
            draft.try_name(&folder.join(self.own_name()?)).map(|()| Some(owner))
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

    /// Gives it a second name for a moment. Neither is left, whatever was made; the first error is the one that counts.
    fn try_name(self, name: &Path) -> io::Result<()> {
        let linked = self.link_to(name);
        let unlinked = fs::remove_file(name);
        linked.and(unlinked).and(self.remove())
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
    let name =
        || -> io::Result<PathBuf> { Ok(directory.join(format!(".try.{}", ArbiterId::fresh()?))) };
    Draft::synced(name()?, &())?.try_name(&name()?)
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
