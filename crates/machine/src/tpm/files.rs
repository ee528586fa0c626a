//! The files of a TPM's state in the VM's directory. There is no moment at which no file has it.
//!
//! While the guest runs here swtpm writes its own file, and no other counts. Two may lie beside it,
//! and count before it, for then it is no state of the guest's, or may not be whole: what a backup
//! has mirrored, and what swtpm's file held before its directory was made anew.

use super::mirror::Mirrored;
use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use understudy_qemu::user::{self, User};

/// The directory of swtpm's files, in the VM's.
const DIRECTORY: &str = "tpm";
/// The file of what outlives a power-off, among them.
const STATE: &str = "tpm2-00.permall";
/// The same, kept beside that directory.
const KEPT: &str = "tpm.kept";
/// The most bytes of it; libtpms writes less than a tenth of them.
const LONGEST: u64 = 1 << 20;
/// The file of what a backup has mirrored.
const MIRROR: &str = "tpm.mirror";

/// The places where the state may be on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpmStateAt {
    /// The guest ran there.
    Own,
    /// The state was backed up there: what is swtpm's own is none of the guest's.
    Mirror,
}

/// Whether there is a state of a VM's TPM in its directory.
pub fn has_tpm_state(run_dir: &Path, at: TpmStateAt) -> bool {
    let beside = mirror(run_dir).is_file() || kept(run_dir).is_file();
    beside || (at == TpmStateAt::Own && own_state(run_dir).is_ok_and(|state| state.is_some()))
}

pub(super) fn directory(run_dir: &Path) -> PathBuf {
    run_dir.join(DIRECTORY)
}

pub(super) fn mirror(run_dir: &Path) -> PathBuf {
    run_dir.join(MIRROR)
}

fn own(run_dir: &Path) -> PathBuf {
    directory(run_dir).join(STATE)
}

fn kept(run_dir: &Path) -> PathBuf {
    run_dir.join(KEPT)
}

/// Makes swtpm's directory anew, with the state that the VM has, or begins with; what was mirrored
/// swtpm itself has to be told.
pub(super) fn prepare(
    run_dir: &Path,
    seed: Option<&Path>,
    user: Option<User>,
) -> anyhow::Result<Option<Mirrored>> {
    if let Some(mirrored) = Mirrored::read(&mirror(run_dir))? {
        user::give_directory(&directory(run_dir), user)?;
        return Ok(Some(mirrored));
    }
    keep(run_dir)?;
    let content = match kept(run_dir).is_file() {
        true => Some(fs::read(kept(run_dir))?),
        false => seed.map(read_seed).transpose()?,
    };
    user::give_directory(&directory(run_dir), user)?;
    // An operator who wants a new one leaves an empty file.
    if let Some(content) = content.filter(|content| !content.is_empty()) {
        user::give(&write(&own(run_dir), &content)?, user)?;
        File::open(directory(run_dir))?.sync_all()?;
    }
    Ok(None)
}

/// Makes swtpm's directory anew for a TPM that comes with the device state. What this host has of
/// it belongs to its former images until then.
pub(super) fn prepare_standby(run_dir: &Path, user: Option<User>) -> anyhow::Result<()> {
    keep(run_dir)?;
    Ok(user::give_directory(&directory(run_dir), user)?)
}

/// Keeps what swtpm's file holds, if that is the state.
fn keep(run_dir: &Path) -> anyhow::Result<()> {
    if kept(run_dir).is_file() || mirror(run_dir).is_file() {
        return Ok(());
    }
    let Some(state) = own_state(run_dir)? else { return Ok(()) };
    let mut content = Vec::new();
    // It may grow meanwhile.
    state.take(LONGEST + 1).read_to_end(&mut content)?;
    ensure!(content.len() as u64 <= LONGEST, "{}", no_state(run_dir, "is too long"));
    Ok(replace(run_dir, KEPT, &content)?)
}

