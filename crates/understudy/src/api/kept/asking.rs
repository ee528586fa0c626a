//! How a keeper is asked what it knows, and told what to do, and what its answer means.

use std::path::Path;
use std::time::Duration;
use understudy_client::{Client, Failure, FailureKind};
use understudy_daemon::config::LONGEST_LEASE;
use understudy_daemon::keeper::SILENCE;
use understudy_protocol::VmName;
use understudy_report::{ErrorKind, HostError};

/// Time for a keeper to say what it knows: one that hangs must not hide the others.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for a keeper to start a VM, beside the lease of a silent host that it may wait for.
const START_PATIENCE: Duration = LONGEST_LEASE.saturating_add(Duration::from_secs(60));

/// What is said to a keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// It is asked what it knows.
    Question,
    /// It is told what to do.
    Order,
}

/// Asks a keeper what it knows.
pub fn ask<T>(
    vm: &VmName,
    socket: &Path,
    question: impl FnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, HostError> {
    let client = Client::new(socket).map(|client| client.patient(PATIENCE));
    understood(vm, Said::Question, client.and_then(|client| question(&client)))
}

/// Tells a keeper what to do: that may take as long as it takes, while the keeper says how its VM is.
pub fn tell<T>(
    vm: &VmName,
    socket: &Path,
    order: impl FnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, HostError> {
    let client = Client::new(socket).map(|client| client.while_heard(vm, SILENCE));
    understood(vm, Said::Order, client.and_then(|client| order(&client)))
}

/// Has a keeper start a VM.
pub fn start<T>(
    vm: &VmName,
    socket: &Path,
    order: impl FnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, HostError> {
    let client = Client::new(socket);
    let client = client.map(|client| client.bounded(START_PATIENCE).while_heard(vm, SILENCE));
    understood(vm, Said::Order, client.and_then(|client| order(&client)))
}

/// What a keeper's answer means.
pub fn understood<T>(vm: &VmName, said: Said, answer: Result<T, Failure>) -> Result<T, HostError> {
    answer.map_err(|failure| match failure.kind {
        FailureKind::Host(kind) => HostError::new(kind, failure.message),
        FailureKind::Usage | FailureKind::Degraded | FailureKind::DaemonUnreachable => {
            let message = format!("the keeper of {vm} does not answer: {}", failure.message);
            HostError::new(ErrorKind::Unreachable, message)
        }
        FailureKind::DaemonSilent => HostError::new(ErrorKind::Unreachable, silent(vm, said)),
    })
}

fn silent(vm: &VmName, said: Said) -> String {
    let yet = match said {
        Said::Question => "",
        Said::Order => ", and may yet do what it was told",
    };
    format!(
        "the keeper of {vm} does not answer: it hangs, or waits{yet}; if that lasts \
         `understudy vm stop {vm} --force` ends it, and what it runs or backs up here (`understudy status {vm}` has its \
         process)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    // Before, `status` said so of a keeper that had been told nothing.
    #[test]
    fn only_who_was_told_something_may_yet_do_it() {
        for (said, may_act) in [(Said::Question, false), (Said::Order, true)] {
            let silent = Err::<(), _>(Failure::new(FailureKind::DaemonSilent, ""));
            let words = understood(&literal("db"), said, silent).unwrap_err().message;
            assert_eq!(words.contains("may yet do what it was told"), may_act, "{words}");
            assert!(words.contains("`understudy vm stop db --force` ends it"), "{words}");
        }
    }
}
