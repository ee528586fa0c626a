//! Identity of measurements that belong together: the build, the guest, the machine.

use super::store::Run;
use crate::bench::machine::Machine;
use crate::bench::words;
use crate::parts::{product, this_program};
use anyhow::{Context, Result};
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;
use understudy_qemu::Capabilities;
use understudy_qemu::definition::AcceleratorChoice;
use understudy_qemu::programs::{agent_of, find_qemu};

/// Letters of the hash that are kept: enough to tell builds apart.
const HASH_LETTERS: usize = 16;

/// The product and this program on this machine, with these files of the guest.
pub fn run(scale: &str, pinned: bool, guest: &[PathBuf]) -> Result<Run> {
    let qemu = find_qemu()?;
    let product = product().map_err(words)?;
    let agent = agent_of(&product)?;
    let capabilities = Capabilities::probe(&qemu)?;
    let accel = capabilities.accelerator(AcceleratorChoice::Auto)?;
    let files = [&[this_program().map_err(words)?, product, agent][..], guest].concat();
    Ok(Run {
        build: hash(&files)?,
        scale: scale.to_owned(),
        pinned,
        commit: commit(),
        machine: Machine::here(capabilities.version.to_string(), accel.to_string()),
    })
}

/// The commit of the sources that this program was built in, as far as they and git are there.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        let output = git.args(["-C", env!("CARGO_MANIFEST_DIR")]).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=7", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { commit + "+" })
}

/// One hash over all of these files.
fn hash(files: &[PathBuf]) -> Result<String> {
    let mut all = blake3::Hasher::new();
    for path in files {
        let read = |file: File| blake3::Hasher::new().update_reader(file).map(|one| one.finalize());
        let one = File::open(path).and_then(read);
        let one = one.with_context(|| format!("cannot read {}", path.display()))?;
        all.update(one.as_bytes());
    }
    Ok(all.finalize().to_hex()[..HASH_LETTERS].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_is_another_build() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        std::fs::write(&one, "1").unwrap();
        std::fs::write(&two, "2").unwrap();
        let both = [one.clone(), two.clone()];
        assert_eq!(hash(&both).unwrap(), hash(&both).unwrap());
        assert_ne!(hash(&both).unwrap(), hash(&[one.clone(), one.clone()]).unwrap());
        // What is in which file counts, not only all of it together.
        std::fs::write(&two, "").unwrap();
        let before = hash(&both).unwrap();
        std::fs::write(&one, "").unwrap();
        std::fs::write(&two, "1").unwrap();
        assert_ne!(hash(&both).unwrap(), before);
        assert!(hash(&[folder.path().join("none")]).is_err());
    }
}
