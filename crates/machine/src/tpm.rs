//! The emulated TPM of a machine: swtpm, a process of its own.
//!
//! Its state is a part of QEMU's device state, so every checkpoint has it. Beside that swtpm keeps
//! the part that outlives a power-off in the VM's directory.

use crate::Plan;
use crate::qemu_log::SWTPM_LOG;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;
use understudy_qemu::process::Launch;
use understudy_qemu::user::{self, User};
use understudy_qemu::{Qemu, Role};

const PROGRAM: &str = "swtpm";
/// The directory of its state, in the VM's.
const DIRECTORY: &str = "tpm";
/// What outlives a power-off.
const STATE: &str = "tpm2-00.permall";
/// For the end of a swtpm whose QEMU has ended: it may be writing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A swtpm, which ends when its QEMU does.
pub(crate) struct Tpm(Qemu);

impl Tpm {
    /// Starts it, if the VM has one; and QEMU's end of its connection.
    pub(crate) fn start(
        plan: &Plan<'_>,
        user: Option<User>,
    ) -> anyhow::Result<Option<(Tpm, UnixStream)>> {
        if plan.definition.tpm.is_none() {
            return Ok(None);
        }
        if plan.former.is_some() {
            bail!("a VM with a TPM cannot go on in another QEMU on the same host");
        }
        let directory = plan.run_dir.join(DIRECTORY);
        let state = directory.join(STATE);
        let seed = plan.definition.tpm_state.as_deref().filter(|_| plan.role == Role::Fresh);
        let prepare = || -> anyhow::Result<()> {
            let kept = match plan.role {
                Role::Fresh => state.is_file().then(|| fs::read(&state)).transpose()?,
                // What it is to be comes with the device state.
                Role::Standby => None,
            };
            let seeded = seed.filter(|_| kept.is_none()).map(read_seed).transpose()?;
            user::give_directory(&directory, user)?;
            if let Some(content) = kept.or(seeded) {
                let mut options = File::options();
                let file = options.write(true).create_new(true).mode(0o600).open(&state)?;
                io::copy(&mut &content[..], &mut &file)?;
                file.sync_all()?;
                user::give(&file, user)?;
            }
            Ok(())
        };
        prepare().with_context(|| format!("cannot prepare {}", directory.display()))?;
        let (qemus, ours) = UnixStream::pair().context("cannot make a TPM's sockets")?;
        let control = format!("type=unixio,clientfd={}", ours.as_raw_fd());
        let arguments =
            ["socket", "--tpm2", "--tpmstate", "dir=.", "--ctrl", &control, "--terminate"];
        let process = Qemu::launch(&Launch {
            binary: Path::new(PROGRAM),
            args: &arguments.map(Into::into),
            env: &[],
            inherit: &[ours.as_fd()],
            log: &plan.run_dir.join(SWTPM_LOG),
            directory: Some(&directory),
            user,
            descriptors: None,
        })
        .context("the VM has a TPM, which needs the package swtpm on every host")?;
        Ok(Some((Tpm(process), qemus)))
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        // Whatever becomes of this wait, the process is ended after it.
        let _ = self.0.wait(PATIENCE);
    }
}

/// The state that another manager's swtpm has left in its directory.
fn read_seed(directory: &Path) -> anyhow::Result<Vec<u8>> {
    let file = directory.join(STATE);
    fs::read(&file).with_context(|| format!("cannot read the TPM's state, {}", file.display()))
}
