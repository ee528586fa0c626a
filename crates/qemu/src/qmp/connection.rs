//! One QMP connection: lines of JSON out, lines of JSON in.

use qapi::{Command, Empty, Execute};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::str::FromStr;
use std::time::Duration;

/// A line longer than this is not from a sane QEMU; the longest, the reply to
/// `query-qmp-schema`, has about 300 kB.
pub(super) const MAX_LINE_BYTES: u64 = 8 << 20;

/// An error between the daemon and QEMU's monitor.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// QEMU ended, or closed its monitor; [`crate::Qemu::wait`] knows why.
    #[error("QEMU closed its monitor")]
    Closed,
    /// No answer in time; QEMU hangs or the machine is overloaded.
    #[error("QEMU did not answer \"{command}\" within {} ms", after.as_millis())]
    Timeout {
        /// The command.
        command: &'static str,
        /// The time given.
        after: Duration,
    },
    /// QEMU refused a command.
    #[error("QEMU refused \"{command}\": {reason}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's reason.
        reason: String,
    },
    /// An answer that cannot be understood.
    #[error("QEMU's answer to \"{command}\" cannot be understood: {reason}")]
    Malformed {
        /// The command.
        command: &'static str,
        /// The fault of the answer.
        reason: String,
    },
    /// The connection failed.
    #[error("the connection to QEMU's monitor failed: {0}")]
    Io(io::Error),
    /// The device state was loaded, but the guest does not run.
    #[error("QEMU loaded the device state but did not start the guest; see its log")]
    NotStarted,
}

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QemuVersion {
    /// 10 in 10.0.2.
    pub major: u32,
    /// 0 in 10.0.2.
    pub minor: u32,
    /// 2 in 10.0.2.
    pub micro: u32,
}

