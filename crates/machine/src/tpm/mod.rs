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
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tracing::info;
use understudy_qemu::process::Launch;
use understudy_qemu::user::{RunAs, User};
use understudy_qemu::{Qemu, Role};

const PROGRAM: &str = "swtpm";
/// Time for the end of a swtpm whose QEMU has ended: it may be writing.
const PATIENCE: Duration = Duration::from_secs(2);

/// What must be known of a swtpm, beside its pidfd, to go on with it in another process. QEMU has its connection.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct TpmNote {
    pid: u32,
    /// Offset at which its words begin in its log.
    log_start: u64,
}

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
        let (process, qemus) = launch(Path::new(PROGRAM), plan.run_dir, user)
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

    /// What the next process needs to go on with it.
    pub(crate) fn entrusted(&self) -> io::Result<(TpmNote, OwnedFd)> {
        let note = TpmNote { pid: self.process.pid(), log_start: self.process.log_start() };
        Ok((note, self.process.as_fd().try_clone_to_owned()?))
    }

    /// One that another process has started, which is no more.
    pub(crate) fn adopt(note: TpmNote, pidfd: OwnedFd, run_dir: &Path) -> Tpm {
        let process = Qemu::adopt(note.pid, pidfd, run_dir.join(SWTPM_LOG), note.log_start);
        Tpm { process, run_dir: run_dir.to_owned(), used: AtomicU64::new(0) }
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

/// Starts swtpm in its prepared directory of a VM's; and QEMU's end of its connection.
fn launch(
    program: &Path,
    run_dir: &Path,
    user: Option<User>,
) -> anyhow::Result<(Qemu, UnixStream)> {
    let (qemus, ours) = UnixStream::pair().context("cannot make a TPM's sockets")?;
    let control = format!("type=unixio,clientfd={}", ours.as_raw_fd());
    let arguments = ["socket", "--tpm2", "--tpmstate", "dir=.", "--ctrl", &control, "--terminate"];
    let process = Qemu::launch(&Launch {
        binary: program,
        args: &arguments.map(Into::into),
        env: &[],
        inherit: &[ours.as_fd()],
        log: &run_dir.join(SWTPM_LOG),
        directory: Some(&files::directory(run_dir)),
        user,
        descriptors: None,
    })?;
    Ok((process, qemus))
}

/// Starts swtpm as for a VM with its files in `state_dir`, and has it begin with a new TPM; nothing of it stays.
pub fn try_out(program: &Path, state_dir: &Path, run_as: &RunAs) -> anyhow::Result<()> {
    // No VM has such a name.
    let home = tempfile::Builder::new().prefix(".tpm-").tempdir_in(state_dir);
    let home =
        home.with_context(|| format!("cannot make a directory in {}", state_dir.display()))?;
    let user = run_as.next();
    files::prepare(home.path(), None, user)?;
    let (process, swtpm) = launch(program, home.path(), user)?;
    let begun = control::initialise(&swtpm);
    drop(swtpm);
    let _ = process.wait(PATIENCE);
    begun.with_context(|| match process.last_words() {
        // What it inherits is refused it, too.
        words if words.is_empty() => "it says nothing".to_owned(),
        words => words,
    })
}

/// What to do about a swtpm that cannot use its files, as a part of a sentence.
pub fn confinement(state_dir: &Path) -> String {
    format!(
        "if AppArmor confines swtpm, as on Ubuntu (`aa-status` names it), write the line `{}/** rwk,` to \
         /etc/apparmor.d/local/usr.bin.swtpm, then `apparmor_parser -r /etc/apparmor.d/usr.bin.swtpm`",
        state_dir.display()
    )
}

/// An error of a QEMU's start, with what to do if its swtpm is the reason.
pub(crate) fn explain(error: anyhow::Error, run_dir: &Path) -> anyhow::Error {
    match (format!("{error:#}").contains("tpm-emulator"), run_dir.parent()) {
        (true, Some(state_dir)) => error.context(confinement(state_dir)),
        _ => error,
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
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command};

    // Before, `doctor` had not tried it: an AppArmor that keeps swtpm from its files showed when a VM did not start.
    #[test]
    fn a_swtpm_that_cannot_begin_a_tpm_is_noticed_and_nothing_stays() {
        let folder = tempfile::tempdir().unwrap();
        let state_dir = folder.path().join("state");
        fs::create_dir(&state_dir).unwrap();
        let try_out = |program: &Path| try_out(program, &state_dir, &RunAs::OwnNumber);
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // None is written here: another test's fork could have it open as it is to run.
        for (program, words) in [("/bin/ls", "unrecognized option"), ("/bin/false", "says nothing")]
        {
            let error = format!("{:#}", try_out(Path::new(program)).unwrap_err());
            assert!(error.contains(words), "{error}");
            assert_eq!(fs::read_dir(&state_dir).unwrap().count(), 0);
        }
        try_out(Path::new(PROGRAM)).unwrap();
        assert_eq!(fs::read_dir(&state_dir).unwrap().count(), 0);
        let failed =
            anyhow::anyhow!("qemu: tpm-emulator: TPM result for CMD_INIT: 0x9 operation failed");
        let words = format!("{:#}", explain(failed, &state_dir.join("db")));
        assert!(words.contains(&format!("`{}/** rwk,`", state_dir.display())), "{words}");
        assert!(words.contains("CMD_INIT"), "{words}");
        let other = explain(anyhow::anyhow!("no memory"), &state_dir.join("db"));
        assert_eq!(format!("{other:#}"), "no memory");
    }

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
