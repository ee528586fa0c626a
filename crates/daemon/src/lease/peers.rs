//! Time as other hosts had it: a host whose hypervisor was paused has clocks that stood still with
//! it, and only others can tell.

use crate::host::Host;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::thread;
use std::time::Duration;
use understudy_link::link::Link;
use understudy_network::boot_time;
use understudy_protocol::wire::Kind;
use understudy_protocol::{HostName, PeerClock, Time};
use understudy_replication::handshake::Purpose;

/// Time between two questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time for a peer to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks one host after the other, as long as this one keeps a lease.
pub(super) fn run(host: &Weak<Host>) {
    let mut clocks: BTreeMap<HostName, PeerClock> = BTreeMap::new();
    let mut turn = 0;
    while let Some(host) = host.upgrade() {
        if host.keeps_leases() {
            let peers = host.known_hosts();
            if let Some(peer) = peers.keys().nth(turn % peers.len().max(1)) {
                let asked = boot_time();
                if let Ok(theirs) = host.ask_clock(peer) {
                    let clock = clocks.entry(peer.clone()).or_default();
                    if let Some(still) = clock.look(asked, boot_time(), theirs) {
                        host.stood_still(still, true);
                    }
                }
            }
            turn = turn.wrapping_add(1);
        } else {
            clocks.clear();
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}

impl Host {
    fn ask_clock(&self, peer: &HostName) -> anyhow::Result<Time> {
        let addresses = self.known_hosts().remove(peer).unwrap_or_default();
        let link = self.identity.dial_first(peer, &addresses, |_| Purpose::Clock)?.0;
        link.set_read_timeout(Some(PATIENCE))?;
        let milliseconds: u64 = link.expect_json(Kind::Welcome)?;
        Ok(Time(Duration::from_millis(milliseconds)))
    }

    /// Says how long this host has been up, that in which it slept included.
    pub(crate) fn answer_clock(&self, link: &Link) -> anyhow::Result<()> {
        link.send_json(Kind::Welcome, &(boot_time().0.as_millis() as u64))
    }
}