impl QemuVersion {
    /// The releases that it is one of: 10.0 for 10.0.2.
    pub fn series(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

impl FromStr for QemuVersion {
    type Err = ();

    fn from_str(text: &str) -> Result<QemuVersion, ()> {
        let numbers: Vec<u32> =
            text.split('.').map(str::parse).collect::<Result<_, _>>().map_err(drop)?;
        let [major, minor, micro] = numbers[..] else { return Err(()) };
        Ok(QemuVersion { major, minor, micro })
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A byte that is in no command: QEMU refuses what came before it.
const FORGET: u8 = 0xff;

/// Stands for a command that was primed and then not wanted.
const DISARMED: &str = "disarmed command";

/// A line that QEMU says.
pub(crate) enum Message {
    /// An event happened.
    Event {
        /// Its name, in capitals.
        name: String,
        /// Its particulars, or null.
        data: Value,
    },
    /// The answer to the oldest command that has none.
    Reply(Result<Value, String>),
}

/// One QMP connection.
#[derive(Debug)]
pub(crate) struct Connection {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// Commands sent and not yet answered; QEMU answers in order.
    owed: VecDeque<&'static str>,
    /// A command sent up to its last brace.
    primed: Option<Primed>,
    /// The next line may lack its beginning, which another process has read.
    cut: bool,
    timeout: Duration,
}

#[derive(Debug, PartialEq, Eq)]
struct Primed {
    command: &'static str,
    text: Vec<u8>,
}

#[derive(Deserialize)]
struct Line {
    event: Option<String>,
    #[serde(default)]
    data: Value,
    #[serde(rename = "return")]
    value: Option<Value>,
    error: Option<Refusal>,
    id: Option<String>,
}

impl Message {
    /// Reads a line, or says what is wrong with it.
    pub(super) fn parse(line: &[u8]) -> Result<Message, String> {
        Message::of(serde_json::from_slice(line).map_err(|error| error.to_string())?)
    }

    fn of(line: Line) -> Result<Message, String> {
        match line {
            Line { event: Some(name), data, .. } => Ok(Message::Event { name, data }),
            Line { error: Some(refusal), .. } => Ok(Message::Reply(Err(refusal.desc))),
            Line { value: Some(value), .. } => Ok(Message::Reply(Ok(value))),
            _ => Err("neither event nor answer".to_owned()),
        }
    }
}

#[derive(Deserialize)]
struct Refusal {
    desc: String,
}

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    qmp: GreetingBody,
}

#[derive(Deserialize)]
struct GreetingBody {
    version: GreetingVersion,
}

#[derive(Deserialize)]
struct GreetingVersion {
    qemu: Triple,
}

#[derive(Deserialize)]
struct Triple {
    major: u32,
    minor: u32,
    micro: u32,
}

impl Connection {
    /// Waits for QEMU's greeting and negotiates; `timeout` is for each answer,
    /// then and later.
    pub(crate) fn open(
        stream: UnixStream,
        timeout: Duration,
    ) -> Result<(Connection, QemuVersion), QmpError> {
        let mut connection = Connection::new(stream, timeout)?;
        const GREETING: &str = "greeting";
        connection.read_line(GREETING)?;
        let greeting: Greeting = serde_json::from_slice(&connection.incoming)
            .map_err(|e| QmpError::Malformed { command: GREETING, reason: e.to_string() })?;
        // With out-of-band commands enabled, QEMU reads the next command while
        // it executes one, so commands can be written back to back.
        let enable = Some(vec![qapi::qmp::QMPCapability::oob]);
        let _: Empty = connection.execute(&qapi::qmp::qmp_capabilities { enable })?;
        let Triple { major, minor, micro } = greeting.qmp.version.qemu;
        Ok((connection, QemuVersion { major, minor, micro }))
    }

    /// Adopts one that another process has negotiated.
    pub(crate) fn adopt(stream: UnixStream, timeout: Duration) -> Result<Connection, QmpError> {
        Ok(Connection { cut: true, ..Connection::new(stream, timeout)? })
    }

    fn new(stream: UnixStream, timeout: Duration) -> Result<Connection, QmpError> {
        stream.set_read_timeout(Some(timeout)).map_err(QmpError::Io)?;
        let reader = BufReader::new(stream.try_clone().map_err(QmpError::Io)?);
        Ok(Connection {
            reader,
            writer: stream,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            owed: VecDeque::new(),
            primed: None,
            cut: false,
            timeout,
        })
    }

    /// Has QEMU forget half a command, and reads past all answers to another process's. Waits
    /// for as long as it takes.
    pub(crate) fn catch_up(&mut self) -> Result<(), QmpError> {
        const CATCH_UP: &str = "catch-up";
        let command = format!(r#"{{"execute":"query-name","id":"{CATCH_UP}"}}"#);
        self.outgoing.push(FORGET);
        self.outgoing.extend(command.as_bytes());
        self.flush()?;
        self.without_timeout()?;
        while self.next_line(CATCH_UP)?.id.as_deref() != Some(CATCH_UP) {}
        self.writer.set_read_timeout(Some(self.timeout)).map_err(QmpError::Io)
    }

    /// The socket, for another process.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.writer.try_clone()?.into())
    }

    /// Its socket, with what was read of it and not taken.
    pub(super) fn into_unread(self) -> (UnixStream, Vec<u8>) {
        (self.writer, self.reader.buffer().to_vec())
    }

    /// Queues a command; [`Connection::flush`] sends it.
    pub(crate) fn push<C: Command>(&mut self, command: &C) -> Result<(), QmpError> {
        self.disarm();
        self.outgoing.extend(unfinished(command)?);
        self.outgoing.push(b'}');
        self.owed.push_back(C::NAME);
        Ok(())
    }

    /// Queues a command up to its last brace, which [`Connection::fire`] adds.
    ///
    /// QEMU reads its monitors byte by byte, with several system calls for each:
    /// a command of 90 bytes takes it half a millisecond on a busy machine. Sent
    /// ahead, that time is not part of a checkpoint's pause.
    pub(crate) fn prime<C: Command>(&mut self, command: &C) -> Result<(), QmpError> {
        let primed = Primed { command: C::NAME, text: unfinished(command)? };
        if self.primed.as_ref() != Some(&primed) {
            self.disarm();
            self.outgoing.extend(&primed.text);
            self.primed = Some(primed);
        }
        Ok(())
    }

    /// Queues the last brace of the primed command.
    pub(crate) fn fire(&mut self) {
        if let Some(Primed { command, .. }) = self.primed.take() {
            self.outgoing.push(b'}');
            self.owed.push_back(command);
        }
    }

    /// Whether this command is primed.
    pub(crate) fn is_primed(&self, command: &str) -> bool {
        self.primed.as_ref().is_some_and(|primed| primed.command == command)
    }

    /// Makes the primed command one that QEMU refuses.
    fn disarm(&mut self) {
        if self.primed.take().is_some() {
            self.outgoing.extend(br#","disarmed":0}"#);
            self.owed.push_back(DISARMED);
        }
    }

    /// Sends all that is queued in one write.
    pub(crate) fn flush(&mut self) -> Result<(), QmpError> {
        let sent = self.writer.write_all(&self.outgoing);
        self.outgoing.clear();
        sent.map_err(|e| self.io_error("write", e))
    }

    /// Sends a command and waits for its answer, read as `T`: our own types
    /// where a later QEMU may drop fields that `C::Ok` insists on.
    pub(crate) fn execute<C: Command, T: DeserializeOwned>(
        &mut self,
        command: &C,
    ) -> Result<T, QmpError> {
        self.settle()?;
        self.push(command)?;
        self.flush()?;
        self.reply(C::NAME)
    }

    /// Waits for the answers that an abandoned checkpoint left behind, so that
    /// the next answer is to the next command.
    pub(crate) fn settle(&mut self) -> Result<(), QmpError> {
        self.disarm();
        self.flush()?;
        while let Some(&abandoned) = self.owed.front() {
            match self.reply::<Value>(abandoned) {
                Ok(_) | Err(QmpError::Refused { command: DISARMED, .. }) => {}
                Err(QmpError::Refused { command, reason }) => {
                    tracing::warn!(command, reason, "QEMU refused an abandoned command");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for the answer to the oldest command that has none, which must be
    /// `command`. Events in between are dropped: they have their own monitor.
    pub(crate) fn reply<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
    ) -> Result<T, QmpError> {
        loop {
            if let Message::Reply(answer) = self.message(command)? {
                let value = answer.map_err(|reason| QmpError::Refused { command, reason })?;
                return serde_json::from_value(value)
                    .map_err(|e| QmpError::Malformed { command, reason: e.to_string() });
            }
        }
    }

    /// Waits for the next line. `waiting_for` is for errors.
    pub(crate) fn message(&mut self, waiting_for: &'static str) -> Result<Message, QmpError> {
        let message = Message::of(self.next_line(waiting_for)?)
            .map_err(|reason| QmpError::Malformed { command: waiting_for, reason })?;
        if let Message::Reply(_) = message {
            self.owed.pop_front();
        }
        Ok(message)
    }

    fn next_line(&mut self, waiting_for: &'static str) -> Result<Line, QmpError> {
        loop {
            self.read_line(waiting_for)?;
            let first = std::mem::take(&mut self.cut);
            match serde_json::from_slice(&self.incoming) {
                Ok(line) => return Ok(line),
                Err(_) if first => {}
                Err(error) => {
                    let reason = error.to_string();
                    return Err(QmpError::Malformed { command: waiting_for, reason });
                }
            }
        }
    }

    /// Waits, from now on, for the next line for as long as it takes.
    fn without_timeout(&mut self) -> Result<(), QmpError> {
        self.writer.set_read_timeout(None).map_err(QmpError::Io)
    }

    fn read_line(&mut self, waiting_for: &'static str) -> Result<(), QmpError> {
        self.incoming.clear();
        let mut limited = io::Read::take(&mut self.reader, MAX_LINE_BYTES);
        match limited.read_until(b'\n', &mut self.incoming) {
            Err(error) => Err(self.io_error(waiting_for, error)),
            Ok(_) if self.incoming.ends_with(b"\n") => Ok(()),
            Ok(_) if self.incoming.len() as u64 == MAX_LINE_BYTES => Err(QmpError::Malformed {
                command: waiting_for,
                reason: "the line is too long".to_owned(),
            }),
            Ok(_) => Err(QmpError::Closed),
        }
    }

    fn io_error(&self, command: &'static str, error: io::Error) -> QmpError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, WouldBlock};
        match error.kind() {
            WouldBlock | TimedOut => QmpError::Timeout { command, after: self.timeout },
            BrokenPipe | ConnectionReset => QmpError::Closed,
            _ => QmpError::Io(error),
        }
    }
}

/// A command without its last brace, and without an empty list of arguments.
fn unfinished<C: Command>(command: &C) -> Result<Vec<u8>, QmpError> {
    let mut text =
        serde_json::to_vec(&Execute::<&C>::from(command)).map_err(|e| QmpError::Io(e.into()))?;
    text.pop();
    const NONE: &[u8] = br#","arguments":{}"#;
    if text.ends_with(NONE) {
        text.truncate(text.len() - NONE.len());
    }
    Ok(text)
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
