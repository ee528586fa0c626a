//! A console's log: what was let out last, in two files of a fixed size at most.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file has so much at most; there are two.
pub(crate) const FILE_BYTES: u64 = 4 << 20;

/// The log at a path. When the file there is full it takes the place of the one before (`.1`), and
/// a new one begins. So the log is the end of what was let out, to the byte, and at least
/// [`FILE_BYTES`] of it.
pub(crate) struct ConsoleLog {
    path: PathBuf,
    file: File,
    file_bytes: u64,
}

impl ConsoleLog {
    /// Goes on with the log that is there.
    pub fn open(path: &Path) -> io::Result<ConsoleLog> {
        ConsoleLog::with_files_of(FILE_BYTES, path)
    }

    fn with_files_of(file_bytes: u64, path: &Path) -> io::Result<ConsoleLog> {
        Ok(ConsoleLog { path: path.to_owned(), file: append_to(path)?, file_bytes })
    }

    /// Appends words.
    pub fn write(&mut self, words: &[u8]) -> io::Result<()> {
        let mut left = words;
        while !left.is_empty() {
            let room = self.room()?;
            let (now, later) = left.split_at(room.min(left.len() as u64) as usize);
            self.file.write_all(now)?;
            left = later;
        }
        Ok(())
    }

    /// The room that the file still has: at least a byte.
    fn room(&mut self) -> io::Result<u64> {
        let room = |file: &File| -> io::Result<u64> {
            Ok(self.file_bytes.saturating_sub(file.metadata()?.len()))
        };
        if room(&self.file)? == 0 {
            // The QEMU that goes on in another's place has this log, too, and may have begun a new
            // file before.
            self.file = append_to(&self.path)?;
            if room(&self.file)? == 0 {
                fs::rename(&self.path, former(&self.path))?;
                self.file = append_to(&self.path)?;
            }
        }
        room(&self.file)
    }
}

/// The path of the file before the current one.
fn former(path: &Path) -> PathBuf {
    let mut former = OsString::from(path);
    former.push(".1");
    former.into()
}

fn append_to(path: &Path) -> io::Result<File> {
    File::options().create(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn two_files_hold_the_end_of_what_was_said_to_the_byte() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut said = String::new();
        let mut log = ConsoleLog::with_files_of(10, &path).unwrap();
        for n in 0..40 {
            let words = format!("{n},");
            log.write(words.as_bytes()).unwrap();
            said += &words;
            let kept = text(&former(&path)) + &text(&path);
            assert!(said.ends_with(&kept), "{kept:?} is no end of {said:?}");
            assert!(kept.len() >= said.len().min(10), "{kept:?}");
            let sizes = [&path, &former(&path)].map(|path| text(path).len());
            assert!(sizes.iter().all(|&bytes| bytes <= 10), "{sizes:?}");
        }
        // What is longer than both files.
        log.write(b"0123456789abcdefghijABCDEFGHIJ!").unwrap();
        assert_eq!(text(&former(&path)).len(), 10);
        assert!((text(&former(&path)) + &text(&path)).ends_with("ABCDEFGHIJ!"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_log_goes_on_where_another_daemon_left_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        for words in ["12345", "67890", "abc"] {
            ConsoleLog::with_files_of(8, &path).unwrap().write(words.as_bytes()).unwrap();
        }
        assert_eq!((text(&former(&path)), text(&path)), ("12345678".into(), "90abc".into()));
    }

    #[test]
    fn two_machines_of_one_vm_share_a_log() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let [mut one, mut other] = [(), ()].map(|()| ConsoleLog::with_files_of(4, &path).unwrap());
        one.write(b"1111").unwrap();
        other.write(b"22").unwrap();
        one.write(b"11").unwrap();
        other.write(b"2").unwrap();
        assert_eq!((text(&former(&path)), text(&path)), ("2211".into(), "2".into()));
    }
}
