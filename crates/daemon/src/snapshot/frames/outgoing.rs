//! The connection to another host, over which frames go to the members there; in that
//! direction only, so that neither host waits for the other to read.

use super::batch::{BATCH_BYTES, append};
use super::network::{Network, Presence};
use crate::host::Host;
use anyhow::Context;
use crossbeam_channel::{Receiver, Sender};
use serde_json::to_vec;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_link::link::Link;
use understudy_protocol::Epoch;
use understudy_protocol::HostName;
use understudy_protocol::wire::Kind;
use understudy_replication::handshake::Purpose;
use understudy_snapshot::Envelope;
use understudy_threads::Common;

/// Bytes of frames that may wait; over it frames are lost, as on any switch.
const QUEUE_BYTES: usize = 8 << 20;
/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(300);
/// Time for the other host to take something.
const PATIENCE: Duration = Duration::from_secs(5);

/// Frames and words that wait for the connection, unless it is closed.
pub(super) struct Outgoing {
    queue: Common<Queue>,
    /// Whether it has changed since the connection's thread looked: one word is enough.
    changed: (Sender<()>, Receiver<()>),
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    bytes: usize,
    dropped: u64,
    /// Counts the connections.
    connection: u64,
    is_up: bool,
    is_over: bool,
}

enum Item {
    Presence(Vec<u8>),
    Message(Box<[u8]>),
}

impl Outgoing {
    pub fn new() -> Arc<Outgoing> {
        Arc::new(Outgoing { queue: Common::default(), changed: crossbeam_channel::bounded(1) })
    }

    /// Whether messages get through.
    pub fn is_up(&self) -> bool {
        self.queue.lock().is_up
    }

    /// Sends a message behind those before it. One that may not be lost waits in any case;
    /// without a connection it need not, for each begins with such.
    pub fn put(&self, message: &[u8], may_be_lost: bool) {
        self.queue.lock().put(message, may_be_lost);
        self.tell();
    }

    /// Says who runs here, then gives their numbers.
    pub fn put_presence(&self, presence: &Presence, signs: &[Envelope]) {
        self.queue.lock().put_presence(presence, signs);
        self.tell();
    }

    /// A connection is there; this comes first. Gives its number.
    pub fn open(&self, presence: &Presence, signs: &[Envelope]) -> u64 {
        let mut queue = self.queue.lock();
        queue.is_up = true;
        queue.connection += 1;
        queue.put_presence(presence, signs);
        queue.connection
    }

    /// No more connections.
    pub fn end(&self) {
        self.queue.lock().is_over = true;
        self.tell();
    }

    fn is_over(&self) -> bool {
        self.queue.lock().is_over
    }

    /// The connection of this number is gone, with all that waited.
    pub fn close(&self, connection: u64) {
        let mut queue = self.queue.lock();
        if queue.connection == connection {
            queue.is_up = false;
            queue.bytes = 0;
            queue.items.clear();
        }
        self.tell();
    }

    fn tell(&self) {
        // Full if it was told and has not looked yet.
        let _ = self.changed.0.try_send(());
    }

    /// The next messages to send; none when the connection is of no more use. Only the
    /// connection's thread asks.
    pub fn next(&self) -> Option<(Kind, Vec<u8>)> {
        let mut queue = self.queue.lock();
        while queue.items.is_empty() && queue.is_up && !queue.is_over {
            drop(queue);
            // Its other end lives as long.
            let _ = self.changed.1.recv();
            queue = self.queue.lock();
        }
        if !queue.is_up || queue.is_over {
            return None;
        }
        let mut batch = Vec::new();
        while let Some(item) = queue.items.pop_front() {
            match item {
                Item::Presence(json) if batch.is_empty() => return Some((Kind::Presence, json)),
                presence @ Item::Presence(_) => {
                    queue.items.push_front(presence);
                    break;
                }
                Item::Message(message) => {
                    queue.bytes -= message.len();
                    append(&mut batch, &message);
                }
            }
            if batch.len() >= BATCH_BYTES {
                break;
            }
        }
        Some((Kind::Frames, batch))
    }

    fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.is_over() && self.changed.1.recv_deadline(until).is_ok() {}
    }
}

impl Queue {
    fn put(&mut self, message: &[u8], may_be_lost: bool) {
        if !self.is_up {
            return;
        }
        if may_be_lost && self.bytes + message.len() > QUEUE_BYTES {
            self.dropped += 1;
            return;
        }
        self.bytes += message.len();
        self.items.push_back(Item::Message(message.into()));
    }

    fn put_presence(&mut self, presence: &Presence, signs: &[Envelope]) {
        if !self.is_up {
            return;
        }
        let json = to_vec(presence).expect("names and numbers become JSON");
        self.items.push_back(Item::Presence(json));
        signs.iter().for_each(|sign| self.put(&sign.encode(), false));
    }
}

/// Connects with a host, again and again, for as long as members run here.
pub(super) fn run(host: &Weak<Host>, network: &Arc<Network>, way: &Arc<Outgoing>, peer: &HostName) {
    let mut was_told = false;
    while !way.is_over() {
        let Some(alive) = host.upgrade() else { return };
        let dialled = dial(&alive, network, peer);
        drop(alive);
        match dialled {
            Ok(link) => {
                was_told = false;
                info!("frames of the cluster {} go to host {peer}", network.name);
                let error = send(network, way, &link);
                link.close();
                if !way.is_over() {
                    warn!(
                        "frames of the cluster {} do not get to host {peer}: {error:#}",
                        network.name
                    );
                }
            }
            Err(error) if !was_told => {
                was_told = true;
                info!("no frames of the cluster {} for host {peer} yet: {error:#}", network.name);
            }
            Err(_) => {}
        }
        way.wait(RETRY);
    }
}

fn dial(host: &Host, network: &Network, peer: &HostName) -> anyhow::Result<Link> {
    let known = host.known_hosts();
    let addresses = known.get(peer).context("its address is not known any more")?;
    let purpose = Purpose::Frames { cluster: network.name.clone() };
    let (link, _) = host.identity.dial_first(peer, addresses, |_| purpose.clone())?;
    link.expect_json::<understudy_replication::handshake::Welcome>(Kind::Welcome)?;
    link.set_read_timeout(None)?;
    link.set_write_timeout(Some(PATIENCE))?;
    Ok(link)
}

/// Sends until that fails; gives why.
fn send(network: &Network, way: &Arc<Outgoing>, link: &Link) -> anyhow::Error {
    let connection = network.state().open(way);
    watch(way.clone(), link.clone(), connection);
    while let Some((kind, bytes)) = way.next() {
        if let Err(error) = link.send_parts(kind, Epoch(0), &[&bytes]) {
            way.close(connection);
            return error.into();
        }
    }
    anyhow::anyhow!("the connection was closed")
}

/// The other end says nothing: whatever is read is the end of the connection, which else
/// would show only at the next message but one.
fn watch(way: Arc<Outgoing>, link: Link, connection: u64) {
    let watching = (way.clone(), link.clone());
    let started = thread::Builder::new().name("fabric-end".to_owned()).spawn(move || {
        let _end = link.receive();
        link.close();
        way.close(connection);
    });
    if started.is_err() {
        let (way, link) = watching;
        link.close();
        way.close(connection);
    }
}

#[cfg(test)]
#[path = "outgoing_tests.rs"]
mod tests;
