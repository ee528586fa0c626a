//! The evidence that is kept of a backup that has diverged, for whoever looks for the cause.

use super::backup::Following;
use crate::moments::pass;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use understudy_lockstep::Spot;
use understudy_machine::Machine;
use understudy_machine::home::CONSOLE_LOG;

/// Its directory in the VM's; the next divergence replaces it.
const DIRECTORY: &str = "diverged";

/// Keeps the reason and QEMU's state (`report.txt`), the end of the log that it got
/// (`log.bin`), its console, and what a comparison found different (`memory-BLOCK-OFFSET.bin`,
/// `disk-NUMBER-OFFSET.bin`). Gives their directory.
pub fn keep(
    vm_directory: &Path,
    machine: &Machine,
    following: &Following,
    reason: &str,
) -> anyhow::Result<PathBuf> {
    pass("keep-evidence");
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
        for (spot, content) in following.differing() {
            let (kind, of) = match spot {
                Spot::Page { block, .. } => ("memory", block),
                Spot::Extent { disk, .. } => ("disk", disk),
            };
            let name = format!("{kind}-{of}-{:#x}.bin", spot.offset());
            fs::write(directory.join(name), content)?;
        }
        if machine.local_sockets().console.is_some() {
            fs::copy(vm_directory.join(CONSOLE_LOG), directory.join(CONSOLE_LOG))?;
        }
        Ok(())
    };
    write().with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(directory)
}
