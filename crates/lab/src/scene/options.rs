//! Options that a scene is made of, and whether what they need is there.

use super::guest::{BOOT_IMAGE, GuestKind, IMAGES, INITRD, INSTALLED_IMAGE, KERNEL};
use crate::bench_guest::{BENCH_IMAGE, BenchGuest, check_file};
use crate::booted;
use crate::host::{HostOptions, HostProcess};
use crate::lab::{GUEST_ADDRESS, Lab};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use understudy_protocol::Policy;
use understudy_qemu::cache;

/// Options that a scene is made of.
#[derive(Clone, Debug)]
pub struct SceneOptions {
    /// The program under test.
    pub binary: PathBuf,
    /// Path where `guests/build` put the guests' files.
    pub guest_files: PathBuf,
    /// The hosts.
    pub hosts: Vec<String>,
    /// Networks between the hosts for their daemons alone; without, they use
    /// the guest's.
    pub cables: usize,
    /// The daemons' options, by host; a host that is not named has none.
    pub daemons: BTreeMap<String, HostOptions>,
    /// The guest.
    pub kind: GuestKind,
    /// Further arguments of its kernel.
    pub kernel_arguments: &'static str,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Its disks, 0 to 2; without the first there is no record server to use.
    pub disks: usize,
    /// Whether the second disk is a qcow2 image; all others are raw.
    pub second_disk_is_qcow2: bool,
    /// Its cards, 1 or 2.
    pub cards: usize,
    /// QEMU's accelerator, as `accel` in the definition; its default without.
    pub accel: Option<String>,
    /// The checkpoint policy in the definition; the product's default without.
    pub policy: Option<Policy>,
    /// Whether its QEMU counts instructions from the start, as `lockstep` in the definition.
    pub lockstep: bool,
    /// Whether guests go on from where one like them had booted, instead of booting: for daemons
    /// with fail points, and tests that are not about the boot.
    pub booted: bool,
    /// Whether the first host has a processor to itself, and all else another one.
    pub pinned: bool,
}

impl SceneOptions {
    /// Hosts a and b; Linux with 512 MiB, one vCPU, one disk, one card.
    pub fn new(binary: &Path, guest_files: &Path) -> SceneOptions {
        SceneOptions {
            binary: binary.to_owned(),
            guest_files: guest_files.to_owned(),
            hosts: vec!["a".to_owned(), "b".to_owned()],
            cables: 0,
            daemons: BTreeMap::new(),
            kind: GuestKind::Linux,
            kernel_arguments: "",
            memory_mib: 512,
            vcpus: 1,
            disks: 1,
            second_disk_is_qcow2: false,
            cards: 1,
            accel: None,
            policy: None,
            lockstep: false,
            booted: false,
            pinned: false,
        }
    }

    /// A host's daemon, started with its options. What QEMU can do is known to it, as on a host where a
    /// daemon ran before.
    pub(super) fn start_daemon(&self, lab: &Lab, name: &str) -> Result<HostProcess> {
        let mut options = self.daemons.get(name).cloned().unwrap_or_default();
        let cache = self.guest_files.join("cache");
        if fs::create_dir_all(&cache).is_ok() {
            let cache = cache.canonicalize()?.display().to_string();
            // A story's own comes behind it, and counts.
            options.environment.insert(0, (cache::VARIABLE.to_owned(), cache));
        }
        HostProcess::start_with(lab, name, &self.binary, &options)
    }

    /// The files that the guest is made of, in `guest_files`.
    pub(super) fn sources(&self) -> Vec<&'static str> {
        match self.kind {
            GuestKind::BootSector => vec![BOOT_IMAGE],
            GuestKind::Bench => vec![KERNEL, INITRD, BENCH_IMAGE],
            GuestKind::Installed => vec![INSTALLED_IMAGE, IMAGES[0]],
            GuestKind::Linux => {
                [&[KERNEL, INITRD][..], &IMAGES[..self.disks.min(IMAGES.len())]].concat()
            }
        }
    }

    /// Has a guest start where one like it had booted, if guests do.
    pub(super) fn spare_boot(&self, lab: &Lab, definition: &Path) -> Result<()> {
        if !self.booted {
            return Ok(());
        }
        booted::prepare(lab, definition, &self.guest_files.join("booted"), &self.binary)
    }

    /// Says what is missing or impossible; [`Scene::start`](super::Scene::start) does so as well.
    pub fn check(&self) -> Result<()> {
        ensure!(self.disks <= IMAGES.len(), "{} disks asked for, 2 possible", self.disks);
        ensure!((1..=2).contains(&self.cards), "{} cards asked for, 1 or 2 possible", self.cards);
        if self.kind == GuestKind::Bench {
            ensure!(
                self.disks == 1 && self.cards == 1,
                "the bench guest has one disk and one card"
            );
            BenchGuest::files(&self.guest_files, GUEST_ADDRESS)?;
        }
        if self.kind == GuestKind::Installed {
            ensure!(
                self.cards == 1 && !self.second_disk_is_qcow2,
                "the installed guest has one card"
            );
            check_file(&self.guest_files.join(INSTALLED_IMAGE), "guests/installed")?;
        }
        for name in self.sources() {
            check_file(&self.guest_files.join(name), "make guests")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scene;

    #[test]
    fn wrong_options_are_refused_before_anything_is_built() {
        let directory = tempfile::tempdir().unwrap();
        let options = SceneOptions::new(Path::new("understudy"), directory.path());
        let refuse = |options| Scene::start(options).err().expect("an error").to_string();
        let missing = refuse(options.clone());
        assert!(missing.contains("vmlinuz") && missing.contains("make guests"), "{missing}");
        let disks = refuse(SceneOptions { disks: 3, ..options.clone() });
        assert!(disks.contains("3 disks"), "{disks}");
        assert!(refuse(SceneOptions { cards: 0, ..options }).contains("0 cards"));
    }
}
