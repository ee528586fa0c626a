//! Offline checks of a survivor's disk: the file system, and every record that
//! was acknowledged to the client.
//!
//! A disk that a host's death left behind is one that a crash left behind: a
//! mount would replay its journal, drop files that were deleted while open,
//! and recount free blocks. `e2fsck -p` does just that, and says "clean" if it
//! found no reason to look further. After it, `e2fsck -fn` must find nothing:
//! whatever it finds then is damage that the replication did.

use crate::command::{output, run};
use crate::records::record_payload;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Path where the guest's record server keeps its records.
pub const RECORD_FILE: &str = "/records";

/// Findings on a disk; see [`is_intact`](DiskCheck::is_intact).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskCheck {
    /// Complaints of `e2fsck` after the journal was replayed.
    pub file_system: Option<String>,
    /// The records.
    pub records: RecordCheck,
}

impl DiskCheck {
    /// Whether the file system and every acknowledged record are intact.
    pub fn is_intact(&self) -> bool {
        self.file_system.is_none() && self.records.is_intact()
    }
}

/// Fate of acknowledged records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordCheck {
    /// Whole records in the file.
    pub found: u64,
    /// Records that were acknowledged and are absent.
    pub lost: Vec<u64>,
    /// Records that are there more than once.
    pub repeated: Vec<u64>,
    /// Records that are there after a record with a higher number.
    pub out_of_order: Vec<u64>,
    /// Lines that are not `NUMBER PAYLOAD` with that number's payload.
    pub damaged: Vec<String>,
    /// Records that were written and not acknowledged, at most the one that was under way; no
    /// fault.
    pub unacknowledged: Vec<u64>,
}

impl RecordCheck {
    /// Whether every acknowledged record is there once, whole and in order, and
    /// nothing is there that the client has not sent.
    pub fn is_intact(&self) -> bool {
        let faults = [&self.lost, &self.repeated, &self.out_of_order];
        faults.iter().all(|numbers| numbers.is_empty())
            && self.damaged.is_empty()
            && self.unacknowledged.len() <= 1
    }
}

/// Checks a raw image with an ext4 file system, of which records 1 to `acked`
/// were acknowledged. Nothing may have the image open; it is not changed.
pub fn check_disk(image: &Path, acked: u64) -> Result<DiskCheck> {
    Snapshot::of(image)?.check(acked)
}

/// Checks only the file system of a raw image, as [`check_disk`] does; returns
/// what `e2fsck` complained of.
pub fn check_file_system(image: &Path) -> Result<Option<String>> {
    Snapshot::of(image)?.recover()
}

/// Reads a file of a raw image's file system, its journal replayed.
pub fn read_file(image: &Path, file: &str) -> Result<Vec<u8>> {
    let copy = Snapshot::of(image)?;
    // Whether it is sound is `check_file_system`'s to say.
    copy.recover()?;
    copy.read(file)
}

/// Compares the record file's content with what was acknowledged.
pub fn check_records(content: &[u8], acked: u64) -> RecordCheck {
    let mut check = RecordCheck::default();
    // A last line without its newline is a record that was being written.
    let end = content.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    let mut seen = std::collections::BTreeSet::new();
    let mut highest = 0;
    for line in content[..end].split_inclusive(|&byte| byte == b'\n') {
        let Some(number) = parse_record(line) else {
            check.damaged.push(line.escape_ascii().to_string());
            continue;
        };
        check.found += 1;
        if !seen.insert(number) {
            check.repeated.push(number);
        } else if number < highest {
            check.out_of_order.push(number);
        }
        highest = highest.max(number);
    }
    check.lost = (1..=acked).filter(|number| !seen.contains(number)).collect();
    check.unacknowledged = seen.range(acked.saturating_add(1)..).copied().collect();
    check
}

/// The number of a line `NUMBER PAYLOAD\n` that is as the client sent it.
fn parse_record(line: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let number = line.split_once(' ')?.0.parse().ok()?;
    (line == format!("{number} {}", record_payload(number))).then_some(number)
}

/// A copy of an image, to be recovered and read. Of an image in use, it is what a
/// crash would leave if the guest stands still meanwhile
/// ([`HostProcess::freeze_guest`](crate::HostProcess::freeze_guest)).
pub struct Snapshot {
    path: PathBuf,
    _directory: TempDir,
}

impl Snapshot {
    /// Copies the image.
    pub fn of(image: &Path) -> Result<Snapshot> {
        // Beside the image: there is room for one, and a reflink is possible.
        let beside = image.parent().context("an image has a directory")?;
        let directory = tempfile::Builder::new().prefix("check-").tempdir_in(beside);
        let directory = directory.with_context(|| format!("in {}", beside.display()))?;
        let path = directory.path().join("copy.raw");
        let copied = Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .args([image, &path])
            .output()
            .context("cannot run `cp`")?;
        if !copied.status.success() {
            bail!("cannot copy {}: {}", image.display(), text(&copied));
        }
        Ok(Snapshot { path, _directory: directory })
    }

    /// [`check_disk`], of the copy.
    pub fn check(&self, acked: u64) -> Result<DiskCheck> {
        let file_system = self.recover()?;
        let records = check_records(&self.read(RECORD_FILE)?, acked);
        Ok(DiskCheck { file_system, records })
    }

    /// Recovers the file system as a mount would, then checks it in full.
    /// Returns the complaints, if any.
    fn recover(&self) -> Result<Option<String>> {
        let path = self.path.to_string_lossy();
        let recovery = output("e2fsck", &["-p", &path])?;
        // Exit code 1 is "errors corrected", and without the word "clean" a
        // full check was thought necessary: both are more than a recovery.
        if recovery.status.code() != Some(0) || !text(&recovery).contains(": clean,") {
            return Ok(Some(text(&recovery)));
        }
        let check = output("e2fsck", &["-fn", &path])?;
        // A question that `-n` answers is a complaint, also where the exit
        // code makes nothing of it.
        let complaint = check.status.code() != Some(0) || text(&check).contains("? no");
        Ok(complaint.then(|| text(&check)))
    }

