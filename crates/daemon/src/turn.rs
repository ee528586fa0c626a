//! Turn of a protected VM from checkpoints to lockstep, or back: what two hosts say about it.
//!
//! The turn is an epoch like others, a checkpoint at whose end the log begins or with which it
//! ends. So at each moment the backup can go live from the last epoch that it acknowledged, by
//! the same rules. What is needed for it, a QEMU that replays or one that records, is started
//! beside the one that there is, before.

use crate::host::Host;
use crate::repair::Wish;
use crate::vm::PrimaryVm;
use anyhow::ensure;
use std::sync::Arc;
use understudy_protocol::{Output, PrimaryPhase};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::{ClockBase, TickRate};
use understudy_replication::primary::{Next, Session};
use understudy_replication::turn::Wanted;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::{Mode, ProtectRequest};

impl Host {
    /// Turns a protected VM to the other way of keeping up, as its operator asks. It stays
    /// protected; on an error it goes on as before. The caller holds [`PrimaryVm::protecting`].
    pub(crate) fn turn(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        session: &Arc<Session>,
        request: &ProtectRequest,
    ) -> Result<(), HostError> {
        let wish = self.check_turn(vm, session, request)?;
        let machine = vm.machine();
        let (clock, moves) = match machine.lockstep() {
            Some(Lockstep { role: LogRole::Record, clock }) => (clock.clone(), false),
            Some(Lockstep { role: LogRole::Replay, .. }) => {
                return Err(refusal("its QEMU has followed a log and cannot record one"));
            }
            None => (ClockBase::now().with_tick_rate(TickRate::of_this_host()), true),
        };
        let qemu_build = self.recording_build(&machine)?;
        let wanted = Wanted {
            mode: wish.mode,
            disk_reads: wish.disk_reads,
            clock: clock.clone(),
            qemu_build: qemu_build.clone(),
            wish: wish.clone(),
        };
        let next = || -> anyhow::Result<Option<Next>> {
            if !moves {
                return Ok(None);
            }
            let lockstep = Lockstep { role: LogRole::Record, clock };
            let next = self.launch_next(vm, &machine, lockstep)?;
            let is_same = next.machine.qemu_build() == qemu_build;
            ensure!(is_same, "QEMU was upgraded meanwhile: {}", self.remedy_for_qemu());
            Ok(Some(next))
        };
        let turned = session.turn(wanted, next);
        // One that was captured, and whose commit took longer than anybody waits, is carried out all the same.
        let is_late = session.mode() == wish.mode && session.phase() == PrimaryPhase::Protected;
        let turned = match turned {
            Err(error) if !is_late => return Err(self.not_turned(vm, session, &error)),
            turned => turned,
        };
        self.want(vm, Some(Wish::alone(wish)));
        vm.repairer().trust_lockstep();
        vm.events.note(format!("protection goes on {}", described(request.mode)));
        if request.mode == Mode::Checkpoint {
            self.note_end_of_lockstep(vm);
        }
        turned.map_err(|_| {
            let name = vm.name();
            let message = format!(
                "{name} has changed its mode, and its backup has not confirmed that in time: \
                 `understudy status {name}` says how it goes on"
            );
            HostError::new(ErrorKind::Internal, message)
        })
    }

    /// Checks a turn; returns what is asked for from then on, if nothing speaks against it.
    fn check_turn(
        &self,
        vm: &PrimaryVm,
        session: &Session,
        request: &ProtectRequest,
    ) -> Result<ProtectRequest, HostError> {
        let name = vm.name();
        self.check_not_ending(vm)?;
        if session.membership().name.is_some() {
            return Err(refusal(&format!(
                "{name} is protected with others of its group, which get checkpoints: run \
                 `understudy unprotect {name}` first"
            )));
        }
        if session.phase() != PrimaryPhase::Protected {
            return Err(refusal(&format!(
                "{name} is still being synchronised: wait until it is protected"
            )));
        }
        if session.output() == Output::Unheld || request.output == Output::Unheld {
            return Err(refusal(&format!(
                "{name} cannot change its mode while its output is not held: run `understudy \
                 unprotect {name}` first"
            )));
        }
        if session.console.is_some() || request.hold_console {
            return Err(refusal(&format!(
                "{name} cannot change its mode while its console is held: run `understudy unprotect \
                 {name}` first"
            )));
        }
        if request.policy.is_some_and(|policy| policy != session.policy) {
            return Err(refusal(&format!(
                "the policy of {name} stays as it is while only its mode changes: leave it out, or \
                 run `understudy unprotect {name}` first"
            )));
        }
        if vm.machine().waits_for_disk() {
            return Err(refusal(&format!(
                "{name} waits for a disk that fails, see `understudy status {name}`: run \
                 `understudy failover {name}` first, or `understudy unprotect {name}`"
            )));
        }
        if self.snapshots.is_taking(name) {
            return Err(refusal(&format!(
                "{name} is being snapshotted: try again when it has ended"
            )));
        }
        self.check_mode(&vm.machine(), request.mode)?;
        let former = vm.repairer().wish().map_or_else(|| request.clone(), |wish| wish.request);
        let (mode, disk_reads) = (request.mode, request.disk_reads);
        Ok(ProtectRequest { mode, disk_reads, repair: request.repair, ..former })
    }

    fn not_turned(&self, vm: &PrimaryVm, session: &Session, error: &anyhow::Error) -> HostError {
        let now = match session.phase() {
            PrimaryPhase::Protected => {
                format!("protection goes on {}", described(session.mode()))
            }
            phase => phase.to_string(),
        };
        let message = format!("{} does not change its mode: {error:#}; {now}", vm.name());
        vm.events.note(message.clone());
        HostError::new(ErrorKind::Internal, message)
    }
}

/// Words for people on protection.
fn described(mode: Mode) -> &'static str {
    match mode {
        Mode::Checkpoint => "with checkpoints",
        Mode::Lockstep => "in lockstep",
    }
}

fn refusal(message: &str) -> HostError {
    HostError::new(ErrorKind::Conflict, message.to_owned())
}
