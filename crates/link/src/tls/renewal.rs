//! Renewal: certificates and the list of revoked ones are read again when their files change.

use super::Tls;
use std::sync::Weak;
use std::thread;
use std::time::Duration;
use tracing::{info, warn};

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_secs(2);

/// Looks for as long as somebody uses the certificates.
pub fn start(tls: Weak<Tls>) {
    let spawned = thread::Builder::new().name("certificates".to_owned()).spawn(move || run(&tls));
    if let Err(error) = spawned {
        warn!("new certificates are not noticed: cannot start a thread: {error}");
    }
}

fn run(tls: &Weak<Tls>) {
    let mut before = None;
    while let Some(tls) = tls.upgrade() {
        let problem = match tls.refresh() {
            Ok(None) => None,
            Ok(Some(closed)) => {
                info!(closed, "[tls]: the files have changed and are in use");
                None
            }
            // Files are replaced one after the other: what does not fit yet may in a moment.
            Err(error) => Some(format!("{error:#}")),
        };
        if problem != before {
            if let Some(problem) = &problem {
                warn!("[tls]: the changed files are not used: {problem}");
            }
            tls.note_problem(problem.clone());
            before = problem;
        }
        drop(tls);
        thread::sleep(INTERVAL);
    }
}