/// Opens swtpm's own file, if there is one. Its directory is of whoever may have taken swtpm, or QEMU, over: what that
/// user could not have read, or made, is no state.
fn own_state(run_dir: &Path) -> anyhow::Result<Option<File>> {
    let plain = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let opened = open(&directory(run_dir), plain | OFlag::O_DIRECTORY, Mode::empty());
    let opened = existing(opened).with_context(|| directory(run_dir).display().to_string())?;
    let Some(directory) = opened else { return Ok(None) };
    // A pipe is not waited for.
    let opened = openat(&directory, STATE, plain | OFlag::O_NONBLOCK, Mode::empty());
    let opened = match opened {
        Err(Errno::ELOOP) => bail!("{}", no_state(run_dir, "is a link")),
        opened => existing(opened).with_context(|| own(run_dir).display().to_string())?,
    };
    let Some(file) = opened.map(File::from) else { return Ok(None) };
    let (found, owner) = (file.metadata()?, File::from(directory).metadata()?.uid());
    ensure!(found.is_file(), "{}", no_state(run_dir, "is no regular file"));
    ensure!(found.uid() == owner, "{}", no_state(run_dir, "is another user's"));
    ensure!(found.len() <= LONGEST, "{}", no_state(run_dir, "is too long"));
    Ok(Some(file))
}

fn existing(opened: nix::Result<OwnedFd>) -> nix::Result<Option<OwnedFd>> {
    match opened {
        Err(Errno::ENOENT) => Ok(None),
        opened => opened.map(Some),
    }
}

fn no_state(run_dir: &Path, why: &str) -> String {
    format!(
        "{} {why}: no swtpm has made it, and whoever has is in the guest's QEMU or swtpm; put a copy of the TPM's state to {}, \
         or remove it, and the guest gets a new TPM",
        own(run_dir).display(),
        kept(run_dir).display()
    )
}

/// Makes what swtpm has written the state from now on.
pub(super) fn settle(run_dir: &Path) -> anyhow::Result<()> {
    let missing = || format!("there is no {}", own(run_dir).display());
    own_state(run_dir)?.with_context(missing)?.sync_all()?;
    File::open(directory(run_dir))?.sync_all()?;
    remove(&mirror(run_dir))?;
    Ok(remove(&kept(run_dir))?)
}

/// A backup has mirrored the state: what this host had before is none any more.
pub(super) fn put_mirror(run_dir: &Path, content: &[u8]) -> io::Result<()> {
    replace(run_dir, MIRROR, content)?;
    remove(&kept(run_dir))
}

