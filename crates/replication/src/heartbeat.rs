//! Signs of life between two hosts, on connections of their own: a large epoch
//! on the data connection must not look like a dead host. Every path has one.

use crate::paths::{Consequence, PathMonitor};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::debug;
use understudy_link::link::Link;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, HEARTBEAT_INTERVAL, PathEvent, PathIndex};
use understudy_qemu::urgency::raise_this_thread;
use understudy_threads::{Mutex, lock};

/// A thread that was not scheduled for this long looks at the peer's messages
/// first: it cannot tell the peer's silence from its own.
const OWN_STALL: Duration = Duration::from_millis(50);

/// A heartbeat that cannot be sent for so long is not worth waiting for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Before a path that is down is dialled again.
const REDIAL_PAUSE: Duration = Duration::from_millis(250);

/// What a session does with its heartbeats. All calls return soon.
pub trait Pulse: Send + Sync + 'static {
    /// The session's paths.
    fn paths(&self) -> &PathMonitor;
    /// The session's heartbeat connections.
    fn heartbeats(&self) -> &Heartbeats;
    /// The peer gave a sign of life.
    fn heard(&self);
    /// The last path was reset.
    fn lost(&self, reason: String);
    /// Time has passed.
    fn tick(&self);
    /// The path that the data goes over is down, another one is up.
    fn leave_path(&self);
    /// Whether the session is over and its threads may end.
    fn is_over(&self) -> bool;
    /// Whether the heartbeats may end too: the end of one is a reason for the peer to give the
    /// session up, and it must not hear that before a better one.
    fn may_hang_up(&self) -> bool {
        self.is_over()
    }
}

/// The heartbeat connections of a session, by path.
pub struct Heartbeats(Mutex<Slots>);

struct Slots {
    links: Vec<Option<Link>>,
    closed: bool,
}

impl Heartbeats {
    /// Room for this many paths.
    pub fn new(paths: usize) -> Heartbeats {
        Heartbeats(Mutex::new(Slots { links: vec![None; paths], closed: false }))
    }

    /// Ends all connections, also those yet to come.
    pub fn close(&self) {
        let mut slots = lock(&self.0);
        slots.closed = true;
        slots.links.iter().flatten().for_each(Link::close);
    }

    /// Ends the connection of a path.
    fn end(&self, path: PathIndex) {
        if let Some(link) = self.get(path) {
            link.close();
        }
    }

    fn get(&self, path: PathIndex) -> Option<Link> {
        lock(&self.0).links.get(usize::from(path.0)).cloned().flatten()
    }

    fn put(&self, path: PathIndex, link: Link) {
        let mut slots = lock(&self.0);
        if slots.closed {
            link.close();
        }
        if let Some(slot) = slots.links.get_mut(usize::from(path.0))
            && let Some(old) = slot.replace(link)
        {
            old.close();
        }
    }
}

/// Starts to send heartbeats over every path that has, or will have, a
/// connection; ends with the session.
pub fn start<P: Pulse>(name: &str, session: &Arc<P>) -> io::Result<()> {
    for path in session.paths().indices() {
        let session = session.clone();
        spawn("beat", name, path, move || beat(path, &*session))?;
    }
    Ok(())
}

/// Listens to a path's heartbeats, beginning with `first`, for as long as the
/// session lives: dials again when the connection has ended. The only path is
/// not dialled again: with it, the peer is lost.
pub fn keep<P: Pulse>(
    name: &str,
    session: &Arc<P>,
    path: PathIndex,
    first: Option<Link>,
    dial: impl Fn(PathIndex) -> anyhow::Result<Link> + Send + 'static,
) -> io::Result<()> {
    let session = session.clone();
    spawn("hear", name, path, move || {
        be_punctual();
        let mut link = first.map(Ok);
        while !session.is_over() {
            match link.take().unwrap_or_else(|| dial(path)) {
                Ok(link) => listen(&*session, path, link),
                Err(error) => ended(&*session, path, format!("{error:#}")),
            }
            if !session.paths().are_several() {
                return;
            }
            thread::sleep(REDIAL_PAUSE);
        }
    })
}

/// Listens to heartbeats that the peer connected, until their connection ends.
pub fn attach<P: Pulse>(
    name: &str,
    session: &Arc<P>,
    path: PathIndex,
    link: Link,
) -> io::Result<()> {
    let session = session.clone();
    spawn("hear", name, path, move || {
        be_punctual();
        listen(&*session, path, link);
    })
}

