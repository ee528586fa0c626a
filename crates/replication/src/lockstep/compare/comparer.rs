//! What the threads of a session on the primary share of its comparisons.

use super::primary::MOST_UNANSWERED;
use crate::clock;
use std::collections::VecDeque;
use std::time::Duration;
use understudy_lockstep::{Comparison, Findings};
use understudy_protocol::Time;
use understudy_report::{ComparisonCounts, ComparisonReport};
use understudy_threads::Waitable;

/// Time after which a waiter for a comparison gives up if nothing is heard of it, longer than a
/// backup may answer nothing: a disk of this host may hang that is being read for it.
const LONGEST_SILENCE: Duration = Duration::from_secs(120);

/// The state of its comparisons that the threads of a session share.
#[derive(Debug, Default)]
pub struct Comparer {
    state: Waitable<State>,
}

#[derive(Debug, Default)]
struct State {
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

impl Comparer {
    /// Compares all, and waits for the result.
    pub fn verify(&self) -> Result<ComparisonReport, Refusal> {
        self.verify_unless_silent(LONGEST_SILENCE)
    }

    fn verify_unless_silent(&self, longest: Duration) -> Result<ComparisonReport, Refusal> {
        let mut state = self.state.lock();
        if state.wanted {
            return Err(Refusal::Busy);
        }
        state.wanted = true;
        // One that nobody waited for any more.
        state.result = None;
        self.state.wake();
        let result = loop {
            let heard = state.heard;
            let waits =
                |state: &mut State| state.result.is_none() && !state.closed && state.heard == heard;
            state = self.state.wait_while_for(state, longest, waits);
            if let Some(result) = state.result.take() {
                break result;
            }
            if state.closed {
                break Err("protection ended".to_owned());
            }
            if state.heard == heard {
                let seconds = longest.as_secs();
                break Err(format!(
                    "nothing was compared for {seconds} s: does a disk of this host hang?"
                ));
            }
        };
        state.wanted = false;
        result.map_err(Refusal::Failed)
    }

    /// Takes what the backup is to be told before the log that was read just now, once no place is being made.
    pub fn take(&self) -> VecDeque<Comparison> {
        let mut state = self.state.wait_while(self.state.lock(), |state| state.announcing);
        std::mem::take(&mut state.announced)
    }

    /// A place is made from now on, while the guest stands still.
    pub(super) fn announce(&self) -> Announcing<'_> {
        self.state.lock().announcing = true;
        Announcing(self)
    }

    /// The backup has compared.
    pub fn heard(&self, findings: Findings) {
        self.state.change(|state| {
            state.heard += 1;
            // More than were asked for are of no use.
            if state.findings.len() <= MOST_UNANSWERED {
                state.findings.push_back(findings);
            }
        });
    }

    /// The report that `status` shows; none before the first comparison has ended.
    pub fn report(&self) -> Option<ComparisonCounts> {
        let state = self.state.lock();
        let ended = state.ended_at?;
        let seconds_ago = (clock::now() - ended).as_secs_f64();
        Some(ComparisonCounts { seconds_ago, ..state.counts })
    }

    /// Whether somebody waits for a whole comparison.
    pub fn is_wanted(&self) -> bool {
        let state = self.state.lock();
        state.wanted && state.result.is_none()
    }

    /// The answer that came first and was not taken yet.
    pub(super) fn next_findings(&self) -> Option<Findings> {
        self.state.lock().findings.pop_front()
    }

    /// Forgets answers to what was asked before.
    pub(super) fn forget_findings(&self) {
        self.state.lock().findings.clear();
    }

    /// Waits for a change, for so long at most.
    pub(super) fn await_change(&self, longest: Duration) {
        drop(self.state.wait_for(self.state.lock(), longest));
    }

    /// The same, unless there are answers.
    pub(super) fn await_findings(&self, longest: Duration) {
        let state = self.state.lock();
        if state.findings.is_empty() {
            drop(self.state.wait_for(state, longest));
        }
    }

    pub(super) fn count(&self, report: &ComparisonReport) {
        let mut state = self.state.lock();
        let counts = &mut state.counts;
        counts.comparisons += 1;
        counts.pages += report.pages;
        counts.extents += report.extents;
        counts.passed += report.passed;
        state.ended_at = Some(clock::now());
    }

    pub(super) fn tell(&self, result: Result<ComparisonReport, String>) {
        self.state.change(|state| state.result = Some(result));
    }

    pub(super) fn close(&self) {
        self.state.change(|state| state.closed = true);
    }
}

/// A place is being made until this is dropped. Nobody has the lock meanwhile: it takes as long as the read of a disk.
pub(super) struct Announcing<'a>(&'a Comparer);

impl Announcing<'_> {
    /// The backup is to be told of this place.
    pub fn done(self, comparison: Comparison) {
        self.0.state.lock().announced.push_back(comparison);
    }
}

impl Drop for Announcing<'_> {
    fn drop(&mut self) {
        self.0.state.change(|state| state.announcing = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use understudy_lockstep::{LogPosition, Place};

    fn answer(number: u64) -> Findings {
        Findings { number, was_compared: true, differences: Vec::new() }
    }

    #[test]
    fn a_comparison_that_nothing_is_heard_of_is_waited_for_no_longer() {
        let comparer = Comparer::default();
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
        let comparer = Comparer::default();
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
        let comparer = Comparer::default();
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
