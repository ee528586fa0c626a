//! The firmware, the kernel and the initial RAM disk of a restored VM, which QEMU reads when it starts.

use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use understudy_qemu::command;
use understudy_qemu::definition::ForeignDefinition;
use understudy_snapshot::{Blob, MemberManifest, Store};

/// Boot files of one VM, to be made in its directory.
pub struct BootFiles<'a>(command::BootFiles<BootFile<'a>>);

struct BootFile<'a> {
    blob: &'a Blob,
    path: PathBuf,
    /// Path where the VM had it, if something as long is there: it often is the same on all hosts.
    former: Option<PathBuf>,
}

impl<'a> BootFiles<'a> {
    /// Boot files of a member's part, whose definition says where it had them.
    pub fn of(
        member: &'a MemberManifest,
        directory: &Path,
        definition: &ForeignDefinition,
    ) -> BootFiles<'a> {
        let there = definition.boot_there();
        let file = |name, blob: &'a Option<Blob>, there: &Option<PathBuf>| {
            let (blob, path) = (blob.as_ref()?, directory.join(name));
            let former = there.clone().filter(|former| is_as_long(former, blob));
            Some(BootFile { blob, path, former })
        };
        BootFiles(command::BootFiles {
            firmware: file("firmware", &member.firmware, &there.firmware),
            kernel: file("kernel", &member.kernel, &there.kernel),
            initrd: file("initrd", &member.initrd, &there.initrd),
        })
    }

    /// Paths where they are made.
    pub fn places(&self) -> command::BootFiles {
        let place = |file: &Option<BootFile<'_>>| file.as_ref().map(|file| file.path.clone());
        command::BootFiles {
            firmware: place(&self.0.firmware),
            kernel: place(&self.0.kernel),
            initrd: place(&self.0.initrd),
        }
    }

    /// Makes those that the host does not have, from the store.
    pub fn fetch(&self, store: &Store) -> anyhow::Result<()> {
        let mut lacking = self.files().filter(|file| file.former.is_none());
        lacking.try_for_each(|file| file.write(store.blob(file.blob)?))
    }

    /// Makes the others, from the host's files; from the store if one turns out to be another.
    pub fn copy(&self, store: &Store) -> anyhow::Result<()> {
        for file in self.files() {
            let Some(former) = &file.former else { continue };
            let same = fs::read(former).ok().filter(|content| file.blob.holds(content));
            file.write(same.map_or_else(|| store.blob(file.blob), Ok)?)?;
        }
        Ok(())
    }

    fn files(&self) -> impl Iterator<Item = &BootFile<'a>> {
        self.0.each().into_iter().filter_map(|(_, file)| file)
    }
}

impl BootFile<'_> {
    fn write(&self, content: Vec<u8>) -> anyhow::Result<()> {
        let path = &self.path;
        fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn is_as_long(path: &Path, blob: &Blob) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == blob.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_snapshot::Compression;

    const KERNEL: &[u8] = b"kernel";

    /// Makes a file where the host has this one; says whether the store was needed, and if it is
    /// known at once.
    fn make(former: Option<&[u8]>) -> (bool, bool) {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().join("store").to_str().unwrap()).unwrap();
        let blob = store.put_blob(KERNEL, Compression::None).unwrap();
        let [path, here] = ["kernel", "here"].map(|name| directory.path().join(name));
        if let Some(content) = former {
            fs::write(&here, content).unwrap();
        }
        let former = Some(here).filter(|here| is_as_long(here, &blob));
        let kernel = Some(BootFile { blob: &blob, path: path.clone(), former });
        let files = BootFiles(command::BootFiles { firmware: None, kernel, initrd: None });
        files.fetch(&store).unwrap();
        let fetched = path.exists();
        files.copy(&store).unwrap();
        assert_eq!(fs::read(&path).unwrap(), KERNEL);
        fs::remove_dir_all(directory.path().join("store/chunks")).unwrap();
        (files.fetch(&store).and_then(|()| files.copy(&store)).is_err(), fetched)
    }

    #[test]
    fn a_file_that_is_here_is_taken_only_if_it_is_the_same() {
        assert_eq!(make(None), (true, true));
        assert_eq!(make(Some(b"kernels")), (true, true));
        assert_eq!(make(Some(b"Kernel")), (true, false), "as long, and another");
        assert_eq!(make(Some(KERNEL)), (false, false));
        let blob = Blob { bytes: 4096, chunks: vec![] };
        assert!(!is_as_long(Path::new("/"), &blob), "a directory");
    }
}
