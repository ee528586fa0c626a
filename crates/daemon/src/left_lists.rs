//! Lists of changed blocks that a process left open when it was killed. They tell what the guest wrote until then. What somebody changes
//! in an image before the next start is none of that: it is found out if the list was sealed before.

use crate::containment::spawn_for;
use crate::host::Host;
use std::path::{Path, PathBuf};
use tracing::{info, warn};
use understudy_disk::{ChangeMap, changes_path};
use understudy_protocol::{DiskIndex, VmName};
use understudy_replication::records::Record;

impl Host {
    /// Seals those of a VM, unless somebody has its images. Their storage may hang: nobody waits for it.
    pub(crate) fn seal_left_lists(&self, record: &Record) {
        let vm = &record.definition.name;
        let left = left_lists(record, &vm.below(&self.config.state_dir));
        if left.is_empty() {
            return;
        }
        let of = vm.clone();
        let seal = move || left.iter().for_each(|(list, image)| seal(&of, list, image));
        if let Err(error) = spawn_for(self, vm, "seal", seal) {
            warn!(%vm, "what is changed in its images until it starts is not noticed: no thread: {error}");
        }
    }
}

/// Lists that are open, and their images.
fn left_lists(record: &Record, directory: &Path) -> Vec<(PathBuf, PathBuf)> {
    let images = record.images().into_iter().enumerate();
    let lists = images.map(|(i, image)| (changes_path(directory, DiskIndex(i as u16)), image));
    lists.filter(|(list, _)| ChangeMap::is_open_at(list)).collect()
}

fn seal(vm: &VmName, list: &Path, image: &Path) {
    match ChangeMap::seal_left(list, image) {
        Ok(true) => info!(%vm, "sealed the list of changed blocks of {}", image.display()),
        Ok(false) => {}
        Err(error) => warn!(%vm, "cannot seal {}: {error}", list.display()),
    }
}
