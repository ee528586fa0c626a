//! The work of a backup beside receiving, as its session gives it out: apply, settle, activate,
//! start, forget.

use crate::guest::{Claim, Frame, Guest, State};
use crate::host::{Former, HostId, Image, Role, SessionId};
use crate::schedule::Moment;
use crate::world::{Event, World};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{DiskWrite, Kind, Message};
use understudy_protocol::{BackupPhase, CardIndex, Epoch, Generation, StagedEpoch};
use understudy_session::backup::{Ending, Errand, Event as BackupEvent};

impl World {
    /// Notes that something is to be done, soon.
    pub(crate) fn errand(&mut self, host: HostId, id: SessionId, errand: Errand) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        // A QEMU with much memory, or a slow disk.
        let is_long = errand == Errand::Forget && self.record_random.percent(20);
        standby.errands.push_back(errand);
        if standby.errands.len() > 1 {
            return;
        }
        if is_long {
            self.coverage.long_forgettings += 1;
            let long = self.record_random.millis(100, 2_000);
            return self.after(long, Event::Errand(host, id));
        }
        let soon = self.random.micros(10, 1_000);
        self.after_work(host, soon, Event::Errand(host, id));
    }

    /// Does a piece of the errand in front.
    pub(crate) fn do_errand(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let Some(errand) = standby.errands.front().cloned() else { return };
        let Some(result) = self.carry_out(host, id, &errand) else {
            let next = self.random.micros(10, 600);
            return self.after_work(host, next, Event::Errand(host, id));
        };
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.errands.pop_front();
        let data = standby.data;
        self.read_on(data);
        self.backup_event(host, id, BackupEvent::Done(0, errand, result));
    }

    /// Carries out an errand; gives how it ended, if it has.
    fn carry_out(
        &mut self,
        host: HostId,
        id: SessionId,
        errand: &Errand,
    ) -> Option<Result<(), String>> {
        let fails = self.hosts[host.0].disk_fails > 0;
        let standby = self.hosts[host.0].standby(id)?;
        let broken = standby.broken;
        let result = match errand {
            Errand::Activate(_) if fails => {
                standby.lost_writes = true;
                self.a_write_fails(host);
                self.excuse("the disk of the backup's record fails");
                self.perhaps_recorded(host, id);
                Err("its record may not be written".to_owned())
            }
            Errand::Apply(_) | Errand::Settle if fails => {
                if let Errand::Apply(epoch) = errand {
                    standby.parts.pop_front();
                    standby.forget_turn(*epoch);
                    standby.progress = 0;
                }
                standby.lost_writes = true;
                self.a_write_fails(host);
                self.excuse("the backup's disk fails");
                Err("its disk fails".to_owned())
            }
            Errand::Apply(epoch) => return self.apply_one(host, id, *epoch),
            Errand::Skip(epoch) => {
                standby.parts.pop_front();
                standby.forget_turn(*epoch);
                self.coverage.skipped_epochs += 1;
                Ok(())
            }
            Errand::Settle => {
                self.hosts[host.0].image.sync();
                Ok(())
            }
            Errand::Activate(generation) => {
                self.activate(host, id, *generation);
                Ok(())
            }
            Errand::Start if broken => {
                standby.never_started = true;
                Err("its QEMU died".to_owned())
            }
            Errand::Open if standby.never_started => {
                self.violation(format!("{host} lets a guest speak that was never started"));
                return None;
            }
            Errand::Start => {
                self.check_start(host, id);
                Ok(())
            }
            Errand::Complete => return self.complete(host, id),
            Errand::Open | Errand::Halt | Errand::Forget | Errand::End(_) => Ok(()),
        };
        Some(result)
    }

    /// The disk fails what is written to it.
    pub(crate) fn a_write_fails(&mut self, host: HostId) {
        let left = &mut self.hosts[host.0].disk_fails;
        *left = if self.lost.failed_disk() == Some(host) { u32::MAX } else { *left - 1 };
        self.coverage.failed_writes += 1;
    }

    /// Applies a piece of the epoch in front, a turn with what that takes; how that ended, if it has.
    fn apply_one(
        &mut self,
        host: HostId,
        id: SessionId,
        epoch: Epoch,
    ) -> Option<Result<(), String>> {
        let standby = self.hosts[host.0].standby(id)?;
        let ends = |part: &StagedEpoch<Message>| {
            part.pieces.iter().any(|piece| piece.header.kind == Kind::LogEnds)
        };
        if standby.parts.front().is_some_and(ends) && !standby.log.has_left(epoch) {
            let left = self.leave_log(host, id, epoch)?;
            if left.is_err() {
                self.hosts[host.0].standby(id)?.parts.pop_front();
                return Some(left);
            }
        }
        if !self.apply_next(host, id, epoch) {
            return None;
        }
        let standby = self.hosts[host.0].standby(id)?;
        if standby.turns_with(epoch) {
            let changed = self.change_over(host, id, epoch);
            if changed.is_err() {
                return Some(changed);
            }
            self.turn_applied(host, id);
        } else if standby.log.has_left(epoch) {
            self.turn_applied(host, id);
        }
        Some(Ok(()))
    }

    /// Applies one message of the epoch in front; whether that was the last.
    fn apply_next(&mut self, host: HostId, id: SessionId, epoch: Epoch) -> bool {
        let Some(standby) = self.hosts[host.0].standby(id) else { return true };
        let (applied, generation) = (standby.core.applied(0), standby.core.generation());
        // What a log that has ended left is the primary's already.
        let has_left = standby.log.has_left(epoch);
        let Some(whole) = standby.parts.front_mut() else { return true };
        if standby.progress < whole.pieces.len() {
            let empty = Message::new(Kind::Pages, epoch, Vec::new());
            let message = std::mem::replace(&mut whole.pieces[standby.progress], empty);
            standby.progress += 1;
            standby.worked += 1;
            self.apply_message(host, id, &message);
            match has_left {
                true => self.check_copy(host, epoch, false),
                false => self.check_copy(host, applied, true),
            }
            self.moment(Moment::Applying);
            return false;
        }
        standby.progress = 0;
        standby.parts.pop_front();
        if epoch == Epoch(1) {
            let data = standby.data;
            self.send(host, data, Message::new(Kind::Settled, epoch, Vec::new()));
            self.set_record(host, ImageRole::Mirror, generation);
        }
        self.check_copy(host, epoch, false);
        true
    }

    pub(crate) fn apply_message(&mut self, host: HostId, id: SessionId, message: &Message) {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        match message.header.kind {
            Kind::Pages => {
                let Some(standby) = self.hosts[host.0].standby(id) else { return };
                for entry in message.payload.chunks_exact(16) {
                    standby.pages[word(&entry[..8]) as usize] = word(&entry[8..]);
                }
            }
            Kind::DiskWrite => match DiskWrite::decode(message.clone()) {
                Ok(write) => {
                    let block = write.range().offset as usize / 8;
                    self.hosts[host.0].image.blocks[block] = word(write.data());
                }
                Err(error) => self.violation(format!("{host} cannot read a disk write: {error}")),
            },
            Kind::DeviceState => {
                let Some(standby) = self.hosts[host.0].standby(id) else { return };
                standby.device_state = Some(State::decode(&message.payload));
            }
            Kind::Outbound | Kind::LogBegins | Kind::LogEnds => {}
            other => self.violation(format!("{host} was sent a {other:?} message")),
        }
    }

    /// Brings this host's image to stable storage, where it says that it is the valid one.
    fn activate(&mut self, host: HostId, id: SessionId, generation: Generation) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let Some(state) = standby.device_state else {
            return self.violation(format!("{host} won a VM of which it has no epoch"));
        };
        let is_late = *standby.core.phase() != BackupPhase::Live;
        self.hosts[host.0].image.lineage = state.lineage;
        if is_late {
            return self.record_late(host, generation);
        }
        self.check_owner(host, generation);
        // It may be torn, too: `perhaps_recorded`.
        self.put_record(host, ImageRole::Active, generation);
        self.check_image();
        self.note(host, || format!("its image is valid at generation {generation}"));
        self.moment(Moment::Activated);
    }

    /// Its record was being written when something failed: whether it is there nobody knows.
    pub(crate) fn perhaps_recorded(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let Some(&Errand::Activate(generation)) = standby.errands.front() else { return };
        self.coverage.records_uncertain += 1;
        if self.record_random.percent(50) {
            self.coverage.records_unheard += 1;
            self.activate(host, id, generation);
        }
    }

    /// A winner that has handed the VM back meanwhile comes to write its record: it counts for as long as
    /// that of whoever has the VM back is not written.
    fn record_late(&mut self, host: HostId, generation: Generation) {
        self.coverage.late_records += 1;
        let is_newer = |image: &Image| image.record.is_some_and(|(_, at)| at > generation);
        if self.hosts.iter().any(|host| is_newer(&host.image)) {
            self.hosts[host.0].image.record = Some((ImageRole::Active, generation));
            self.check_records();
        } else {
            self.put_record(host, ImageRole::Active, generation);
        }
    }

    /// A guest is started only where the records name its image from here on.
    fn check_start(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let valid = Some((ImageRole::Active, standby.core.generation()));
        if self.hosts[host.0].image.record != valid {
            self.violation(format!("{host} starts the VM, and its record does not say so"));
        }
    }

    /// The standby's QEMU dies. Before the arbiter's grant the core knows what to
    /// do; after it, the VM cannot start here.
    pub(crate) fn standby_breaks(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.broken = true;
        self.coverage.standbys_failed += 1;
        self.cannot_run(host, id, BackupEvent::CannotServe("its QEMU died".to_owned()));
    }

    /// The session is told why this host could not run the VM. It must not win that then.
    pub(crate) fn cannot_run(&mut self, host: HostId, id: SessionId, why: BackupEvent) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let granted =
            matches!(standby.core.phase(), BackupPhase::Live | BackupPhase::HandingBack(_));
        self.backup_event(host, id, why);
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        if !granted && *standby.core.phase() != BackupPhase::Discarded {
            self.violation(format!("{host} may still win the VM, and cannot run it"));
        }
    }

    /// A session has ended.
    pub(crate) fn ended(&mut self, host: HostId, id: SessionId, ending: &Ending) {
        match ending {
            Ending::Live(generation, _) => self.go_live(host, id, *generation),
            Ending::Failed(_, why) => {
                self.violation(format!("{host} keeps a VM that it cannot run: {why}"));
            }
            Ending::Discarded => self.discard(host, id),
            Ending::Returned(_) => {
                self.note_returned(host);
                self.discard(host, id);
            }
        }
    }

    fn go_live(&mut self, host: HostId, id: SessionId, generation: Generation) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (broken, in_lockstep) = (standby.broken, standby.log.has_come());
        // A log may have come that was acknowledged to nobody: the guest has executed it, too.
        let (last, pages) = (standby.core.committed().max(standby.log.last), standby.pages);
        let announced = standby.beside.orders.other().is_some();
        let carried = standby.carried.take(now);
        let origin = standby.device_state.expect("an epoch was applied");
        self.coverage.partial_epochs_dropped += u64::from(standby.staging.bytes() > 0);
        self.check_copy(host, last, false);
        let right = self.oracle.boundary(id, last).is_some_and(|it| it.state == origin);
        if !right {
            self.violation(format!("{host} goes live from {origin:?}, not from epoch {last}"));
        }
        if self.handed_over.is_some_and(|(of, state)| of == id && state != origin) {
            self.violation(format!("a planned fail-over lost the guest's last state: {origin:?}"));
        }
        if let Some(shown) = self.oracle.shown().filter(|it| !self.oracle.descends(origin, *it)) {
            self.violation(format!("output commit: {host} goes live without {shown:?}"));
        }
        let state = self.oracle.new_lineage(Some(origin));
        let image = &mut self.hosts[host.0].image;
        image.lineage = state.lineage;
        let flushed = Claim { state, blocks: image.synced };
        self.note(host, || format!("goes live from epoch {last}"));
        self.coverage.takeovers += 1;
        self.coverage.takeovers_in_lockstep += u64::from(in_lockstep);
        self.coverage.takeovers_before_turn += u64::from(announced);
        self.live_since = self.now;
        self.run_here(host, Guest { state, pages, flushed }, generation);
        self.resend(host, carried);
        self.moment(Moment::Live);
        if broken {
            self.excuse("its guest died as it began to speak");
            self.note(host, || "its guest died as it began to speak".to_owned());
            self.hosts[host.0].role = Role::Fenced;
        }
    }

    /// Sends from here what the former primary may not have released, under the same
    /// checks as any other output.
    fn resend(&mut self, host: HostId, carried: Vec<(CardIndex, Vec<u8>)>) {
        let frames: Vec<Frame> = carried.iter().map(|(_, bytes)| Frame::decode(bytes)).collect();
        let shown = self.oracle.shown();
        let is_new = |frame: &&Frame| shown.is_none_or(|it| !self.oracle.descends(it, frame.state));
        self.coverage.frames_rescued += frames.iter().filter(is_new).count() as u64;
        self.coverage.frames_resent += frames.len() as u64;
        self.let_out(host, frames);
    }

    fn discard(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (primary, core) = (standby.primary, standby.core.clone());
        self.hosts[host.0].former.push(Former { id, core, primary });
        self.hosts[host.0].role = Role::Idle;
        self.note(host, || "has forgotten the VM".to_owned());
    }
}
