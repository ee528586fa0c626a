//! The emulated TPM of a machine: swtpm, a process of its own.
//!
//! Its state is a part of QEMU's device state, so every checkpoint has it. Beside that swtpm keeps
//! the part that outlives a power-off in the VM's directory ([`files`]), and a backup keeps it
//! there, too ([`mirror`]).

mod control;
mod files;
mod mirror;

pub use files::{TpmStateAt, has_tpm_state};
pub use mirror::TpmMirror;

use crate::Plan;
use crate::qemu_log::SWTPM_LOG;
use anyhow::{Context, bail};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tracing::info;
use understudy_qemu::process::Launch;
use understudy_qemu::user::User;
use understudy_qemu::{Qemu, Role};

const PROGRAM: &str = "swtpm";
/// Time for the end of a swtpm whose QEMU has ended: it may be writing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A swtpm, which ends when its QEMU does.
pub(crate) struct Tpm {
    process: Qemu,
    /// The VM's.
    run_dir: PathBuf,
    /// The time that it had used at the last look, in nanoseconds.
    used: AtomicU64,
}

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
        let directory = files::directory(plan.run_dir);
        let prepared = match plan.role {
            Role::Fresh => files::prepare(plan.run_dir, plan.definition.tpm_state.as_deref(), user),
            Role::Standby => files::prepare_standby(plan.run_dir, user).map(|()| None),
        };
        let mirrored =
            prepared.with_context(|| format!("cannot prepare {}", directory.display()))?;
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
        if let Some(mirrored) = mirrored {
            let vm = &plan.definition.name;
            info!(%vm, "its TPM begins as its mirror was at epoch {}", mirrored.epoch);
            control::set_permanent(&qemus, &mirrored.state)
                .context("swtpm does not take the state that this host has mirrored")?;
        }
        let run_dir = plan.run_dir.to_owned();
        Ok(Some((Tpm { process, run_dir, used: AtomicU64::new(0) }, qemus)))
    }

    /// Whether it has used a processor, or waited for one, since the last look.
    pub(crate) fn works(&self) -> bool {
        let used = used_time(self.process.pid()).unwrap_or_default();
        self.used.swap(used, Ordering::Relaxed) != used
    }

    pub(crate) fn settle(&self) -> anyhow::Result<()> {
        settle(&self.run_dir)
    }
}

/// Brings what swtpm has written in a VM's directory to stable storage: it is the TPM's state from then
/// on, and other copies are none.
pub fn settle(run_dir: &Path) -> anyhow::Result<()> {
    files::settle(run_dir).context("cannot settle the TPM's state")
}

/// The time that a process's first thread has used a processor, or waited for one.
fn used_time(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    let mut times = text.split_whitespace().map(str::parse::<u64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

impl Drop for Tpm {
    fn drop(&mut self) {
        // Whatever becomes of this wait, the process is ended after it.
        let _ = self.process.wait(PATIENCE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    /// Ends with the test.
    struct Process(Child);

    impl Process {
        fn begin(script: &str) -> Process {
            Process(Command::new("sh").args(["-c", script]).spawn().unwrap())
        }

        fn used(&self) -> u64 {
            used_time(self.0.id()).unwrap()
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_works_is_told_from_one_that_waits() {
        let works = Process::begin("while :; do :; done");
        let before = works.used();
        while works.used() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waits = Process::begin("exec sleep 1000");
        let settled = || {
            let before = waits.used();
            std::thread::sleep(Duration::from_millis(20));
            waits.used() == before
        };
        while !settled() {}
    }
}
