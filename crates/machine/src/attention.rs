//! Whether a QEMU that lives does its work: the detector of one that hangs.
//!
//! QEMU owes this daemon an answer in each step of a pause, and, where the agent pauses it, to a
//! probe of its main loop between pauses. Its silence is measured as a peer's is, with the time
//! taken by this thread's own looks: time in which this host, or this daemon, stood still or was
//! starved counts as one look, since QEMU had none of it either.

use crate::Machine;
use crate::tpm::Tpm;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest time for which a TPM's work excuses QEMU, which waits for the command that runs
/// before it saves the device state: a key of RSA takes seconds. Shorter than any time-out of a
/// pause.
const TPM_BOUND: Duration = Duration::from_secs(15);

/// Looks within the bound: it is exceeded by a tenth at most, for a host that is not starved.
const LOOKS: u32 = 10;

/// The side whose turn it is in a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// No pause.
    Free = 0,
    /// QEMU is to do something.
    Qemus = 1,
    /// The daemon is; QEMU's main loop waits for it.
    Daemons = 2,
}

impl Turn {
    fn of(state: u64) -> Turn {
        match state % TURNS {
            0 => Turn::Free,
            1 => Turn::Qemus,
            _ => Turn::Daemons,
        }
    }
}

/// The number of turns that there are, for the state of an [`Attention`].
const TURNS: u64 = 3;

/// The attention that QEMU owes pauses, and what it did: its answers so far, and whose turn it is.
#[derive(Debug, Default)]
pub struct Attention(AtomicU64);

impl Attention {
    /// A pause begins; QEMU is to stop the guest.
    pub fn begin(&self) -> Attended<'_> {
        let attended = Attended(self);
        attended.owes();
        attended
    }

    fn put(&self, turn: Turn) {
        let next = |state: u64| {
            // Only an answer ends QEMU's turn.
            let answers = state / TURNS + u64::from(Turn::of(state) == Turn::Qemus);
            Some(answers * TURNS + turn as u64)
        };
        // It always has a next one.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
    }

    fn get(&self) -> (Turn, u64) {
        let state = self.0.load(Ordering::Acquire);
        (Turn::of(state), state / TURNS)
    }
}

/// A pause under way. Dropped, it is over.
#[derive(Debug)]
pub struct Attended<'a>(&'a Attention);

impl Attended<'_> {
    /// QEMU is to do the next step.
    pub fn owes(&self) {
        self.0.put(Turn::Qemus);
    }

    /// Ends QEMU's turn: it has done the step.
    pub fn answered(&self) {
        self.0.put(Turn::Daemons);
    }
}

impl Drop for Attended<'_> {
    fn drop(&mut self) {
        self.0.put(Turn::Free);
    }
}

/// The signs of one QEMU at a look.
#[derive(Debug)]
pub struct Signs<'a> {
    /// Its pauses.
    pub attention: &'a Attention,
    /// Whether its main loop has answered the last probe; none before the first.
    pub echoed: Option<bool>,
    /// Whether it waits for this host: for a disk, or for room in its log.
    pub excused: bool,
    /// Whether its TPM has worked since the last look: it may wait for that.
    pub tpm_works: bool,
}

/// Measures one QEMU's silence.
#[derive(Debug)]
pub struct HangDetector {
    bound: Duration,
    silent: Duration,
    /// Part of the time without an answer in which its TPM worked.
    in_tpm: Duration,
    answers: u64,
    /// Whether it has answered a probe, so that one can be expected of it.
    echoes: bool,
}

impl HangDetector {
    /// Makes the detector of a QEMU that may be silent for so long.
    pub fn new(bound: Duration) -> HangDetector {
        let (silent, in_tpm) = Default::default();
        HangDetector { bound, silent, in_tpm, answers: 0, echoes: false }
    }

    /// The time between looks.
    pub fn interval(&self) -> Duration {
        self.bound / LOOKS
    }

    /// The silence so far, `passed` after the last look. Says, too, whether a probe is due.
    pub fn look(&mut self, signs: &Signs<'_>, passed: Duration) -> (Duration, bool) {
        let (turn, answers) = signs.attention.get();
        let answered = std::mem::replace(&mut self.answers, answers) != answers;
        self.echoes |= signs.echoed == Some(true);
        let awaited = match turn {
            Turn::Daemons => false,
            Turn::Qemus => true,
            Turn::Free => self.echoes && signs.echoed == Some(false),
        };
        let passed = passed.min(self.interval());
        if !awaited || answered || signs.excused {
            (self.silent, self.in_tpm) = Default::default();
        } else if signs.tpm_works && self.in_tpm < TPM_BOUND {
            self.in_tpm += passed;
        } else {
            self.silent += passed;
        }
        (self.silent, turn == Turn::Free && signs.echoed != Some(false))
    }

    /// Whether it hangs.
    pub fn is_over(&self) -> bool {
        self.silent >= self.bound
    }
}

