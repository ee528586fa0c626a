//! The guest's reads: at once what the page cache has, on a reader's thread what waits for the
//! device, and in lockstep what the primary's guest read.

use super::connection::{Buffer, Connection, LENT_BYTES, Replies, Served};
use super::protocol::{Request, Status, reply};
use super::room::Place;
use crate::lent::Loan;
use crate::reads::{ReadFollower, ReadRecorder, ReadSink, Reads, Span};
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;
use understudy_protocol::DiskIndex;
use understudy_threads::Worker;

/// Number of times that in lockstep a read that fails here is tried again before this image is
/// given up.
const RETRIES: u32 = 5;
/// Pause before each of these tries.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A read that must wait for the device, for a reader thread.
pub(super) struct ColdRead {
    request: Request,
    replies: Arc<Replies>,
    beside: Beside,
    _place: Place,
    /// Closed when it has been read, if a write of what it reads waits for that.
    _done: Option<Sender<Infallible>>,
}

/// A cold read that a later write may not overtake.
pub(super) struct UnderWay {
    at: Span,
    done: Receiver<Infallible>,
}

impl UnderWay {
    /// A read of this, and what it holds until it has been read.
    fn begin(at: Span) -> (UnderWay, Sender<Infallible>) {
        let (holder, done) = channel();
        (UnderWay { at, done }, holder)
    }

    fn is_over(&self) -> bool {
        self.done.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Waits for its end, if a change of this would show in it.
    fn await_before(&self, change: Span) {
        if self.at.overlaps(change) {
            let Err(RecvError) = self.done.recv();
        }
    }
}

/// Action that is done about a read, beside answering it.
enum Beside {
    Nothing,
    Copied,
    /// Watched, with what the sink returned at its beginning.
    Watched(Arc<dyn ReadSink>, u64),
    /// Recorded, with the read's number.
    Recorded(Arc<dyn ReadRecorder>, u64),
    Followed(Arc<dyn ReadFollower>),
}

impl Connection<'_> {
    /// In lockstep each read gives what the image has at its turn: this waits until none is under way
    /// that a change of this would show in, which on the other host it may not.
    pub(super) fn await_reads_of(&self, change: &Request) {
        let mut cold = self.cold.borrow_mut();
        cold.iter().for_each(|read| read.await_before(span(change)));
        cold.retain(|read| !read.is_over());
    }

    fn hand(&self, request: Request, beside: Beside) {
        let done = self.served.disk.reads().must_agree().then(|| {
            let (read, done) = UnderWay::begin(span(&request));
            let mut cold = self.cold.borrow_mut();
            cold.retain(|read| !read.is_over());
            cold.push(read);
            done
        });
        let replies = self.replies.clone();
        let place = self.served.room.place();
        self.readers.hand(ColdRead { request, replies, beside, _place: place, _done: done });
    }

    pub(super) fn read(&self, request: Request, buffer: &mut Buffer, loan: &mut Loan) {
        let Some(beside) = self.begin(&request) else { return };
        // Whoever looks on wants what the guest got, so that needs a copy.
        let may_lend = matches!(beside, Beside::Nothing) && request.length >= LENT_BYTES;
        if may_lend && self.lend(&request, loan) {
            return;
        }
        let data = buffer.get(request.length as usize);
        let result = self.served.disk.read_if_cached(request.offset, data);
        let again = result.is_err() && matches!(beside, Beside::Followed(_));
        if matches!(result, Ok(false)) || again {
            return self.hand(request, beside);
        }
        self.served.answer_read(&request, result.map(|_| ()), data, &self.replies, &beside);
    }

    /// Answers a read without copying the data, if that can be done at once.
    fn lend(&self, request: &Request, loan: &mut Loan) -> bool {
        let header = reply(Status::Ok, request.handle);
        if !self.served.disk.lend(loan, &header, request.offset, request.length) {
            return false;
        }
        self.served.counters.read(request.length);
        self.replies.send_with(|stream| loan.send(stream));
        true
    }

