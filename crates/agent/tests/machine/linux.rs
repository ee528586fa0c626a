//! Linux in a machine, and its console.

use super::{Machine, Start, wait_for};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

/// The console's last words of a boot.
const UP: &str = "UNDERSTUDY-GUEST-READY";

/// The test guest of `guests/build`.
pub struct Linux {
    /// Place of its files.
    pub files: PathBuf,
    /// QEMU's end of its console.
    pub console: OwnedFd,
}

/// Starts a machine, which gets Linux, and waits until that has come to its shell.
pub fn boot(start: Start) -> (Machine, Console) {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let files = std::env::var_os("UNDERSTUDY_GUEST").map_or(built, PathBuf::from);
    let (ours, console) = UnixStream::pair().unwrap();
    let linux = Some(Linux { files, console: console.into() });
    let mut machine = Machine::start(Start { linux, ..start });
    let console = Console::open(ours);
    machine.qmp("cont");
    wait_for("the guest to boot", || console.has_said(UP));
    (machine, console)
}

/// The guest's console.
pub struct Console {
    socket: UnixStream,
    said: Arc<Mutex<String>>,
}

impl Console {
    fn open(socket: UnixStream) -> Console {
        let said = Arc::new(Mutex::new(String::new()));
        let (mut from, to) = (socket.try_clone().unwrap(), Arc::clone(&said));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                to.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        Console { socket, said }
    }

    fn has_said(&self, words: &str) -> bool {
        self.said.lock().unwrap().contains(words)
    }

    /// Types a line.
    pub fn say(&mut self, line: &str) {
        self.socket.write_all(format!("\n{line}\n").as_bytes()).unwrap();
    }
}
