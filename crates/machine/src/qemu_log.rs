//! QEMU's own messages, and those of its swtpm, bounded.
//!
//! QEMU appends them to a file by itself: behind a pipe it would wait, or end, when nobody reads
//! while the daemon is away. So the daemon looks at the files now and then, and one that has grown
//! too long is cut to nothing, after its end was copied: QEMU goes on at its new end.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;

/// The file, in a VM's directory.
pub const QEMU_LOG: &str = "qemu.log";
/// The same of its swtpm.
pub(crate) const SWTPM_LOG: &str = "swtpm.log";
/// Suffix of the file with what it held last before it was cut.
const FORMER: &str = ".1";
/// The size above which it is cut.
const MOST_BYTES: u64 = 1 << 20;
/// Time between two looks. What QEMU says in between comes on top.
const INTERVAL: Duration = Duration::from_secs(1);

/// Bounds the logs in the directories of VMs that `find` finds, also of those that no machine is left of, for as long as `host` lives.
/// Of two processes that did so in one directory, one would overwrite what the other has kept.
pub fn start<T: Send + Sync + 'static>(
    host: &Arc<T>,
    find: impl Fn(&T) -> Vec<PathBuf> + Send + 'static,
) -> io::Result<()> {
    let host = Arc::downgrade(host);
    let body = move || run(&host, find);
    thread::Builder::new().name("qemu-logs".to_owned()).spawn(body).map(drop)
}

fn run<T>(host: &Weak<T>, find: impl Fn(&T) -> Vec<PathBuf>) {
    while let Some(directories) = host.upgrade().map(|host| find(&host)) {
        for directory in directories {
            for log in [QEMU_LOG, SWTPM_LOG] {
                if let Err(error) = bound(&directory, log, MOST_BYTES) {
                    let vm = directory.file_name().unwrap_or(OsStr::new("?")).to_string_lossy();
                    warn!(%vm, "cannot bound {log}: {error}");
                }
            }
        }
        thread::sleep(INTERVAL);
    }
}

/// Whether a log in a VM's directory is too long by now. Most are not.
pub fn is_due(directory: &Path) -> bool {
    [QEMU_LOG, SWTPM_LOG].iter().any(|log| is_longer(&directory.join(log), MOST_BYTES))
}

fn is_longer(log: &Path, most: u64) -> bool {
    fs::metadata(log).is_ok_and(|metadata| metadata.is_file() && metadata.len() > most)
}

/// Cuts a VM's log if it has grown over `most` bytes.
fn bound(directory: &Path, log: &str, most: u64) -> io::Result<()> {
    let path = directory.join(log);
    if !is_longer(&path, most) {
        return Ok(());
    }
    let mut file = File::options().read(true).write(true).open(&path)?;
    let kept = keep_end(&mut file, &directory.join(format!("{log}{FORMER}")), most);
    // Also if it could not be copied: a full disk is a reason to cut it.
    file.set_len(0)?;
    kept
}

fn keep_end(log: &mut File, former: &Path, most: u64) -> io::Result<()> {
    let from = log.metadata()?.len().saturating_sub(most);
    log.seek(SeekFrom::Start(from))?;
    let mut options = File::options();
    let mut former = options.create(true).write(true).truncate(true).mode(0o600).open(former)?;
    io::copy(&mut log.take(most), &mut former).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn a_long_log_is_cut_and_whoever_writes_it_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        // Of a swtpm it is the same, which nobody bounded.
        for log in [QEMU_LOG, SWTPM_LOG] {
            is_cut(directory.path(), log);
        }
    }

    fn is_cut(directory: &Path, name: &str) {
        let bound = |most| bound(directory, name, most);
        let (log, former) = (directory.join(name), directory.join(format!("{name}{FORMER}")));
        bound(10).unwrap();
        let appended = || File::options().create(true).append(true).open(&log).unwrap();
        // A process with the file as its standard output, as QEMU has it.
        let mut cat = Command::new("cat");
        let mut qemu = cat.stdin(Stdio::piped()).stdout(appended()).spawn().unwrap();
        let mut says = |words: &str| {
            let before = fs::metadata(&log).unwrap().len();
            qemu.stdin.as_mut().unwrap().write_all(words.as_bytes()).unwrap();
            while fs::metadata(&log).unwrap().len() < before + words.len() as u64 {
                thread::yield_now();
            }
        };
        says("0123456789");
        bound(10).unwrap();
        assert!(!former.exists(), "it is not too long");
        says("abc");
        bound(10).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "");
        assert_eq!(fs::read_to_string(&former).unwrap(), "3456789abc");
        says("on it goes");
        assert_eq!(fs::read_to_string(&log).unwrap(), "on it goes");
        says("!");
        bound(10).unwrap();
        assert_eq!(fs::read_to_string(&former).unwrap(), "n it goes!");
        drop(qemu.stdin.take());
        assert!(qemu.wait().unwrap().success(), "nothing happened to it");
    }

    #[test]
    fn a_full_disk_does_not_keep_a_log_from_being_cut() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(QEMU_LOG), [b'x'; 100]).unwrap();
        // It cannot be copied: there is a directory in the way.
        fs::create_dir(directory.path().join(format!("{QEMU_LOG}{FORMER}"))).unwrap();
        assert!(bound(directory.path(), QEMU_LOG, 10).is_err());
        assert_eq!(fs::metadata(directory.path().join(QEMU_LOG)).unwrap().len(), 0);
    }
}