    /// None if somebody else answers it.
    fn begin(&self, request: &Request) -> Option<Beside> {
        if self.served.aside.load(Ordering::Acquire) {
            return Some(Beside::Nothing);
        }
        Some(match self.served.disk.reads() {
            Reads::Plain => Beside::Nothing,
            Reads::Copied => Beside::Copied,
            Reads::Watched(sink) => match sink.begin() {
                Some(began) => Beside::Watched(sink, began),
                None => Beside::Nothing,
            },
            Reads::Recorded(recorder) => {
                let number = recorder.came(self.served.disk.index());
                Beside::Recorded(recorder, number)
            }
            Reads::Followed(follower) => {
                let (served, replies) = (self.served.clone(), self.replies.clone());
                let place = served.room.place();
                follower.came(AwaitedRead { request: *request, served, replies, _place: place })?;
                Beside::Followed(follower)
            }
        })
    }
}

/// Carries out reads that wait for the device.
pub(super) fn reader(served: Served) -> Worker<ColdRead> {
    let mut buffer = Buffer::default();
    Box::new(move |read| served.read_cold(read, &mut buffer))
}

fn span(request: &Request) -> Span {
    Span { offset: request.offset, length: request.length }
}

impl Served {
    fn read_cold(&self, read: ColdRead, buffer: &mut Buffer) {
        let ColdRead { request, replies, beside, _place, _done } = read;
        let data = buffer.get(request.length as usize);
        let mut result = self.disk.read(request.offset, data);
        if let Beside::Followed(follower) = &beside {
            for _ in 0..RETRIES {
                if result.is_ok() {
                    break;
                }
                thread::sleep(RETRY_PAUSE);
                result = self.disk.read(request.offset, data);
            }
            if let Err(error) = &result {
                return follower.failed(self.disk.index(), span(&request), error);
            }
        }
        self.answer_read(&request, result, data, &replies, &beside);
    }

    fn answer_read(
        &self,
        request: &Request,
        result: io::Result<()>,
        data: &[u8],
        replies: &Arc<Replies>,
        beside: &Beside,
    ) {
        let disk = self.disk.index();
        if let Beside::Recorded(recorder, number) = beside {
            // Before QEMU has it: what comes of it is in the log only afterwards. A fault of this
            // host's disk is none of the other's.
            match Status::from(&result) {
                Status::Ok => recorder.gave(disk, *number, span(request), Ok(data)),
                status if status.is_fault() => {}
                status => recorder.gave(disk, *number, span(request), Err(status as u32)),
            }
        }
        if result.is_err() {
            return self.answer(request, result, replies);
        }
        self.counters.read(request.length);
        replies.send(Status::Ok, request.handle, data);
        if let Beside::Watched(sink, began) = beside {
            sink.read(*began, disk, request.offset, data);
        }
    }
}

/// A read of the guest that waits for its answer.
pub struct AwaitedRead {
    request: Request,
    served: Served,
    replies: Arc<Replies>,
    _place: Place,
}

impl AwaitedRead {
    /// The disk.
    pub fn disk(&self) -> DiskIndex {
        self.served.disk.index()
    }

    /// Part of the disk that is to be read.
    pub fn span(&self) -> Span {
        span(&self.request)
    }

    /// The guest gets this: the data, or the error of that number.
    pub fn answer(self, outcome: Result<&[u8], u32>) {
        let (result, data) = match outcome {
            Ok(data) => (Ok(()), data),
            Err(number) => (Err(io::Error::from_raw_os_error(number as i32)), &[][..]),
        };
        self.served.answer_read(&self.request, result, data, &self.replies, &Beside::Nothing);
    }

    /// The guest gets what this host's image has.
    pub fn read_here(self) {
        let mut data = vec![0; self.request.length as usize];
        let result = self.served.disk.read(self.request.offset, &mut data);
        self.served.answer_read(&self.request, result, &data, &self.replies, &Beside::Nothing);
    }
}

impl fmt::Debug for AwaitedRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwaitedRead").field("request", &self.request).finish_non_exhaustive()
    }
}
