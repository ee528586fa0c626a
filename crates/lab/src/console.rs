//! Shell lines on a guest's serial console, timed from outside.
//!
//! The console is local administration: its bytes are not held by output commit and
//! make no frames, so neither running a line nor seeing its end disturbs what is
//! measured. Only the clock of this machine is used. The guest's own stands still
//! whenever the guest does, in every pause of a checkpoint: a time measured by the
//! guest would leave out just what protection costs.

use anyhow::{Context, Result, bail, ensure};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for a shell to answer, while the guest may still boot on a busy machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(240);
/// Time for one try: what is typed before the shell runs is lost.
const GREETING_LIMIT: Duration = Duration::from_millis(500);
/// A terminal takes no longer line (`man 3 termios`), with room for the markers.
const LONGEST_LINE: usize = 3800;
/// More output than any line of a benchmark prints.
const MOST_OUTPUT: usize = 16 * 1024 * 1024;
/// Length of it that an error shows.
const EXCERPT: usize = 2000;

/// End of a line of shell on the console.
#[derive(Clone, Debug, PartialEq)]
pub struct ConsoleOutput {
    /// The exit code, or 128 plus the signal that ended it.
    pub code: i32,
    /// Text that it wrote to stdout and stderr.
    pub text: String,
    /// Time from its start to its end, by this machine's clock.
    pub took: Duration,
}

impl ConsoleOutput {
    /// Returns itself if the line ended well, else an error with what it printed.
    pub fn expect_success(self, line: &str) -> Result<ConsoleOutput> {
        ensure!(self.code == 0, "`{line}` ended with {}: {}", self.code, tail(&self.text));
        Ok(self)
    }
}

/// The one connection to a guest's serial console, with a shell at its other end.
pub struct Console {
    stream: UnixStream,
    /// Tells the answers to this connection from those to an earlier one.
    name: String,
    lines: u64,
    /// Text that came and was not looked at yet.
    pending: Vec<u8>,
}

impl Console {
    /// Connects to the socket of a serial console, waits until a shell answers, and
    /// ends what an earlier connection may have left running in its foreground.
    pub fn connect(socket: &Path) -> Result<Console> {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(0);
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to the console {}", socket.display()))?;
        let number = CONNECTIONS.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let mut console = Console { stream, name, lines: 0, pending: Vec::new() };
        console.await_shell().with_context(|| format!("the console {}", socket.display()))?;
        Ok(console)
    }

    /// Runs one line of shell to its end, in a shell of its own; an error after `limit`,
    /// which shows what the line printed.
    pub fn run(&mut self, line: &str, limit: Duration) -> Result<ConsoleOutput> {
        ensure!(!line.contains('\n'), "a line for the console is one line: `{line}`");
        ensure!(line.len() <= LONGEST_LINE, "too long for the console: `{line}`");
        self.lines += 1;
        let (begin, end) = (self.marker("begin"), self.marker("end"));
        // Quoted here and there, a marker is not its own echo.
        let (quoted_begin, quoted_end) = (quoted(&begin), quoted(&end));
        self.send(&format!("echo {quoted_begin}; ( {line} ) 2>&1; echo {quoted_end} $?\n"))?;
        let deadline = Instant::now() + limit;
        self.pending.clear();
        self.await_marker(&begin, deadline).with_context(|| format!("`{line}` did not begin"))?;
        let begun = Instant::now();
        let text = self
            .await_marker(&end, deadline)
            .with_context(|| format!("`{line}` did not end within {limit:?}"))?;
        let took = begun.elapsed();
        let code = self.rest_of_line(deadline)?;
        let code = code.parse().with_context(|| format!("`{line}` ended with `{code}`"))?;
        Ok(ConsoleOutput { code, text: text.replace("\r\n", "\n"), took })
    }

    fn marker(&self, what: &str) -> String {
        format!("us-{what}-{}-{} ", self.name, self.lines)
    }

    fn send(&mut self, text: &str) -> Result<()> {
        self.stream.write_all(text.as_bytes()).context("cannot write to the console")
    }

    /// Types until a shell answers; then it neither prompts nor echoes.
    fn await_shell(&mut self) -> Result<()> {
        let begun = Instant::now();
        // Control-C ends a half-typed line, or a command of somebody before. Not at once:
        // it would end a shell that is just starting.
        let mut control = "";
        loop {
            let marker = self.marker("shell");
            let greeting = format!("{control}\nPS1=; PS2=; stty -echo; echo {}\n", quoted(&marker));
            self.send(&greeting)?;
            let found = self.await_marker(&marker, Instant::now() + GREETING_LIMIT);
            match found {
                Ok(_) => return Ok(()),
                Err(_) if begun.elapsed() < CONNECT_LIMIT => {}
                Err(error) => return Err(error.context("no shell answers")),
            }
            control = "\x03";
        }
    }

    /// Reads up to a marker and takes it; returns what came before it.
    fn await_marker(&mut self, marker: &str, deadline: Instant) -> Result<String> {
        let mut searched: usize = 0;
        loop {
            let from = searched.saturating_sub(marker.len());
            if let Some(at) = find(&self.pending[from..], marker.as_bytes()) {
                let before: Vec<u8> = self.pending.drain(..from + at + marker.len()).collect();
                let text = &before[..from + at];
                return Ok(String::from_utf8_lossy(text).trim_start().to_owned());
            }
            searched = self.pending.len();
            self.read(deadline)?;
        }
    }

    fn rest_of_line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = find(&self.pending, b"\n") {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim().to_owned());
            }
            self.read(deadline)?;
        }
    }

    fn read(&mut self, deadline: Instant) -> Result<()> {
        let mut chunk = [0; 4096];
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero would wait for ever.
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let said = || tail(&String::from_utf8_lossy(&self.pending));
        match self.stream.read(&mut chunk) {
            Ok(0) => bail!("the guest's console was closed; it had said: {}", said()),
            Ok(count) => self.pending.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                bail!("the guest's console said: {}", said())
            }
            Err(error) => return Err(error).context("cannot read the guest's console"),
        }
        ensure!(self.pending.len() <= MOST_OUTPUT, "too much output on the guest's console");
        Ok(())
    }
}

/// A marker as shell words that print it.
fn quoted(marker: &str) -> String {
    marker.trim_end().replacen('-', "'-'", 1) + "' '"
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// The end of a text, for an error.
fn tail(text: &str) -> String {
    let text = text.trim();
    let begin = text.char_indices().rev().nth(EXCERPT).map_or(0, |(at, _)| at);
    if text.is_empty() { "nothing".to_owned() } else { text[begin..].to_owned() }
}

#[cfg(test)]
#[path = "console_tests.rs"]
mod tests;
