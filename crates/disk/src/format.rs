//! Size that an export must have for an image of a given format.

use crate::changes::ChangeMap;
use crate::error::DiskError;
use serde_json::Value;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

/// QEMU counts disks in sectors.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Bytes that a qcow2 image begins with, and the versions that follow (big-endian).
const QCOW2_MAGIC: &[u8] = b"QFI\xfb";
const QCOW2_VERSIONS: [&[u8]; 3] = [&[0, 0, 0, 1], &[0, 0, 0, 2], &[0, 0, 0, 3]];
/// Sizes of qcow2 exports are rounded up to this.
const QCOW2_ROUNDING_BYTES: u64 = 1024 * 1024;

/// Format of a disk image, as the VM's definition names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the disk, one after the other.
    Raw,
    /// QEMU's growing format; QEMU's own layer for it runs on top of our raw export.
    Qcow2,
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<ImageFormat, String> {
        match name {
            "raw" => Ok(ImageFormat::Raw),
            "qcow2" => Ok(ImageFormat::Qcow2),
            other => Err(format!("disk format {other:?} is unknown; use \"raw\" or \"qcow2\"")),
        }
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        })
    }
}

/// Bytes to export for the image at `path`: its size for a raw one, and for qcow2 what it
/// can grow to, so that QEMU never meets the end of the export. Sparse space is free.
///
/// # Errors
/// A missing or unreadable image, a qcow2 image that depends on other files (they would
/// not be mirrored), `qemu-img` missing or unable to read the image.
pub fn export_bytes(path: impl AsRef<Path>, format: ImageFormat) -> Result<u64, DiskError> {
    let path = path.as_ref();
    let file_bytes = image_bytes(path)?;
    match format {
        ImageFormat::Raw => Ok(file_bytes.next_multiple_of(SECTOR_BYTES)),
        ImageFormat::Qcow2 => qcow2_bytes(path, file_bytes),
    }
}

/// The same of an image whose changes are listed at `changes`: for qcow2 no fewer than the list's, which is of no use for
/// a smaller disk. What an image can grow to depends on what it holds now.
///
/// # Errors
/// The same.
pub fn export_bytes_as_listed(
    path: impl AsRef<Path>,
    format: ImageFormat,
    changes: &Path,
) -> Result<u64, DiskError> {
    let bytes = export_bytes(path, format)?;
    match format {
        ImageFormat::Raw => Ok(bytes),
        ImageFormat::Qcow2 => Ok(bytes.max(ChangeMap::disk_bytes_at(changes).unwrap_or(0))),
    }
}

/// Refuses an image whose content is of another format than the one declared. To be asked before
/// a VM first runs on the image: what a guest writes to a raw one may look like anything.
///
/// # Errors
/// The other format, or an image that cannot be read.
pub fn check_format(path: impl AsRef<Path>, declared: ImageFormat) -> Result<(), DiskError> {
    let path = path.as_ref();
    let is_qcow2 = has_qcow2_header(open_image(path)?).map_err(DiskError::io("read", path))?;
    let found = match (declared, is_qcow2) {
        (ImageFormat::Raw, false) | (ImageFormat::Qcow2, true) => return Ok(()),
        (ImageFormat::Raw, true) => "qcow2",
        (ImageFormat::Qcow2, false) => "not qcow2 (raw, perhaps)",
    };
    Err(DiskError::WrongFormat { path: path.into(), declared, found })
}

/// Whether the file begins with qcow2's magic and one of its versions.
fn has_qcow2_header(file: File) -> io::Result<bool> {
    let mut head = Vec::new();
    file.take(8).read_to_end(&mut head)?;
    Ok(head.strip_prefix(QCOW2_MAGIC).is_some_and(|version| QCOW2_VERSIONS.contains(&version)))
}

fn open_image(path: &Path) -> Result<File, DiskError> {
    let open = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => DiskError::Missing { path: path.into() },
        _ => DiskError::Io { action: "open", path: path.into(), source },
    };
    let file = File::open(path).map_err(open)?;
    if file.metadata().map_err(DiskError::io("examine", path))?.is_dir() {
        return Err(DiskError::NotAnImage { path: path.into() });
    }
    Ok(file)
}

/// Bytes that the image at `path` has: of a file its length, of a block device its size.
///
/// # Errors
/// A missing or unreadable image.
pub fn image_bytes(path: &Path) -> Result<u64, DiskError> {
    let mut file = open_image(path)?;
    // Not the metadata's length, which is 0 for a block device.
    file.seek(SeekFrom::End(0)).map_err(DiskError::io("examine", path))
}

