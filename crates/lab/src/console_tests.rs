use super::*;
use nix::pty::openpty;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::thread;

const LIMIT: Duration = Duration::from_secs(180);

/// A shell on a terminal, and a socket that stands for the serial port.
struct Guest {
    _directory: tempfile::TempDir,
    socket: std::path::PathBuf,
    shell: Child,
}

impl Guest {
    fn boot() -> Guest {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("console");
        let listener = UnixListener::bind(&socket).unwrap();
        let terminal = openpty(None, None).unwrap();
        let stdio = |fd: &OwnedFd| Stdio::from(fd.try_clone().unwrap());
        // Whoever started the tests may have left control-C ignored; a guest does not.
        let shell = Command::new("env")
            .args(["--default-signal", "setsid", "--ctty", "sh", "-i"])
            .env("PS1", "prompt# ")
            .stdin(stdio(&terminal.slave))
            .stdout(stdio(&terminal.slave))
            .stderr(stdio(&terminal.slave))
            .spawn()
            .unwrap();
        drop(terminal.slave);
        let mut master = File::from(terminal.master);
        let mut said = Vec::new();
        // Before its prompt, control-C would end it, and nothing here starts it again.
        while find(&said, b"prompt# ").is_none() {
            let mut byte = [0];
            master.read_exact(&mut byte).unwrap();
            said.push(byte[0]);
        }
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut to_guest = master.try_clone().unwrap();
                let mut from_guest = master.try_clone().unwrap();
                let mut input = connection.unwrap();
                let mut output = input.try_clone().unwrap();
                thread::spawn(move || std::io::copy(&mut from_guest, &mut output));
                let _ = std::io::copy(&mut input, &mut to_guest);
            }
        });
        Guest { _directory: directory, socket, shell }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.shell.kill().unwrap();
        self.shell.wait().unwrap();
    }
}

#[test]
fn a_line_returns_its_output_and_exit_code() {
    let guest = Guest::boot();
    let mut console = Console::connect(&guest.socket).unwrap();
    let output = console.run("echo out; echo err >&2; exit 3", LIMIT).unwrap();
    assert_eq!((output.code, output.text.as_str()), (3, "out\nerr\n"));
    let output = console.run("printf 'no newline'", LIMIT).unwrap();
    assert_eq!((output.code, output.text.as_str()), (0, "no newline"));
    let asked = Instant::now();
    let output = console.run("sleep 0.2 && seq 10000 | wc -l", LIMIT).unwrap();
    assert_eq!(output.text, "10000\n");
    // A busy machine may hear late that it began, and then it took less than the sleep.
    assert!((Duration::from_nanos(1)..asked.elapsed()).contains(&output.took), "{output:?}");
}

#[test]
fn a_line_that_does_not_end_is_an_error_with_its_output() {
    let guest = Guest::boot();
    let mut console = Console::connect(&guest.socket).unwrap();
    let error = console.run("echo begun; sleep 600", Duration::from_secs(1)).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("sleep 600") && error.contains("begun"), "{error}");
    // As at QEMU's socket, the next connection is served when this one is gone. It ends
    // what this one left running.
    drop(console);
    let mut console = Console::connect(&guest.socket).unwrap();
    let output = console.run("echo why; exit 7", LIMIT).unwrap();
    let failure = output.expect_success("line").unwrap_err().to_string();
    assert!(failure.contains("ended with 7") && failure.contains("why"), "{failure}");
}
