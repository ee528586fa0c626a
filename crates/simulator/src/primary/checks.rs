//! What must hold of a primary and its session, checked at each beat and each turn of its state.

use super::{FRESH, SLACK};
use crate::host::{HostId, SessionId};
use crate::world::World;
use std::time::Duration;
use understudy_protocol::{EPOCH_BOUND, PrimaryPhase};

impl World {
    /// Checks that a sick host leaves the VM to a backup that stands ready and can be reached.
    pub(super) fn check_sick_winner(
        &mut self,
        host: HostId,
        before: &PrimaryPhase,
        after: &PrimaryPhase,
    ) {
        let won = matches!((before, after), (PrimaryPhase::Contesting(_), PrimaryPhase::Alone(_)));
        let now = self.now;
        let sick = self.hosts[host.0].running().is_some_and(|running| running.sick_until > now);
        let schedule = &self.schedule;
        let nothing_else = schedule.lost_answers == 0 && schedule.without_arbiter.is_none();
        if won && sick && self.must_survive && nothing_else {
            self.violation(format!("{host} is sick, and won the VM from a backup that was not"));
        }
    }

    /// Checks that nobody is called protected against the word of its backup, or by an old one.
    pub(super) fn check_standing(&mut self, host: HostId, id: SessionId) {
        let (now, awake) = (self.now, self.hosts[host.0].stalled_until);
        let told = self.clock_of_cores(host);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let called = *session.core.phase() == PrimaryPhase::Protected;
        if !called || session.core.obstacle(told).is_some() {
            return;
        }
        let (obstacle, heard) = &session.word;
        let age = now - (*heard).max(awake);
        if let Some(obstacle) = obstacle.clone() {
            self.violation(format!("{host} is called protected, and its backup says: {obstacle}"));
        } else if age > FRESH + SLACK {
            self.violation(format!("{host} is called protected by a word of {age:?} ago"));
        }
    }

    /// Checks that nobody is called protected whose output waits, and for nothing.
    pub(super) fn check_delivery(&mut self, host: HostId, id: SessionId) {
        let (now, awake) = (self.now, self.hosts[host.0].stalled_until);
        let told = self.clock_of_cores(host);
        let longest = self.schedule.policy.longest_epoch();
        let waits = self.hosts[host.0].running().and_then(|running| running.port.waits_in_epoch());
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if *session.core.phase() != PrimaryPhase::Protected {
            return;
        }
        let Some(oldest) = session.flying.front() else {
            let Some(since) = session.outbox.held_up() else { return };
            let begun = since.max(session.acknowledged).max(awake);
            let quiet = now - session.delivered.1.max(begun);
            let called = session.core.obstacle(told).or_else(|| session.core.delay(told)).is_none();
            let age = waits.map_or(Duration::ZERO, |came| now - (came + longest).max(begun));
            self.coverage.outputs_held_up += u64::from(!called && age > EPOCH_BOUND);
            if quiet > EPOCH_BOUND + SLACK {
                self.violation(format!("{host} waits for room for {quiet:?}, and nothing moves"));
            } else if called && age > EPOCH_BOUND + SLACK {
                let what = "is called protected, and its output waits";
                self.violation(format!("{host} {what} for room for {age:?}"));
            }
            return;
        };
        let quiet = now - session.delivered.1.max(*oldest).max(awake);
        let age = now - (*oldest).max(awake);
        let called = session.core.obstacle(told).or_else(|| session.core.delay(told)).is_none();
        self.coverage.slow_epochs += u64::from(age > EPOCH_BOUND + SLACK);
        if quiet > EPOCH_BOUND + SLACK {
            self.violation(format!("{host} waits for its backup for {quiet:?}, and nothing moves"));
        } else if called && age > EPOCH_BOUND + SLACK {
            self.violation(format!("{host} is called protected, and its output waits for {age:?}"));
        }
    }

    /// Checks that no backup is given up of whose oldest epoch something has just moved.
    pub(super) fn check_useless(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let held_up = session.outbox.held_up().map(|since| since.max(session.acknowledged));
        let Some(oldest) = session.flying.front().copied().or(held_up) else {
            return self.violation(format!("{host} gives its backup up, which owes it nothing"));
        };
        let quiet = now - oldest.max(session.delivered.1);
        if quiet < EPOCH_BOUND - SLACK && now - oldest < EPOCH_BOUND * 20 {
            self.violation(format!(
                "{host} gives its backup up, and something moved {quiet:?} ago"
            ));
        }
    }

    /// Checks that no turn ends protection by itself.
    pub(super) fn check_unprovoked(&mut self, after: &PrimaryPhase) {
        let sound = self.coverage.faults == 0 && self.coverage.records_torn == 0;
        let turned = sound && !self.schedule.turns.is_empty();
        if let PrimaryPhase::Contesting(reason) = after
            && turned
            && self.schedule.without_arbiter.is_none()
        {
            self.violation(format!("protection ends, and nothing has failed: {reason}"));
        }
    }
}
