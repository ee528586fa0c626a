//! The paths between two hosts: which of them live, and which one carries the
//! session's data.
//!
//! Every path has heartbeats of its own. A path that falls silent, or whose
//! connection ends, is down; the data moves to another one. The peer itself is
//! suspected only when no path is left: at once when the last one was reset,
//! after the state machine's own time-out when it fell silent.

use crate::{Detector, Epoch, PathIndex, Time};
use std::time::Duration;

/// The connection of a path that has been down for so long is given up.
const RENEWAL: Duration = Duration::from_secs(5);

/// An event that happens to a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathEvent {
    /// Its heartbeat connection stands.
    Connected(PathIndex),
    /// The peer's heartbeat came over it.
    Heard(PathIndex),
    /// Its heartbeat connection ended, or could not be made.
    Ended(PathIndex, String),
    /// The data goes over this path from now on.
    InUse(PathIndex),
    /// This epoch has not moved for long over the path in use.
    Stuck(Epoch),
    /// Time has passed.
    Tick,
}

/// An action that follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathAction {
    /// The path works.
    Up(PathIndex),
    /// The path does not work any more, for this reason.
    Down(PathIndex, String),
    /// Move the data away from this path, which is down or carries no data, to one that is up.
    Leave(PathIndex),
    /// This path has been silent for long while another is not: end its heartbeat connection.
    /// A new one stands sooner than the system tries the old one again.
    Renew(PathIndex),
    /// The last path was reset: the peer is gone, for this reason.
    Lost(String),
}

/// The state of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathState {
    /// Its first connection is being made.
    Connecting,
    /// The peer is heard over it.
    Up,
    /// The path does not work.
    Down {
        /// Time since which it does not.
        since: Time,
        /// The reason, for people.
        reason: String,
    },
}

#[derive(Clone, Debug)]
struct Path {
    detector: Detector,
    connected: bool,
    state: PathState,
}

/// All paths to one peer, for one session.
#[derive(Clone, Debug)]
pub struct Paths {
    paths: Vec<Path>,
    in_use: PathIndex,
    /// The epoch for which a path was left last. Once for each: the backup itself may be what hangs.
    left_for: Option<Epoch>,
    /// The shortest silence that makes a path count as down.
    floor: Duration,
}

impl Paths {
    /// `count` paths, none connected yet; the data goes over `in_use`.
    pub fn new(count: usize, in_use: PathIndex, floor: Duration, now: Time) -> Paths {
        let detector = Detector::new(floor, now);
        let path = Path { detector, connected: false, state: PathState::Connecting };
        Paths { paths: vec![path; count], in_use, left_for: None, floor }
    }

    /// The state of each path.
    pub fn states(&self) -> impl Iterator<Item = &PathState> {
        self.paths.iter().map(|path| &path.state)
    }

    /// The path that the data goes over.
    pub fn in_use(&self) -> PathIndex {
        self.in_use
    }

    /// The paths that are up, the one in use last: it may have failed just now.
    pub fn candidates(&self) -> Vec<PathIndex> {
        let up = |(index, path): (usize, &Path)| {
            (path.state == PathState::Up).then_some(PathIndex(index as u16))
        };
        let mut up: Vec<PathIndex> = self.paths.iter().enumerate().filter_map(up).collect();
        up.sort_by_key(|path| *path == self.in_use);
        up
    }

    /// Takes one event; appends what follows to `actions`. A path that does not
    /// exist is nobody's: nothing happens.
    pub fn handle(&mut self, now: Time, event: PathEvent, actions: &mut Vec<PathAction>) {
        match event {
            PathEvent::Connected(path) => self.connected(now, path, actions),
            PathEvent::Heard(path) => self.heard(now, path, actions),
            PathEvent::Ended(path, reason) => self.ended(now, path, reason, actions),
            PathEvent::InUse(path) => self.in_use = path,
            PathEvent::Stuck(epoch) => self.stuck(epoch, actions),
            PathEvent::Tick => self.tick(now, actions),
        }
        self.leave_if_down(actions);
    }

    fn get(&mut self, path: PathIndex) -> Option<&mut Path> {
        self.paths.get_mut(usize::from(path.0))
    }

    fn connected(&mut self, now: Time, index: PathIndex, actions: &mut Vec<PathAction>) {
        let floor = self.floor;
        let Some(path) = self.get(index) else { return };
        // What was learnt from an outage says nothing about jitter.
        path.detector = Detector::new(floor, now);
        path.connected = true;
        path.come_up(index, actions);
    }

