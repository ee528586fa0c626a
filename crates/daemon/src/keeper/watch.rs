//! Watch by which the daemon notices that a keeper has ended, and what it says then.

use super::note::{self, End, Found, Note};
use crate::autostart;
use crate::host::Host;
use crate::inventory::{Entries, Inventory};
use crate::vm::{FencedVm, Vm};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_report::events::EventKind;

/// Time between two looks while more is about to come.
const INTERVAL: Duration = Duration::from_millis(250);
/// The same otherwise: that a keeper has begun, or ended, is told by whoever notices it.
pub(super) const CALM: Duration = Duration::from_secs(2);

/// Watches for as long as the host lives. Those that ended before this daemon began are for `recover`
/// and `autostart`, as all that ran here is.
pub(crate) fn start(host: &Arc<Host>) -> io::Result<()> {
    for vm in host.directories() {
        if let Some(note) = host.dead_note(&vm) {
            host.forget_note(&note);
        }
        // Before anybody can ask for it.
        host.take_up(&vm);
    }
    let host = Arc::downgrade(host);
    thread::Builder::new().name("keepers".to_owned()).spawn(move || run(&host)).map(drop)
}

fn run(host: &Weak<Host>) {
    let Some(mut word) = host.upgrade().map(|host| host.word_of_keepers()) else { return };
    while let Some(host) = host.upgrade() {
        let is_more_to_come = host.look_at_keepers();
        drop(host);
        word.wait(is_more_to_come);
        fail::fail_point!("look-at-keepers");
    }
}

/// Word of keepers that have begun, or ended: whoever looks after them waits for it, and so need not look all the time.
pub struct Word {
    vms: Inventory,
    heard: u64,
}

impl Word {
    fn of(vms: &Inventory) -> Word {
        Word { vms: vms.clone(), heard: vms.look(|all| all.turns_of_keepers) }
    }

    /// Tells all that wait.
    pub fn tell(&self) {
        self.vms.tell_of_keepers();
    }

    /// Waits for what this was not told yet. If more is about to come, of which nobody tells, for as long as there is between
    /// two tries: whoever tries tells, too.
    pub fn wait(&mut self, is_more_to_come: bool) {
        match is_more_to_come {
            true => thread::sleep(INTERVAL),
            false => self.hear_within(CALM),
        }
    }

    fn hear_within(&mut self, longest: Duration) {
        let heard = self.heard;
        let is_known = |all: &Entries| all.turns_of_keepers == heard;
        self.heard = self.vms.look_after(longest, is_known, |all| all.turns_of_keepers);
    }
}

/// Last words of keepers that are known, and stay where they are: a state directory can only be read when its disk
/// fails.
pub(crate) struct KnownEnds(Inventory);

impl KnownEnds {
    /// Those of the VMs of a host.
    pub fn of(vms: &Inventory) -> KnownEnds {
        KnownEnds(vms.clone())
    }

    /// What a VM's last keeper has said, in this directory, unless that is known.
    fn dead_note(&self, vm: &VmName, directory: &Path) -> Option<Note> {
        self.last_note(vm, directory).filter(|note| !self.is_known(note))
    }

    fn is_known(&self, note: &Note) -> bool {
        self.0.look(|all| all.known_ends.get(&note.vm) == Some(note))
    }

    /// What a VM's last keeper has said, in this directory, be it known or not.
    fn last_note(&self, vm: &VmName, directory: &Path) -> Option<Note> {
        match note::look(directory) {
            Found::Nobody(note) => note,
            // The next one has the lock.
            Found::Starting | Found::Lives(_) => {
                // Nobody is woken for nothing.
                if self.0.look(|all| all.known_ends.contains_key(vm)) {
                    self.0.change(|all| all.known_ends.remove(vm));
                }
                None
            }
            Found::Unknown(_) => None,
        }
    }

    fn forget(&self, note: &Note, directory: &Path) {
        if let Err(error) = note::forget(directory) {
            warn!(vm = %note.vm, "the end of its keeper cannot be noted: {error}");
            self.0.change(|all| all.known_ends.insert(note.vm.clone(), note.clone()));
        }
    }
}

