//! Marks: objects that say since when somebody does something with the store, and who.

use super::encryption::random;
use super::{Store, StoreError};
use object_store::path::Path;

/// The word that tells one maker of marks from all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MarkWord(String);

impl MarkWord {
    /// The text of a mark that was made, or made anew, at this second since 1970.
    pub fn at(&self, seconds: u64) -> String {
        format!("{seconds} {}", self.0)
    }

    fn is_in(&self, mark: &[u8]) -> bool {
        mark.split(|&byte| byte == b' ').nth(1) == Some(self.0.as_bytes())
    }
}

impl Store {
    /// A word that nobody else has.
    pub(super) fn mark_word(&self) -> Result<MarkWord, StoreError> {
        let mut bytes = [0; 16];
        random(&mut bytes).map_err(|error| self.failed("be marked", error))?;
        Ok(MarkWord(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Makes a mark where none is; returns whether it is there. A request whose answer is lost is sent again,
    /// and finds what it has made itself; and an error may come after the deed.
    pub(super) fn put_mark(
        &self,
        path: &Path,
        word: &MarkWord,
        now: u64,
    ) -> Result<bool, StoreError> {
        match self.put_new(path, word.at(now).into_bytes()) {
            Ok(true) => Ok(true),
            Ok(false) => self.has_mark(path, word),
            Err(error) => match self.has_mark(path, word) {
                Ok(true) => Ok(true),
                Ok(false) | Err(_) => Err(error),
            },
        }
    }

    /// Whether the mark that is there is of this maker.
    pub(super) fn has_mark(&self, path: &Path, word: &MarkWord) -> Result<bool, StoreError> {
        Ok(self.get(path)?.is_some_and(|mark| word.is_in(&mark)))
    }

    /// Removes a mark, unless it is another's by now.
    pub(super) fn remove_mark(&self, path: &Path, word: &MarkWord) -> Result<(), StoreError> {
        match self.has_mark(path, word)? {
            true => self.delete(path),
            false => Ok(()),
        }
    }
}

/// The time at which a mark was made; one that cannot be read was made just now, so far as anybody
/// knows.
pub(super) fn begun(mark: &[u8]) -> u64 {
    let seconds = mark.split(|&byte| byte == b' ').next().unwrap_or_default();
    std::str::from_utf8(seconds).ok().and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}
