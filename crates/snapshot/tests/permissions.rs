//! A snapshot holds all that its guests have in memory: nobody but who took it may read it,
//! whatever umask the daemon was started with.

use nix::sys::stat::{Mode, umask};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use understudy_protocol::literal;
use understudy_snapshot::{ChunkId, Compression, SnapshotNumber, Store};

/// All files and directories below a directory, itself included, with their modes.
fn modes(path: &Path, found: &mut Vec<(PathBuf, u32)>) {
    let metadata = fs::metadata(path).unwrap();
    found.push((path.to_owned(), metadata.permissions().mode()));
    if metadata.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            modes(&entry.unwrap().path(), found);
        }
    }
}

// Before, files had 0666 and directories 0777 less the umask: 0644 and 0755 mostly, and with
// 0777 nobody but root could read them again.
#[test]
fn what_is_stored_is_private_whatever_the_umask() {
    let directory = tempfile::tempdir().unwrap();
    for mask in [0, 0o022, 0o777] {
        umask(Mode::from_bits(mask).unwrap());
        let root = directory.path().join(format!("{mask:o}/snapshots"));
        let store = Store::create(root.to_str().unwrap()).unwrap();
        let blob = store.put_blob(&[7; 3 << 20], Compression::Lz4).unwrap();
        let writing = store.begin(&literal("shop"), SnapshotNumber(0), 1_790_000_000).unwrap();
        assert_eq!(store.blob(&blob).unwrap().len(), 3 << 20);

        let mut found = Vec::new();
        modes(root.parent().unwrap(), &mut found);
        let id: ChunkId = blob.chunks[0];
        let chunk = root.join(format!("chunks/{}/{id}", &id.to_string()[..2]));
        let mark = root.join(format!("writing/shop/{}", writing.number));
        for path in [&root, &chunk, &mark, &root.join("store")] {
            assert!(found.iter().any(|(there, _)| there == path), "{}", path.display());
        }
        for (path, mode) in &found {
            let wanted = if path.is_dir() { 0o40700 } else { 0o100600 };
            assert_eq!(*mode, wanted, "{} has {mode:o}, umask {mask:o}", path.display());
        }
    }
}
