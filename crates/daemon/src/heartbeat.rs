//! Signs of life between two hosts, on a connection of their own: a large epoch
//! on the data connection must not look like a dead host.

use crate::link::Link;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::debug;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, HEARTBEAT_INTERVAL};
use understudy_qemu::urgency::raise_this_thread;

/// A thread that was not scheduled for this long looks at the peer's messages
/// first: it cannot tell the peer's silence from its own.
const OWN_STALL: Duration = Duration::from_millis(50);

/// What a session does with its heartbeats. All calls return soon.
pub trait Pulse: Send + Sync + 'static {
    /// The peer gave a sign of life.
    fn heard(&self);
    /// The connection ended.
    fn lost(&self, reason: String);
    /// Time has passed.
    fn tick(&self);
    /// Whether the session is over and its threads may end.
    fn is_over(&self) -> bool;
}

/// Starts sending and receiving heartbeats; ends with the session.
pub fn start(link: Link, name: &str, session: Arc<impl Pulse>) -> anyhow::Result<()> {
    link.set_read_timeout(None)?;
    link.set_write_timeout(Some(Duration::from_secs(2)))?;
    let receiving = link.try_clone()?;
    let listener = session.clone();
    thread::Builder::new()
        .name(format!("hear-{name}"))
        .spawn(move || listen(&receiving, &*listener))?;
    thread::Builder::new().name(format!("beat-{name}")).spawn(move || beat(&link, &*session))?;
    Ok(())
}

fn beat(link: &Link, session: &impl Pulse) {
    be_punctual();
    while !session.is_over() {
        // A broken connection is the listening thread's to report.
        let _ = link.send_signal(Kind::Heartbeat, Epoch(0));
        let before = Instant::now();
        thread::sleep(HEARTBEAT_INTERVAL);
        if before.elapsed() < HEARTBEAT_INTERVAL + OWN_STALL {
            session.tick();
        }
    }
    link.close();
}

/// On a busy host a late heartbeat would look like a dead one. Where the system
/// does not allow it, the session has said so already.
fn be_punctual() {
    if let Err(error) = raise_this_thread() {
        debug!("no real-time priority for heartbeats: {error}");
    }
}

fn listen(link: &Link, session: &impl Pulse) {
    be_punctual();
    loop {
        match link.receive() {
            Ok(_) => session.heard(),
            Err(error) => return session.lost(format!("heartbeat: {error:#}")),
        }
    }
}