fn remove(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Replaces a file as a whole; on return it is on stable storage.
fn replace(run_dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = run_dir.join(format!("{name}.new"));
    write(&new, content)?;
    fs::rename(&new, run_dir.join(name))?;
    File::open(run_dir)?.sync_all()
}

/// Writes a file that its owner alone may read, to stable storage.
fn write(path: &Path, content: &[u8]) -> io::Result<File> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let file = options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)?;
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
    use understudy_protocol::Epoch;

    /// The directory of a VM whose TPM has this state.
    fn vm(content: &str) -> tempfile::TempDir {
        let vm = tempfile::tempdir().unwrap();
        fs::create_dir(directory(vm.path())).unwrap();
        fs::write(own(vm.path()), content).unwrap();
        vm
    }

    fn state(vm: &tempfile::TempDir) -> String {
        fs::read_to_string(own(vm.path())).unwrap()
    }

    #[test]
    fn a_tpm_is_the_same_after_a_start() {
        let vm = vm("endorsed");
        fs::write(directory(vm.path()).join("left"), "by swtpm").unwrap();
        prepare(vm.path(), None, None).unwrap();
        assert_eq!(state(&vm), "endorsed");
        assert!(!directory(vm.path()).join("left").exists());
        settle(vm.path()).unwrap();
        assert!(!kept(vm.path()).exists());
    }

    /// The file was read, removed, and written again: what ended in between ended the TPM.
    #[test]
    fn a_start_that_fails_in_the_middle_leaves_the_tpm() {
        let vm = vm("endorsed");
        // As far as it may have come: what swtpm has is gone.
        keep(vm.path()).unwrap();
        fs::remove_dir_all(directory(vm.path())).unwrap();
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

    /// It was read by root, and the guest's next TPM told what was in it.
    #[test]
    fn what_swtpm_could_not_have_read_or_made_is_no_state() {
        use std::os::unix::fs::{chown, symlink};
        let refused = |vm: &tempfile::TempDir, words: &str| {
            assert!(!has_tpm_state(vm.path(), TpmStateAt::Own), "{words}");
            for error in [
                prepare(vm.path(), None, None).map(drop).unwrap_err(),
                prepare_standby(vm.path(), None).unwrap_err(),
                settle(vm.path()).unwrap_err(),
            ] {
                assert!(format!("{error:#}").contains(words), "{error:#}");
            }
            assert!(!kept(vm.path()).exists(), "{words}");
        };
        let secret = tempfile::NamedTempFile::new().unwrap();
        fs::write(secret.path(), "of root").unwrap();
        let vm = vm("endorsed");
        let own = own(vm.path());
        let state = File::options().write(true).open(&own).unwrap();
        state.set_len(1 << 30).unwrap();
        refused(&vm, "is too long");
        fs::remove_file(&own).unwrap();
        symlink(secret.path(), &own).unwrap();
        refused(&vm, "is a link");
        fs::remove_file(&own).unwrap();
        nix::unistd::mkfifo(&own, Mode::S_IRWXU).unwrap();
        refused(&vm, "is no regular file");
        fs::remove_file(&own).unwrap();
        fs::write(&own, "of root").unwrap();
        chown(directory(vm.path()), Some(12_345), None).unwrap();
        refused(&vm, "is another user's");
        chown(&own, Some(12_345), None).unwrap();
        prepare(vm.path(), None, None).unwrap();
        assert_eq!(fs::read_to_string(kept(vm.path())).unwrap(), "of root");
    }

    #[test]
    fn a_directory_that_is_a_link_is_not_swtpms() {
        let (vm, other) = (tempfile::tempdir().unwrap(), vm("of another"));
        std::os::unix::fs::symlink(directory(other.path()), directory(vm.path())).unwrap();
        assert!(!has_tpm_state(vm.path(), TpmStateAt::Own));
        assert!(prepare(vm.path(), None, None).is_err());
        assert!(!kept(vm.path()).exists());
    }

    /// A standby's swtpm writes a file of its own, which is none of the guest's.
    #[test]
    fn what_a_backup_has_counts_before_what_its_swtpm_wrote() {
        let vm = vm("of the former images");
        prepare_standby(vm.path(), None).unwrap();
        fs::write(own(vm.path()), "of nobody").unwrap();
        assert!(has_tpm_state(vm.path(), TpmStateAt::Mirror), "of its former images");
        prepare(vm.path(), None, None).unwrap();
        assert_eq!(state(&vm), "of the former images");

        let mirrored = Mirrored { epoch: Epoch(7), state: b"endorsed".to_vec() };
        mirrored.write(vm.path()).unwrap();
        assert!(!kept(vm.path()).exists());
        for _ in 0..2 {
            // However often it is begun.
            let found = prepare(vm.path(), None, None).unwrap().unwrap();
            assert_eq!((found.epoch, &found.state[..]), (Epoch(7), &b"endorsed"[..]));
            assert!(!own(vm.path()).exists());
        }
        assert!(settle(vm.path()).is_err(), "swtpm has written nothing yet");
        assert!(has_tpm_state(vm.path(), TpmStateAt::Mirror));
        fs::write(own(vm.path()), "endorsed").unwrap();
        settle(vm.path()).unwrap();
        assert!(!has_tpm_state(vm.path(), TpmStateAt::Mirror));
        assert!(has_tpm_state(vm.path(), TpmStateAt::Own));
    }

    #[test]
    fn an_operator_who_leaves_an_empty_file_gets_a_new_tpm() {
        let vm = vm("of nobody");
        fs::write(kept(vm.path()), "").unwrap();
        assert!(has_tpm_state(vm.path(), TpmStateAt::Mirror));
        prepare(vm.path(), None, None).unwrap();
        assert!(!own(vm.path()).exists());
    }
}
