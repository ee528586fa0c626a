//! The relay and the gate, with this side as QEMU and as the client.

use super::log::FILE_BYTES;
use super::output::{AT_ONCE, MOST_BYTES};
use super::*;
use crate::hearing::Hearing;
use std::fs;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;
use understudy_protocol::Epoch;
use understudy_qemu::qmp::Events;

const LIMIT: Duration = Duration::from_secs(20);

struct Stage {
    folder: tempfile::TempDir,
    server: ConsoleServer,
    hearing: Hearing,
    qemu: UnixStream,
    /// QEMU's end of its monitor.
    _monitor: UnixStream,
    rings: Arc<AtomicU32>,
}

impl Stage {
    fn new() -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let rings = Arc::new(AtomicU32::new(0));
        let rung = rings.clone();
        let waiting = Box::new(move || {
            rung.fetch_add(1, Ordering::Relaxed);
        });
        let paths = ["console", "log"].map(|name| folder.path().join(name));
        let ((server, relay), qemu) = ConsoleServer::serve(&paths[0], &paths[1], waiting).unwrap();
        let (told, _monitor) = UnixStream::pair().unwrap();
        let hearing = Hearing::begin(Events::adopt(told), |_| (), Some(relay)).unwrap();
        Stage { folder, server, hearing, qemu, _monitor, rings }
    }

    fn output(&self) -> &ConsoleOutput {
        self.server.output()
    }

    fn client(&self) -> UnixStream {
        let client = UnixStream::connect(self.folder.path().join("console")).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client
    }

    fn log(&self) -> Vec<u8> {
        fs::read(self.folder.path().join("log")).unwrap()
    }

    fn says(&mut self, words: &[u8]) {
        self.qemu.write_all(words).unwrap();
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn expect(stream: &mut UnixStream, bytes: &[u8]) {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut read = vec![0; bytes.len()];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(read, bytes);
}

/// Reads until these words come.
fn await_words(client: &mut UnixStream, words: &[u8]) {
    let mut said = Vec::new();
    while !said.ends_with(words) {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        said.push(byte[0]);
    }
}

/// `yes > /dev/ttyS0` in a guest. Before, the log grew without end beside the mirrors.
#[test]
fn a_guest_that_never_stops_speaking_costs_two_files() {
    const LINE: &[u8] = b"y\n";
    let mut stage = Stage::new();
    let piece = LINE.repeat(1 << 19);
    for _ in 0..20 {
        stage.says(&piece);
    }
    let Stage { folder, hearing, .. } = stage;
    drop(hearing);
    let sizes = ["log", "log.1"].map(|name| fs::metadata(folder.path().join(name)).unwrap().len());
    assert!(sizes.iter().all(|bytes| *bytes <= FILE_BYTES), "{sizes:?}");
    assert_eq!(sizes[1], FILE_BYTES, "the end of it is there");
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.retain(|name| name != "console");
    assert_eq!(files.len(), 2, "{files:?}");
}

#[test]
fn what_is_said_and_typed_goes_to_the_other_side() {
    let mut stage = Stage::new();
    for _ in 0..2 {
        // Nobody hears it, and QEMU is not held up.
        stage.says(&[b'x'; 3 * 4096]);
        let mut client = stage.client();
        client.write_all(b"ls\n").unwrap();
        expect(&mut stage.qemu, b"ls\n");
        stage.says(b"bin dev\n");
        await_words(&mut client, b"bin dev\n");
    }
    let Stage { folder, server, hearing, mut qemu, .. } = stage;
    drop((hearing, server));
    assert_eq!(qemu.read(&mut [0]).unwrap(), 0, "QEMU sees the end");
    let log = fs::read(folder.path().join("log")).unwrap();
    assert_eq!(log.len(), 2 * (3 * 4096 + 8), "the log has all of it");
}

#[test]
fn held_words_are_heard_when_their_epoch_is_committed() {
    let mut stage = Stage::new();
    stage.says(b"before ");
    stage.output().hold(Epoch(2));
    until("what was said before is in the log", || stage.log() == b"before ");
    stage.says(b"two ");
    until("words wait", || stage.output().held_bytes() == 4);
    assert_eq!(stage.rings.load(Ordering::Relaxed), 1, "there is a reason to commit");
    stage.says(b"too ");
    // The guest stands still: nobody has read that, and it is part of the epoch.
    stage.output().drain_and_barrier(Epoch(3));
    assert_eq!(stage.output().held_of(Epoch(2)), b"two too ");
    stage.says(b"three");
    until("more waits", || stage.output().held_bytes() == 13);
    assert_eq!(stage.log(), b"before ");
    let mut client = stage.client();
    stage.output().release_through(Epoch(2));
    until("the epoch is heard", || stage.log() == b"before two too ");
    assert_eq!(stage.output().held_bytes(), 5);
    stage.output().open();
    await_words(&mut client, b"three");
    assert_eq!(stage.log(), b"before two too three");
    stage.says(b"!");
    await_words(&mut client, b"!");
}

/// Each checkpoint took all that QEMU had, however much waited for a client that takes nothing.
#[test]
fn words_that_nobody_takes_hold_the_guest_up() {
    const EPOCHS: u64 = 200;
    let mut stage = Stage::new();
    stage.output().hold(Epoch(1));
    let _client = stage.client();
    stage.qemu.set_nonblocking(true).unwrap();
    let mut most = 0;
    for epoch in 1..=EPOCHS {
        while stage.qemu.write(&[b'x'; 1 << 16]).is_ok() {}
        stage.output().drain_and_barrier(Epoch(epoch + 1));
        most = most.max(stage.output().bytes());
        stage.output().release_through(Epoch(epoch));
    }
    assert!(most > MOST_BYTES / 2, "the client took it: {most}");
    assert!(most <= MOST_BYTES + AT_ONCE, "{most} bytes wait");
}

#[test]
fn what_another_host_says_is_not_heard_from_here() {
    let mut stage = Stage::new();
    stage.output().hold(Epoch(2));
    stage.says(b"never");
    until("words wait", || stage.output().held_bytes() == 5);
    stage.output().shut();
    stage.says(b"nor this");
    let Stage { folder, hearing, .. } = stage;
    drop(hearing);
    assert_eq!(fs::read(folder.path().join("log")).unwrap(), b"");
}

#[test]
fn held_words_are_lost_with_their_daemon_and_the_last_free_ones_are_not() {
    for held in [false, true] {
        let mut stage = Stage::new();
        stage.says(b"first ");
        if held {
            stage.output().hold(Epoch(2));
        }
        stage.says(b"last");
        let Stage { folder, hearing, .. } = stage;
        drop(hearing);
        let expected: &[u8] = if held { b"first " } else { b"first last" };
        assert_eq!(fs::read(folder.path().join("log")).unwrap(), expected);
    }
}

#[test]
fn a_standby_repeats_what_the_primary_sent_of_it() {
    let mut stage = Stage::new();
    stage.output().say(b"on the former host; ");
    stage.says(b"on this one");
    until("both are in the log", || stage.log() == b"on the former host; on this one");
}

#[test]
fn a_path_that_is_taken_is_named() {
    let stage = Stage::new();
    let paths = ["console", "other"].map(|name| stage.folder.path().join(name));
    let error = ConsoleServer::serve(&paths[0], &paths[1], Box::new(|| ())).err().unwrap();
    assert!(format!("{error:#}").contains("cannot serve the console"), "{error:#}");
}
