//! The paths between the two hosts of a session, if there are several: each has heartbeats of its own, and
//! [`Paths`] decides which carries the data. The primary dials.

use crate::host::{HostId, Role, SessionId};
use crate::messages::hello;
use crate::network::ConnectionId;
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::{Generation, PathAction, PathEvent, PathIndex, PathState, Paths, Time};
use understudy_session::backup::Event as BackupEvent;
use understudy_session::primary::Event as PrimaryEvent;

/// Before a path that is down is dialled again.
const REDIAL_PAUSE: Duration = Duration::from_millis(250);

/// Data has left a path that is down after so long.
const MOVE_WITHIN: Duration = Duration::from_millis(100);

/// How a path fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Nothing gets through.
    Cut,
    /// Its heartbeat connection breaks. The next one stands.
    Reset,
    /// Nothing gets through one way: from the primary, or to it.
    OneWay(bool),
    /// Heartbeats get through, and nothing larger.
    Hole,
}

/// What one host knows of its session's paths.
#[derive(Debug)]
pub(crate) struct Ways {
    core: Paths,
    /// The heartbeat connection of each path.
    pub(crate) beats: Vec<Option<ConnectionId>>,
    /// The data is being moved.
    moving: bool,
    /// How often it was.
    pub(crate) renewals: u64,
}

impl Ways {
    /// So many paths, of which none is connected; the data goes over the first.
    pub(crate) fn new(count: usize, floor: Duration, now: Time) -> Ways {
        let core = Paths::new(count, PathIndex(0), floor, now);
        Ways { core, beats: vec![None; count], moving: false, renewals: 0 }
    }

    /// The path whose heartbeats that connection carries.
    pub(crate) fn path_of(&self, id: ConnectionId) -> Option<PathIndex> {
        let path = self.beats.iter().position(|beats| *beats == Some(id))?;
        Some(PathIndex(path as u16))
    }

    /// All heartbeat connections.
    pub(crate) fn open(&self) -> Vec<ConnectionId> {
        self.beats.iter().flatten().copied().collect()
    }

    pub(crate) fn are_several(&self) -> bool {
        self.beats.len() > 1
    }

    /// Whether all of several work.
    pub(crate) fn are_all_up(&self) -> bool {
        self.are_several() && self.core.candidates().len() == self.beats.len()
    }
}

impl World {
    pub(crate) fn ways(&mut self, host: HostId, id: SessionId) -> Option<&mut Ways> {
        match &mut self.hosts[host.0].role {
            Role::Primary(running) => {
                let session = running.session.as_mut().filter(|session| session.id == id)?;
                Some(&mut session.ways)
            }
            Role::Backup(standby) if standby.id == id => Some(&mut standby.ways),
            _ => None,
        }
    }

    /// Feeds the state machine and does what it says.
    pub(crate) fn path_event(&mut self, host: HostId, id: SessionId, event: PathEvent) {
        let now = self.now;
        let is_primary = self.hosts[host.0].session(id).is_some();
        let Some(ways) = self.ways(host, id) else { return };
        let mut actions = Vec::new();
        ways.core.handle(now, event, &mut actions);
        for action in actions {
            match action {
                PathAction::Up(path) => self.note(host, || format!("path {} is up", path.0)),
                PathAction::Down(path, why) => self.path_fell(host, id, path, &why),
                PathAction::Leave(_) if is_primary => self.leave_path(host, id),
                // The dialling side does; and no path is down for so long here.
                PathAction::Leave(_) | PathAction::Renew(_) => {}
                PathAction::Lost(why) if is_primary => {
                    self.primary_event(host, id, PrimaryEvent::LostAside(why));
                }
                PathAction::Lost(why) => self.backup_event(host, id, BackupEvent::PeerLost(why)),
            }
        }
    }

    fn path_fell(&mut self, host: HostId, id: SessionId, path: PathIndex, why: &str) {
        if self.ways(host, id).is_some_and(|ways| ways.are_several()) {
            self.coverage.paths_down += 1;
            self.note(host, || format!("path {} is down: {why}", path.0));
        }
    }

    /// A heartbeat connection of the session has ended.
    pub(crate) fn beats_ended(&mut self, host: HostId, id: SessionId, path: PathIndex, why: &str) {
        let is_primary = self.hosts[host.0].session(id).is_some();
        let Some(ways) = self.ways(host, id) else { return };
        ways.beats[usize::from(path.0)] = None;
        if is_primary && ways.are_several() {
            self.after(REDIAL_PAUSE, Event::DialPath(host, id, path));
        }
        self.path_event(host, id, PathEvent::Ended(path, why.to_owned()));
    }

