//! How a coordinator speaks with the hosts of a group: one connection to each, dialled again
//! when it is lost. What is lost with it is said again by the machines on both ends.

use super::words::{Heard, Reply, Said};
use crate::handshake::Purpose;
use crate::host::Host;
use crate::link::{Link, read_json};
use crossbeam_channel::{Receiver, Sender};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tracing::debug;
use understudy_protocol::wire::Kind;

/// Before a host is dialled again.
const AGAIN: Duration = Duration::from_millis(200);
/// Orders and reports are small: a host that does not take one for so long is not there.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// The ways to the hosts of a group.
pub struct Exchange {
    host: Arc<Host>,
    peers: BTreeMap<String, Sender<Said>>,
    reply: Reply,
}

impl Exchange {
    /// To these hosts; their reports go to `reply`.
    pub fn new(host: &Arc<Host>, hosts: &[String], reply: Reply) -> Exchange {
        let known = host.known_hosts();
        let mut peers = BTreeMap::new();
        for peer in hosts.iter().filter(|peer| **peer != host.config.name) {
            let addresses = known.get(peer).cloned().unwrap_or_default();
            peers.entry(peer.clone()).or_insert_with(|| reach(host, peer, addresses, &reply));
        }
        Exchange { host: host.clone(), peers, reply }
    }

    /// Says it to the host; it may be lost.
    pub fn say(&self, host: &str, said: Said) {
        match self.peers.get(host) {
            // The thread behind it lives as long as this.
            Some(peer) => drop(peer.send(said)),
            None => obey(&self.host, said, &self.reply),
        }
    }
}

fn reach(host: &Arc<Host>, peer: &str, addresses: Vec<SocketAddr>, reply: &Reply) -> Sender<Said> {
    let (sender, queue) = crossbeam_channel::unbounded();
    let (host, peer, reply) = (host.clone(), peer.to_owned(), reply.clone());
    thread::spawn(move || {
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

/// Until the connection breaks, or nothing is left to say.
fn talk(link: &Link, first: Said, queue: &Receiver<Said>, reply: &Reply) {
    let hear = || -> anyhow::Result<()> {
        link.set_read_timeout(None)?;
        link.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let (link, reply) = (link.clone(), reply.clone());
        thread::spawn(move || {
            while let Ok(heard) = receive::<Heard>(&link) {
                reply(heard);
            }
            link.close();
        });
        Ok(())
    };
    let mut said = Some(first);
    let mut sound = hear().is_ok();
    while let (true, Some(order)) = (sound, said.take()) {
        sound = send(link, &order, matches!(order, Said::Take(..))).is_ok();
        said = queue.recv().ok();
    }
}

fn send(link: &Link, body: &impl Serialize, take: bool) -> anyhow::Result<()> {
    link.send_json(if take { Kind::Snapshot } else { Kind::Restore }, body)
}

fn receive<T: serde::de::DeserializeOwned>(link: &Link) -> anyhow::Result<T> {
    let message = link.receive()?;
    match message.header.kind {
        kind @ (Kind::Snapshot | Kind::Restore) => read_json(&message, kind),
        _ => read_json(&message, Kind::Snapshot),
    }
}

/// Serves a coordinator on another host, for as long as it is connected.
pub(crate) fn serve(host: &Arc<Host>, link: &Link) -> anyhow::Result<()> {
    link.set_read_timeout(None)?;
    link.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let answers = link.clone();
    let reply: Reply = Arc::new(move |heard: Heard| {
        // A lost report is asked for again.
        let _ = send(&answers, &heard, matches!(heard, Heard::Take(..)));
    });
    // Ends with the connection.
    while let Ok(said) = receive::<Said>(link) {
        obey(host, said, &reply);
    }
    Ok(())
}

fn obey(host: &Arc<Host>, said: Said, reply: &Reply) {
    match said {
        Said::Take(task, order) => host.take_order(task, order, reply),
        Said::Restore(task, order) => host.restore_order(task, order, reply),
    }
}
