//! Lapses of protection: the backup follows, and could not take over at the moment, or output waits for it for long, since
//! its disk or the arbiter is slow, say. Nothing is lost by that, and it mostly ends by itself within seconds. And silences
//! of a VM's keeper.

use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Failure};
use understudy_report::{Protection, VmStatus};

/// Time for a lapse to end: the backup says every two seconds what it could.
const PATIENCE: Duration = Duration::from_secs(15);
/// Time before the next try.
const AGAIN: Duration = Duration::from_millis(200);

/// The wait for the end of one.
pub struct Lapse {
    patience: Duration,
    quiet: bool,
    /// Time at which there is no more to wait for; none if there was no lapse yet.
    until: Option<Instant>,
}

impl Lapse {
    /// A wait that nobody has begun yet; whoever does is told once, unless `quiet`.
    pub fn new(quiet: bool) -> Lapse {
        Lapse { patience: PATIENCE, quiet, until: None }
    }

    /// Whether a VM's protection has lapsed, and its end is worth waiting for.
    pub fn is_worth_waiting(&mut self, status: &VmStatus) -> bool {
        let Some(lapse) = &status.lapse else { return false };
        let until = *self.until.get_or_insert_with(|| {
            if !self.quiet {
                let (vm, seconds) = (&status.name, self.patience.as_secs());
                eprintln!(
                    "{vm}: the backup follows, and {lapse}; waiting for it, {seconds} s at \
                     most"
                );
            }
            Instant::now() + self.patience
        });
        Instant::now() < until
    }

    /// Whether there was one, and the VM is protected now.
    fn has_ended(&self, status: &VmStatus) -> bool {
        self.until.is_some() && matches!(status.protection, Protection::Protected { .. })
    }
}

/// The wait for a VM's keeper that says nothing for a moment: what it does may go on.
pub struct Silence {
    patience: Duration,
    /// Time at which it began; none while the VM is heard of.
    since: Option<Instant>,
}

impl Silence {
    /// A silence that has not begun.
    pub fn new() -> Silence {
        Silence { patience: PATIENCE, since: None }
    }

    /// Whether nothing is known of the VM, and its keeper is worth waiting for.
    pub fn is_worth_waiting(&mut self, status: &VmStatus) -> bool {
        if status.unheard.is_none() {
            self.since = None;
            return false;
        }
        self.since.get_or_insert_with(Instant::now).elapsed() < self.patience
    }
}

/// Hands a VM over to its backup, perhaps after a lapse.
pub fn hand_over(client: &Client, vm: &str, quiet: bool) -> Result<(), Failure> {
    patiently(|| client.failover(vm), || client.vm_status(vm), Lapse::new(quiet), AGAIN)
}

fn patiently(
    mut hand_over: impl FnMut() -> Result<(), Failure>,
    mut status: impl FnMut() -> Result<VmStatus, Failure>,
    mut lapse: Lapse,
    pause: Duration,
) -> Result<(), Failure> {
    let mut is_last = false;
    loop {
        let Err(refused) = hand_over() else { return Ok(()) };
        let Ok(status) = status() else { return Err(refused) };
        // It may have ended since the refusal.
        is_last = !is_last && lapse.has_ended(&status);
        if !is_last && !lapse.is_worth_waiting(&status) {
            return Err(refused);
        }
        thread::sleep(pause);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::table::tests::example;
    use understudy_client::FailureKind;
    use understudy_protocol::literal;

    const SLOW: &str = "could not take over now: its disk is slow; output still waits for it";

    /// A lapse that nobody waits for.
    pub fn over() -> Lapse {
        Lapse { patience: Duration::ZERO, ..Lapse::new(true) }
    }

    /// A VM whose protection has lapsed, or is lost.
    pub fn degraded(lapse: Option<&str>) -> VmStatus {
        let reason = "b follows, and could not take over now".to_owned();
        VmStatus { lapse: lapse.map(str::to_owned), ..example(Protection::Degraded { reason }) }
    }

    /// A VM whose keeper does not answer.
    pub fn unheard() -> VmStatus {
        VmStatus { unheard: Some("it hangs".to_owned()), ..degraded(None) }
    }

    /// A silence that nobody waits through.
    pub fn endless() -> Silence {
        Silence { patience: Duration::ZERO, since: None }
    }

    #[test]
    fn each_silence_is_waited_through_by_itself() {
        let mut silence = Silence::new();
        assert!(!silence.is_worth_waiting(&degraded(None)));
        assert!(silence.is_worth_waiting(&unheard()) && silence.since.is_some());
        assert!(!silence.is_worth_waiting(&degraded(None)) && silence.since.is_none());
        assert!(!endless().is_worth_waiting(&unheard()));
    }

    /// Tries a hand-over that is refused so often.
    fn try_refused(times: usize, status: VmStatus, lapse: Lapse) -> (Result<(), Failure>, usize) {
        let mut tried = 0;
        let refused = Failure::new(FailureKind::Usage, "not now");
        let hand_over = || {
            tried += 1;
            if tried > times { Ok(()) } else { Err(refused.clone()) }
        };
        (patiently(hand_over, || Ok(status.clone()), lapse, Duration::ZERO), tried)
    }

    #[test]
    fn a_hand_over_waits_for_the_end_of_a_lapse_and_for_nothing_else() {
        let (outcome, tried) = try_refused(2, degraded(Some(SLOW)), Lapse::new(true));
        assert_eq!((outcome, tried), (Ok(()), 3));
        let (outcome, tried) = try_refused(2, degraded(None), Lapse::new(true));
        assert_eq!((outcome.is_err(), tried), (true, 1));
        let (outcome, tried) = try_refused(2, degraded(Some(SLOW)), over());
        assert_eq!((outcome.is_err(), tried), (true, 1));
    }

    // Before, it was refused for a lapse that had ended before the status was read.
    #[test]
    fn a_hand_over_is_tried_once_more_when_the_lapse_has_ended() {
        let try_refused = |times: usize| {
            let mut refusals = 0..times;
            let hand_over = || match refusals.next() {
                Some(_) => Err(Failure::new(FailureKind::Usage, "not now")),
                None => Ok(()),
            };
            let protected = || example(Protection::Protected { peer: literal("b") });
            let mut states = [degraded(Some(SLOW))].into_iter();
            let status = || Ok(states.next().unwrap_or_else(protected));
            patiently(hand_over, status, Lapse::new(true), Duration::ZERO)
        };
        assert_eq!(try_refused(2), Ok(()));
        assert!(try_refused(3).is_err(), "it is refused for something else");
    }
}