    fn read(&self, file: &str) -> Result<Vec<u8>> {
        let target = self.path.with_file_name("content");
        let dump = format!("dump {file} {}", target.display());
        let printed = run("debugfs", &["-R", &dump, &self.path.to_string_lossy()])?;
        // debugfs exits with 0 whatever happens; the file is what tells.
        std::fs::read(&target).with_context(|| format!("no {file} on the disk: {printed}"))
    }
}

fn text(output: &Output) -> String {
    let both = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&both).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::FileExt;

    const BLOCK: usize = 1024;

    fn records(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let line = |number| format!("{number} {}\n", record_payload(number));
        numbers.into_iter().map(line).collect::<String>().into_bytes()
    }

    #[test]
    fn whole_records_are_intact_with_one_on_its_way() {
        assert!(check_records(&records(1..=5), 5).is_intact());
        assert!(check_records(b"", 0).is_intact());
        let check = check_records(&records(1..=6), 5);
        assert!(check.is_intact());
        assert_eq!(check.unacknowledged, [6]);
        let mut torn = records(1..=5);
        torn.extend(b"6 12ab");
        assert!(check_records(&torn, 5).is_intact());
        assert_eq!(check_records(&torn, 6).lost, [6]);
    }

    #[test]
    fn every_fault_is_found() {
        assert_eq!(check_records(&records([1, 2, 4, 5]), 6).lost, [3, 6]);
        assert_eq!(check_records(&records([1, 2, 2, 3]), 3).repeated, [2]);
        assert_eq!(check_records(&records([1, 3, 2]), 3).out_of_order, [2]);
        assert!(!check_records(&records(1..=7), 5).is_intact());
        let mut changed = records(1..=3);
        changed[60] ^= 1;
        let check = check_records(&changed, 3);
        assert_eq!((check.damaged.len(), check.lost), (1, vec![2]));
        let mut zeroes = records(1..=2);
        zeroes.extend([0; 4096]);
        zeroes.extend(records([3]));
        let check = check_records(&zeroes, 3);
        assert_eq!((check.damaged.len(), check.lost), (1, vec![3]));
    }

    /// An ext4 image with a record file, and its directory.
    fn image(content: &[u8]) -> (TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("records"), content).unwrap();
        let image = directory.path().join("disk.raw");
        fs::File::create(&image).unwrap().set_len(16 * 1024 * 1024).unwrap();
        let (root, path) = (root.to_string_lossy(), image.to_string_lossy());
        run("mke2fs", &["-q", "-t", "ext4", "-b", &BLOCK.to_string(), "-d", &root, &path]).unwrap();
        (directory, image)
    }

    #[test]
    fn a_sound_disk_is_intact_and_stays_untouched() {
        let (_directory, image) = image(&records(1..=2000));
        let before = fs::read(&image).unwrap();
        let check = check_disk(&image, 2000).unwrap();
        assert!(check.is_intact(), "{check:?}");
        assert_eq!(check.records.found, 2000);
        assert_eq!(check_disk(&image, 2001).unwrap().records.lost, [2001]);
        assert!(fs::read(&image).unwrap() == before);
    }

    #[test]
    fn the_journal_is_replayed_before_anything_is_judged() {
        let (directory, image) = image(&records(1..=10));
        let path = image.to_string_lossy();
        // As after a crash: the block on the disk is old, its new content is in
        // a transaction of the journal.
        let block = run("debugfs", &["-R", "blocks /records", &path]).unwrap();
        let block: u64 = block.trim().parse().unwrap();
        let new = directory.path().join("new");
        let mut content = records(1..=15);
        content.resize(BLOCK, 0);
        fs::write(&new, content).unwrap();
        let script = directory.path().join("script");
        let length = records(1..=15).len();
        let lines = format!(
            "set_inode_field /records size {length}\njo\njw -b {block} {}\njc\n",
            new.display()
        );
        fs::write(&script, lines).unwrap();
        run("debugfs", &["-w", "-f", &script.to_string_lossy(), &path]).unwrap();
        let stale = run("debugfs", &["-R", "cat /records", &path]).unwrap();
        assert_ne!(stale.into_bytes(), records(1..=15));
        let check = check_disk(&image, 15).unwrap();
        assert!(check.is_intact(), "{check:?}");
        assert_eq!(check.records.found, 15);
    }

    #[test]
    fn a_damaged_file_system_is_told() {
        let (_directory, image) = image(&records(1..=10));
        run(
            "debugfs",
            &["-w", "-R", "set_inode_field /records links_count 3", &image.to_string_lossy()],
        )
        .unwrap();
        let complaint = check_disk(&image, 10).unwrap().file_system.expect("a complaint");
        assert!(complaint.contains("ref count"), "{complaint}");
    }

    #[test]
    fn missing_files_are_errors() {
        let (directory, image) = image(b"");
        run("debugfs", &["-w", "-R", "rm /records", &image.to_string_lossy()]).unwrap();
        let error = check_disk(&image, 0).unwrap_err();
        assert!(error.to_string().contains("/records"), "{error:#}");
        let error = check_disk(&directory.path().join("absent"), 0).unwrap_err();
        assert!(error.to_string().contains("absent"), "{error:#}");
        let file = fs::File::create(directory.path().join("empty")).unwrap();
        file.write_all_at(&[0; 4096], 0).unwrap();
        assert!(check_disk(&directory.path().join("empty"), 0).is_err());
    }
}
