//! How the daemon notices that a keeper has ended, and what it says then.

use super::note::{self, End, Found, Note};
use crate::host::Host;
use crate::vm::{FencedVm, Vm};
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_protocol::VmName;
use understudy_report::events::EventKind;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(250);

/// Watches for as long as the host lives. Those that ended before this daemon began are for `recover`
/// and `autostart`, as all that ran here is.
pub(crate) fn start(host: &Arc<Host>) -> io::Result<()> {
    for vm in host.directories() {
        if let Some(note) = host.dead_note(&vm) {
            host.forget_note(&note);
        }
    }
    let host = Arc::downgrade(host);
    thread::Builder::new().name("keepers".to_owned()).spawn(move || run(&host)).map(drop)
}

fn run(host: &Weak<Host>) {
    while let Some(host) = host.upgrade() {
        for vm in host.directories() {
            if host.dead_note(&vm).is_some() {
                host.tell_of_ended(&vm);
            }
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}

impl Host {
    fn dead_note(&self, vm: &VmName) -> Option<Note> {
        match note::look(&vm.below(&self.config.state_dir)) {
            Found::Nobody(note) => note,
            Found::Starting | Found::Lives(_) | Found::Unknown(_) => None,
        }
    }

    fn tell_of_ended(&self, vm: &VmName) {
        // Nobody starts the next one meanwhile.
        let _adding = self.adding.lock();
        let Some(note) = self.dead_note(vm) else { return };
        self.forget_note(&note);
        let lost = match note.end {
            Some(End::Gone) => return,
            Some(End::Fenced { generation, reason }) => {
                Some(FencedVm { name: vm.clone(), generation, reason })
            }
            None => {
                let reason = format!("its keeper (process {}) was killed", note.pid);
                self.events.of(vm).record(EventKind::GuestDied { reason: reason.clone() });
                let record = self.record(vm).ok().flatten();
                record.map(|record| FencedVm {
                    name: vm.clone(),
                    generation: record.image.generation,
                    reason: format!(
                        "{reason}; if no backup has taken it over, `understudy recover {vm}`"
                    ),
                })
            }
        };
        if let Some(lost) = lost {
            self.vms.lock().entry(vm.clone()).or_insert_with(|| Vm::Fenced(Arc::new(lost)));
        }
    }

    fn forget_note(&self, note: &Note) {
        if let Err(error) = note::forget(&note.vm.below(&self.config.state_dir)) {
            warn!(vm = %note.vm, "the end of its keeper cannot be noted: {error}");
        }
    }
}