/// A fully allocated copy of the image, plus what it holds now: clusters that snapshots
/// keep, or that were leaked by a crash, are not counted by `measure`.
fn qcow2_bytes(path: &Path, file_bytes: u64) -> Result<u64, DiskError> {
    let info = qemu_img("info", path, &[])?;
    refuse_other_files(path, &info)?;
    let measured = qemu_img("measure", path, &["-O", "qcow2", "-o", &layout_options(&info)])?;
    let fully_allocated = number("measure", path, &measured, "fully-allocated")?;
    let held = number("info", path, &info, "actual-size")?;
    let bitmaps = measured.get("bitmaps").and_then(Value::as_u64).unwrap_or(0);
    let grown = fully_allocated.saturating_add(held).saturating_add(bitmaps);
    Ok(grown.max(file_bytes).next_multiple_of(QCOW2_ROUNDING_BYTES))
}

/// The creation options that decide how much room the image's own tables take.
fn layout_options(info: &Value) -> String {
    let specific = &info["format-specific"]["data"];
    let mut options = Vec::new();
    if let Some(bytes) = info["cluster-size"].as_u64() {
        options.push(format!("cluster_size={bytes}"));
    }
    if let Some(bits) = specific["refcount-bits"].as_u64() {
        options.push(format!("refcount_bits={bits}"));
    }
    if specific["extended-l2"] == Value::Bool(true) {
        options.push("extended_l2=on".into());
    }
    options.join(",")
}

fn refuse_other_files(path: &Path, info: &Value) -> Result<(), DiskError> {
    let backing = info.get("backing-filename").map(|name| ("the backing file", name));
    let data = info["format-specific"]["data"].get("data-file").map(|name| ("the data file", name));
    match backing.or(data) {
        None => Ok(()),
        Some((what, name)) => {
            Err(DiskError::NotStandalone { path: path.into(), needs: format!("{what} {name}") })
        }
    }
}

fn number(
    action: &'static str,
    path: &Path,
    answer: &Value,
    field: &str,
) -> Result<u64, DiskError> {
    answer.get(field).and_then(Value::as_u64).ok_or_else(|| DiskError::QemuImg {
        action,
        path: path.into(),
        message: format!("the answer has no number {field:?}"),
    })
}

/// Runs a query of `qemu-img` and returns its JSON answer. It only looks on (`-U`): whether
/// the image is in use is for the lock to find out.
fn qemu_img(action: &'static str, path: &Path, options: &[&str]) -> Result<Value, DiskError> {
    let output = Command::new("qemu-img")
        .args([action, "-U", "-f", "qcow2", "--output=json"])
        .args(options)
        .arg(path)
        .output()
        .map_err(|source| DiskError::QemuImgMissing { source })?;
    let failed = |message: String| DiskError::QemuImg { action, path: path.into(), message };
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    // The metadata of a device say 0.
    #[test]
    fn an_image_has_the_bytes_of_its_device() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("db.img");
        fs::write(&file, vec![7; 3 << 20]).unwrap();
        assert_eq!(image_bytes(&file).unwrap(), 3 << 20);
        let device = crate::loop_device::LoopDevice::on(&file);
        assert_eq!(image_bytes(device.path()).unwrap(), 3 << 20);
        assert!(matches!(
            image_bytes(&directory.path().join("no")),
            Err(DiskError::Missing { .. })
        ));
    }

    #[test]
    fn a_declared_format_must_be_that_of_the_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("db.img");
        let check = |content: &[u8], declared| {
            fs::write(&path, content).unwrap();
            check_format(&path, declared).map_err(|error| error.to_string())
        };
        let qcow2 = b"QFI\xfb\0\0\0\x03, and all that follows";
        check(qcow2, ImageFormat::Qcow2).unwrap();
        let words = check(qcow2, ImageFormat::Raw).unwrap_err();
        assert!(words.contains("declared raw") && words.contains("is qcow2"), "{words}");
        for raw in [&b""[..], b"QFI", b"a boot sector", b"QFI\xfb but a word, not a version"] {
            check(raw, ImageFormat::Raw).unwrap();
            let words = check(raw, ImageFormat::Qcow2).unwrap_err();
            assert!(words.contains("declared qcow2") && words.contains("not qcow2"), "{words}");
        }
        fs::remove_file(&path).unwrap();
        let missing = check_format(&path, ImageFormat::Raw).unwrap_err();
        assert!(matches!(missing, DiskError::Missing { .. }), "{missing}");
    }
}
