//! `vm stop --force` of a VM that has a keeper, which may hang.

use super::asking::{Said, understood};
use super::{Routed, comes_true};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_client::{Client, Failure, FailureKind};
use understudy_daemon::keeper::{Keeper, SILENCE};
use understudy_protocol::VmName;
use understudy_report::HostError;

/// Pause before one that takes no connection is asked again.
const PAUSE: Duration = Duration::from_millis(250);

/// Whether a keeper has said nothing. One that refuses, since the arbiter is away, lives, and so does its guest.
fn is_no_answer(failure: &Failure) -> bool {
    matches!(failure.kind, FailureKind::DaemonUnreachable | FailureKind::DaemonSilent)
}

impl Routed {
    /// Has a VM end here at once, and its keeper with it if that does not answer.
    pub(super) fn cut(&self, vm: &VmName) -> Result<(), HostError> {
        let Some(keeper) = self.0.keeper_of(vm) else { return self.0.vm_stop(vm, true) };
        match self.ask_for_end(&keeper, keeper.reachable()?) {
            Err(failure) if is_no_answer(&failure) && self.is_still_there(&keeper) => {
                self.0.end_hung_keeper(&keeper)
            }
            Err(failure) => understood(vm, Said::Order, Err(failure)),
            Ok(()) => {
                self.await_end(&keeper);
                Ok(())
            }
        }
    }

    /// Asks a keeper until it answers or is gone: to cut its VM it may wait for its backup and for the arbiter.
    fn ask_for_end(&self, keeper: &Keeper, socket: &Path) -> Result<(), Failure> {
        let deadline = Instant::now() + SILENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let client = Client::new(socket).map(|client| client.bounded(left));
            match client.and_then(|client| client.vm_stop(&keeper.vm, true)) {
                // One that hangs for long has no room for more connections, and says so at once.
                Err(failure)
                    if is_no_answer(&failure) && !left.is_zero() && self.is_still_there(keeper) =>
                {
                    thread::sleep(PAUSE)
                }
                answer => return answer,
            }
        }
    }

    pub(super) fn await_end(&self, keeper: &Keeper) {
        if !comes_true(|| !self.is_still_there(keeper)) {
            warn!(vm = %keeper.vm, "it has ended, and its keeper has not yet");
        }
    }

    fn is_still_there(&self, keeper: &Keeper) -> bool {
        // Its last words may be half written.
        let is_it = |now: Keeper| now.pid.is_none() || now.pid == keeper.pid;
        self.0.keeper_of(&keeper.vm).is_some_and(is_it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_report::ErrorKind;

    #[test]
    fn a_keeper_that_refuses_is_none_that_does_not_answer() {
        for silent in [FailureKind::DaemonUnreachable, FailureKind::DaemonSilent] {
            assert!(is_no_answer(&Failure::new(silent, "")));
        }
        for kind in [ErrorKind::Unreachable, ErrorKind::Conflict, ErrorKind::Internal] {
            assert!(!is_no_answer(&Failure::new(FailureKind::Host(kind), "")), "{kind:?}");
        }
    }
}
