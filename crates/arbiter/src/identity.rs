//! Identity of an arbiter: a random number that the first host writes there, once, and that every
//! host remembers. An empty directory where the shared one should be mounted, another directory,
//! or a cluster set up anew is another arbiter, and decides nothing.

use crate::Unreachable;
use crate::whole_file;
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use understudy_threads::Common;

/// Digits of an identity: 128 random bits.
const DIGITS: usize = 32;

/// The file of the state directory that remembers it; no VM's name has a dot.
pub const MEMORY: &str = "arbiter.id";

/// Names one arbiter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ArbiterId(String);

impl ArbiterId {
    /// One that nobody has had before.
    pub fn fresh() -> std::io::Result<ArbiterId> {
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let digits: String = uuid.chars().filter(char::is_ascii_hexdigit).collect();
        ArbiterId::try_from(digits).map_err(std::io::Error::other)
    }
}

impl TryFrom<String> for ArbiterId {
    type Error = String;

    fn try_from(text: String) -> Result<ArbiterId, String> {
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.len() == DIGITS && text.bytes().all(digit) {
            true => Ok(ArbiterId(text)),
            false => Err(format!("an arbiter's identity has {DIGITS} digits 0-9 and a-f")),
        }
    }
}

impl From<ArbiterId> for String {
    fn from(id: ArbiterId) -> String {
        id.0
    }
}

impl std::fmt::Display for ArbiterId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The arbiter as a host speaks of it to another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArbiterName {
    /// Identity of the arbiter.
    pub id: ArbiterId,
    /// Place where the speaking host finds it; for people.
    pub place: String,
}

impl std::fmt::Display for ArbiterName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.id, self.place)
    }
}

/// The arbiter that this host has used before.
#[derive(Debug, Default)]
pub struct Memory {
    /// File of the memory; none: it lasts as long as the daemon.
    path: Option<PathBuf>,
    /// Another process of this host writes it there.
    is_anothers: bool,
    known: Common<Option<ArbiterId>>,
}

impl Memory {
    /// Memory that the host has in its state directory.
    pub fn of(state_dir: &Path) -> anyhow::Result<Memory> {
        let path = state_dir.join(MEMORY);
        let known = match fs::read_to_string(&path) {
            Ok(text) => ArbiterId::try_from(text.trim().to_owned()).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        };
        let known = known.map_err(anyhow::Error::msg).with_context(|| {
            format!("{} does not name the arbiter that this host uses", path.display())
        })?;
        Ok(Memory { path: Some(path), is_anothers: false, known: Common::new(known) })
    }

    /// The same, for a process that notes nothing there.
    pub fn of_another(state_dir: &Path) -> anyhow::Result<Memory> {
        Ok(Memory { is_anothers: true, ..Memory::of(state_dir)? })
    }

    pub fn known(&self) -> Option<ArbiterId> {
        self.known.lock().clone()
    }

    /// [`recognise`](Memory::recognise) of what `look` finds. That there is none says nothing if others have
    /// met this host's first arbiter meanwhile, who may have named it after the look.
    pub fn meet(
        &self,
        look: impl Fn() -> Result<Option<ArbiterId>, Unreachable>,
        place: &str,
    ) -> Result<Option<ArbiterId>, Unreachable> {
        let before = self.known();
        let found = look()?;
        match (before, &found, self.known()) {
            (None, None, Some(_)) => self.recognise(look()?, place),
            _ => self.recognise(found, place),
        }
    }

    /// `found` is the arbiter at `place`: the one that this host has always used, or its first.
    pub fn recognise(
        &self,
        found: Option<ArbiterId>,
        place: &str,
    ) -> Result<Option<ArbiterId>, Unreachable> {
        match (self.known(), found) {
            (Some(known), Some(found)) if known == found => Ok(Some(found)),
            (Some(known), found) => Err(Unreachable(self.explain(&known, found.as_ref(), place))),
            (None, None) => Ok(None),
            (None, Some(found)) => {
                self.remember(&found).map_err(|error| Unreachable(format!("{error:#}")))?;
                Ok(Some(found))
            }
        }
    }

