//! The host's own look at its arbiter, from its start on: `status` tells what is wrong with it, before
//! any VM needs it.

use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_arbiter::Unreachable;
use understudy_report::events::EventKind;

const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for as long as the host lives. Storage that hangs holds this thread and nothing else.
pub(crate) fn start(host: &Arc<Host>) {
    if host.arbiter.is_none() {
        return;
    }
    let weak = Arc::downgrade(host);
    if let Err(error) = thread::Builder::new().name("arbiter".to_owned()).spawn(move || run(&weak))
    {
        warn!("nobody looks after the arbiter: {error}");
    }
}

fn run(host: &Weak<Host>) {
    while let Some(arbiter) = host.upgrade().and_then(|host| host.arbiter.clone()) {
        let found = arbiter.identify();
        let Some(host) = host.upgrade() else { return };
        let problem = found.as_ref().err().map(|Unreachable(reason)| format!("arbiter: {reason}"));
        let before = std::mem::replace(&mut host.findings.lock().arbiter, problem.clone());
        match (&found, problem) {
            (_, Some(reason)) if before.as_ref() != Some(&reason) => {
                host.events.record(EventKind::ArbiterLost { reason });
            }
            (Ok(name), None) if before.is_some() => {
                host.events.record(EventKind::ArbiterFound { arbiter: name.to_string() });
            }
            _ => {}
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}
