//! The programs and files that a host needs, and where they are found.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The library that the daemon preloads into QEMU.
const AGENT_FILE: &str = "libunderstudy_agent.so";
const QEMU: &str = "qemu-system-x86_64";

/// A missing program: where it was looked for, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Missing(pub String);

/// Finds QEMU on the PATH.
pub fn find_qemu() -> Result<PathBuf, Missing> {
    on_path(QEMU).ok_or_else(|| {
        Missing(format!(
            "{QEMU} is not on the PATH: install the package qemu-system-x86, \
             or name the binary as `qemu` in the host's configuration"
        ))
    })
}

/// Finds the agent library of this program.
pub fn find_agent() -> Result<PathBuf, Missing> {
    let executable =
        env::current_exe().map_err(|error| Missing(format!("/proc/self/exe: {error}")))?;
    agent_of(&executable)
}

/// Finds the agent library beside `executable`, or where packages install it.
pub fn agent_of(executable: &Path) -> Result<PathBuf, Missing> {
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let candidates = [folder.join(AGENT_FILE), folder.join("../lib/understudy").join(AGENT_FILE)];
    candidates.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        Missing(format!(
            "{AGENT_FILE} is neither {} nor {}: install it there, \
             or name it as `agent` in the host's configuration",
            candidates[0].display(),
            candidates[1].display(),
        ))
    })
}

/// The first program of this name on the PATH.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(name)).find(|file| is_executable(file))
}

/// Whether there is a program of this name.
pub fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}
