//! Settings of a disk: what is looked at often, and changed seldom.

use crate::changes::ChangeMap;
use crate::reads::Reads;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use understudy_threads::RwLock;

/// Settings behind a lock of their own, which nobody holds while he waits: a write that waits for
/// its sink, with the order locked, keeps neither reads waiting nor whoever reports.
pub(super) struct Settings(RwLock<Values>);

struct Values {
    path: PathBuf,
    changes: Option<Arc<ChangeMap>>,
    reads: Reads,
}

impl Settings {
    pub fn new(path: &Path) -> Settings {
        let path = path.to_owned();
        Settings(RwLock::new(Values { path, changes: None, reads: Reads::default() }))
    }

    /// Path of the image.
    pub fn path(&self) -> PathBuf {
        self.look(|values| values.path.clone())
    }

    pub fn set_path(&self, path: &Path) {
        let path = path.to_owned();
        self.change(|values| mem::replace(&mut values.path, path));
    }

    /// Map where changes are noted, if anywhere.
    pub fn changes(&self) -> Option<Arc<ChangeMap>> {
        self.look(|values| values.changes.clone())
    }

    /// Sets where changes are noted; to be called with the order locked.
    pub fn set_changes(&self, changes: Option<Arc<ChangeMap>>) {
        self.change(|values| mem::replace(&mut values.changes, changes));
    }

    /// Choice of what is done about the guest's reads.
    pub fn reads(&self) -> Reads {
        self.look(|values| values.reads.clone())
    }

    pub fn set_reads(&self, reads: Reads) {
        self.change(|values| mem::replace(&mut values.reads, reads));
    }

    fn look<T>(&self, look: impl FnOnce(&Values) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// `change` gives what was there before, which is dropped outside the lock: that may take long.
    fn change<T>(&self, change: impl FnOnce(&mut Values) -> T) {
        let former = change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
        drop(former);
    }
}
