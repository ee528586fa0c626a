use super::*;
use crate::nbd::AwaitedRead;
use crate::reads::{ReadFollower, Reads, Span};
use nix::errno::Errno;
use std::cell::Cell;
use understudy_protocol::DiskIndex;
use understudy_threads::{Waitable, Worker};

/// Regression: it counted as open for good: a QEMU that hung later passed for one that waits
/// for its disk.
#[test]
fn a_request_ends_whose_answer_was_withheld_until_its_connection_had_ended() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, b"").unwrap();
    let disk = Arc::new(Disk::open(DiskIndex(0), &image, 4096).unwrap());
    let export = Export { name: String::new(), bytes: 4096 };
    let (counters, aside, room) = (Arc::default(), Arc::default(), Arc::default());
    let served = Served { disk: disk.clone(), export, counters, aside, room };
    let (stream, client) = UnixStream::pair().unwrap();
    let replies = Arc::new(Replies::new(stream, disk.clone()));
    let mut header = [0; REQUEST_BYTES];
    header[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    let request = Request::parse(&header).unwrap();
    disk.withhold_errors(Arc::new(|_| ()));
    disk.request_begins();
    served.answer(&request, Err(Errno::EIO.into()), &replies);
    drop((replies, client));
    assert!(disk.has_requests() && disk.withholds_errors());
    disk.let_pass();
    assert!(!disk.has_requests());
}

/// Reads everything here.
struct Passing;

impl ReadFollower for Passing {
    fn came(&self, read: AwaitedRead) -> Option<AwaitedRead> {
        Some(read)
    }

    fn failed(&self, _: DiskIndex, _: Span, _: &io::Error) {}
}

fn request(command: u16, offset: u64, length: u32) -> Request {
    let mut header = [0; REQUEST_BYTES];
    header[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    header[6..8].copy_from_slice(&command.to_be_bytes());
    header[16..24].copy_from_slice(&offset.to_be_bytes());
    header[24..28].copy_from_slice(&length.to_be_bytes());
    Request::parse(&header).unwrap()
}

/// It was overtaken, on whichever host it had to wait for the device: the other one's guest read something else.
#[test]
fn in_lockstep_no_write_overtakes_a_read_of_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, b"").unwrap();
    let disk = Arc::new(Disk::open(DiskIndex(0), &image, 8192).unwrap());
    disk.set_reads(Reads::Followed(Arc::new(Passing)));
    let export = Export { name: String::new(), bytes: 8192 };
    let (counters, aside, room) = (Arc::default(), Arc::default(), Arc::default());
    let served = Served { disk: disk.clone(), export, counters, aside, room };
    let (stream, _client) = UnixStream::pair().unwrap();
    let replies = Arc::new(Replies::new(stream, disk.clone()));
    let gate = Arc::new(Waitable::new(false));
    let waits = gate.clone();
    let readers = Crew::new("read-test", 1, move || {
        let waits = waits.clone();
        let worker: Worker<ColdRead> = Box::new(move |read| {
            drop(waits.wait_while(waits.lock(), |open| !*open));
            drop(read);
        });
        worker
    });
    let first_byte = |at| {
        let mut byte = [0];
        disk.read(at, &mut byte).unwrap();
        byte[0]
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let cold = RefCell::default();
            let connection = Connection { served: &served, replies, readers: &readers, cold };
            (0..3).for_each(|_| disk.request_begins());
            // A read that fails at once is one that a reader tries again.
            let read = request(0, 4096, 8192);
            connection.read(read, &mut Buffer::default(), &mut Loan::default());
            for offset in [0, 4096] {
                let write = Command::Write { fua: false };
                connection.change(request(1, offset, 512), write, &[7; 512]);
            }
        });
        while first_byte(0) != 7 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let before = first_byte(4096);
        gate.change(|open| *open = true);
        assert_eq!(before, 0, "the write has overtaken the read");
    });
    assert_eq!(first_byte(4096), 7);
}

/// A door at which somebody knocks who cannot be let in before the third time, or at all.
struct Stuck {
    knock: UnixStream,
    _knocker: UnixStream,
    client: UnixStream,
    opened: Cell<u32>,
    for_good: bool,
}

impl Stuck {
    /// Makes one, and the socket that QEMU's requests come through.
    fn new(for_good: bool) -> (Stuck, UnixStream) {
        let (client, stream) = UnixStream::pair().unwrap();
        let (mut knocker, knock) = UnixStream::pair().unwrap();
        knocker.write_all(b"!").unwrap();
        let opened = Cell::new(0);
        (Stuck { knock, _knocker: knocker, client, opened, for_good }, stream)
    }
}

impl Door for Stuck {
    fn fd(&self) -> BorrowedFd<'_> {
        self.knock.as_fd()
    }

    fn open(&self) -> Opened {
        self.opened.set(self.opened.get() + 1);
        if self.for_good || self.opened.get() < 3 {
            return Opened::NotNow;
        }
        (&self.client).write_all(b"3").unwrap();
        Opened::LetIn
    }
}

fn requests(stream: UnixStream, door: &Stuck) -> Requests<'_> {
    Requests { stream, patience: None, door: Some(door), rests_until: None }
}

/// The thread that serves the guest slept at each request, for as long as somebody stood at the door.
#[test]
fn who_cannot_be_let_in_is_not_looked_at_with_each_request() {
    let (door, stream) = Stuck::new(true);
    let begin = Instant::now();
    let mut requests = requests(stream, &door);
    for number in 0..100 {
        (&door.client).write_all(&[number]).unwrap();
        let mut byte = [0];
        requests.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [number]);
    }
    let rests = begin.elapsed().as_millis() / REST.as_millis();
    assert!(u128::from(door.opened.get()) <= rests + 1, "opened {} times", door.opened.get());
}

#[test]
fn who_knocks_is_let_in_in_the_end_however_silent_the_guest_is() {
    let (door, stream) = Stuck::new(false);
    let mut byte = [0];
    requests(stream, &door).read_exact(&mut byte).unwrap();
    assert!(byte == *b"3" && door.opened.get() >= 3, "opened {} times", door.opened.get());
}
