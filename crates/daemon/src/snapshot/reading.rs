//! The mark of a restore in its store, for whoever would delete what it reads.

use super::time_of;
use crate::host::Host;
use tracing::warn;
use understudy_cluster::messages::RestoreTask;
use understudy_snapshot::{Reading, Store};

impl Host {
    /// The member is about to be restored. A store that cannot be written can be restored from, too:
    /// there, nobody is kept from deleting.
    pub(super) fn begin_reading(&self, store: &Store, task: &RestoreTask) {
        if let Err(error) = store.begin_reading(&reading(task), &self.config.name, time_of(store)) {
            let (vm, number) = (task.vm(), task.number);
            warn!(%vm, "nobody is kept from deleting snapshot {number} while it is read: {error}");
        }
    }

    /// All of the member is there, or it is given up.
    pub(super) fn end_reading(&self, task: &RestoreTask) {
        let store = self.config.store_keys.open(&task.store);
        if let Err(error) = store.and_then(|store| store.end_reading(&reading(task))) {
            let (vm, number) = (task.vm(), task.number);
            warn!(%vm, "snapshot {number} counts as being restored until it is deleted by force: {error}");
        }
    }
}

fn reading(task: &RestoreTask) -> Reading {
    let (group, vm, id) = (task.group.name.clone(), task.vm().clone(), task.id.clone());
    Reading { group, number: task.number, vm, id }
}
