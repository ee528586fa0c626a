//! The boot files that come with an offer: each lies beside the former one until all have come.

use super::receive_file;
use crate::handshake::FileOffer;
use anyhow::Context;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use understudy_link::link::Link;

/// A boot file that has come as a whole. Dropped before it has its name, it is removed.
pub(super) struct BootFile {
    beside: PathBuf,
    path: PathBuf,
    has_its_name: bool,
}

impl BootFile {
    /// Receives the file that will be `name` in the directory. On return it is on stable storage.
    pub fn receive(
        link: &Link,
        offer: &FileOffer,
        directory: &Path,
        name: &str,
    ) -> anyhow::Result<BootFile> {
        let (beside, path) = (directory.join(format!("{name}.partial")), directory.join(name));
        let file = BootFile { beside, path, has_its_name: false };
        let receive = || -> anyhow::Result<()> {
            let mut target = File::create(&file.beside)?;
            receive_file(link, offer.bytes, |piece| target.write_all(piece))?;
            Ok(target.sync_all()?)
        };
        receive().with_context(|| {
            format!("cannot receive the VM's {name} into {}", file.beside.display())
        })?;
        Ok(file)
    }

    /// Path where it will be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it its name, in place of a former one. Who syncs the directory makes that last.
    pub fn take_name(mut self) -> io::Result<()> {
        fs::rename(&self.beside, &self.path)?;
        self.has_its_name = true;
        Ok(())
    }
}

impl Drop for BootFile {
    fn drop(&mut self) {
        if !self.has_its_name {
            // It may not even have begun.
            let _ = fs::remove_file(&self.beside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::receive_files;
    use super::*;
    use serde_json::json;
    use std::net::{TcpListener, TcpStream};
    use understudy_protocol::Epoch;
    use understudy_protocol::wire::Kind;

    /// What is in a directory after these files have come into it, and whether the offer was taken. Then the link ends.
    fn receive(pieces: &[&[u8]], is_prepared: bool) -> (bool, Vec<(String, Vec<u8>)>) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("kernel"), b"the former kernel").unwrap();
        let file = |role, bytes| json!({ "role": role, "bytes": bytes });
        let offer = json!({
            "session": "s",
            "definition": {
                "name": "db", "memory": "64M", "vcpus": 1, "kernel": "/k", "initrd": "/i",
            },
            "machine_type": "pc", "accelerator": "tcg", "qemu_version": "7.2.0", "generation": 1,
            "arbiter": { "id": "0".repeat(32), "place": "/arbiter" }, "disk_bytes": [],
            "files": [file("kernel", 9), file("initrd", 4)], "paths": [], "path": 0,
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let sender = Link::accepted(sender, None).unwrap();
        let link = Link::accepted(listener.accept().unwrap().0, None).unwrap();
        for piece in pieces {
            sender.send_parts(Kind::File, Epoch(0), &[piece]).unwrap();
        }
        if is_prepared {
            sender.send_signal(Kind::Prepare, Epoch(0)).unwrap();
        }
        sender.close();
        let offer = serde_json::from_value(offer).unwrap();
        let received = receive_files(&link, &offer, directory.path(), &[]);
        if let Ok(definition) = &received {
            assert_eq!(definition.kernel, Some(directory.path().join("kernel")));
        }
        let mut left: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| {
                (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
            })
            .collect();
        left.sort();
        (received.is_ok(), left)
    }

    // The former one was emptied at once: a VM that could be started from the images on record had half a kernel.
    #[test]
    fn the_former_boot_files_stay_until_all_have_come() {
        let former = vec![("kernel".to_owned(), b"the former kernel".to_vec())];
        let (kernel, initrd): (&[&[u8]], &[u8]) = (&[b"new ", b"kerne"], b"init");
        assert_eq!(receive(&kernel[..1], false), (false, former.clone()));
        assert_eq!(receive(kernel, false), (false, former.clone()));
        let all = [kernel, &[initrd]].concat();
        assert_eq!(receive(&all, false), (false, former));
        let new = [("initrd", initrd), ("kernel", b"new kerne".as_slice())];
        let new = new.map(|(name, content)| (name.to_owned(), content.to_vec())).to_vec();
        assert_eq!(receive(&all, true), (true, new));
    }
}
