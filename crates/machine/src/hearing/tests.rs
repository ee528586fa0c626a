use super::*;
use crate::console::ConsoleServer;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// QEMU's ends, and what is heard of it.
struct Stage {
    folder: tempfile::TempDir,
    server: ConsoleServer,
    hearing: Hearing,
    console: UnixStream,
    monitor: UnixStream,
    told: Receiver<VmEvent>,
}

impl Stage {
    fn at(folder: tempfile::TempDir) -> Stage {
        let paths = ["console", "log"].map(|name| folder.path().join(name));
        let ((server, relay), console) =
            ConsoleServer::serve(&paths[0], &paths[1], Box::new(|| ())).unwrap();
        let (ours, monitor) = UnixStream::pair().unwrap();
        let (sender, told) = channel();
        let on_event = move |event| drop(sender.send(event));
        let hearing = Hearing::begin(Events::adopt(ours), on_event, Some(relay)).unwrap();
        Stage { folder, server, hearing, console, monitor, told }
    }

    fn new() -> Stage {
        Stage::at(tempfile::tempdir().unwrap())
    }

    fn tells(&mut self, name: &str) {
        writeln!(self.monitor, "{{\"event\": \"{name}\"}}").unwrap();
    }

    fn await_event(&self, expected: &VmEvent) {
        assert_eq!(&self.told.recv_timeout(LIMIT).unwrap(), expected);
    }
}

/// A pipe that nobody reads stands for the log on a disk that hangs.
#[test]
fn a_console_that_is_held_up_holds_up_no_event() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    let mut reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut stage = Stage::at(folder);
    // More than the pipe and the console's socket take together: the relay is in the midst of it.
    let mut console = stage.console.try_clone().unwrap();
    let words = vec![b'x'; 4 << 20];
    let speaking = thread::spawn(move || console.write_all(&words));
    let mut first = [0];
    reader.read_exact(&mut first).unwrap();
    stage.tells("STOP");
    stage.await_event(&VmEvent::Stopped);
    stage.tells("GUEST_PANICKED");
    stage.await_event(&VmEvent::Panicked);
    assert!(!speaking.is_finished(), "the console is held up");
    let mut rest = vec![0; (4 << 20) - 1];
    reader.read_exact(&mut rest).unwrap();
    speaking.join().unwrap().unwrap();
    assert_eq!((first[0], rest.iter().all(|&byte| byte == b'x')), (b'x', true));
}

#[test]
fn it_ends_with_qemu_and_has_told_all() {
    let mut stage = Stage::new();
    stage.console.write_all(b"last words").unwrap();
    stage.tells("STOP");
    let Stage { folder, server: _server, mut hearing, console, monitor, told } = stage;
    drop((console, monitor));
    hearing.thread.take().unwrap().join().unwrap();
    assert_eq!(told.iter().collect::<Vec<_>>(), [VmEvent::Stopped, VmEvent::Disconnected]);
    assert_eq!(fs::read(folder.path().join("log")).unwrap(), b"last words");
}

/// A relay that was at rest, and then at work again.
#[test]
fn whoever_has_been_quiet_is_heard_again() {
    let mut stage = Stage::new();
    let mut client = UnixStream::connect(stage.folder.path().join("console")).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    for words in ["one", "two"] {
        client.write_all(b"?").unwrap();
        let mut typed = [0];
        stage.console.read_exact(&mut typed).unwrap();
        stage.console.write_all(words.as_bytes()).unwrap();
        let mut heard = vec![0; words.len()];
        client.read_exact(&mut heard).unwrap();
        assert_eq!(heard, words.as_bytes());
        // Longer than a relay waits for more.
        thread::sleep(Duration::from_millis(2200));
    }
    stage.tells("STOP");
    stage.await_event(&VmEvent::Stopped);
}

/// A host may end the machine because of an event.
#[test]
fn an_event_may_be_the_end() {
    let (ours, mut monitor) = UnixStream::pair().unwrap();
    let (give, take) = channel::<Hearing>();
    let (over, is_over) = channel();
    let on_event = move |_| {
        drop(take.recv());
        over.send(()).unwrap();
    };
    give.send(Hearing::begin(Events::adopt(ours), on_event, None).unwrap()).unwrap();
    monitor.write_all(b"{\"event\": \"STOP\"}\n").unwrap();
    is_over.recv_timeout(LIMIT).unwrap();
}
