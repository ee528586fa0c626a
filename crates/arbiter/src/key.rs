//! Keys: what the arbiter has a record of.

use std::fmt;
use std::path::{Path, PathBuf};
use understudy_protocol::{GroupName, VmName};

/// Names a record at the arbiter. No VM's name has a dot, so the kinds never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key<'a> {
    /// The ownership of a VM.
    Vm(&'a VmName),
    /// Incarnation of a group of VMs: how often it was restored.
    Incarnation(&'a GroupName),
    /// Whether the members of a restored group stay.
    Restore(&'a GroupName),
}

impl Key<'_> {
    /// Path of the record's folder, in the directory of the arbiter.
    pub fn below(&self, directory: &Path) -> PathBuf {
        directory.join(self.to_string())
    }
}

impl<'a> From<&'a VmName> for Key<'a> {
    fn from(vm: &'a VmName) -> Key<'a> {
        Key::Vm(vm)
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Vm(vm) => vm.fmt(f),
            Key::Incarnation(group) => write!(f, "cluster.{group}"),
            Key::Restore(group) => write!(f, "restore.{group}"),
        }
    }
}