fn spawn(
    role: &str,
    name: &str,
    path: PathIndex,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    // The system shows 15 characters of it: the VM's name comes last.
    understudy_threads::spawn(format!("{role}{path}-{name}"), body).map(drop)
}

fn beat(path: PathIndex, session: &impl Pulse) {
    be_punctual();
    while !session.may_hang_up() {
        // Where nothing leaves any more, enough heartbeats wait already: one that had to be
        // given up would make nonsense of the next.
        if let Some(link) = session.heartbeats().get(path).filter(Link::has_room) {
            // A broken connection is the listening thread's to report.
            let _ = link.send_signal(Kind::Heartbeat, Epoch(0));
        }
        let before = Instant::now();
        thread::sleep(HEARTBEAT_INTERVAL);
        if before.elapsed() < HEARTBEAT_INTERVAL + OWN_STALL {
            follow(session, PathEvent::Tick);
            session.tick();
        }
    }
    session.heartbeats().close();
}

/// On a busy host a late heartbeat would look like a dead one. Where the system
/// does not allow it, the session has said so already.
fn be_punctual() {
    if let Err(error) = raise_this_thread() {
        debug!("no real-time priority for heartbeats: {error}");
    }
}

fn listen(session: &impl Pulse, path: PathIndex, link: Link) {
    let set = link.set_read_timeout(None).and(link.set_write_timeout(Some(WRITE_TIMEOUT)));
    session.heartbeats().put(path, link.clone());
    follow(session, PathEvent::Connected(path));
    let mut result = set.map_err(Into::into);
    while result.is_ok() {
        session.heard();
        follow(session, PathEvent::Heard(path));
        result = link.receive().map(drop);
    }
    let reason = result.err().map_or_else(String::new, |error| format!("{error:#}"));
    // The peer would go on to write to a connection that nobody reads.
    link.close();
    // A connection that was replaced is not the path's end.
    if session.heartbeats().get(path).is_some_and(|present| present.is(&link)) {
        ended(session, path, reason);
    }
}

fn ended(session: &impl Pulse, path: PathIndex, reason: String) {
    follow(session, PathEvent::Ended(path, format!("heartbeat: {reason}")));
}

fn follow(session: &impl Pulse, event: PathEvent) {
    for consequence in session.paths().event(event) {
        match consequence {
            Consequence::Leave => session.leave_path(),
            Consequence::Renew(path) => session.heartbeats().end(path),
            Consequence::Lost(reason) => session.lost(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};
    use understudy_protocol::literal;
    use understudy_report::events::Journal;

    /// A session that is over, and that the peer shall hear of by other means first.
    struct Parting {
        paths: PathMonitor,
        heartbeats: Heartbeats,
        may_hang_up: AtomicBool,
    }

    impl Pulse for Parting {
        fn paths(&self) -> &PathMonitor {
            &self.paths
        }
        fn heartbeats(&self) -> &Heartbeats {
            &self.heartbeats
        }
        fn heard(&self) {}
        fn lost(&self, _: String) {}
        fn tick(&self) {}
        fn leave_path(&self) {}
        fn is_over(&self) -> bool {
            true
        }
        fn may_hang_up(&self) -> bool {
            self.may_hang_up.load(Ordering::Acquire)
        }
    }

    #[test]
    fn heartbeats_go_on_until_the_session_may_hang_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let peer =
            Link::dialled(TcpStream::connect(address).unwrap(), &literal("b"), None).unwrap();
        let link = Link::accepted(listener.accept().unwrap().0, None).unwrap();
        let path = PathIndex(0);
        let session = Arc::new(Parting {
            paths: PathMonitor::new(
                &Journal::default().of(&literal("vm")),
                &literal("b"),
                vec![address],
                path,
                Duration::from_secs(9),
            ),
            heartbeats: Heartbeats::new(1),
            may_hang_up: AtomicBool::new(false),
        });
        session.heartbeats.put(path, link);
        start("vm", &session).unwrap();
        for _ in 0..10 {
            assert_eq!(peer.receive().unwrap().header.kind, Kind::Heartbeat);
        }
        session.may_hang_up.store(true, Ordering::Release);
        while peer.receive().is_ok() {}
    }
}
