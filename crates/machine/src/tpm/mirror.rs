//! A TPM's state on the host that backs its VM up: a file, as the mirrors of the disks are.

use super::files;
use anyhow::{Context, anyhow};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use understudy_protocol::Epoch;
use understudy_qemu::tpm_state::permanent_state;

const EPOCH: &[u8] = b"epoch ";

/// A state, and the epoch at whose end it became that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mirrored {
    pub epoch: Epoch,
    /// The state as swtpm gave it to QEMU.
    pub state: Vec<u8>,
}

impl Mirrored {
    /// The one that is there, if one is.
    pub fn read(path: &Path) -> anyhow::Result<Option<Mirrored>> {
        let content = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            content => content.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let mirrored = Mirrored::decode(&content);
        mirrored.map(Some).ok_or_else(|| anyhow!("{} is no TPM's state", path.display()))
    }

    /// Writes it in place of any other; on return it is on stable storage.
    pub fn write(&self, run_dir: &Path) -> io::Result<()> {
        files::put_mirror(run_dir, &self.encode())
    }

    fn encode(&self) -> Vec<u8> {
        [EPOCH, self.epoch.to_string().as_bytes(), b"\n", &self.state].concat()
    }

    fn decode(content: &[u8]) -> Option<Mirrored> {
        let content = content.strip_prefix(EPOCH)?;
        let end = content.iter().position(|&byte| byte == b'\n')?;
        let epoch = std::str::from_utf8(&content[..end]).ok()?.parse().ok()?;
        let state = content[end + 1..].to_vec();
        (!state.is_empty()).then_some(Mirrored { epoch: Epoch(epoch), state })
    }
}

/// The state of a TPM whose VM this host backs up.
#[derive(Debug)]
pub struct TpmMirror {
    /// The VM's.
    run_dir: PathBuf,
    /// The state that the file holds, once this session has written it.
    state: Vec<u8>,
}

impl TpmMirror {
    /// The mirror in a VM's directory, before its session's first epoch.
    pub fn new(run_dir: &Path) -> TpmMirror {
        TpmMirror { run_dir: run_dir.to_owned(), state: Vec::new() }
    }

    /// The epoch that was applied ends with this device state. A new state of the TPM, of which there is
    /// one each few seconds at most, is on stable storage when this returns.
    pub fn apply(&mut self, epoch: Epoch, device_state: &[u8]) -> anyhow::Result<()> {
        let state = permanent_state(device_state)?;
        if state == self.state {
            return Ok(());
        }
        let mirrored = Mirrored { epoch, state: state.to_vec() };
        mirrored.write(&self.run_dir).context("cannot mirror the state of the VM's TPM")?;
        self.state = mirrored.state;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirrored_state_comes_back_and_a_damaged_one_is_an_error() {
        let vm = tempfile::tempdir().unwrap();
        let path = files::mirror(vm.path());
        assert_eq!(Mirrored::read(&path).unwrap(), None);
        let mirrored = Mirrored { epoch: Epoch(12), state: b"a\nb".to_vec() };
        mirrored.write(vm.path()).unwrap();
        assert_eq!(Mirrored::read(&path).unwrap(), Some(mirrored));
        for damaged in [&b""[..], b"epoch 12\n", b"epoch x\nab", b"epoch 12"] {
            fs::write(&path, damaged).unwrap();
            let words = Mirrored::read(&path).unwrap_err().to_string();
            assert!(words.contains("tpm.mirror"), "{words}");
        }
    }
}
