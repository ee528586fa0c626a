//! By what a list of changes knows that its image is what it was when the list was sealed.
//!
//! Of a file its inode and its time of modification say so. A block device's node says nothing of
//! its content: a file system on it writes past the node. The kernel counts what is written to a
//! device, for as long as the kernel runs and the device is there; where it does not count, and
//! after that, nothing says so.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes of a stamp in the list.
pub(crate) const BYTES: usize = 32;
/// The first word of each kind. That of a release which knew the time alone is 0.
const FILE: u64 = 1;
const DEVICE: u64 = 2;
const UNCOUNTED: u64 = 3;
/// In the kernel's statistics of a device: sectors written, and discarded.
const WRITTEN: usize = 6;
const DISCARDED: usize = 13;

/// What an image was like when it was sealed, beside its time of modification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stamp {
    /// A release that knew the time alone has sealed it.
    Time,
    /// Another file in its place has another inode.
    File { inode: u64 },
    /// The device's number, which device of those that bore it, and the sectors that were written and discarded since
    /// it came.
    Device { number: u64, sequence: u64, written: u64 },
    /// A block device of which nothing is counted.
    Uncounted,
}

impl Stamp {
    /// That of an image now.
    pub fn of(image: &Path) -> io::Result<Stamp> {
        let metadata = fs::metadata(image)?;
        Ok(match metadata.file_type().is_block_device() {
            true => counted(&metadata).unwrap_or(Stamp::Uncounted),
            false => Stamp::File { inode: metadata.ino() },
        })
    }

    /// Whether nothing in both says that they are of two images: what was written to it is not looked at.
    pub fn may_name_same(self, other: Stamp) -> bool {
        match (self, other) {
            (Stamp::Time, _) | (_, Stamp::Time) => true,
            (Stamp::File { inode }, Stamp::File { inode: other }) => inode == other,
            (Stamp::File { .. }, _) | (_, Stamp::File { .. }) => false,
            (Stamp::Uncounted, _) | (_, Stamp::Uncounted) => true,
            (
                Stamp::Device { number, sequence, .. },
                Stamp::Device { number: other, sequence: others, .. },
            ) => (number, sequence) == (other, others),
        }
    }

    pub fn encode(self) -> [u8; BYTES] {
        let words = match self {
            Stamp::Time => [0; 4],
            Stamp::File { inode } => [FILE, inode, 0, 0],
            Stamp::Device { number, sequence, written } => [DEVICE, number, sequence, written],
            Stamp::Uncounted => [UNCOUNTED, 0, 0, 0],
        };
        let mut bytes = [0; BYTES];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// None if it is of no kind that this release knows.
    pub fn decode(bytes: &[u8; BYTES]) -> Option<Stamp> {
        let mut words = [0; BYTES / 8];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().expect("eight of them"));
        }
        let word = |at: usize| words[at];
        match word(0) {
            0 => Some(Stamp::Time),
            FILE => Some(Stamp::File { inode: word(1) }),
            DEVICE => Some(Stamp::Device { number: word(1), sequence: word(2), written: word(3) }),
            UNCOUNTED => Some(Stamp::Uncounted),
            _ => None,
        }
    }
}

fn counted(device: &Metadata) -> Option<Stamp> {
    let number = device.rdev();
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    counted_in(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")), number)
}

/// What the kernel says in a device's directory; of a partition, that of its whole disk is the one above.
fn counted_in(directory: &Path, number: u64) -> Option<Stamp> {
    // Links are followed before `..`.
    let directory = fs::canonicalize(directory).ok()?;
    let whole = match directory.join("partition").exists() {
        true => directory.parent()?,
        false => &directory,
    };
    let number_in = |file: &str| -> Option<u64> {
        fs::read_to_string(whole.join(file)).ok()?.trim().parse().ok()
    };
    if number_in("queue/iostats")? == 0 {
        return None;
    }
    let sequence = number_in("diskseq")?;
    let statistics = fs::read_to_string(directory.join("stat")).ok()?;
    let field = |at| statistics.split_whitespace().nth(at)?.parse::<u64>().ok();
    // A driver that counts nothing says 0, too.
    let written = field(WRITTEN)?.wrapping_add(field(DISCARDED)?);
    (written > 0).then_some(Stamp::Device { number, sequence, written })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_read_as_it_was_written() {
        for stamp in [
            Stamp::Time,
            Stamp::File { inode: 7 },
            Stamp::Device { number: 0x700, sequence: 9, written: u64::MAX },
            Stamp::Uncounted,
        ] {
            assert_eq!(Stamp::decode(&stamp.encode()), Some(stamp));
        }
        assert_eq!(Stamp::decode(&[4; BYTES]), None);
    }

    #[test]
    fn a_stamp_names_its_image_whatever_was_written_to_it() {
        let device = |sequence, written| Stamp::Device { number: 0x700, sequence, written };
        assert!(device(9, 1).may_name_same(device(9, 2)));
        assert!(!device(9, 1).may_name_same(device(10, 1)), "another one that bears its number");
        let file = Stamp::File { inode: 7 };
        assert!(file.may_name_same(file) && !file.may_name_same(Stamp::File { inode: 8 }));
        assert!(!file.may_name_same(Stamp::Uncounted) && !device(9, 1).may_name_same(file));
        for untold in [Stamp::Time, Stamp::Uncounted] {
            assert!(untold.may_name_same(device(9, 1)) && device(9, 1).may_name_same(untold));
        }
    }

    #[test]
    fn a_file_in_the_place_of_another_has_another_stamp() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for name in ["image", "other"] {
            fs::write(path(name), name).unwrap();
        }
        let stamp = Stamp::of(&path("image")).unwrap();
        assert_eq!(Stamp::of(&path("image")).unwrap(), stamp);
        fs::rename(path("other"), path("image")).unwrap();
        assert_ne!(Stamp::of(&path("image")).unwrap(), stamp);
    }

    /// The kernel's words, of a disk with a partition.
    #[test]
    fn a_device_is_known_by_what_was_written_to_it_if_that_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let (disk, partition) = (directory.path().join("sdb"), directory.path().join("sdb/sdb1"));
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir(&partition).unwrap();
        let stat = |written, discarded| {
            format!("  9 0 72 3 5 0 {written} 4 0 8 8 1 0 {discarded} 0 2 1\n")
        };
        fs::write(disk.join("queue/iostats"), "1\n").unwrap();
        fs::write(disk.join("diskseq"), "23\n").unwrap();
        fs::write(disk.join("stat"), stat(4096, 8)).unwrap();
        fs::write(partition.join("partition"), "1\n").unwrap();
        fs::write(partition.join("stat"), stat(64, 0)).unwrap();
        let device = |written| Some(Stamp::Device { number: 5, sequence: 23, written });
        assert_eq!(counted_in(&disk, 5), device(4104));
        assert_eq!(counted_in(&partition, 5), device(64));
        fs::write(disk.join("stat"), stat(4096, 16)).unwrap();
        assert_eq!(counted_in(&disk, 5), device(4112), "a discard changes it, too");
        fs::write(disk.join("stat"), stat(0, 0)).unwrap();
        assert_eq!(counted_in(&disk, 5), None, "nothing is counted");
        fs::write(disk.join("queue/iostats"), "0\n").unwrap();
        assert_eq!(counted_in(&partition, 5), None, "nothing is counted any more");
        fs::remove_file(disk.join("diskseq")).unwrap();
        assert_eq!(counted_in(&directory.path().join("sdz"), 5), None, "there is none");
    }
}