impl Machine {
    /// Looks at QEMU, `passed` after the last look. `waits`: this host does not read its log.
    /// Returns for how long it has been silent.
    pub fn look(&self, detector: &mut HangDetector, passed: Duration, waits: bool) -> Duration {
        let waits_for_disk = || self.disks().iter().any(|disk| disk.has_requests());
        let waits_for_room = || self.log.as_ref().is_some_and(|log| log.status().is_blocked);
        // A process that was stopped waits for nothing, whatever it asked for before.
        let asks = (waits_for_disk() || waits_for_room()) && !is_stopped(self.qemu_pid());
        let tpm_works = self.tpm.as_ref().is_some_and(Tpm::works);
        self.pauser.look(detector, passed, waits || asks, tpm_works)
    }
}

/// Whether a process is stopped, by a signal or a debugger.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in brackets, may contain anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(100);

    struct Watched {
        attention: Attention,
        detector: HangDetector,
    }

    impl Watched {
        fn new() -> Watched {
            let detector = HangDetector::new(LOOK * LOOKS);
            Watched { attention: Attention::default(), detector }
        }

        fn look(&mut self, echoed: Option<bool>, excused: bool, passed: Duration) -> u128 {
            let signs = Signs { attention: &self.attention, echoed, excused, tpm_works: false };
            self.detector.look(&signs, passed).0.as_millis()
        }

        fn look_while_tpm_works(&mut self) -> u128 {
            let attention = &self.attention;
            let signs = Signs { attention, echoed: Some(false), excused: false, tpm_works: true };
            self.detector.look(&signs, LOOK).0.as_millis()
        }
    }

    #[test]
    fn a_pause_that_is_not_answered_is_a_silence() {
        let mut qemu = Watched::new();
        assert_eq!(qemu.look(None, false, LOOK), 0, "nothing was asked");
        for _ in 0..20 {
            let attention = std::mem::take(&mut qemu.attention);
            let pause = attention.begin();
            pause.answered();
            drop(pause);
            qemu.attention = attention;
            assert_eq!(qemu.look(None, false, LOOK), 0, "it answers each");
        }
        std::mem::forget(qemu.attention.begin());
        for look in 1..=LOOKS {
            assert!(!qemu.detector.is_over());
            assert_eq!(qemu.look(None, false, LOOK), (LOOK * look).as_millis());
        }
        assert!(qemu.detector.is_over());
        let pause = Attended(&qemu.attention);
        pause.answered();
        std::mem::forget(pause);
        assert_eq!(qemu.look(None, false, LOOK), 0, "it is this daemon's turn");
        assert_eq!(qemu.look(None, false, LOOK * 100), 0, "for as long as it takes");
    }

    #[test]
    fn a_probe_counts_of_a_main_loop_that_answers_probes() {
        let mut qemu = Watched::new();
        assert_eq!(qemu.look(Some(false), false, LOOK), 0, "an agent that knows none");
        assert_eq!(qemu.look(Some(true), false, LOOK), 0);
        assert_eq!(qemu.look(Some(false), false, LOOK), 100);
        // A pause that begins does not hide that nothing is answered.
        let attention = std::mem::take(&mut qemu.attention);
        let pause = attention.begin();
        let echoed = Some(false);
        let signs = Signs { attention: &attention, echoed, excused: false, tpm_works: false };
        assert_eq!(qemu.detector.look(&signs, LOOK), (LOOK * 2, false));
        pause.answered();
        assert_eq!(qemu.detector.look(&signs, LOOK).0, Duration::ZERO);
        drop(pause);
        assert_eq!(qemu.detector.look(&signs, LOOK).0, LOOK, "it is free to answer the probe");
    }

    #[test]
    fn what_this_host_lost_itself_counts_as_one_look() {
        let mut qemu = Watched::new();
        std::mem::forget(qemu.attention.begin());
        assert_eq!(qemu.look(None, false, LOOK * 300), 100, "the daemon was stopped");
        assert_eq!(qemu.look(None, true, LOOK), 0, "it waits for a disk of this host");
    }

    /// A guest that had its TPM make a key of RSA was handed over: QEMU waits for that before it saves the
    /// device state.
    #[test]
    fn a_tpm_that_works_is_no_silence_within_its_bound() {
        let mut qemu = Watched::new();
        std::mem::forget(qemu.attention.begin());
        for _ in 0..TPM_BOUND.as_millis() / LOOK.as_millis() {
            assert_eq!(qemu.look_while_tpm_works(), 0);
        }
        assert_eq!(qemu.look_while_tpm_works(), LOOK.as_millis(), "it has worked for too long");
        let mut qemu = Watched::new();
        std::mem::forget(qemu.attention.begin());
        assert_eq!(qemu.look_while_tpm_works(), 0);
        assert_eq!(qemu.look(None, false, LOOK), 100, "it does not work, or is stopped");
        assert_eq!(qemu.look_while_tpm_works(), 100, "what was silence stays that");
    }
}
