use super::*;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::thread;
use understudy_protocol::wire::{Header, Kind};
use understudy_protocol::{Epoch, literal};
use understudy_report::events::Journal;

/// A time longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

const INTERVAL: Duration = Duration::from_millis(20);

/// A session that does nothing but to count.
struct Counting {
    paths: PathMonitor,
    heartbeats: Heartbeats,
    heard: AtomicUsize,
    ticks: AtomicUsize,
    lost: Mutex<Option<String>>,
    may_hang_up: AtomicBool,
}

impl Counting {
    fn new(paths: usize) -> Arc<Counting> {
        let address = "127.0.0.1:1".parse().unwrap();
        let events = Journal::default().of(&literal("vm"));
        let (peer, in_use) = (literal("b"), PathIndex(0));
        let addresses = vec![address; paths];
        Arc::new(Counting {
            paths: PathMonitor::new(&events, &peer, addresses, in_use, PATIENCE),
            heartbeats: Heartbeats::new().unwrap(),
            heard: AtomicUsize::new(0),
            ticks: AtomicUsize::new(0),
            lost: Mutex::default(),
            may_hang_up: AtomicBool::new(false),
        })
    }

    fn await_heard(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.heard.load(Ordering::Acquire) < count {
            assert!(Instant::now() < deadline, "heard {:?} of {count}", self.heard);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The reason why the only path was lost.
    fn await_lost(&self) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(reason) = self.lost.lock().unwrap().take() {
                return reason;
            }
            assert!(Instant::now() < deadline, "the only path is lost with its connection");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(&self) {
        self.may_hang_up.store(true, Ordering::Release);
    }
}

impl Pulse for Counting {
    fn paths(&self) -> &PathMonitor {
        &self.paths
    }
    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }
    fn heard(&self) {
        self.heard.fetch_add(1, Ordering::AcqRel);
    }
    fn lost(&self, reason: String) {
        *self.lost.lock().unwrap() = Some(reason);
    }
    fn tick(&self) {
        self.ticks.fetch_add(1, Ordering::AcqRel);
    }
    fn leave_path(&self) {}
    fn is_over(&self) -> bool {
        self.may_hang_up()
    }
    fn may_hang_up(&self) -> bool {
        self.may_hang_up.load(Ordering::Acquire)
    }
}

/// A connection, and its other end.
fn connection() -> (Link, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Link::accepted(listener.accept().unwrap().0, None).unwrap(), peer)
}

fn of_messages(peer: TcpStream) -> Link {
    Link::dialled(peer, &literal("b"), None).unwrap()
}

fn sign() -> [u8; understudy_protocol::wire::HEADER_BYTES] {
    signal(Kind::Heartbeat)
}

fn signal(kind: Kind) -> [u8; understudy_protocol::wire::HEADER_BYTES] {
    Header::for_payload(kind, Epoch(0), &[]).unwrap().encode()
}

#[test]
fn heartbeats_go_on_until_the_session_may_hang_up() {
    let (session, (link, peer)) = (Counting::new(1), connection());
    let peer = of_messages(peer);
    start(&literal("vm"), &session, INTERVAL, vec![(PathIndex(0), link)], None).unwrap();
    for _ in 0..10 {
        assert_eq!(peer.receive().unwrap().header.kind, Kind::Heartbeat);
    }
    session.end();
    while peer.receive().is_ok() {}
}

#[test]
fn a_patient_heart_looks_at_the_time_more_often_than_it_beats() {
    let (session, (link, peer)) = (Counting::new(1), connection());
    let peer = of_messages(peer);
    let interval = Duration::from_millis(200);
    start(&literal("vm"), &session, interval, vec![(PathIndex(0), link)], None).unwrap();
    let deadline = Instant::now() + PATIENCE;
    for beats in 1.. {
        assert_eq!(peer.receive().unwrap().header.kind, Kind::Heartbeat);
        if session.ticks.load(Ordering::Acquire) > 3 * beats {
            break;
        }
        assert!(Instant::now() < deadline, "{beats} beats, and {:?} ticks", session.ticks);
    }
    session.end();
}

#[test]
fn half_a_message_on_one_path_holds_no_other_up() {
    let session = Counting::new(2);
    let ((one, mut ones), (other, mut others)) = (connection(), connection());
    let first = vec![(PathIndex(0), one), (PathIndex(1), other)];
    start(&literal("vm"), &session, INTERVAL, first, None).unwrap();
    session.await_heard(2);
    let (half, rest) = (&sign()[..7], &sign()[7..]);
    ones.write_all(half).unwrap();
    for count in 3..6 {
        others.write_all(&sign()).unwrap();
        session.await_heard(count);
    }
    ones.write_all(rest).unwrap();
    session.await_heard(6);
    session.end();
}

#[test]
fn a_path_is_dialled_beside_the_others_until_it_stands() {
    let session = Counting::new(2);
    let (link, peer) = connection();
    let peer = of_messages(peer);
    let (answer, answers) = crossbeam_channel::bounded(0);
    let dial: Dial = Arc::new(move |_| Ok(answers.recv()?));
    start(&literal("vm"), &session, INTERVAL, vec![(PathIndex(0), link)], Some(dial)).unwrap();
    for _ in 0..10 {
        peer.receive().expect("the heart waits for nobody who dials");
    }
    for _ in 0..2 {
        let (link, peer) = connection();
        answer.send_timeout(link, PATIENCE).expect("the path is dialled, and dialled again");
        of_messages(peer).receive().expect("it is of use");
    }
    session.end();
    drop(answer);
}

#[test]
fn connections_that_come_after_the_end_are_ended() {
    let session = Counting::new(1);
    start(&literal("vm"), &session, INTERVAL, Vec::new(), None).unwrap();
    session.heartbeats.close();
    for has_ended in [false, true] {
        if has_ended {
            session.end();
        }
        let (link, peer) = connection();
        session.heartbeats.attach(PathIndex(0), link);
        let peer = of_messages(peer);
        while peer.receive().is_ok() {}
    }
}

/// Any message was once one.
#[test]
fn what_is_no_heartbeat_is_no_sign_of_life_and_ends_the_connection() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Heartbeat) {
        let (session, (link, mut peer)) = (Counting::new(1), connection());
        start(&literal("vm"), &session, INTERVAL, vec![(PathIndex(0), link)], None).unwrap();
        session.await_heard(1);
        peer.write_all(&signal(kind)).unwrap();
        let peer = of_messages(peer);
        while peer.receive().is_ok() {}
        let lost = session.await_lost();
        session.end();
        assert!(lost.contains(&format!("{kind:?}")), "{lost}");
        assert_eq!(session.heard.load(Ordering::Acquire), 1, "{kind:?}");
    }
}
