//! The paths to a session's other host: what they do is logged and reported.

use crate::clock;
use std::net::SocketAddr;
use std::time::Duration;
use tracing::info;
use understudy_protocol::HostName;
use understudy_protocol::{PathAction, PathEvent, PathIndex, PathState, Paths};
use understudy_report::PathReport;
use understudy_report::events::{EventKind, VmEvents};
use understudy_threads::{Mutex, lock};

/// A thing that a session must do about its paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// Move the data to another path; the dialling side does.
    Leave,
    /// End the path's heartbeat connection, and make a new one; the dialling side does.
    Renew(PathIndex),
    /// The last path was reset.
    Lost(String),
}

/// The paths of one session.
pub struct PathMonitor {
    events: VmEvents,
    peer: HostName,
    /// The backup's addresses, one for each path.
    addresses: Vec<SocketAddr>,
    paths: Mutex<Paths>,
}

impl PathMonitor {
    /// A session with `peer`, whose data goes over `in_use`.
    pub fn new(
        events: &VmEvents,
        peer: &HostName,
        addresses: Vec<SocketAddr>,
        in_use: PathIndex,
        floor: Duration,
    ) -> PathMonitor {
        let paths = Mutex::new(Paths::new(addresses.len(), in_use, floor, clock::now()));
        PathMonitor { events: events.clone(), peer: peer.to_owned(), addresses, paths }
    }

    /// Every path.
    pub fn indices(&self) -> impl Iterator<Item = PathIndex> + use<> {
        (0..self.addresses.len() as u16).map(PathIndex)
    }

    /// Whether there is more than one.
    pub fn are_several(&self) -> bool {
        self.addresses.len() > 1
    }

    /// The backup's address on a path.
    pub fn address(&self, path: PathIndex) -> Option<SocketAddr> {
        self.addresses.get(usize::from(path.0)).copied()
    }

    /// The paths that the data may go over, best first.
    pub fn candidates(&self) -> Vec<PathIndex> {
        lock(&self.paths).candidates()
    }

    /// Takes note of what happened to a path; returns what the session must do.
    pub fn event(&self, event: PathEvent) -> Vec<Consequence> {
        let mut actions = Vec::new();
        let mut paths = lock(&self.paths);
        paths.handle(clock::now(), event, &mut actions);
        let left = paths.candidates().len();
        drop(paths);
        let mut consequences = Vec::new();
        for action in actions {
            match action {
                PathAction::Up(path) => self.tell_up(path, left),
                PathAction::Down(path, reason) => self.tell_down(path, left, &reason),
                PathAction::Leave(_) => consequences.push(Consequence::Leave),
                PathAction::Renew(path) => consequences.push(Consequence::Renew(path)),
                PathAction::Lost(reason) => consequences.push(Consequence::Lost(reason)),
            }
        }
        consequences
    }

    fn tell_up(&self, path: PathIndex, up: usize) {
        let (name, all) = (self.name(path), self.addresses.len());
        self.events.record(EventKind::PathUp { path: name, up, all });
    }

    fn tell_down(&self, path: PathIndex, left: usize, reason: &str) {
        if self.are_several() {
            let (path, all) = (self.name(path), self.addresses.len());
            let reason = reason.to_owned();
            self.events.record(EventKind::PathDown { path, reason, left, all });
        }
    }

    /// The session's data goes over `path` now.
    pub fn use_path(&self, path: PathIndex) {
        info!(vm = %self.events.vm(), "the data goes over {} now", self.name(path));
        self.event(PathEvent::InUse(path));
    }

    fn name(&self, path: PathIndex) -> String {
        let address = self.address(path).map_or("?".to_owned(), |address| address.to_string());
        format!("path {} ({address}) with {}", path.0 + 1, self.peer)
    }

    /// The reports that `status` shows.
    pub fn report(&self) -> Vec<PathReport> {
        let paths = lock(&self.paths);
        let now = clock::now();
        let report = |(index, (state, address)): (usize, (&PathState, &SocketAddr))| {
            let (down_seconds, reason) = match state {
                PathState::Down { since, reason } => {
                    (Some((now - *since).as_secs_f64()), Some(reason.clone()))
                }
                _ => (None, None),
            };
            PathReport {
                address: *address,
                up: *state == PathState::Up,
                in_use: usize::from(paths.in_use().0) == index,
                down_seconds,
                reason,
            }
        };
        paths.states().zip(&self.addresses).enumerate().map(report).collect()
    }
}