    fn heard(&mut self, now: Time, index: PathIndex, actions: &mut Vec<PathAction>) {
        let floor = self.floor;
        let Some(path) = self.get(index).filter(|path| path.connected) else { return };
        if path.state == PathState::Up {
            return path.detector.heard(now);
        }
        path.detector = Detector::new(floor, now);
        path.come_up(index, actions);
    }

    fn ended(
        &mut self,
        now: Time,
        index: PathIndex,
        reason: String,
        actions: &mut Vec<PathAction>,
    ) {
        let Some(path) = self.get(index) else { return };
        let was_connected = std::mem::replace(&mut path.connected, false);
        path.go_down(now, index, &reason, actions);
        if was_connected && (self.candidates().is_empty() || planted!(LostWithOnePath)) {
            actions.push(PathAction::Lost(reason));
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<PathAction>) {
        for (index, path) in self.paths.iter_mut().enumerate() {
            let Some(silence) = path.detector.suspicion(now).filter(|_| path.connected) else {
                continue;
            };
            let reason = format!("silent for {} ms", silence.as_millis());
            path.go_down(now, PathIndex(index as u16), &reason, actions);
        }
        // While all are silent, the peer's hanging up could be taken for its end.
        if !self.candidates().is_empty() {
            let renewed = |(index, path): (usize, &Path)| {
                path.is_stale(now).then_some(PathAction::Renew(PathIndex(index as u16)))
            };
            actions.extend(self.paths.iter().enumerate().filter_map(renewed));
        }
    }

    /// A path may carry heartbeats and nothing larger.
    fn stuck(&mut self, epoch: Epoch, actions: &mut Vec<PathAction>) {
        let has_other = self.candidates().iter().any(|path| *path != self.in_use);
        if has_other && self.left_for != Some(epoch) && !planted!(StayInTheHole) {
            self.left_for = Some(epoch);
            actions.push(PathAction::Leave(self.in_use));
        }
    }

    fn leave_if_down(&self, actions: &mut Vec<PathAction>) {
        let in_use = self.paths.get(usize::from(self.in_use.0));
        let down = in_use.is_some_and(|path| matches!(path.state, PathState::Down { .. }));
        if down && !self.candidates().is_empty() && !planted!(StayOnTheDead) {
            actions.push(PathAction::Leave(self.in_use));
        }
    }
}

impl Path {
    /// Whether it has a connection that has long been silent.
    fn is_stale(&self, now: Time) -> bool {
        let down = matches!(self.state, PathState::Down { since, .. } if now - since >= RENEWAL);
        down && self.connected
    }

    fn come_up(&mut self, index: PathIndex, actions: &mut Vec<PathAction>) {
        if matches!(std::mem::replace(&mut self.state, PathState::Up), PathState::Down { .. }) {
            actions.push(PathAction::Up(index));
        }
    }

