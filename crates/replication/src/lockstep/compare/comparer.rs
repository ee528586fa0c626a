//! What the threads of a session on the primary share of its comparisons.

use super::primary::MOST_UNANSWERED;
use crate::clock;
use crate::lockstep::primary::{Recording, State};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_lockstep::{Comparison, Findings};
use understudy_protocol::Time;
use understudy_report::{ComparisonCounts, ComparisonReport};
use understudy_threads::MutexGuard;

/// Time after which a waiter for a comparison gives up if nothing is heard of it, longer than a
/// backup may answer nothing: a disk of this host may hang that is being read for it.
const LONGEST_SILENCE: Duration = Duration::from_secs(120);

/// The comparisons of a log, of which all that is known is a part of the state that its threads share.
#[derive(Clone, Copy)]
pub struct Comparer<'a>(pub &'a Recording);

/// What is known of comparisons.
#[derive(Debug, Default)]
pub(in crate::lockstep) struct Comparing {
    /// Whether a place is being made: log from behind it must not go before it is announced.
    announcing: bool,
    /// Comparisons that the backup is to be told of before log that is read from now on.
    announced: VecDeque<Comparison>,
    /// True while somebody waits for a whole comparison.
    wanted: bool,
    result: Option<Result<ComparisonReport, String>>,
    findings: VecDeque<Findings>,
    /// Number of times that the backup has answered.
    heard: u64,
    counts: ComparisonCounts,
    ended_at: Option<Time>,
    closed: bool,
}

/// The reason why a whole comparison cannot be asked for, or has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A comparison is under way.
    Busy,
    /// The comparison has no result, for this reason.
    Failed(String),
}

impl<'a> Comparer<'a> {
    fn lock(self) -> MutexGuard<'a, State> {
        self.0.state.lock()
    }

    fn change<T>(self, change: impl FnOnce(&mut Comparing) -> T) -> T {
        self.0.state.change(|state| change(&mut state.comparing))
    }

    /// Compares all, and waits for the result.
    pub fn verify(self) -> Result<ComparisonReport, Refusal> {
        self.verify_unless_silent(LONGEST_SILENCE)
    }

    fn verify_unless_silent(self, longest: Duration) -> Result<ComparisonReport, Refusal> {
        let mut state = self.lock();
        if state.comparing.wanted {
            return Err(Refusal::Busy);
        }
        state.comparing.wanted = true;
        // One that nobody waited for any more.
        state.comparing.result = None;
        self.0.state.wake();
        let result = loop {
            let heard = state.comparing.heard;
            let waits = |state: &mut State| {
                let Comparing { result, closed, heard: now, .. } = &state.comparing;
                result.is_none() && !closed && *now == heard
            };
            state = self.0.state.wait_while_for(state, longest, waits);
            if let Some(result) = state.comparing.result.take() {
                break result;
            }
            if state.comparing.closed {
                break Err("protection ended".to_owned());
            }
            if state.comparing.heard == heard {
                let seconds = longest.as_secs();
                break Err(format!(
                    "nothing was compared for {seconds} s: does a disk of this host hang?"
                ));
            }
        };
        state.comparing.wanted = false;
        result.map_err(Refusal::Failed)
    }

    /// Takes what the backup is to be told before the log that was read just now, once no place is being made.
    pub fn take(self) -> VecDeque<Comparison> {
        let mut state = self.0.state.wait_while(self.lock(), |state| state.comparing.announcing);
        std::mem::take(&mut state.comparing.announced)
    }

    /// A place is made from now on, while the guest stands still.
    pub(super) fn announce(self) -> Announcing<'a> {
        self.lock().comparing.announcing = true;
        Announcing(self)
    }

    /// The backup has compared.
    pub fn heard(self, findings: Findings) {
        self.change(|comparing| {
            comparing.heard += 1;
            // More than were asked for are of no use.
            if comparing.findings.len() <= MOST_UNANSWERED {
                comparing.findings.push_back(findings);
            }
        });
    }

    /// The report that `status` shows; none before the first comparison has ended.
    pub fn report(self) -> Option<ComparisonCounts> {
        let state = self.lock();
        let ended = state.comparing.ended_at?;
        let seconds_ago = (clock::now() - ended).as_secs_f64();
        Some(ComparisonCounts { seconds_ago, ..state.comparing.counts })
    }

    /// Whether somebody waits for a whole comparison.
    pub fn is_wanted(self) -> bool {
        let state = self.lock();
        state.comparing.wanted && state.comparing.result.is_none()
    }

    /// The answer that came first and was not taken yet.
    pub(super) fn next_findings(self) -> Option<Findings> {
        self.lock().comparing.findings.pop_front()
    }

    /// Forgets answers to what was asked before.
    pub(super) fn forget_findings(self) {
        self.lock().comparing.findings.clear();
    }

    /// Waits for a change, for so long at most.
    pub(super) fn await_change(self, longest: Duration) {
        drop(self.0.state.wait_for(self.lock(), longest));
    }

    /// The same, unless there are answers.
    pub(super) fn await_findings(self, longest: Duration) {
        let state = self.lock();
        if state.comparing.findings.is_empty() {
            drop(self.0.state.wait_for(state, longest));
        }
    }

    pub(super) fn count(self, report: &ComparisonReport) {
        let mut state = self.lock();
        let counts = &mut state.comparing.counts;
        counts.comparisons += 1;
        counts.pages += report.pages;
        counts.extents += report.extents;
        counts.passed += report.passed;
        state.comparing.ended_at = Some(clock::now());
    }

    pub(super) fn tell(self, result: Result<ComparisonReport, String>) {
        self.change(|comparing| comparing.result = Some(result));
    }

    pub(super) fn close(self) {
        self.change(|comparing| comparing.closed = true);
    }
}

