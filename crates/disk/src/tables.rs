//! Whether the tables of a qcow2 image are whole, before a guest runs on it: if power failed on both
//! hosts between a checkpoint and the fsync behind it they may not be, and the guest finds no disk.

use crate::error::DiskError;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Tables of an image of some terabytes are read within this; a guest that is to start waits no longer.
const BOUND: Duration = Duration::from_secs(10);
/// Time between two looks whether it is done.
const GLANCE: Duration = Duration::from_millis(5);
/// Offset where a qcow2 header has its incompatible features, as big-endian bits, and the one of an
/// image whose counts of references QEMU makes anew itself when it opens it.
const FEATURES_AT: u64 = 72;
const DIRTY: u64 = 1;

/// State of an image's tables, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tables {
    /// The tables are whole.
    Whole,
    /// The tables are whole, and so many clusters are nobody's: room that is lost, and nothing
    /// else.
    Leaks(u64),
    /// The state could not be found out, for this reason.
    Unchecked(String),
}

/// Looks through the tables of a qcow2 image that nobody writes, for a bounded time.
///
/// # Errors
/// If they are damaged.
pub fn check_tables(path: &Path) -> Result<Tables, DiskError> {
    if is_dirty(path).map_err(DiskError::io("read", path))? {
        return Ok(Tables::Whole);
    }
    let answer = match checked(path) {
        Ok(answer) => answer,
        Err(error) => return Ok(Tables::Unchecked(error.to_string())),
    };
    let count = |field: &str| answer.get(field).and_then(Value::as_u64).unwrap_or(0);
    match (count("corruptions"), count("leaks"), count("check-errors")) {
        (0, 0, 0) => Ok(Tables::Whole),
        (0, leaks, 0) => Ok(Tables::Leaks(leaks)),
        (0, _, errors) => Ok(Tables::Unchecked(format!("{errors} of its tables cannot be read"))),
        (errors, ..) => Err(DiskError::DamagedTables { path: path.into(), errors }),
    }
}

fn is_dirty(path: &Path) -> io::Result<bool> {
    let mut features = [0; 8];
    match File::open(path)?.read_exact_at(&mut features, FEATURES_AT) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| u64::from_be_bytes(features) & DIRTY != 0),
    }
}

/// Answer of `qemu-img check`.
fn checked(path: &Path) -> io::Result<Value> {
    let mut child = Command::new("qemu-img")
        .args(["check", "-U", "-f", "qcow2", "--output=json"])
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    await_end(&mut child)?;
    let mut answer = Vec::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_end(&mut answer)?;
    }
    serde_json::from_slice(&answer).map_err(io::Error::from)
}

/// Waits for it, or ends it.
fn await_end(child: &mut Child) -> io::Result<()> {
    let deadline = Instant::now() + BOUND;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            let words = format!("`qemu-img check` took more than {} s", BOUND.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, words));
        }
        thread::sleep(GLANCE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    const CLUSTER: u64 = 65_536;

    fn run(program: &str, arguments: &[&str]) {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// A qcow2 image with some data.
    fn image(directory: &Path) -> PathBuf {
        let path = directory.join("db.qcow2");
        let text = path.to_str().unwrap();
        run("qemu-img", &["create", "-q", "-f", "qcow2", text, "16M"]);
        run("qemu-io", &["-f", "qcow2", "-c", "write -q 0 1M", text]);
        path
    }

    /// Writes the count of references of one cluster of an image that has a single table of them.
    fn set_references(path: &Path, cluster: u64, count: u16) {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let number = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).unwrap();
            u64::from_be_bytes(bytes)
        };
        let block = number(number(48));
        file.write_all_at(&count.to_be_bytes(), block + 2 * cluster).unwrap();
    }

    #[test]
    fn damaged_tables_are_told_from_whole_ones_and_leaks() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(directory.path());
        assert_eq!(check_tables(&path).unwrap(), Tables::Whole);
        let end = fs::metadata(&path).unwrap().len() / CLUSTER;
        File::options().write(true).open(&path).unwrap().set_len((end + 1) * CLUSTER).unwrap();
        set_references(&path, end, 1);
        assert_eq!(check_tables(&path).unwrap(), Tables::Leaks(1));
        set_references(&path, end, 0);
        // The last of its data is nobody's, the tables say, and the next write would go there.
        set_references(&path, end - 1, 0);
        let words = check_tables(&path).unwrap_err().to_string();
        assert!(words.contains("qemu-img check -r all") && words.contains("db.qcow2"), "{words}");
    }

    #[test]
    fn what_cannot_be_checked_is_said_to_be_so() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("db.qcow2");
        fs::write(&path, "no image").unwrap();
        assert!(matches!(check_tables(&path).unwrap(), Tables::Unchecked(_)));
    }
}
