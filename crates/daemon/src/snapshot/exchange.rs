//! Exchange of a coordinator with the hosts of a group: one connection to each, dialled again
//! when it is lost. What is lost with it is said again by the machines on both ends.

use crate::containment::spawn_for_request;
use crate::host::Host;
use anyhow::Context;
use crossbeam_channel::{Receiver, Sender, select};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tracing::{debug, warn};
use understudy_cluster::messages::{Reply, ToCoordinator, ToMember};
use understudy_link::link::{Link, read_json};
use understudy_protocol::HostName;
use understudy_protocol::wire::{Kind, Message};
use understudy_replication::handshake::Purpose;
use understudy_threads::spawn;

/// Pause before a host is dialled again.
const AGAIN: Duration = Duration::from_millis(200);
/// Orders and reports are small: a host that does not take one for so long is not there.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// Reports that may wait to be written.
const MOST_REPORTS: usize = 1024;

/// The ways to the hosts of a group.
pub struct Exchange {
    host: Arc<Host>,
    peers: BTreeMap<HostName, Sender<ToMember>>,
    reply: Reply,
}

impl Exchange {
    /// Exchange with these hosts; their reports go to `reply`.
    pub fn new(host: &Arc<Host>, hosts: &[HostName], reply: Reply) -> Exchange {
        let known = host.known_hosts();
        let mut peers = BTreeMap::new();
        for peer in hosts.iter().filter(|peer| **peer != host.config.name) {
            let addresses = known.get(peer).cloned().unwrap_or_default();
            peers.entry(peer.clone()).or_insert_with(|| {
                reach(host, peer, addresses, &of_own_members(peer, hosts, &reply))
            });
        }
        Exchange { host: host.clone(), peers, reply }
    }

    /// Says it to the host; it may be lost.
    pub fn send_to(&self, host: &HostName, message: ToMember) {
        match self.peers.get(host) {
            // The thread behind it lives as long as this.
            Some(peer) => drop(peer.send(message)),
            None => obey(&self.host, message, &self.reply),
        }
    }
}

/// A reply that takes a host's reports about its own members only: which member a report is
/// about is the peer's word, and the coordinator's tables are indexed with it.
fn of_own_members(peer: &HostName, hosts: &[HostName], reply: &Reply) -> Reply {
    let own: Vec<bool> = hosts.iter().map(|host| host == peer).collect();
    let (peer, reply) = (peer.clone(), reply.clone());
    Arc::new(move |heard| match own.get(heard.member().index()) {
        Some(true) => reply(heard),
        _ => warn!("host {peer} reports about {:?}, which is not there", heard.member()),
    })
}

fn reach(
    host: &Arc<Host>,
    peer: &HostName,
    addresses: Vec<SocketAddr>,
    reply: &Reply,
) -> Sender<ToMember> {
    let (sender, queue) = crossbeam_channel::unbounded();
    let (host, peer, reply) = (host.clone(), peer.to_owned(), reply.clone());
    spawn_for_request("exchange", move || {
        while let Ok(first) = queue.recv() {
            match host.identity.dial_first(&peer, &addresses, |_| Purpose::Group) {
                Ok((link, _)) => {
                    talk(&link, first, &queue, &reply);
                    link.close();
                }
                Err(error) => debug!("{error:#}"),
            }
            thread::sleep(AGAIN);
        }
    });
    sender
}

/// Talks until the connection breaks, or nothing is left to say.
fn talk(link: &Link, first: ToMember, queue: &Receiver<ToMember>, reply: &Reply) {
    let hear = || -> anyhow::Result<()> {
        link.set_read_timeout(None)?;
        link.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let (link, reply) = (link.clone(), reply.clone());
        spawn("exchange-in", move || {
            while let Ok(heard) = link.receive().and_then(|message| read(&message)) {
                reply(heard);
            }
            link.close();
        })?;
        Ok(())
    };
    let mut message = Some(first);
    let mut sound = hear().is_ok();
    while let (true, Some(order)) = (sound, message.take()) {
        sound = send(link, &order, matches!(order, ToMember::Take(..))).is_ok();
        message = queue.recv().ok();
    }
}

fn send(link: &Link, body: &impl Serialize, take: bool) -> anyhow::Result<()> {
    link.send_json(if take { Kind::Snapshot } else { Kind::Restore }, body)
}

fn read<T: DeserializeOwned>(message: &Message) -> anyhow::Result<T> {
    match message.header.kind {
        kind @ (Kind::Snapshot | Kind::Restore) => read_json(message, kind),
        _ => read_json(message, Kind::Snapshot),
    }
}

/// Serves a coordinator on another host, for as long as it is connected.
pub(crate) fn serve(host: &Arc<Host>, link: &Link) -> anyhow::Result<()> {
    link.set_read_timeout(None)?;
    link.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let (reports, queue) = crossbeam_channel::bounded(MOST_REPORTS);
    let reply: Reply = Arc::new(move |heard: ToCoordinator| {
        // A lost report is asked for again.
        let _ = reports.try_send(heard);
    });
    // Whoever reports keeps its end of the queue for longer than there is a connection.
    let (_connected, over) = crossbeam_channel::bounded::<Infallible>(0);
    let answers = link.clone();
    spawn("exchange-out", move || report(&answers, &queue, &over))?;
    // Ends with the connection.
    while let Ok(message) = link.receive() {
        let message: ToMember = read(&message).context("an order that cannot be")?;
        match host.may_be_told(message.store()) {
            Ok(()) => obey(host, message, &reply),
            Err(error) => reply(message.failed(error.to_string())),
        }
    }
    Ok(())
}

/// Writes what is reported until the connection is over.
fn report(link: &Link, queue: &Receiver<ToCoordinator>, over: &Receiver<Infallible>) {
    loop {
        let heard = select! {
            recv(queue) -> heard => heard,
            recv(over) -> _ => return,
        };
        let Ok(heard) = heard else { return };
        if send(link, &heard, matches!(heard, ToCoordinator::Take(..))).is_err() {
            return link.close();
        }
    }
}

fn obey(host: &Arc<Host>, message: ToMember, reply: &Reply) {
    match message {
        ToMember::Take(task, order) => host.take_order(task, order, reply),
        ToMember::Restore(task, order) => host.restore_order(task, order, reply),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_snapshot::{Member, Report};
    use understudy_threads::Mutex;

    /// The coordinator panicked, and its daemon with it, at a member that the group does not have.
    #[test]
    fn a_host_reports_about_its_own_members_only() {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let reply: Reply = {
            let taken = taken.clone();
            Arc::new(move |heard: ToCoordinator| taken.lock().unwrap().push(heard.member()))
        };
        let hosts: [HostName; 3] = [literal("a"), literal("b"), literal("a")];
        let of_a = of_own_members(&hosts[0], &hosts, &reply);
        for member in [0, 1, 2, 3, u16::MAX] {
            of_a(ToCoordinator::Restore(Member(member), Report::StartFin));
        }
        assert_eq!(*taken.lock().unwrap(), [Member(0), Member(2)]);
    }
}
