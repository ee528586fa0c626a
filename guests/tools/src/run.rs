//! Shell lines from the network. For tests only: whoever connects is root.
//!
//! | request       | answer |
//! |---------------|--------|
//! | `LINE\n`      | `started PID\n`: `/bin/sh -c LINE` runs in a session of its own |
//! | `wait LINE\n` | `exit CODE LENGTH\n`, then LENGTH bytes: what it wrote to stdout, then to stderr |
//!
//! CODE is the exit code, or 128 plus the signal that ended the shell.
//! `error …\n` if the line could not be started.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread;

use crate::server;

/// Serves the protocol above on `port`.
pub fn serve(port: u16) -> Result<(), String> {
    server::serve(port, |stream| server::answer_lines(stream, |line| Ok(answer(line))))
}

fn answer(request: &str) -> Vec<u8> {
    let answer = match request.strip_prefix("wait ") {
        Some(line) => run_to_end(line),
        None => start(request),
    };
    answer.unwrap_or_else(|error| format!("error: cannot run `{request}`: {error}\n").into_bytes())
}

fn start(line: &str) -> io::Result<Vec<u8>> {
    // `setsid` executes the shell in its own place, so the PID is the shell's.
    let mut child = Command::new("setsid")
        .args(["/bin/sh", "-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let answer = format!("started {}\n", child.id());
    // Somebody has to reap it.
    thread::spawn(move || child.wait());
    Ok(answer.into_bytes())
}

fn run_to_end(line: &str) -> io::Result<Vec<u8>> {
    let mut output = Command::new("/bin/sh").args(["-c", line]).stdin(Stdio::null()).output()?;
    let status = output.status;
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(-1);
    output.stdout.append(&mut output.stderr);
    let mut answer = format!("exit {code} {}\n", output.stdout.len()).into_bytes();
    answer.append(&mut output.stdout);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_returns_exit_code_and_output() {
        assert_eq!(answer("wait printf abc; exit 3"), b"exit 3 3\nabc");
        assert_eq!(answer("wait printf e >&2; printf o"), b"exit 0 2\noe");
        assert_eq!(answer("wait kill -9 $$"), b"exit 137 0\n");
    }

    #[test]
    fn a_background_line_answers_with_its_pid_at_once() {
        let answer = String::from_utf8(answer("exec sleep 0")).unwrap();
        let pid = answer.strip_prefix("started ").unwrap().trim_end();
        assert!(pid.parse::<u32>().is_ok(), "{answer}");
    }
}
