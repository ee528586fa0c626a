//! The state directory, which one daemon has at a time: `daemon.lock` in it is locked for as long as that lives.
//!
//! The addresses do not see to that: a second daemon may be given others by mistake. Keepers do not take
//! it: they are to outlive their daemon, and each has the lock of its VM.

use crate::file_lock;
use crate::host::prepare_directory;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process;
use std::thread;
use std::time::{Duration, Instant};
use understudy_report::error::{ErrorKind, HostError};

/// No VM's name has a dot.
const FILE: &str = "daemon.lock";
/// Pause between two tries, while the last daemon ends.
const LOOK: Duration = Duration::from_millis(50);

/// A daemon's hold on its state directory, until this is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct StateDir {
    _lock: File,
}

impl StateDir {
    /// Makes the directory if need be, and takes it; refused if another daemon has it after so long.
    pub(crate) fn take(path: &Path, patience: Duration) -> Result<StateDir, HostError> {
        prepare_directory(path)?;
        let file = path.join(FILE);
        let conflict = |message: String| HostError::new(ErrorKind::Conflict, message);
        let cannot = |error: io::Error| {
            conflict(format!("cannot lock {}, as a daemon must: {error}", file.display()))
        };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut lock = options.open(&file).map_err(cannot)?;
        let deadline = Instant::now() + patience;
        while !file_lock::try_take(&lock).map_err(cannot)? {
            if Instant::now() > deadline {
                return Err(conflict(format!(
                    "the state directory {} is another daemon's{}: stop that one, or correct `state_dir` in the \
                     configuration; two daemons must not both have its VMs",
                    path.display(),
                    holder(&mut lock)
                )));
            }
            thread::sleep(LOOK);
        }
        // For people only: a full disk is no obstacle.
        let _ = lock.set_len(0).and_then(|()| writeln!(lock, "{}", process::id()));
        Ok(StateDir { _lock: lock })
    }
}

/// Holder of the lock, for people, as far as it has said so.
fn holder(lock: &mut File) -> String {
    let mut said = String::new();
    let process = lock.read_to_string(&mut said).ok().and_then(|_| said.trim().parse().ok());
    process.map(|process: u32| format!(" (process {process})")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_directory_is_one_daemons_until_that_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let take = |patience| StateDir::take(&path, patience);
        let first = take(Duration::ZERO).unwrap();
        let error = take(LOOK).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        for words in [&*path.to_string_lossy(), "state_dir", &format!("process {}", process::id())]
        {
            assert!(error.message.contains(words), "{error}");
        }
        // Whoever comes while the last one ends waits for it.
        thread::scope(|scope| {
            let next = scope.spawn(|| take(Duration::from_secs(60)));
            thread::sleep(LOOK);
            drop(first);
            next.join().unwrap().unwrap();
        });
    }
}
