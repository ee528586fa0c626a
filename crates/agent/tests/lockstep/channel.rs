//! The logging channel between both sides, with queues in the place of the wire.

use crate::vm::Vm;
use crate::{DEADLINE, MACHINE};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use understudy_lockstep::{Batcher, Feed, Lag, LogPosition};
use understudy_network::{Port, boot_time};
use understudy_protocol::{Epoch, Time};

/// Log that is not acknowledged, at most.
const LIMIT_BYTES: u64 = 4 << 20;

/// Frames wait for the next batch so long at most, when there is no log.
const LONGEST_BATCH: u8 = 2;

/// Time after which a sender whose log has ended looks again whether it is over.
const GLANCE: Duration = Duration::from_millis(10);

pub struct Channel {
    shared: Arc<Shared>,
    /// Bytes that had passed the primary's agent when the log began.
    begins: u64,
    opened: Instant,
    sender: Option<JoinHandle<()>>,
}

struct Shared {
    feed: Mutex<Feed>,
    fed: Condvar,
    lag: Mutex<Lag>,
    over: AtomicBool,
    batches: AtomicU64,
    origin: Instant,
}

type Batch = (Epoch, Vec<u8>);

impl Channel {
    pub fn open(primary: &Vm, backup: &Vm, begins: u64) -> Channel {
        let shared = Arc::new(Shared {
            feed: Mutex::new(Feed::new()),
            fed: Condvar::new(),
            lag: Mutex::new(Lag::new()),
            over: AtomicBool::new(false),
            batches: AtomicU64::new(0),
            origin: Instant::now(),
        });
        let (batches, arriving) = channel();
        let (acknowledgements, acknowledged) = channel();
        let from_qemu = primary.log.log.try_clone().unwrap();
        from_qemu.set_nonblocking(true).unwrap();
        let to_qemu = backup.log.log.try_clone().unwrap();
        let (port, of_port) = (primary.port.clone(), primary.port.clone());
        let [of_sender, of_receiver, of_feeder] = [(); 3].map(|()| shared.clone());
        let batcher = Arc::new(Mutex::new(Batcher::new(MACHINE, LIMIT_BYTES)));
        let of_acknowledged = batcher.clone();
        let send = move || of_sender.send(from_qemu, &port, &batcher, &batches);
        let sender = Some(thread::spawn(send));
        thread::spawn(move || of_receiver.receive(&arriving, &acknowledgements));
        thread::spawn(move || of_feeder.feed_qemu(to_qemu));
        thread::spawn(move || release(&acknowledged, &of_port, &of_acknowledged));
        Channel { shared, begins, opened: Instant::now(), sender }
    }

    /// Whether the backup has got some log.
    pub fn has_log(&self) -> bool {
        self.shared.feed.lock().unwrap().received() > LogPosition(0)
    }

    /// Place in the log of what the primary's agent says.
    pub fn position_of(&self, passed: u64) -> u64 {
        passed - self.begins
    }

    /// Measures how far the backup is behind.
    pub fn note_progress(&self, backup: &Vm) {
        let mut feed = self.shared.feed.lock().unwrap();
        feed.taken(LogPosition(backup.log.status().position));
        let lag = feed.behind_since().map_or(Duration::ZERO, |since| self.shared.now() - since);
        self.shared.lag.lock().unwrap().measured(lag);
    }

    pub fn account(&self) -> String {
        let received = self.shared.feed.lock().unwrap().received().0;
        let seconds = self.opened.elapsed().as_secs_f64();
        let lag = self.shared.lag.lock().unwrap();
        format!(
            "{:.2} Mbit/s of log in {} batches over {seconds:.1} s; lag p50 {:.1?}, p99 {:.1?}",
            received as f64 * 8e-6 / seconds,
            self.shared.batches.load(Ordering::Relaxed),
            lag.quantile(0.5).unwrap_or_default(),
            lag.quantile(0.99).unwrap_or_default()
        )
    }

    /// The primary is gone, or stands still for good: what arrived is all.
    pub fn end(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(sender) = self.sender.take() {
            sender.join().unwrap();
        }
    }
}

/// A test that ends leaves no thread behind.
impl Drop for Channel {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
    }
}

impl Shared {
    fn now(&self) -> Time {
        Time(self.origin.elapsed())
    }

    /// Cuts batches on the primary, as the log comes.
    fn send(
        &self,
        mut log: UnixStream,
        port: &Port,
        batcher: &Mutex<Batcher>,
        batches: &Sender<Batch>,
    ) {
        let mut next = MACHINE.next();
        let mut buffer = vec![0; LIMIT_BYTES as usize];
        while !self.over.load(Ordering::Acquire) {
            let mut readable = [PollFd::new(log.as_fd(), PollFlags::POLLIN)];
            let came = poll(&mut readable, PollTimeout::from(LONGEST_BATCH)).unwrap();
            if came == 0 && port.held_frames() == 0 {
                continue;
            }
            // The order matters: see `Batcher`.
            next = next.next();
            port.barrier(next);
            let (bytes, ended) = read_all(&mut log, &mut buffer);
            assert!(bytes < buffer.len(), "more log than the test expects at once");
            let batch = batcher.lock().unwrap().cut(bytes);
            assert_eq!(batch.next(), next);
            self.batches.fetch_add(1, Ordering::Relaxed);
            batches.send((batch, buffer[..bytes].to_vec())).unwrap();
            // An ended log is readable for ever; what arrived is not all before somebody says so.
            while ended && !self.over.load(Ordering::Acquire) {
                thread::sleep(GLANCE);
            }
        }
    }

    /// Acknowledges on the backup what it got, before it is replayed.
    fn receive(&self, arriving: &Receiver<Batch>, acknowledgements: &Sender<Epoch>) {
        for (batch, log) in arriving {
            self.feed.lock().unwrap().receive(&log, self.now()).unwrap();
            self.fed.notify_one();
            // The primary may be gone.
            let _ = acknowledgements.send(batch);
        }
        self.feed.lock().unwrap().end();
        self.fed.notify_one();
    }

    /// Hands the log to the backup's QEMU.
    fn feed_qemu(&self, mut log: UnixStream) {
        let mut feed = self.feed.lock().unwrap();
        loop {
            if feed.is_over() {
                log.shutdown(Shutdown::Write).unwrap();
                return;
            }
            let piece = feed.ready().to_vec();
            if piece.is_empty() {
                feed = self.fed.wait(feed).unwrap();
                continue;
            }
            drop(feed);
            if log.write_all(&piece).is_err() {
                return; // QEMU has ended.
            }
            feed = self.feed.lock().unwrap();
            feed.gave(piece.len());
        }
    }
}

/// Reads what there is; also says whether the log has ended.
fn read_all(log: &mut UnixStream, buffer: &mut [u8]) -> (usize, bool) {
    let mut bytes = 0;
    while bytes < buffer.len() {
        match log.read(&mut buffer[bytes..]) {
            Ok(0) => return (bytes, true),
            Ok(more) => bytes += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return (bytes, true),
            Err(error) => panic!("reading the log: {error}"),
        }
    }
    (bytes, false)
}

/// Releases frames of the primary as acknowledgements come.
fn release(acknowledged: &Receiver<Epoch>, port: &Port, batcher: &Mutex<Batcher>) {
    for batch in acknowledged {
        batcher.lock().unwrap().acknowledged(batch);
        // However busy the machine is: a release that is out of date is tried elsewhere.
        port.release_through(batch, boot_time() + DEADLINE);
    }
}
