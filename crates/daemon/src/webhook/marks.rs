//! Marks of how far the receiver has been told what keepers remember: each daemon hears all of that from them anew.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use tracing::warn;
use understudy_arbiter::whole_file;
use understudy_protocol::VmName;
use understudy_report::events::{Event, ToldBy};

/// The last event of each VM's keeper that the receiver has, or never will have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
struct Last(BTreeMap<VmName, ToldBy>);

/// The marks, and the file in which the next daemon finds them.
pub(super) struct Marks {
    file: PathBuf,
    last: Last,
    /// Whether the file has others.
    is_written: bool,
    writing: Option<JoinHandle<()>>,
}

impl Marks {
    /// Reads those of a host, whose VMs have directories beside the file. Without them all is told once more.
    pub(super) fn of(state_dir: &Path) -> Marks {
        let file = state_dir.join("webhook.posted");
        let mut last = read(&file);
        last.0.retain(|vm, _| vm.below(state_dir).exists());
        Marks { file, last, is_written: true, writing: None }
    }

    /// Whether the receiver has been told an event by an earlier daemon. A keeper's numbers only grow, and they are told
    /// in their order.
    pub(super) fn have(&self, event: &Event) -> bool {
        let (Some(vm), Some(told)) = (&event.vm, &event.told_by) else { return false };
        let last = self.last.0.get(vm);
        last.is_some_and(|last| last.keeper == told.keeper && told.number <= last.number)
    }

    /// The receiver has the event.
    pub(super) fn note(&mut self, event: &Event) {
        let (Some(vm), Some(told)) = (&event.vm, &event.told_by) else { return };
        self.last.0.insert(vm.clone(), *told);
        self.is_written = false;
        self.write();
    }

    /// Has the file written, unless it is being written. What hangs with its storage does not hold up what is told.
    pub(super) fn write(&mut self) {
        if self.is_written || self.writing.as_ref().is_some_and(|writing| !writing.is_finished()) {
            return;
        }
        let (file, last) = (self.file.clone(), self.last.clone());
        match thread::Builder::new()
            .name("webhook-marks".to_owned())
            .spawn(move || write(&file, &last))
        {
            Ok(writing) => (self.writing, self.is_written) = (Some(writing), true),
            Err(error) => warn!("webhook: what was told is not noted: no thread: {error}"),
        }
    }
}

fn read(file: &Path) -> Last {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Last::default(),
        text => text.map_err(|error| error.to_string()),
    };
    let last = text.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
    last.unwrap_or_else(|error| {
        warn!("webhook: all that keepers remember is told again: {}: {error}", file.display());
        Last::default()
    })
}

fn write(file: &Path, last: &Last) {
    let text = serde_json::to_string(last).map_err(std::io::Error::other);
    if let Err(error) = text.and_then(|text| whole_file::replace(file, &text, 0o600)) {
        warn!("webhook: the next daemon tells again what was told: {}: {error}", file.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_report::events::{EventKind, Journal};

    /// Events of the VM's keeper, as its daemon has them.
    fn told(keeper: u32) -> Vec<Event> {
        let (keepers, daemons) = (Journal::default(), Journal::default());
        let db = keepers.of(&literal("db"));
        (0..3).for_each(|_| db.record(EventKind::Rebooted));
        for event in keepers.after(0, None).events {
            daemons.relay(event, Some(keeper));
        }
        daemons.after(0, None).events
    }

    #[test]
    fn marks_are_found_by_the_next_daemon_and_are_of_one_keeper() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("db")).unwrap();
        let events = told(7);
        let mut marks = Marks::of(directory.path());
        assert!(!marks.have(&events[0]));
        marks.note(&events[1]);
        marks.writing.take().unwrap().join().unwrap();
        let marks = Marks::of(directory.path());
        let have = |events: &[Event]| events.iter().map(|it| marks.have(it)).collect::<Vec<_>>();
        assert_eq!(have(&events), [true, true, false]);
        assert_eq!(have(&told(8)), [false; 3], "another keeper's");
        fs::write(&marks.file, "rotten").unwrap();
        assert!(!Marks::of(directory.path()).have(&events[0]), "rather twice than never");
    }
}
