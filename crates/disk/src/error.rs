//! Errors of a disk, said so that the operator can act on it.

use crate::format::ImageFormat;
use std::io;
use std::path::{Path, PathBuf};

/// Reason why a disk, a mirror or its NBD server could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// No file at the path.
    #[error("disk image {path} does not exist; create it (qemu-img create) or correct the path")]
    Missing {
        /// The image.
        path: PathBuf,
    },
    /// Something other than a regular file or a block device.
    #[error("{path} is neither a file nor a block device; a disk image must be one of them")]
    NotAnImage {
        /// The path given.
        path: PathBuf,
    },
    /// A medium that another host names, and that not everybody may read.
    #[error(
        "{path} is not a file that everybody on its host may read, and no other is opened because \
         another host names it: make it one (`chmod o+r`)"
    )]
    NotPublic {
        /// The path given.
        path: PathBuf,
    },
    /// Another process holds the image open for writing, or reads it unshared.
    #[error(
        "disk image {path} is in use by another process (a daemon, a QEMU or a qemu-img); \
         stop that first: two writers would destroy it"
    )]
    InUse {
        /// The image.
        path: PathBuf,
    },
    /// The kernel, or somebody with an exclusive claim, has the device.
    #[error(
        "device {path} is mounted, or in use by LVM, RAID or another program: `lsblk {path}` says by \
         which; a guest and its host must not both write it"
    )]
    DeviceBusy {
        /// The device.
        path: PathBuf,
    },
    /// A device is not as large as the disk that it is to hold.
    #[error("device {path} has {bytes} bytes, and the disk {wanted}")]
    OtherSize {
        /// The device.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
        /// The disk's.
        wanted: u64,
    },
    /// Another file has taken its name.
    #[error(
        "another file is at {path} than the disk image that the guest has: put that one back, or stop the VM and start it \
         again with the other"
    )]
    Replaced {
        /// The path.
        path: PathBuf,
    },
    /// A restore of it did not come to its end.
    #[error(
        "disk image {path} is being restored from a snapshot, and not all of it is there: try again \
         once it is, or restore the snapshot again"
    )]
    Incomplete {
        /// The image.
        path: PathBuf,
    },
    /// The export would hide the end of the image from the guest.
    #[error(
        "disk image {path} holds {image_bytes} bytes, but only {export_bytes} would be shown to \
         the guest; take the size from export_bytes()"
    )]
    ExportTooSmall {
        /// The image.
        path: PathBuf,
        /// Its length.
        image_bytes: u64,
        /// The size asked for.
        export_bytes: u64,
    },
    /// The size cannot be addressed by the kernel's file offsets.
    #[error("a disk of {export_bytes} bytes is larger than a file can be (2^63 - 1 bytes)")]
    ExportTooLarge {
        /// The size asked for.
        export_bytes: u64,
    },
    /// A system call on the image or its directory failed.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Action that was tried, as a verb.
        action: &'static str,
        /// Path on which it was tried.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// Another server answers on the socket.
    #[error("another process already serves a disk on {path}; stop it or choose another path")]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// `qemu-img` could not be started.
    #[error("cannot run qemu-img, which sizes qcow2 images: {source}; install qemu-utils")]
    QemuImgMissing {
        /// Error of the kernel.
        source: io::Error,
    },
    /// `qemu-img` refused the image or answered with something else than expected.
    #[error("qemu-img {action} {path}: {message}; is it a sound image of the format given?")]
    QemuImg {
        /// The qemu-img command.
        action: &'static str,
        /// The image.
        path: PathBuf,
        /// Words that it said.
        message: String,
    },
    /// The tables of a qcow2 image do not fit together.
    #[error(
        "disk image {path} is damaged, with {errors} errors in its qcow2 tables, as a power failure of both \
         hosts can leave it: the guest may not find its disk, and lose more with each write. Copy the image, \
         then `qemu-img check -r all {path}`, and try again; else restore a snapshot, or a backup"
    )]
    DamagedTables {
        /// The image.
        path: PathBuf,
        /// Number of errors.
        errors: u64,
    },
    /// The content is of another format than the definition says.
    #[error(
        "disk image {path} is declared {declared}, but its content is {found}: the guest would not \
         find its disk there; correct `format` in the definition"
    )]
    WrongFormat {
        /// The image.
        path: PathBuf,
        /// Format that the definition names.
        declared: ImageFormat,
        /// Format that the image begins as.
        found: &'static str,
    },
    /// The image is only part of a disk, so that mirroring it would lose the rest.
    #[error(
        "disk image {path} needs {needs}, which would not be mirrored; flatten it first: \
         qemu-img convert -O qcow2 {path} NEW"
    )]
    NotStandalone {
        /// The image.
        path: PathBuf,
        /// The other file.
        needs: String,
    },
}

impl DiskError {
    /// Attaches the action and the path to what the kernel said.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> DiskError {
        let path = path.into();
        move |source| DiskError::Io { action, path, source }
    }

    /// The same of an image that cannot be opened.
    pub(crate) fn cannot_open(path: &Path) -> impl FnOnce(io::Error) -> DiskError {
        let path = path.to_owned();
        move |source| match source.kind() {
            io::ErrorKind::ResourceBusy => DiskError::DeviceBusy { path },
            io::ErrorKind::NotFound => DiskError::Missing { path },
            io::ErrorKind::IsADirectory => DiskError::NotAnImage { path },
            _ => DiskError::Io { action: "open", path, source },
        }
    }
}