impl Host {
    /// Word of this host's keepers from now on.
    pub fn word_of_keepers(&self) -> Word {
        Word::of(&self.vms)
    }

    /// Whether VMs are about to be here, for some of which keepers begin.
    pub fn expects_vms(&self) -> bool {
        self.arrivals.are_any_to_come()
    }

    /// The VMs that have keepers, as this daemon saw a moment ago: nobody waits for storage.
    pub fn seen_in_keepers(&self) -> Vec<VmName> {
        self.vms.look(|all| all.findings.kept.clone())
    }

    /// Notices those that have ended; whether more is about to come.
    fn look_at_keepers(self: &Arc<Self>) -> bool {
        let (mut is_more_to_come, mut kept) = (false, Vec::new());
        for vm in self.directories() {
            let is_between = self.take_up(&vm);
            let has_ended = !is_between && self.dead_note(&vm).is_some();
            if has_ended {
                self.tell_of_ended(&vm);
            }
            // Nobody follows one that this daemon cannot speak with.
            let keeper = self.keeper_of(&vm);
            let is_followed = keeper.as_ref().is_none_or(|keeper| keeper.problem.is_none());
            kept.extend(keeper.map(|keeper| keeper.vm));
            is_more_to_come |= is_between || has_ended || !is_followed;
        }
        self.vms.note(|all| all.findings.kept = kept);
        is_more_to_come
    }

    fn dead_note(&self, vm: &VmName) -> Option<Note> {
        self.known_ends.dead_note(vm, &vm.below(&self.config.state_dir))
    }

    fn tell_of_ended(self: &Arc<Self>, vm: &VmName) {
        let was_killed = {
            // Nobody starts the next one meanwhile.
            let _adding = self.adding.lock();
            // The next keeper's words are about to be there.
            if self.arrivals.is_expected(vm) {
                return;
            }
            let was_killed = self.dead_note(vm).is_some_and(|note| note.end.is_none());
            self.notice_end_of_keeper(vm);
            was_killed
        };
        if was_killed {
            autostart::again(self, vm);
        }
    }

    /// Notices that a VM's last keeper has ended, if it has: before the next one is started, too, whose
    /// words would cover its own. What it left is undone once more if that could not be noted. To be called under the
    /// lock `adding`.
    pub(crate) fn notice_end_of_keeper(&self, vm: &VmName) {
        let directory = vm.below(&self.config.state_dir);
        let Some(note) = self.known_ends.last_note(vm, &directory) else { return };
        if !self.known_ends.is_known(&note) {
            let lost = lost_with(self, &note);
            if note.end.is_none() {
                self.tell_of_killed(&note, lost.is_some());
            }
            if let Some(lost) = lost {
                self.vms.put_if(vm, Vm::Fenced(Arc::new(lost)), |there| there.is_none());
            }
        }
        self.clear_up_after(&note);
    }

    /// Undoes what a VM's last keeper has left, whose end is told already. To be called under the lock `adding`.
    pub(super) fn clear_up_after_last(&self, vm: &VmName) {
        if let Some(note) = self.known_ends.last_note(vm, &vm.below(&self.config.state_dir)) {
            self.clear_up_after(&note);
        }
    }

    fn clear_up_after(&self, note: &Note) {
        let vm = &note.vm;
        self.end_dead_restore(vm);
        self.forget_insistence(vm);
        if let Ok(Some(record)) = self.record(vm) {
            self.seal_left_lists(&record);
        }
        // Not before: whoever asks meanwhile is told of it either way.
        self.forget_note(note);
    }

    /// A VM that this host has lost with its keeper, of which nobody has taken notice yet.
    pub(crate) fn just_lost(&self, vm: &VmName) -> Option<Vm> {
        if self.keeps.is_some() || self.arrivals.is_expected(vm) || self.is_left(vm) {
            return None;
        }
        let lost = lost_with(self, &self.dead_note(vm)?)?;
        Some(Vm::Fenced(Arc::new(lost)))
    }

