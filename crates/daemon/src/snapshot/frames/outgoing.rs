//! The connection to another host, over which frames go to the members there; in that
//! direction only, so that neither host waits for the other to read.

use super::batch::{BATCH_BYTES, append};
use super::network::{Network, Presence};
use crate::host::Host;
use anyhow::Context;
use crossbeam_channel::{Receiver, Sender};
use serde_json::to_vec;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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

/// Bytes of frames that may wait; over it frames are lost, as on any switch.
const QUEUE_BYTES: usize = 8 << 20;
/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(300);
/// Time for the other host to take something.
const PATIENCE: Duration = Duration::from_secs(5);

/// Frames and words that wait for the connection, unless it is closed. What is put there is put under
/// the network's lock, and taken by the connection's thread.
pub(super) struct Outgoing {
    items: (Sender<Item>, Receiver<Item>),
    /// Bytes of messages that wait.
    waiting: AtomicUsize,
    /// Number of the connection that is up; 0 is none.
    up: AtomicU64,
    /// Counts the connections.
    connections: AtomicU64,
    is_over: AtomicBool,
}

enum Item {
    /// For the connection of this number.
    Presence(u64, Vec<u8>),
    Message(u64, Box<[u8]>),
    /// Nothing waits: look whether the connection is still there.
    Look,
}

impl Outgoing {
    pub fn new() -> Arc<Outgoing> {
        Arc::new(Outgoing {
            items: crossbeam_channel::unbounded(),
            waiting: AtomicUsize::new(0),
            up: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
        })
    }

    /// Whether messages get through.
    pub fn is_up(&self) -> bool {
        self.present().is_some()
    }

    fn present(&self) -> Option<u64> {
        Some(self.up.load(Ordering::Acquire)).filter(|&up| up != 0)
    }

    /// Sends a message behind those before it. One that may not be lost waits in any case;
    /// without a connection it need not, for each begins with such.
    pub fn put(&self, message: &[u8], may_be_lost: bool) {
        let Some(connection) = self.present() else { return };
        let waiting = self.waiting.load(Ordering::Acquire) + message.len();
        if may_be_lost && waiting > QUEUE_BYTES {
            return;
        }
        self.waiting.fetch_add(message.len(), Ordering::AcqRel);
        self.push(Item::Message(connection, message.into()));
    }

    /// Says who runs here, then gives their numbers.
    pub fn put_presence(&self, presence: &Presence, signs: &[Envelope]) {
        let Some(connection) = self.present() else { return };
        let json = to_vec(presence).expect("names and numbers become JSON");
        self.push(Item::Presence(connection, json));
        signs.iter().for_each(|sign| self.put(&sign.encode(), false));
    }

    /// A connection is there; this comes first. Gives its number.
    pub fn open(&self, presence: &Presence, signs: &[Envelope]) -> u64 {
        let connection = self.connections.fetch_add(1, Ordering::AcqRel) + 1;
        self.up.store(connection, Ordering::Release);
        self.put_presence(presence, signs);
        connection
    }

    /// No more connections.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.push(Item::Look);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The connection of this number is gone, with all that waits.
    pub fn close(&self, connection: u64) {
        let closed =
            self.up.compare_exchange(connection, 0, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if closed {
            self.push(Item::Look);
        }
    }

    fn push(&self, item: Item) {
        // The other end is this value's own.
        let _ = self.items.0.send(item);
    }

    /// Takes an item out, if it is for the present connection; what was for one before is lost with that.
    fn admit(&self, item: Item) -> Option<Item> {
        if let Item::Message(_, message) = &item {
            self.waiting.fetch_sub(message.len(), Ordering::AcqRel);
        }
        let present = self.present();
        match &item {
            Item::Presence(of, _) | Item::Message(of, _) => present == Some(*of),
            Item::Look => false,
        }
        .then_some(item)
    }

    /// Waits for so long, unless there are no more connections.
    fn wait(&self, time: Duration) {
        let until = Instant::now() + time;
        // Without a connection nothing that comes is for anybody.
        while !self.is_over()
            && let Ok(item) = self.items.1.recv_deadline(until)
        {
            self.admit(item);
        }
    }
}

/// The connection's thread, as it takes what waits.
pub(super) struct Taker<'a> {
    way: &'a Outgoing,
    /// Word that is next, behind the messages that were taken before it.
    ahead: Option<Vec<u8>>,
}

impl Taker<'_> {
    pub fn new(way: &Outgoing) -> Taker<'_> {
        Taker { way, ahead: None }
    }

    /// The next messages to send; none when the connection is of no more use.
    pub fn next(&mut self) -> Option<(Kind, Vec<u8>)> {
        let mut batch = Vec::new();
        while self.way.is_up() && !self.way.is_over() {
            if let Some(json) = self.ahead.take() {
                return Some((Kind::Presence, json));
            }
            let Some(item) = self.wait(batch.is_empty()) else {
                return Some((Kind::Frames, batch));
            };
            match self.way.admit(item) {
                Some(Item::Presence(_, json)) => {
                    self.ahead = Some(json);
                    if !batch.is_empty() {
                        return Some((Kind::Frames, batch));
                    }
                }
                Some(Item::Message(_, message)) => append(&mut batch, &message),
                Some(Item::Look) | None => {}
            }
            if batch.len() >= BATCH_BYTES {
                return Some((Kind::Frames, batch));
            }
        }
        None
    }

    /// The next item: one that is there already, or one that comes, if it may wait.
    fn wait(&self, may_wait: bool) -> Option<Item> {
        match may_wait {
            // Its other end lives as long.
            true => Some(self.way.items.1.recv().unwrap_or(Item::Look)),
            false => self.way.items.1.try_recv().ok(),
        }
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
    let mut taker = Taker::new(way);
    while let Some((kind, bytes)) = taker.next() {
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
