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
use understudy_protocol::validity::ImageRole;
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
        // The next keeper's words are about to be there.
        if !self.arrivals.has(vm) {
            self.notice_end_of_keeper(vm);
        }
    }

    /// Notices that a VM's last keeper has ended, if it has: before the next one is started, too, whose
    /// words would cover its own. To be called under the lock `adding`.
    pub(crate) fn notice_end_of_keeper(&self, vm: &VmName) {
        let Some(note) = self.dead_note(vm) else { return };
        self.forget_note(&note);
        let lost = match note.end {
            Some(End::Gone) => return,
            Some(End::Fenced { generation, reason }) => {
                Some(FencedVm { name: vm.clone(), generation, reason })
            }
            None => self.lost_with(&note),
        };
        if let Some(lost) = lost {
            self.vms.lock().entry(vm.clone()).or_insert_with(|| Vm::Fenced(Arc::new(lost)));
        }
    }

    /// What was lost with a keeper that was killed: a guest, if it ran there; else a backup, whose
    /// primary notices.
    fn lost_with(&self, note: &Note) -> Option<FencedVm> {
        let vm = &note.vm;
        let reason = format!("its keeper (process {}) was killed", note.pid);
        let events = self.events.of(vm);
        let record = self.record(vm).ok().flatten();
        let Some(record) = record.filter(|record| record.image.role == ImageRole::Active) else {
            events.note(reason);
            events.record(EventKind::StoodDown);
            return None;
        };
        events.record(EventKind::GuestDied { reason: reason.clone() });
        Some(FencedVm {
            name: vm.clone(),
            generation: record.image.generation,
            reason: format!("{reason}; if no backup has taken it over, `understudy recover {vm}`"),
        })
    }

    fn forget_note(&self, note: &Note) {
        if let Err(error) = note::forget(&note.vm.below(&self.config.state_dir)) {
            warn!(vm = %note.vm, "the end of its keeper cannot be noted: {error}");
        }
    }
}