    /// All of them, but those among `known`.
    pub(crate) fn all_just_lost(&self, known: &BTreeMap<VmName, Vm>) -> Vec<Vm> {
        let others = self.directories().into_iter().filter(|vm| !known.contains_key(vm));
        others.filter_map(|vm| self.just_lost(&vm)).collect()
    }

    /// Forgets a VM that this host has lost.
    pub(crate) fn forget_lost(&self, vm: &VmName) {
        if self.just_lost(vm).is_some() {
            let _adding = self.adding.lock();
            self.notice_end_of_keeper(vm);
        }
        self.vms.remove(vm);
    }

    fn tell_of_killed(&self, note: &Note, had_guest: bool) {
        let events = self.events.of(&note.vm);
        if had_guest {
            return events.record(EventKind::GuestDied { reason: killed(note) });
        }
        events.note(killed(note));
        events.record(EventKind::StoodDown);
    }

    fn forget_note(&self, note: &Note) {
        self.known_ends.forget(note, &note.vm.below(&self.config.state_dir));
    }
}

/// Report on a VM that this host had in a keeper which has ended; none if it has nothing to do with
/// it any more.
fn lost_with(host: &Host, note: &Note) -> Option<FencedVm> {
    let name = note.vm.clone();
    match &note.end {
        // Whoever it was left to was, too, and has said no more.
        Some(End::Gone | End::Left) => None,
        Some(End::Fenced { generation, reason, elsewhere }) => {
            let (generation, reason, elsewhere) = (*generation, reason.clone(), *elsewhere);
            Some(FencedVm { name, generation, reason, elsewhere })
        }
        None => {
            let record = host.record(&name).ok().flatten();
            // Whose backup it was notices by itself.
            let ran = record.filter(|record| record.image.role == ImageRole::Active)?;
            let killed = killed(note);
            let reason =
                format!("{killed}; if no backup has taken it over, `understudy recover {name}`");
            Some(FencedVm { name, generation: ran.image.generation, reason, elsewhere: false })
        }
    }
}

fn killed(note: &Note) -> String {
    format!("its keeper (process {}) was killed", note.pid)
}

#[cfg(test)]
mod tests {
    use super::super::note::Claim;
    use super::*;
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use understudy_protocol::literal;

    /// Regression: on a file system that could only be read a keeper was killed four times a second.
    #[test]
    fn an_end_that_cannot_be_cleared_is_told_once() {
        let (directory, db) = (tempfile::tempdir().unwrap(), literal("db"));
        // A file that nobody can shorten.
        let file: File = memfd_create(c"note", MFdFlags::MFD_ALLOW_SEALING).unwrap().into();
        let place = format!("/proc/self/fd/{}", file.as_raw_fd());
        symlink(place, directory.path().join(note::FILE)).unwrap();
        let take = || Claim::take(directory.path(), &literal("a"), &db, None).unwrap();
        drop(take());
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let known = KnownEnds::of(&Inventory::default());
        let note = known.dead_note(&db, directory.path()).unwrap();
        known.forget(&note, directory.path());
        assert_eq!(known.dead_note(&db, directory.path()), None);
        // The end of the next one is another.
        let next = take();
        assert_eq!(known.dead_note(&db, directory.path()), None);
        drop(next);
        assert_eq!(known.dead_note(&db, directory.path()), Some(note));
    }

    /// Those who look after keepers looked four times a second, each for itself.
    #[test]
    fn whoever_waits_for_word_of_keepers_hears_it_at_once_and_once() {
        // Whoever does not hear it waits for ever.
        const LONG: Duration = Duration::from_secs(3600);
        let vms = Inventory::default();
        let (told, mut first, mut second) = (Word::of(&vms), Word::of(&vms), Word::of(&vms));
        told.tell();
        first.hear_within(LONG);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| first.hear_within(LONG));
            thread::sleep(INTERVAL);
            assert!(!waiting.is_finished(), "it has heard that");
            vms.change(|all| all.lost.insert(literal("db")));
            thread::sleep(INTERVAL);
            assert!(!waiting.is_finished(), "that is no word of a keeper");
            told.tell();
        });
        second.hear_within(LONG);
    }
}
