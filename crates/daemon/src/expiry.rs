//! What nobody else looks at until it is too late: certificates that expire.

use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_report::events::EventKind;

const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for as long as the host lives.
pub(crate) fn start(host: &Arc<Host>) {
    if host.identity.tls.is_none() {
        return;
    }
    let weak = Arc::downgrade(host);
    let spawned = thread::Builder::new().name("watch".to_owned()).spawn(move || run(&weak));
    if let Err(error) = spawned {
        warn!("nobody tells of certificates that expire: cannot start a thread: {error}");
    }
}

fn run(host: &Weak<Host>) {
    let mut known: Vec<String> = Vec::new();
    while let Some(host) = host.upgrade() {
        let problems = host.identity.tls.as_ref().map_or_else(Vec::new, |tls| tls.problems());
        for problem in problems.iter().filter(|problem| !known.contains(problem)) {
            host.events.record(EventKind::Certificate { problem: problem.clone() });
        }
        known = problems;
        drop(host);
        thread::sleep(INTERVAL);
    }
}
