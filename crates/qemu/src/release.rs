//! Whether one QEMU can load the device state that another one wrote.
//!
//! Distributions bring out patch releases of a series (10.0.2, 10.0.13), and hosts get them one after the other. QEMU
//! prints how its devices write their state (`-dump-vmstate`); two releases of one series that print the same
//! read each other's. Of releases of two series that is not known: a new version may have changed what a field means.

use crate::process::{Launch, Qemu};
use crate::qmp::QemuVersion;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::Duration;

/// Time that QEMU may take to print it.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The most bytes that it may print: far more than it does, some 800 kB.
const MOST_BYTES: u64 = 64 << 20;

/// A digest of how a QEMU's devices write their state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StateLayout(String);

impl From<String> for StateLayout {
    fn from(digest: String) -> StateLayout {
        StateLayout(digest)
    }
}

impl From<StateLayout> for String {
    fn from(layout: StateLayout) -> String {
        layout.0
    }
}

impl StateLayout {
    /// Asks a QEMU; none if it does not say.
    ///
    /// # Errors
    /// If it cannot be started, or the system refuses something.
    pub fn of(binary: &Path) -> io::Result<Option<StateLayout>> {
        let memfd = |name| memfd_create(name, MFdFlags::MFD_CLOEXEC).map_err(io::Error::from);
        let (mut printed, log) = (File::from(memfd(c"qemu-layout")?), memfd(c"qemu-layout-log")?);
        let number = printed.as_raw_fd();
        let args = [
            "-machine",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-dump-vmstate",
            &format!("/proc/self/fd/{number}"),
        ];
        let qemu = Qemu::launch_for_thread(&Launch {
            binary,
            args: &args.map(OsString::from),
            env: &[],
            inherit: &[printed.as_fd()],
            log: Path::new(&format!("/proc/self/fd/{}", log.as_raw_fd())),
            directory: None,
            user: None,
            descriptors: None,
        });
        let ended = qemu.map_err(io::Error::other)?.wait(TIMEOUT)?;
        if !ended.is_some_and(|exit| exit.status.is_some_and(|status| status.success())) {
            return Ok(None);
        }
        printed.rewind()?;
        let mut text = String::new();
        printed.take(MOST_BYTES).read_to_string(&mut text)?;
        Ok(StateLayout::of_text(&text))
    }

    /// The digest does not depend on the order in which devices and their parts are named.
    fn of_text(text: &str) -> Option<StateLayout> {
        let devices: Value = serde_json::from_str(text).ok()?;
        let devices = devices.as_object().filter(|devices| !devices.is_empty())?;
        // A map of `serde_json` prints its keys in their order.
        let canonical = serde_json::to_vec(devices).ok()?;
        Some(StateLayout(blake3::hash(&canonical).to_hex().to_string()))
    }
}

/// A QEMU, as far as it matters to another one. In messages its version is text (`10.0.2`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Its version.
    #[serde(rename = "qemu_version", with = "as_text")]
    pub version: QemuVersion,
    /// The layout in which its devices write their state, if it says so.
    #[serde(rename = "qemu_layout", default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<StateLayout>,
}

mod as_text {
    use crate::qmp::QemuVersion;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(version: &QemuVersion, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(version)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<QemuVersion, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(|()| D::Error::custom(format!("{text:?} is no version of QEMU")))
    }
}

/// The reason why a QEMU is not known to read another one's device state; for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unlike {
    /// The two are of two series.
    Series,
    /// The two are of one series, and write it in two ways.
    Layout,
    /// One of them at least does not say how it writes it.
    Unknown,
}

impl Release {
    /// Whether this QEMU and the other read each other's device state.
    pub fn compare(&self, other: &Release) -> Result<(), Unlike> {
        if self.version == other.version {
            return Ok(());
        }
        if self.version.series() != other.version.series() {
            return Err(Unlike::Series);
        }
        match (&self.layout, &other.layout) {
            (Some(ours), Some(theirs)) if ours == theirs => Ok(()),
            (Some(_), Some(_)) => Err(Unlike::Layout),
            _ => Err(Unlike::Unknown),
        }
    }
}

impl fmt::Display for Unlike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unlike::Series => "install releases of the same series on both hosts",
            Unlike::Layout => {
                "their devices do not write their state alike: install the same release on both hosts"
            }
            Unlike::Unknown => {
                "whether their devices write their state alike is not known: install the same release \
                 on both hosts"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::find_qemu;

    fn release(version: [u32; 3], layout: Option<&str>) -> Release {
        let [major, minor, micro] = version;
        let layout = layout.map(|layout| StateLayout(layout.to_owned()));
        Release { version: QemuVersion { major, minor, micro }, layout }
    }

    #[test]
    fn releases_of_a_series_that_write_alike_read_each_other() {
        let old = release([10, 0, 2], Some("x"));
        assert_eq!(old.compare(&release([10, 0, 13], Some("x"))), Ok(()));
        assert_eq!(old.compare(&release([10, 0, 13], Some("y"))), Err(Unlike::Layout));
        assert_eq!(old.compare(&release([10, 0, 13], None)), Err(Unlike::Unknown));
        assert_eq!(old.compare(&release([10, 1, 0], Some("x"))), Err(Unlike::Series));
        assert_eq!(old.compare(&release([11, 0, 2], Some("x"))), Err(Unlike::Series));
        // As before there was a layout.
        assert_eq!(old.compare(&release([10, 0, 2], None)), Ok(()));
    }

    #[test]
    fn a_version_is_text_in_messages() {
        let said = r#"{"qemu_version":"10.0.2","qemu_layout":"x"}"#;
        let release = release([10, 0, 2], Some("x"));
        assert_eq!(serde_json::to_string(&release).unwrap(), said);
        assert_eq!(serde_json::from_str::<Release>(said).unwrap(), release);
        for wrong in ["10.0", "10.0.2.1", "ten", "", "10.0.-2", "10.0.2 "] {
            let said = serde_json::json!({ "qemu_version": wrong });
            assert!(serde_json::from_value::<Release>(said).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_layout_is_what_was_said_and_not_in_which_order() {
        let of = StateLayout::of_text;
        assert_eq!(of(r#"{"a": {"x": 1, "y": 2}, "b": {}}"#), of(r#"{"b":{},"a":{"y":2,"x":1}}"#));
        assert_ne!(of(r#"{"a": {"x": 1}}"#), of(r#"{"a": {"x": 2}}"#));
        assert_ne!(of(r#"{"a": {"x": [1, 2]}}"#), of(r#"{"a": {"x": [2, 1]}}"#));
        for nothing in ["", "{}", "[]", "7", r#"{"a": "#] {
            assert_eq!(of(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn the_installed_qemu_says_the_same_twice() {
        let qemu = find_qemu().unwrap();
        let layout = StateLayout::of(&qemu).unwrap();
        assert!(layout.is_some());
        assert_eq!(StateLayout::of(&qemu).unwrap(), layout);
        assert_eq!(StateLayout::of(Path::new("/bin/false")).unwrap(), None);
        assert!(StateLayout::of(Path::new("/nowhere/qemu")).is_err());
    }
}
