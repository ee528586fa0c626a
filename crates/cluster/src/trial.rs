//! Writes what a guest touches after a snapshot and a restore, for trials.

use crate::fill::Filler;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fs, io, thread};
use tracing::warn;
use understudy_machine::Machine;
use understudy_memory::Sample;
use understudy_protocol::PageIndex;
use understudy_protocol::VmName;
use understudy_report::traces::{RestoreTrace, SnapshotTrace, VARIABLE};
use understudy_threads::spawn;

/// Time for which a restored guest is watched: as long as a snapshot traces if nothing else is
/// asked.
const WATCHED: Duration = Duration::from_secs(7);

/// Writes what a VM touched while its snapshot was traced, if that is wanted.
pub fn write_accesses(vm: &VmName, accesses: &[PageIndex]) {
    if let Some(directory) = directory() {
        let accesses = accesses.iter().map(|page| page.0).collect();
        write(&SnapshotTrace::path(&directory, vm), &SnapshotTrace { accesses });
    }
}

/// A restored guest is watched.
pub struct Watch {
    machine: Arc<Machine>,
    filler: Arc<Filler>,
    touched: Option<Sample>,
    path: PathBuf,
}

impl Watch {
    /// Begins the trial of a guest that is about to start, if that is wanted.
    pub fn begin(machine: &Arc<Machine>, filler: &Arc<Filler>) -> anyhow::Result<Option<Watch>> {
        let Some(directory) = directory() else { return Ok(None) };
        let all_there = filler.state().complete;
        let touched = all_there.then(|| machine.watch_all()).transpose()?;
        let path = RestoreTrace::path(&directory, &machine.definition().name);
        Ok(Some(Watch { machine: machine.clone(), filler: filler.clone(), touched, path }))
    }

    /// The guest runs: writes what it touches, on a thread of its own.
    pub fn run(mut self) {
        let started = spawn("watched", move || {
            thread::sleep(WATCHED);
            let waits = self.filler.waits();
            let was_watched = self.touched.is_some();
            let touched = self.touched.take().map(Sample::end);
            if was_watched {
                self.machine.drop_guard();
            }
            let touched = touched.map(|pages| pages.iter().map(|page| page.0).collect());
            write(&self.path, &RestoreTrace { touched, waits });
        });
        if let Err(error) = started {
            warn!("nobody watches a restored guest: cannot start a thread: {error}");
        }
    }
}

fn directory() -> Option<PathBuf> {
    env::var_os(VARIABLE).map(PathBuf::from)
}

/// Writes the file whole or not at all: whoever waits for the file reads it at once.
fn write(path: &Path, trace: &impl Serialize) {
    let beside = path.with_extension("new");
    let written = serde_json::to_vec(trace)
        .map_err(io::Error::other)
        .and_then(|bytes| fs::write(&beside, bytes))
        .and_then(|()| fs::rename(&beside, path));
    if let Err(error) = written {
        warn!("cannot write {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    #[test]
    fn the_next_trace_of_a_vm_replaces_the_former() {
        let directory = tempfile::tempdir().unwrap();
        let path = RestoreTrace::path(directory.path(), &literal("web"));
        for waits in [1, 2] {
            let trace = RestoreTrace { touched: Some(vec![7, 3]), waits };
            write(&path, &trace);
            let read = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            assert_eq!(trace, read);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert_ne!(path, SnapshotTrace::path(directory.path(), &literal("web")));
    }
}
