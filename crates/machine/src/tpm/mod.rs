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
/// The same beside that directory, while it is made anew: there is no moment at which no file has it.
const KEPT: &str = "tpm.kept";
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
        let prepared = match plan.role {
            Role::Fresh => prepare(plan.run_dir, plan.definition.tpm_state.as_deref(), user),
            // What it is to be comes with the device state.
            Role::Standby => user::give_directory(&directory, user).map_err(anyhow::Error::from),
        };
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
        Ok(Some((Tpm(process), qemus)))
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        // Whatever becomes of this wait, the process is ended after it.
        let _ = self.0.wait(PATIENCE);
    }
}

/// Makes swtpm's directory anew, with the state that the VM has, or begins with.
fn prepare(run_dir: &Path, seed: Option<&Path>, user: Option<User>) -> anyhow::Result<()> {
    let (directory, kept) = (run_dir.join(DIRECTORY), run_dir.join(KEPT));
    let state = directory.join(STATE);
    // A start that came no further has left the one, and perhaps nothing of the other.
    let found = [&kept, &state].into_iter().find(|file| file.is_file());
    let content = match found {
        Some(file) => Some(fs::read(file)?),
        None => seed.map(read_seed).transpose()?,
    };
    if let Some(content) = content.as_ref().filter(|_| found == Some(&state)) {
        let new = run_dir.join(format!("{KEPT}.new"));
        write(&new, content)?;
        fs::rename(&new, &kept)?;
        File::open(run_dir)?.sync_all()?;
    }
    user::give_directory(&directory, user)?;
    let Some(content) = content else { return Ok(()) };
    user::give(&write(&state, &content)?, user)?;
    File::open(&directory)?.sync_all()?;
    match fs::remove_file(&kept) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Writes a file that its owner alone may read, to stable storage.
fn write(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    io::copy(&mut &content[..], &mut &file)?;
    file.sync_all()?;
    Ok(file)
}

/// The state that another manager's swtpm has left in its directory.
fn read_seed(directory: &Path) -> anyhow::Result<Vec<u8>> {
    let file = directory.join(STATE);
    fs::read(&file).with_context(|| format!("cannot read the TPM's state, {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The directory of a VM whose TPM has this state.
    fn vm(content: &str) -> tempfile::TempDir {
        let vm = tempfile::tempdir().unwrap();
        fs::create_dir(vm.path().join(DIRECTORY)).unwrap();
        fs::write(vm.path().join(DIRECTORY).join(STATE), content).unwrap();
        vm
    }

    fn state(vm: &tempfile::TempDir) -> String {
        fs::read_to_string(vm.path().join(DIRECTORY).join(STATE)).unwrap()
    }

    #[test]
    fn a_tpm_is_the_same_after_a_start() {
        let vm = vm("endorsed");
        fs::write(vm.path().join(DIRECTORY).join("left"), "by swtpm").unwrap();
        prepare(vm.path(), None, None).unwrap();
        assert_eq!(state(&vm), "endorsed");
        assert!(!vm.path().join(DIRECTORY).join("left").exists() && !vm.path().join(KEPT).exists());
    }

    /// The file was read, removed, and written again: what ended in between ended the TPM.
    #[test]
    fn a_start_that_fails_in_the_middle_leaves_the_tpm() {
        let vm = vm("endorsed");
        // It cannot be removed as a file.
        let obstacle = vm.path().join(DIRECTORY).join("directory");
        fs::create_dir(&obstacle).unwrap();
        assert!(prepare(vm.path(), None, None).is_err());
        // As far as it may have come.
        let _ = fs::remove_file(vm.path().join(DIRECTORY).join(STATE));
        fs::remove_dir(&obstacle).unwrap();
        prepare(vm.path(), None, None).unwrap();
        assert_eq!(state(&vm), "endorsed");
    }

    #[test]
    fn a_new_tpm_begins_with_its_seed_and_an_old_one_stays() {
        let seed = tempfile::tempdir().unwrap();
        fs::write(seed.path().join(STATE), "of libvirt").unwrap();
        let new = tempfile::tempdir().unwrap();
        prepare(new.path(), Some(seed.path()), None).unwrap();
        assert_eq!(state(&new), "of libvirt");
        let old = vm("endorsed");
        prepare(old.path(), Some(seed.path()), None).unwrap();
        assert_eq!(state(&old), "endorsed");
    }
}
