//! The agent's library as it was when this process began: a package's upgrade puts another in its place, which may speak
//! a version that this process does not.

use crate::host::not_found;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process;
use understudy_qemu::programs::Missing;
use understudy_qemu::user::path_in_qemu;
use understudy_report::error::HostError;

/// The agent's library, held open.
#[derive(Debug)]
pub struct AgentFile {
    file: File,
    path: PathBuf,
}

impl AgentFile {
    /// Opens it.
    pub fn open(path: &Path) -> Result<AgentFile, HostError> {
        let missing =
            |error: io::Error| not_found(Missing(format!("agent: {}: {error}", path.display())));
        let file = File::open(path).map_err(missing)?;
        let path = path_in_qemu(file.as_raw_fd());
        Ok(AgentFile { file, path })
    }

    /// The path at which this process finds it, whatever has become of the file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path at which a process that this one starts finds it.
    pub(crate) fn path_from_outside(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", process::id(), self.file.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    #[test]
    fn a_library_that_was_replaced_is_found_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let [library, next] = ["agent.so", "next"].map(|name| directory.path().join(name));
        fs::write(&library, "this").unwrap();
        let agent = AgentFile::open(&library).unwrap();
        fs::write(&next, "another").unwrap();
        fs::rename(&next, &library).unwrap();
        assert_eq!(fs::read_to_string(agent.path()).unwrap(), "this");
        let seen = Command::new("cat").arg(agent.path_from_outside()).output().unwrap();
        assert_eq!(seen.stdout, b"this");
        let again = AgentFile::open(&agent.path_from_outside()).unwrap();
        drop(agent);
        assert!(again.path().is_file() && fs::read_to_string(again.path()).unwrap() == "this");
        let error = AgentFile::open(&next).unwrap_err();
        assert!(error.message.contains("next"), "{error}");
    }
}
