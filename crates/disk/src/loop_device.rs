//! A loop device, for tests.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device on a file, until it is dropped.
pub(crate) struct LoopDevice(PathBuf);

impl LoopDevice {
    pub fn on(file: &Path) -> LoopDevice {
        let shown = losetup(&["--find", "--show", file.to_str().unwrap()]);
        LoopDevice(shown.trim().into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        losetup(&["--detach", self.0.to_str().unwrap()]);
    }
}

fn losetup(arguments: &[&str]) -> String {
    let output = Command::new("losetup").args(arguments).output().expect("losetup");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}
