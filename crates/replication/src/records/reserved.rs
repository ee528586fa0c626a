//! A file that is replaced as a whole, also on a full disk.
//!
//! Beside it lies another one of its size, with place of its own on the disk. The next content is
//! written over that one, and then the two exchange their names: nothing has to be allocated.

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Both files are a multiple of this: room for a content that grows a little.
const UNIT_BYTES: usize = 16 * 1024;
/// A byte that no reader of JSON minds.
const FILLER: u8 = b' ';

/// Replaces the content of the file, which is JSON. On return it is on stable storage, and so is
/// the room for the next one.
pub(super) fn replace(path: &Path, json: &[u8]) -> io::Result<()> {
    let spare = path.with_extension("json.new");
    let mut content = json.to_vec();
    content.resize(json.len().next_multiple_of(UNIT_BYTES), FILLER);
    write(&spare, &content)?;
    match exchange(&spare, path) {
        Err(Errno::ENOENT) => {
            // The first one. Without room for a second it is not said to be there.
            fs::rename(&spare, path)?;
            write(&spare, &content)?;
        }
        // A file system that cannot, a network's mostly.
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => fs::rename(&spare, path)?,
        exchanged => exchanged?,
    }
    File::open(super::parent(path))?.sync_all()
}

fn exchange(one: &Path, other: &Path) -> nix::Result<()> {
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)
}

/// Writes over what is there, whose place on the disk is kept.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    let file = options.create(true).write(true).truncate(false).mode(0o600).open(path)?;
    file.write_all_at(content, 0)?;
    // Longer ones were there before.
    file.set_len(content.len() as u64)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Activation;
    use std::process::Command;
    use understudy_protocol::Generation;

    /// A file system of its own, an ext4 in a file, which can be filled to the last byte.
    struct SmallDisk(tempfile::TempDir);

    fn run(command: &str, arguments: &[&str]) {
        let output = Command::new(command).args(arguments).output().expect(command);
        assert!(output.status.success(), "{command} {arguments:?}: {output:?}");
    }

    impl SmallDisk {
        fn new() -> SmallDisk {
            let directory = tempfile::tempdir().unwrap();
            let (image, place) = (directory.path().join("image"), directory.path().join("disk"));
            fs::create_dir(&place).unwrap();
            File::create(&image).unwrap().set_len(8 << 20).unwrap();
            let (image, place) = (image.to_str().unwrap(), place.to_str().unwrap());
            run("mkfs.ext4", &["-q", "-m", "0", image]);
            run("mount", &["-o", "loop", image, place]);
            SmallDisk(directory)
        }

        fn path(&self) -> std::path::PathBuf {
            self.0.path().join("disk")
        }

        fn fill(&self) {
            let mut filler = File::create(self.path().join("filler")).unwrap();
            for bytes in [1 << 16, 1 << 10, 1] {
                while io::Write::write_all(&mut filler, &vec![0; bytes]).is_ok() {}
            }
            filler.sync_all().unwrap();
            let no_room = fs::write(self.path().join("another"), [1; 8192]);
            assert_eq!(no_room.unwrap_err().kind(), io::ErrorKind::StorageFull);
        }
    }

    impl Drop for SmallDisk {
        fn drop(&mut self) {
            run("umount", &["--lazy", self.path().to_str().unwrap()]);
        }
    }

    // Before, each record was a new file: none could be written on a full disk.
    #[test]
    fn a_full_disk_takes_one_record_after_the_other() {
        let disk = SmallDisk::new();
        let path = disk.path().join("record.json");
        replace(&path, b"[1]").unwrap();
        disk.fill();
        for n in 2..50 {
            let json = format!("[{n}, \"{}\"]", "x".repeat(n * 200));
            replace(&path, json.as_bytes()).unwrap();
            let read: serde_json::Value =
                serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(read[0], n);
        }
        // What is there stays there when there is no room for what comes.
        let long = serde_json::to_vec(&"y".repeat(4 * UNIT_BYTES)).unwrap();
        assert_eq!(replace(&path, &long).unwrap_err().kind(), io::ErrorKind::StorageFull);
        let read: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read[0], 49);
    }

    // Before, nothing was written while a guest wrote nothing: its backup was called one that could take
    // over, and could note nothing.
    #[test]
    fn a_proof_finds_a_file_system_that_takes_nothing_any_more() {
        let disk = SmallDisk::new();
        let path = disk.path().join("activation");
        Activation::prove(&path).unwrap();
        assert!(!path.exists(), "there is nothing to take over with yet");
        let activation = Activation::prepare(&path, &"s".to_owned().try_into().unwrap()).unwrap();
        disk.fill();
        Activation::prove(&path).unwrap();
        assert!(Activation::read(&path).unwrap().is_none());
        activation.write(Generation(2)).unwrap();
        Activation::prove(&path).unwrap();
        assert_eq!(Activation::read(&path).unwrap().unwrap().generation, Generation(2));
        // What ext4 does itself when it finds that its device has failed.
        run("mount", &["-o", "remount,abort", disk.path().to_str().unwrap()]);
        let error = Activation::prove(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem);
    }

    #[test]
    fn without_room_for_a_second_the_first_is_refused() {
        let disk = SmallDisk::new();
        disk.fill();
        assert!(replace(&disk.path().join("record.json"), b"{}").is_err());
    }
}
