//! The invariants, checked whenever something could have broken them.

use crate::backup::Standby;
use crate::guest::{Frame, Gate, State};
use crate::host::{HostId, Role};
use crate::world::World;
use understudy_protocol::{BackupPhase, Epoch, Generation, STALL};

impl World {
    /// Frames leave a host: output commit.
    pub(crate) fn let_out(&mut self, host: HostId, frames: Vec<Frame>) {
        if frames.is_empty() {
            return;
        }
        if self.is_beyond_its_lease(host) {
            // In the product they wait; here they are lost, as frames may be.
            self.coverage.frames_without_lease += frames.len() as u64;
            return;
        }
        self.last_output = self.now;
        self.check_late_release(host);
        for frame in frames {
            self.coverage.frames += 1;
            if let Err(wrong) = self.oracle.show(frame.state, frame.claim) {
                self.violation(format!("two live copies: {wrong}"));
            }
            if let Some((survivor, state)) = self.survivor_without(host, frame.state) {
                self.violation(format!(
                    "output commit: {host} let out a frame of state {}, and {survivor} may go on \
                     from state {}",
                    frame.state.number, state.number
                ));
            }
        }
        self.check_image();
    }

    fn is_beyond_its_lease(&self, host: HostId) -> bool {
        let Role::Primary(running) = &self.hosts[host.0].role else { return false };
        running.limit.is_some_and(|end| self.clock(host) >= end)
    }

    /// An acknowledgement that was under way may release output after its sender
    /// went live. One that waited here while this host stood still must not.
    fn check_late_release(&mut self, sender: HostId) {
        let live = |host: &HostId| self.lets_out(*host);
        let any = (0..self.hosts.len()).map(HostId).any(|host| live(&host));
        let host = &self.hosts[sender.0];
        if live(&sender) || !any {
            return;
        }
        self.coverage.released_after_takeover += 1;
        let stalled = host.stalled_from..host.stalled_until;
        let long = host.stalled_until - host.stalled_from > 2 * STALL;
        if long && stalled.contains(&self.live_since) {
            self.violation(format!("two live copies: {sender} stood still and lets output out"));
        }
    }

    /// A host that runs the VM, or still may, and would lack `shown`.
    fn survivor_without(&self, sender: HostId, shown: State) -> Option<(HostId, State)> {
        let others = (0..self.hosts.len()).map(HostId).filter(|host| *host != sender);
        others
            .filter_map(|host| Some((host, self.would_go_on_from(host)?)))
            .find(|(_, state)| !self.oracle.descends(*state, shown))
    }

    fn would_go_on_from(&self, id: HostId) -> Option<State> {
        let host = &self.hosts[id.0];
        match &host.role {
            Role::Primary(running) if self.lets_out(id) => Some(running.guest.state),
            Role::Backup(standby) if self.is_entitled(id, standby) => {
                let boundary = self.oracle.boundary(standby.id, standby.core.committed());
                boundary.map(|boundary| boundary.state)
            }
            _ => None,
        }
    }

    /// Whether a standby has won the VM, or still can.
    pub(crate) fn is_entitled(&self, host: HostId, standby: &Standby) -> bool {
        let arbiter = &self.arbiter;
        let own = standby.core.generation();
        match standby.core.phase() {
            BackupPhase::Syncing | BackupPhase::Discarded | BackupPhase::HandingBack(_) => false,
            BackupPhase::Live => arbiter.owner == host && arbiter.generation == own,
            BackupPhase::Standing | BackupPhase::Contesting(_) => {
                let won = arbiter.owner == host && arbiter.generation == own.next();
                won || arbiter.generation == own
            }
        }
    }

    /// Whether a host lets the guest's output out at once, if it honours its lease.
    fn lets_out(&self, host: HostId) -> bool {
        let Role::Primary(running) = &self.hosts[host.0].role else { return false };
        running.port.gate == Gate::Open && !self.is_beyond_its_lease(host)
    }

    /// Checks that there is one live copy: whoever lets output out at once is the owner, or has a
    /// lease that whoever is the owner by now waits for.
    pub(crate) fn check_live(&mut self) {
        let live = |host: &HostId| self.lets_out(*host);
        let live = (0..self.hosts.len()).map(HostId).filter(live);
        let several = live.clone().nth(1).is_some();
        let strangers = live.filter_map(|host| {
            let Role::Primary(running) = &self.hosts[host.0].role else { return None };
            let counts = running.limit.is_none() || several;
            (counts && !self.owns(host, running.generation)).then_some((host, running.generation))
        });
        if let Some((host, generation)) = { strangers }.next() {
            self.check_owner(host, generation);
        }
    }

    /// A guest runs: not where another host has won it, or may have.
    pub(crate) fn check_runs(&mut self, host: HostId) {
        if self.hosts[host.0].is_frozen() {
            self.violation(format!("{host} may have lost the VM, and its guest runs on"));
        }
    }

    /// A loser ends its guest: not before another host has run the VM.
    pub(crate) fn check_sacrifice(&mut self, host: HostId) {
        if self.oracle.ran_last() == host {
            self.violation(format!("{host} ends its guest, and nobody else has run the VM"));
        }
    }

    fn owns(&self, host: HostId, generation: Generation) -> bool {
        (self.arbiter.owner, self.arbiter.generation) == (host, generation)
    }

    /// The arbiter's own record says that the VM is this host's.
    pub(crate) fn check_owner(&mut self, host: HostId, generation: Generation) {
        let (owner, newest) = (self.arbiter.owner, self.arbiter.generation);
        if !self.owns(host, generation) {
            self.violation(format!(
                "two live copies: {host} lives at generation {generation}, the arbiter says \
                 {owner} at {newest}"
            ));
        }
    }

    /// A standby that has applied `applied` and perhaps a part of the epoch
    /// after it shows nothing else, in memory and on its mirror.
    pub(crate) fn check_copy(&mut self, host: HostId, applied: Epoch, within: bool) {
        let Role::Backup(standby) = &self.hosts[host.0].role else { return };
        let Some(before) = self.oracle.boundary(standby.id, applied) else { return };
        let after = match within {
            true => self.oracle.boundary(standby.id, applied.next()).unwrap_or(before),
            false => before,
        };
        // A block may have been written more than once in the epoch.
        let of_next = before.state.number + 1..=after.state.number;
        let foreign = |(is, before): (&u64, &u64)| is != before && !of_next.contains(is);
        let memory_wrong = standby.pages.iter().zip(&before.pages).any(foreign);
        let disk_wrong = self.hosts[host.0].image.blocks.iter().zip(&before.blocks).any(foreign);
        if memory_wrong || disk_wrong {
            let what = if disk_wrong { "mirror" } else { "memory" };
            self.violation(format!("{host}'s {what} is not at the boundary of epoch {applied}"));
        }
    }
}
