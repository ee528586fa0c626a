//! What is kept of a backup that has diverged, for whoever looks for the cause.

use super::backup::Following;
use crate::home::CONSOLE_LOG;
use crate::machine::Machine;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// In the VM's directory; the next divergence replaces it.
const DIRECTORY: &str = "diverged";

/// Keeps the reason and QEMU's state (`report.txt`), the end of the log that it got
/// (`log.bin`) and its console. Gives their directory.
pub fn keep(
    vm_directory: &Path,
    machine: &Machine,
    following: &Following,
    reason: &str,
) -> anyhow::Result<PathBuf> {
    let directory = vm_directory.join(DIRECTORY);
    let write = || -> std::io::Result<()> {
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir(&directory)?,
        }
        let (begins, log) = following.recent();
        let ends = begins + log.len();
        let status = machine.log().map(|log| log.status());
        let report = format!(
            "{reason}\nQEMU: {status:#?}\nQEMU got the log up to {ends}; log.bin begins at {begins}\n\
             QEMU said: {}\n",
            machine.last_words()
        );
        fs::write(directory.join("report.txt"), report)?;
        fs::write(directory.join("log.bin"), log)?;
        if let Some(console) = machine.console() {
            fs::copy(console.with_file_name(CONSOLE_LOG), directory.join(CONSOLE_LOG))?;
        }
        Ok(())
    };
    write().with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(directory)
}