    /// The first reason is the one that counts.
    fn go_down(
        &mut self,
        now: Time,
        index: PathIndex,
        reason: &str,
        actions: &mut Vec<PathAction>,
    ) {
        if !matches!(self.state, PathState::Down { .. }) {
            self.state = PathState::Down { since: now, reason: reason.to_owned() };
            actions.push(PathAction::Down(index, reason.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PathIndex = PathIndex(0);
    const B: PathIndex = PathIndex(1);
    const FLOOR: Duration = Duration::from_millis(100);

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    /// Two paths that are up at 0 ms, the data on A.
    fn two() -> Paths {
        let mut paths = Paths::new(2, A, FLOOR, at(0));
        assert_eq!(
            [
                after(&mut paths, 0, PathEvent::Connected(A)),
                after(&mut paths, 0, PathEvent::Connected(B))
            ],
            [[], []]
        );
        paths
    }

    fn after(paths: &mut Paths, ms: u64, event: PathEvent) -> Vec<PathAction> {
        let mut actions = Vec::new();
        paths.handle(at(ms), event, &mut actions);
        actions
    }

    #[test]
    fn the_data_leaves_a_silent_path_and_stays_away() {
        let mut paths = two();
        after(&mut paths, 90, PathEvent::Heard(B));
        let down = after(&mut paths, 101, PathEvent::Tick);
        let silent = PathAction::Down(A, "silent for 101 ms".to_owned());
        assert_eq!(down, [silent, PathAction::Leave(A)]);
        assert_eq!(paths.candidates(), [B]);
        after(&mut paths, 110, PathEvent::InUse(B));
        assert_eq!(after(&mut paths, 120, PathEvent::Heard(A)), [PathAction::Up(A)]);
        assert_eq!(paths.candidates(), [A, B], "the one in use is the last resort");
        assert_eq!(paths.in_use(), B);
    }

    /// A path whose frames are cut short lived by its heartbeats, and the backup was given up with the other path up.
    #[test]
    fn data_that_does_not_move_tries_another_path_once() {
        let mut paths = two();
        assert_eq!(after(&mut paths, 600, PathEvent::Stuck(Epoch(7))), [PathAction::Leave(A)]);
        after(&mut paths, 610, PathEvent::InUse(B));
        assert_eq!(
            after(&mut paths, 1200, PathEvent::Stuck(Epoch(7))),
            [],
            "the backup may be what hangs"
        );
        assert_eq!(after(&mut paths, 1900, PathEvent::Stuck(Epoch(8))), [PathAction::Leave(B)]);
        after(&mut paths, 1901, PathEvent::InUse(A));
        after(&mut paths, 2000, PathEvent::Ended(B, "reset".to_owned()));
        assert_eq!(after(&mut paths, 2600, PathEvent::Stuck(Epoch(9))), [], "there is no other");
    }

    #[test]
    fn the_connection_of_a_path_that_stays_silent_is_renewed() {
        let mut paths = two();
        after(&mut paths, 101, PathEvent::Heard(B));
        after(&mut paths, 101, PathEvent::Tick);
        after(&mut paths, 101, PathEvent::InUse(B));
        after(&mut paths, 5100, PathEvent::Heard(B));
        assert_eq!(after(&mut paths, 5100, PathEvent::Tick), []);
        assert_eq!(after(&mut paths, 5101, PathEvent::Tick), [PathAction::Renew(A)]);
        assert_eq!(after(&mut paths, 5102, PathEvent::Ended(A, "closed".to_owned())), []);
        assert_eq!(after(&mut paths, 5103, PathEvent::Tick), [], "nothing is left to be ended");
        assert_eq!(after(&mut paths, 9000, PathEvent::Connected(A)), [PathAction::Up(A)]);
    }

    #[test]
    fn nothing_is_renewed_while_all_paths_are_silent() {
        let mut paths = two();
        after(&mut paths, 101, PathEvent::Tick);
        assert_eq!(after(&mut paths, 60_000, PathEvent::Tick), []);
    }

    #[test]
    fn the_peer_is_gone_with_the_reset_of_the_last_path() {
        let mut paths = two();
        let reset = || "reset".to_owned();
        let actions = after(&mut paths, 1, PathEvent::Ended(A, reset()));
        assert_eq!(actions, [PathAction::Down(A, reset()), PathAction::Leave(A)]);
        // A dial that fails is no news.
        assert_eq!(after(&mut paths, 2, PathEvent::Ended(A, reset())), [PathAction::Leave(A)]);
        let actions = after(&mut paths, 3, PathEvent::Ended(B, reset()));
        assert_eq!(actions, [PathAction::Down(B, reset()), PathAction::Lost(reset())]);
    }

    #[test]
    fn a_reset_counts_when_the_other_path_is_silent() {
        let mut paths = two();
        after(&mut paths, 90, PathEvent::Heard(B));
        after(&mut paths, 101, PathEvent::Tick);
        let actions = after(&mut paths, 102, PathEvent::Ended(B, "reset".to_owned()));
        assert_eq!(actions.last(), Some(&PathAction::Lost("reset".to_owned())));
    }

    #[test]
    fn silence_of_all_paths_is_not_for_this_to_judge() {
        let mut paths = two();
        let actions = after(&mut paths, 500, PathEvent::Tick);
        assert!(actions.iter().all(|action| matches!(action, PathAction::Down(..))), "{actions:?}");
    }

    #[test]
    fn a_path_that_returns_takes_the_data_from_one_that_is_down() {
        let mut paths = two();
        after(&mut paths, 500, PathEvent::Tick);
        let actions = after(&mut paths, 510, PathEvent::Heard(B));
        assert_eq!(actions, [PathAction::Up(B), PathAction::Leave(A)]);
    }

    #[test]
    fn the_only_path_is_lost_at_once_and_never_left() {
        let mut paths = Paths::new(1, A, FLOOR, at(0));
        after(&mut paths, 0, PathEvent::Connected(A));
        let actions = after(&mut paths, 200, PathEvent::Tick);
        assert_eq!(actions, [PathAction::Down(A, "silent for 200 ms".to_owned())]);
        let actions = after(&mut paths, 201, PathEvent::Ended(A, "reset".to_owned()));
        assert_eq!(actions, [PathAction::Lost("reset".to_owned())]);
    }

    #[test]
    fn paths_that_do_not_exist_change_nothing() {
        let mut paths = two();
        for event in [PathEvent::Heard(PathIndex(9)), PathEvent::Ended(PathIndex(9), String::new())]
        {
            assert_eq!(after(&mut paths, 1, event), []);
        }
    }
}
