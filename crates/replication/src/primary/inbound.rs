//! Copies of what the guest receives, on their way to the backup: over a connection
//! of their own, beside the epochs, which they neither wait for nor hold up.
//! `understudy_protocol::inbound` says what they are for.

use super::dialler::Dialler;
use super::session::Session;
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::debug;
use understudy_link::link::Link;
use understudy_network::InboundSink;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Allowance, CardFrames, CardIndex, Epoch, FORWARDED_BYTES};
use understudy_report::InboundReport;
use understudy_threads::{Mutex, lock};

/// Frames that may wait for the connection; over it they are not forwarded.
const QUEUE_FRAMES: usize = 512;

/// Copies wait for so long for one another: a thread is woken here and on the backup for each message, and
/// what is committed meanwhile need not be sent at all. A frame that is lost with it is repeated.
const GATHER: Duration = Duration::from_millis(1);

/// A connection that stands still for so long is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two tries to connect.
const REDIAL_PAUSE: Duration = Duration::from_secs(1);

/// Time between two looks of the thread whether the session is over.
const GLANCE: Duration = Duration::from_millis(250);

/// A frame on its way.
struct Arrival {
    epoch: Epoch,
    card: CardIndex,
    frame: Vec<u8>,
}

/// The inbound frames of a session that were forwarded.
pub struct Inbound {
    /// The epoch that receives what is delivered now; 0 while nobody could take over.
    epoch: AtomicU64,
    frames: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    queue: Sender<Arrival>,
}

/// The other end of its queue.
pub struct Copies(Receiver<Arrival>);

impl Copies {
    /// The next copy; once one has come that was waited for, more have had time to.
    fn await_some(&self, longest: Duration) -> Option<Arrival> {
        self.0.try_recv().ok().or_else(|| {
            let first = self.0.recv_timeout(longest).ok()?;
            thread::sleep(GATHER);
            Some(first)
        })
    }
}

/// A fresh queue.
pub fn queue() -> (Arc<Inbound>, Copies) {
    let (queue, copies) = crossbeam_channel::bounded(QUEUE_FRAMES);
    let inbound = Inbound {
        epoch: AtomicU64::new(0),
        frames: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        dropped: AtomicU64::new(0),
        queue,
    };
    (Arc::new(inbound), Copies(copies))
}

impl Inbound {
    /// The guest is about to stand still: what is delivered from now on waits, most of
    /// it, until `next` runs. What gets in before is tagged too high, and may come twice.
    pub fn begin_epoch(&self, next: Epoch) {
        self.epoch.store(next.0, Ordering::Release);
    }

    /// The report that `status` shows.
    pub fn report(&self) -> InboundReport {
        InboundReport {
            frames: self.frames.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
            ..Default::default()
        }
    }

    /// The sink that is called with every frame that a card got.
    fn sink(self: &Arc<Self>, card: CardIndex) -> InboundSink {
        let allowance = Mutex::new(Allowance::new(FORWARDED_BYTES));
        let inbound = self.clone();
        Arc::new(move |frame: &[u8]| {
            let epoch = Epoch(inbound.epoch.load(Ordering::Acquire));
            if epoch == Epoch(0) {
                return;
            }
            let admitted = lock(&allowance).admit(epoch, frame.len());
            let copy = || Arrival { epoch, card, frame: frame.to_vec() };
            match admitted.then(|| inbound.queue.try_send(copy())) {
                Some(Ok(()) | Err(TrySendError::Disconnected(_))) => {}
                Some(Err(TrySendError::Full(_))) | None => inbound.drop_frames(1),
            }
        })
    }

    fn drop_frames(&self, frames: u64) {
        self.dropped.fetch_add(frames, Ordering::Relaxed);
    }
}

/// Has the session's cards forward what they get from now on.
pub fn begin(session: &Session) {
    for port in session.machine().ports() {
        port.forward_inbound(Some(session.inbound.sink(port.card())));
    }
}

/// The cards forward nothing more.
pub fn end(session: &Session) {
    for port in session.machine().ports() {
        port.forward_inbound(None);
    }
}

/// Sends what is forwarded until the session is over. Without a connection it is lost.
pub fn run(session: &Session, copies: &Copies, dialler: &Dialler) {
    let mut line = Line { session, dialler, link: None, dialled: None };
    let mut next = None;
    while !session.is_over() {
        // In lockstep nothing is forwarded.
        if session.recording().is_none() {
            line.connect();
        }
        let Some(first) = next.take().or_else(|| copies.await_some(GLANCE)) else { continue };
        let mut message = CardFrames::inbound(first.epoch, first.card);
        let (mut count, mut bytes) = (0, 0);
        let mut copy = first;
        loop {
            if !message.push(&copy.frame) {
                next = Some(copy);
                break;
            }
            (count, bytes) = (count + 1, bytes + copy.frame.len() as u64);
            match copies.0.try_recv() {
                Ok(more) if (more.epoch, more.card) == (message.epoch(), copy.card) => copy = more,
                Ok(more) => {
                    next = Some(more);
                    break;
                }
                Err(_) => break,
            }
        }
        line.send(&message, count, bytes);
    }
}

/// The connection, while there is one.
struct Line<'a> {
    session: &'a Session,
    dialler: &'a Dialler,
    link: Option<Link>,
    dialled: Option<Instant>,
}

impl Line<'_> {
    fn connect(&mut self) {
        let tried = self.dialled.is_some_and(|at| at.elapsed() < REDIAL_PAUSE);
        if self.link.is_some() || tried {
            return;
        }
        self.dialled = Some(Instant::now());
        let path = self.session.paths.candidates().first().copied();
        let dial = |path| {
            let link = self.dialler.inbound(path)?;
            link.set_write_timeout(Some(WRITE_TIMEOUT))?;
            anyhow::Ok(link)
        };
        match path.map(dial) {
            Some(Ok(link)) => self.link = Some(link),
            Some(Err(error)) => debug!("frames for the guest are not forwarded: {error:#}"),
            None => {}
        }
    }

    fn send(&mut self, message: &CardFrames, frames: u64, bytes: u64) {
        let inbound = &self.session.inbound;
        // Committed while it waited here: the backup would throw it away.
        if message.epoch() <= self.session.position().1 {
            return;
        }
        let Some(link) = &self.link else { return inbound.drop_frames(frames) };
        let header = link.send_parts(Kind::Inbound, message.epoch(), &[message.payload()]);
        match header {
            Ok(_) => {
                inbound.frames.fetch_add(frames, Ordering::Relaxed);
                inbound.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(error) => {
                debug!("frames for the guest are not forwarded: {error}");
                link.close();
                self.link = None;
                inbound.drop_frames(frames);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_was_waited_for_brings_others_along() {
        let (inbound, copies) = queue();
        inbound.begin_epoch(Epoch(7));
        let sink = inbound.sink(CardIndex(0));
        let sender = thread::spawn(move || {
            for number in 0..3 {
                thread::sleep(GATHER / 10);
                sink(&[number]);
            }
        });
        let began = Instant::now();
        let first = copies.await_some(Duration::from_secs(20)).unwrap();
        assert_eq!((first.epoch, first.frame), (Epoch(7), vec![0]));
        assert!(began.elapsed() >= GATHER, "it waits for others");
        sender.join().unwrap();
        // These are there, and wait for nothing.
        let rest = [(); 2].map(|()| copies.await_some(Duration::ZERO).unwrap().frame);
        assert_eq!(rest, [vec![1], vec![2]]);
        assert!(copies.await_some(Duration::ZERO).is_none());
    }
}
