//! Media of CD-ROM drives, which are changed while a VM runs.
//!
//! A medium is a file that both hosts have at the same place. The backup looks at its own before
//! anything happens: it must be the same, to the last byte, and one that everybody may read, since
//! it is the other host that names it. Then the primary's QEMU gets the
//! medium within one epoch, and that epoch tells the backup, whose QEMU gets it when the epoch is
//! applied: so whatever epoch a take-over goes on from, the drive has what its guest saw.

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_disk::{Disk, DiskError, ImageFormat, check_format};
use understudy_machine::Machine;
use understudy_protocol::DiskIndex;
use understudy_qemu::definition::DiskDefinition;
use understudy_qemu::qmp::EjectError;

/// The bytes that a drive without a medium is served, which its guest never sees.
const PLACEHOLDER_BYTES: u64 = 64 << 10;

/// The medium that a drive has from now on, as hosts tell each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// The drive.
    pub drive: DiskIndex,
    /// The file; none if it is to be empty.
    pub file: Option<MediumFile>,
}

/// A medium's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumFile {
    /// Path of it on every host.
    pub path: PathBuf,
    /// BLAKE3 hash of what is in it.
    pub hash: String,
}

/// Whether a backup has a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MediumAnswer {
    /// The medium can be put in.
    Ready,
    /// The medium cannot be put in, for this reason.
    Refused(String),
}

impl Medium {
    /// Whether it is one for a drive of this machine.
    pub fn check_drive(&self, machine: &Machine) -> anyhow::Result<()> {
        let drive = machine.definition().disks.get(usize::from(self.drive.0));
        ensure!(drive.is_some_and(|disk| disk.cdrom), "disk {} is no CD-ROM drive", self.drive);
        Ok(())
    }

    /// Opens it on this host, whose operator names it, for a drive of this machine. `directory` is
    /// the VM's own.
    pub fn open(
        &self,
        machine: &Machine,
        directory: &Path,
    ) -> anyhow::Result<understudy_machine::Medium> {
        self.open_with(machine, directory, |path| Disk::open_medium(self.drive, path))
    }

    /// The same where another host names it: a file that everybody may read.
    pub fn open_for_peer(
        &self,
        machine: &Machine,
        directory: &Path,
    ) -> anyhow::Result<understudy_machine::Medium> {
        let open = |path: &Path| match self.file {
            Some(_) => Disk::open_public_medium(self.drive, path),
            // The placeholder is this host's own.
            None => Disk::open_medium(self.drive, path),
        };
        self.open_with(machine, directory, open)
    }

    fn open_with(
        &self,
        machine: &Machine,
        directory: &Path,
        open: impl FnOnce(&Path) -> Result<Disk, DiskError>,
    ) -> anyhow::Result<understudy_machine::Medium> {
        let index = usize::from(self.drive.0);
        let now = machine.definition_now();
        let defined = now.disks[index].clone();
        let (path, medium_hash) = match &self.file {
            Some(file) => (file.path.clone(), Some(file.hash.clone())),
            None => (placeholder(directory, index)?, Some("none".to_owned())),
        };
        let disk = Arc::new(open(&path)?);
        let ejected = self.file.is_none();
        let defined = DiskDefinition { path, ejected, medium_hash, ..defined };
        Ok(understudy_machine::Medium { disk, defined })
    }

    /// Whether the file here is the one that is meant.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        check_format(&file.path, ImageFormat::Raw)?;
        ensure!(
            hash_of(&file.path)? == file.hash,
            "its {} is another one: both hosts must have the same file",
            file.path.display()
        );
        Ok(())
    }
}

/// BLAKE3 hash of a file.
pub fn hash_of(path: &Path) -> anyhow::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut read = || hasher.update_reader(File::open(path)?).map(|_| ());
    read().with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// The file that stands for no medium in a drive.
pub fn placeholder(directory: &Path, index: usize) -> std::io::Result<PathBuf> {
    let path = directory.join(format!("disk{index}.empty"));
    if !path.exists() {
        File::create(&path)?.set_len(PLACEHOLDER_BYTES)?;
    }
    Ok(path)
}

/// Whether a medium could not be taken out because the guest holds it.
pub fn is_locked(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(EjectError::Locked(_)))
}

/// The backup has not got the medium.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MediumRefused(pub String);