/// A place is being made until this is dropped. Nobody has the lock meanwhile: it takes as long as the read of a disk.
pub(super) struct Announcing<'a>(Comparer<'a>);

impl Announcing<'_> {
    /// The backup is to be told of this place.
    pub fn done(self, comparison: Comparison) {
        self.0.lock().comparing.announced.push_back(comparison);
    }
}

impl Drop for Announcing<'_> {
    fn drop(&mut self) {
        self.0.change(|comparing| comparing.announcing = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use understudy_lockstep::{LogPosition, Place};
    use understudy_protocol::Epoch;

    fn answer(number: u64) -> Findings {
        Findings { number, was_compared: true, differences: Vec::new() }
    }

    #[test]
    fn a_comparison_that_nothing_is_heard_of_is_waited_for_no_longer() {
        let recording = Recording::of(None, Epoch(1));
        let comparer = recording.comparer();
        for _ in 0..2 {
            let failed = comparer.verify_unless_silent(Duration::from_millis(10)).unwrap_err();
            assert!(matches!(&failed, Refusal::Failed(why) if why.contains("hang")), "{failed:?}");
            assert!(!comparer.is_wanted());
            // It came late, and to nobody.
            comparer.tell(Ok(ComparisonReport::default()));
        }
    }

    #[test]
    fn one_that_goes_on_is_waited_for() {
        let recording = Recording::of(None, Epoch(1));
        let comparer = recording.comparer();
        let report = ComparisonReport { pages: 7, ..Default::default() };
        thread::scope(|scope| {
            let waiting = scope.spawn(|| comparer.verify_unless_silent(Duration::from_secs(60)));
            while !comparer.is_wanted() {
                thread::yield_now();
            }
            assert_eq!(comparer.verify(), Err(Refusal::Busy));
            (0..3).for_each(|number| comparer.heard(answer(number)));
            comparer.tell(Ok(report.clone()));
            assert_eq!(waiting.join().unwrap(), Ok(report));
        });
    }

    #[test]
    fn log_waits_for_a_place_that_is_being_made() {
        let recording = Recording::of(None, Epoch(1));
        let comparer = recording.comparer();
        let place =
            Place { number: 1, position: LogPosition(7), instructions: 0, disk_requests: 0 };
        thread::scope(|scope| {
            let announcing = comparer.announce();
            let log = scope.spawn(|| comparer.take());
            thread::sleep(Duration::from_millis(50));
            // Whoever asks for something else does not wait.
            assert!(!comparer.is_wanted() && !log.is_finished());
            announcing.done(Comparison { place, readings: Vec::new() });
            assert_eq!(log.join().unwrap().len(), 1);
        });
        // One that comes to nothing holds nothing up.
        drop(comparer.announce());
        assert!(comparer.take().is_empty());
    }
}