    fn explain(&self, known: &ArbiterId, found: Option<&ArbiterId>, place: &str) -> String {
        let is = match found {
            Some(found) => format!("is the arbiter {found}"),
            None => "has no arbiter's identity: is its storage mounted?".to_owned(),
        };
        let memory = match &self.path {
            Some(path) => {
                format!("stop the daemon, and VMs that have keepers, and remove {}", path.display())
            }
            None => "restart the daemon".to_owned(),
        };
        format!(
            "{place} {is}; this host has used the arbiter {known} before, which knows who owns its \
             VMs: correct the path or mount it; if all hosts were given a new arbiter, {memory} on \
             each of them"
        )
    }

    /// Remembers `id`, under the lock: several may meet the arbiter for the first time at once.
    fn remember(&self, id: &ArbiterId) -> anyhow::Result<()> {
        let mut known = self.known.lock();
        if known.is_none() {
            if let Some(path) = self.path.as_ref().filter(|_| !self.is_anothers) {
                whole_file::replace(path, &format!("{id}\n"), 0o644)
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
            *known = Some(id.clone());
        }
        ensure!(known.as_ref() == Some(id), "the arbiter changed just now");
        Ok(())
    }
}

/// A host without images has nothing that only one arbiter knows about: it takes the one that
/// there is.
pub fn forget(state_dir: &Path) -> std::io::Result<()> {
    match fs::remove_file(state_dir.join(MEMORY)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_meet_the_arbiter_at_once() {
        for _ in 0..20 {
            let state = tempfile::tempdir().unwrap();
            let (memory, id) = (Memory::of(state.path()).unwrap(), ArbiterId::fresh().unwrap());
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    let meet = || memory.recognise(Some(id.clone()), "/srv");
                    scope.spawn(move || assert!(meet().is_ok(), "{:?}", meet()));
                }
            });
            assert_eq!(Memory::of(state.path()).unwrap().known(), Some(id));
        }
    }

    /// Regression: the first `vm start` beside the daemon's own look at a new arbiter failed, now
    /// and then.
    #[test]
    fn an_arbiter_that_others_name_meanwhile_has_not_lost_its_name() {
        let memory = Memory::default();
        let id = ArbiterId::fresh().unwrap();
        let looks = std::cell::Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            let found = (looks.get() > 1).then(|| id.clone());
            // The others, behind this look.
            memory.recognise(Some(id.clone()), "/srv")?;
            Ok(found)
        };
        assert_eq!(memory.meet(look, "/srv"), Ok(Some(id.clone())));
        assert_eq!(looks.get(), 2);
        let words = memory.meet(|| Ok(None), "/srv").unwrap_err().0;
        assert!(words.contains("/srv has no arbiter's identity"), "{words}");
    }

    #[test]
    fn an_arbiter_is_remembered_and_another_one_is_not_taken_for_it() {
        let state = tempfile::tempdir().unwrap();
        let [first, second] = [(); 2].map(|()| ArbiterId::fresh().unwrap());
        let memory = Memory::of(state.path()).unwrap();
        assert_eq!(memory.recognise(None, "/srv"), Ok(None), "nobody has used it");
        assert_eq!(memory.recognise(Some(first.clone()), "/srv"), Ok(Some(first.clone())));
        let later = Memory::of(state.path()).unwrap();
        assert_eq!(later.known(), Some(first.clone()));
        let words = later.recognise(Some(second.clone()), "/srv").unwrap_err().0;
        assert!(words.contains(&first.0) && words.contains(&second.0), "{words}");
        let words = later.recognise(None, "/srv").unwrap_err().0;
        assert!(words.contains("/srv has no arbiter's identity"), "{words}");
        forget(state.path()).unwrap();
        assert_eq!(Memory::of(state.path()).unwrap().known(), None);
        fs::write(state.path().join(MEMORY), "an other").unwrap();
        assert!(Memory::of(state.path()).is_err());
    }
}
