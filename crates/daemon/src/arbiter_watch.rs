//! The host's own look at its arbiter, from its start on: `status` tells what is wrong with it, before
//! any VM needs it.

use crate::host::Host;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_arbiter::{Arbiter, ArbiterName, Unreachable};
use understudy_report::events::EventKind;
use understudy_threads::spawn;

const INTERVAL: Duration = Duration::from_secs(5);
/// Time for it to answer: longer than etcd's endpoints may take, each of which has a bound of its own.
const PATIENCE: Duration = Duration::from_secs(5);

type Found = Result<ArbiterName, Unreachable>;

/// Looks for as long as the host lives. Storage that hangs holds the thread that asks, and nothing else.
pub(crate) fn start(host: &Arc<Host>) {
    let Some(arbiter) = host.arbiter.clone() else { return };
    let (found, answers) = crossbeam_channel::bounded(0);
    let weak = Arc::downgrade(host);
    let started = spawn("ask-arbiter", move || ask(&arbiter, &found)).and_then(|_| {
        let tell = move |found| host_hears(&weak, found);
        spawn("arbiter", move || listen(&answers, INTERVAL + PATIENCE, tell))
    });
    if let Err(error) = started {
        warn!("nobody looks after the arbiter: {error}");
    }
}

/// Asks as long as somebody hears what it answers.
fn ask(arbiter: &Arbiter, found: &Sender<Found>) {
    loop {
        // A fail point, for one that does not answer.
        fail::fail_point!("ask-arbiter");
        if found.send(arbiter.identify()).is_err() {
            return;
        }
        thread::sleep(INTERVAL);
    }
}

/// Tells what it answers, or that it does not, as long as `tell` wants to know.
fn listen(answers: &Receiver<Found>, patience: Duration, mut tell: impl FnMut(Found) -> bool) {
    loop {
        let found = match answers.recv_timeout(patience) {
            Ok(found) => found,
            Err(RecvTimeoutError::Timeout) => Err(silent()),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if !tell(found) {
            return;
        }
    }
}

fn silent() -> Unreachable {
    Unreachable(format!(
        "it has not answered for more than {} s: does its storage hang?",
        PATIENCE.as_secs()
    ))
}

/// Returns whether there still is a host.
fn host_hears(host: &Weak<Host>, found: Found) -> bool {
    let Some(host) = host.upgrade() else { return false };
    let problem = found.as_ref().err().map(|Unreachable(reason)| format!("arbiter: {reason}"));
    let before = host.vms.note(|all| std::mem::replace(&mut all.findings.arbiter, problem.clone()));
    match (&found, problem) {
        (_, Some(reason)) if before.as_ref() != Some(&reason) => {
            host.events.record(EventKind::ArbiterLost { reason });
        }
        (Ok(name), None) if before.is_some() => {
            host.events.record(EventKind::ArbiterFound { arbiter: name.to_string() });
        }
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    // Before, a directory that hung held the one thread, and what it had answered last was told for ever.
    #[test]
    fn an_arbiter_that_hangs_is_told_of_until_it_answers() {
        let (found, answers) = crossbeam_channel::bounded(0);
        let (heard, is_told) = crossbeam_channel::unbounded();
        let words = || Unreachable("its directory is not there".to_owned());
        let mut told = Vec::new();
        thread::scope(|scope| {
            scope.spawn(move || {
                is_told.recv().unwrap();
                found.send(Err(words())).unwrap();
            });
            listen(&answers, Duration::from_millis(20), |found| {
                told.push(found.unwrap_err());
                // It hangs until that is told.
                let _ = heard.send(());
                true
            });
        });
        assert_eq!(told[0], silent());
        assert!(told.contains(&words()), "{told:?}");
    }
}