    /// A path without a connection gets one.
    pub(crate) fn dial_path(&mut self, host: HostId, id: SessionId, path: PathIndex) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let (peer, place) = (session.peer, usize::from(path.0));
        if session.ways.beats[place].is_some() {
            return;
        }
        if !self.passes(host, peer, path) {
            return self.after(REDIAL_PAUSE, Event::DialPath(host, id, path));
        }
        let beats = self.dial_over(host, peer, path);
        if let Some(ways) = self.ways(host, id) {
            ways.beats[place] = Some(beats);
        }
        self.send(host, beats, hello(id, Generation(0)));
    }

    /// The data is to go over another path.
    pub(crate) fn leave_path(&mut self, host: HostId, id: SessionId) {
        let soon = self.path_random.millis(1, 30);
        let Some(ways) = self.ways(host, id) else { return };
        if ways.are_several() && !std::mem::replace(&mut ways.moving, true) {
            self.after(soon, Event::MoveData(host, id));
        }
    }

    /// The first path that can be dialled carries the data. What the backup has not confirmed is sent
    /// again.
    pub(crate) fn move_data(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let (peer, data, candidates) = (session.peer, session.data, session.ways.core.candidates());
        session.ways.moving = false;
        let next = candidates.into_iter().find(|path| self.passes(host, peer, *path));
        let Some(path) = next else { return };
        let Some(session) = self.hosts[host.0].session(id) else { return };
        session.ways.renewals += 1;
        session.delivered.1 = now;
        self.coverage.data_moved += 1;
        self.note(host, || format!("the data goes over path {}", path.0));
        self.carry_over(data, path);
        self.path_event(host, id, PathEvent::InUse(path));
        self.path_event(peer, id, PathEvent::InUse(path));
    }

    /// One of several paths fails, the one in use or the other.
    pub(crate) fn path_fails(&mut self, flaw: Flaw, in_use: bool, span: Duration) {
        let Some((host, id, peer)) = self.session_of_now() else { return };
        let up = |world: &mut World, host| world.ways(host, id).is_some_and(|it| it.are_all_up());
        let all_up = up(self, host) && up(self, peer);
        let Some(ways) = self.ways(host, id).filter(|ways| ways.are_several()) else { return };
        let used = ways.core.in_use();
        let path = if in_use { used } else { PathIndex(1 - used.0) };
        let beats = ways.beats[usize::from(path.0)].filter(|_| flaw == Flaw::Reset);
        self.coverage.paths_failed += 1;
        self.spare_path = (all_up && self.is_all_that_fails()).then_some(id);
        if let Some(beats) = beats {
            self.break_connection(beats);
        }
        let both = [(host, peer), (peer, host)];
        let ways = match flaw {
            Flaw::Reset => &[],
            Flaw::Cut | Flaw::Hole => &both[..],
            Flaw::OneWay(true) => &both[..1],
            Flaw::OneWay(false) => &both[1..],
        };
        for (from, to) in ways {
            match flaw {
                Flaw::Hole => self.network.holes.push((*from, *to, path)),
                _ => self.cut_path(*from, *to, path),
            }
            self.after(span, Event::PathHeals(*from, *to, path));
        }
    }

    /// Whether the schedule has one fault. A backup that does not hear the arbiter gives way to another host.
    fn is_all_that_fails(&self) -> bool {
        let schedule = &self.schedule;
        let hears = schedule.lost_answers == 0 && schedule.without_arbiter.is_none();
        schedule.faults.len() == 1 && hears
    }

    /// The session of the VM's primary: its host, its number, its backup's host.
    pub(crate) fn session_of_now(&self) -> Option<(HostId, SessionId, HostId)> {
        let host = self.primary_host()?;
        let Role::Primary(running) = &self.hosts[host.0].role else { return None };
        let session = running.session.as_ref()?;
        Some((host, session.id, session.peer))
    }

    /// Checks that data leaves a path that is down at once, where another works.
    pub(crate) fn check_data_path(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let is_spared = self.spare_path == Some(id);
        let Some(ways) = self.ways(host, id).filter(|_| is_spared) else { return };
        let in_use = ways.core.states().nth(usize::from(ways.core.in_use().0));
        let is_dead = |state: &PathState| match state {
            PathState::Down { since, .. } => now - *since > MOVE_WITHIN,
            PathState::Up | PathState::Connecting => false,
        };
        if in_use.is_some_and(is_dead) {
            self.violation(format!("{host} sends data over a dead path, although another works"));
        }
    }

    /// Nobody gives the other up while nothing has failed but one of several paths.
    pub(crate) fn check_spare_path(&mut self, host: HostId, id: SessionId) {
        if self.spare_path == Some(id) {
            self.violation(format!("{host} gives its peer up, although another path works"));
        }
    }
}
