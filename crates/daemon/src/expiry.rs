//! Watch over what nobody else looks at until it is too late: certificates that expire.

use crate::config::{ArbiterConfig, HostConfig};
use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_arbiter::Arbiter;
use understudy_arbiter::etcd::Etcd;
use understudy_link::tls;
use understudy_report::events::EventKind;

const INTERVAL: Duration = Duration::from_secs(5);

/// Looks for as long as the host lives.
pub(crate) fn start(host: &Arc<Host>) {
    let weak = Arc::downgrade(host);
    let spawned = thread::Builder::new().name("watch".to_owned()).spawn(move || run(&weak));
    if let Err(error) = spawned {
        warn!("nobody tells of certificates that expire: cannot start a thread: {error}");
    }
}

impl Host {
    /// Problems of the certificates of this host, its authority's, and those for etcd.
    pub(crate) fn problems_of_certificates(&self) -> Vec<String> {
        let own = self.identity.tls.iter().flat_map(|tls| tls.problems());
        let unused = self.arbiter.as_ref().and_then(Arbiter::etcd).and_then(Etcd::problem);
        own.chain(unused).chain(of_etcd(&self.config)).collect()
    }
}

/// Words on this host's certificate for etcd, if it has one that expires.
pub(crate) fn of_etcd(config: &HostConfig) -> Option<String> {
    let Some(ArbiterConfig::Etcd(etcd)) = &config.arbiter else { return None };
    tls::expiring(&etcd.endpoints.tls()?.cert)
}

fn run(host: &Weak<Host>) {
    let mut known: Vec<String> = Vec::new();
    while let Some(host) = host.upgrade() {
        let problems = host.problems_of_certificates();
        for problem in problems.iter().filter(|problem| !known.contains(problem)) {
            host.events.record(EventKind::Certificate { problem: problem.clone() });
        }
        known = problems;
        drop(host);
        thread::sleep(INTERVAL);
    }
}
