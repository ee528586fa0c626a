//! The events that QEMU tells without being asked.

use super::connection::{Connection, MAX_LINE_BYTES, Message, QmpError};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use serde_json::Value;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// An event that happened to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The vCPUs stand still; every checkpoint causes one.
    Stopped,
    /// The vCPUs run.
    Resumed,
    /// The guest powered off (`guest`), or QEMU was told to end it. QEMU stays,
    /// its vCPUs stand still, until the daemon ends it. This event counts, not
    /// the run state: a power-off during a checkpoint leaves it at `paused`.
    Shutdown {
        /// Whether the guest wanted it.
        guest: bool,
        /// QEMU's word for the cause, like `guest-shutdown`.
        reason: String,
    },
    /// The machine was reset and boots again.
    Reset {
        /// Whether the guest wanted it.
        guest: bool,
    },
    /// The guest's kernel reported a panic.
    Panicked,
    /// Reading or writing a disk failed.
    DiskError {
        /// Name of the block node, like `disk0`.
        node: String,
        /// QEMU's reason.
        reason: String,
        /// Whether the vCPUs stand still because of it.
        stopped: bool,
    },
    /// QEMU ended or closed its monitor: the last event.
    Disconnected,
}

/// The events that QEMU tells, on a monitor of its own.
#[derive(Debug)]
pub struct Events {
    socket: UnixStream,
    /// Bytes that were read and not taken: the beginning of a line, mostly.
    unread: Vec<u8>,
    /// The first line may lack its beginning, which another process has read.
    is_cut: bool,
}

impl Events {
    /// The events of a monitor that another process has negotiated.
    pub fn adopt(socket: UnixStream) -> Events {
        Events { socket, unread: Vec::new(), is_cut: true }
    }

    /// The events of a monitor that was just negotiated.
    pub(super) fn of(connection: Connection) -> Events {
        let (socket, unread) = connection.into_unread();
        Events { socket, unread, is_cut: false }
    }

    /// Calls `on_event` for all that QEMU has told, and does not wait for more. Returns whether
    /// more may come: nothing does after [`VmEvent::Disconnected`].
    pub fn take(&mut self, mut on_event: impl FnMut(VmEvent)) -> bool {
        let ended = self.take_all(&mut on_event);
        if let Err(error) = &ended {
            tracing::debug!(%error, "the events monitor ended");
            on_event(VmEvent::Disconnected);
        }
        ended.is_ok()
    }

    fn take_all(&mut self, on_event: &mut impl FnMut(VmEvent)) -> Result<(), QmpError> {
        let mut piece = [0; 4096];
        loop {
            self.take_lines(on_event)?;
            match recv(self.socket.as_raw_fd(), &mut piece, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(QmpError::Closed),
                Ok(count) => self.unread.extend_from_slice(&piece[..count]),
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(QmpError::Io(errno.into())),
            }
        }
    }

    fn take_lines(&mut self, on_event: &mut impl FnMut(VmEvent)) -> Result<(), QmpError> {
        let malformed = |reason| QmpError::Malformed { command: "event", reason };
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            let is_cut = std::mem::take(&mut self.is_cut);
            match Message::parse(&line) {
                Ok(Message::Event { name, data }) => {
                    if let Some(event) = parse(&name, &data) {
                        on_event(event);
                    }
                }
                Ok(Message::Reply(_)) => {}
                Err(_) if is_cut => {}
                Err(reason) => return Err(malformed(reason)),
            }
        }
        if self.unread.len() as u64 > MAX_LINE_BYTES {
            return Err(malformed("the line is too long".to_owned()));
        }
        Ok(())
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn parse(name: &str, data: &Value) -> Option<VmEvent> {
    let text = |key: &str| data[key].as_str().unwrap_or_default().to_owned();
    let guest = data["guest"].as_bool().unwrap_or(false);
    Some(match name {
        "STOP" => VmEvent::Stopped,
        "RESUME" => VmEvent::Resumed,
        "SHUTDOWN" => VmEvent::Shutdown { guest, reason: text("reason") },
        "RESET" => VmEvent::Reset { guest },
        "GUEST_PANICKED" => VmEvent::Panicked,
        "BLOCK_IO_ERROR" => VmEvent::DiskError {
            node: text("node-name"),
            reason: text("reason"),
            stopped: data["action"] == "stop",
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::Write;

    fn taken(events: &mut Events) -> (Vec<VmEvent>, bool) {
        let mut taken = Vec::new();
        let goes_on = events.take(|event| taken.push(event));
        (taken, goes_on)
    }

    #[test]
    fn events_are_taken_as_they_come_and_waited_for_by_nobody() {
        let (ours, mut qemus) = UnixStream::pair().unwrap();
        let mut events = Events::adopt(ours);
        assert_eq!(taken(&mut events), (vec![], true));
        // Of a line that another process began to read.
        qemus.write_all(b"nt\": \"STOP\"}\n{\"event\": \"RESU").unwrap();
        assert_eq!(taken(&mut events), (vec![], true));
        qemus.write_all(b"ME\"}\n{\"return\": {}}\n{\"event\": \"STOP\"}\n").unwrap();
        assert_eq!(taken(&mut events), (vec![VmEvent::Resumed, VmEvent::Stopped], true));
        qemus.write_all(b"{\"event\": \"GUEST_PANICKED\"}\n").unwrap();
        drop(qemus);
        assert_eq!(taken(&mut events), (vec![VmEvent::Panicked, VmEvent::Disconnected], false));
    }

    #[test]
    fn what_is_no_event_is_the_end() {
        let (ours, mut qemus) = UnixStream::pair().unwrap();
        let mut events = Events::adopt(ours);
        qemus.write_all(b"cut\n{\"event\": \"STOP\"}\nnonsense\n").unwrap();
        assert_eq!(taken(&mut events), (vec![VmEvent::Stopped, VmEvent::Disconnected], false));
    }

    #[test]
    fn events_keep_their_particulars() {
        let shutdown = json!({"guest": true, "reason": "guest-shutdown"});
        assert_eq!(
            parse("SHUTDOWN", &shutdown),
            Some(VmEvent::Shutdown { guest: true, reason: "guest-shutdown".to_owned() })
        );
        let error = json!({"device": "", "node-name": "disk0", "operation": "write",
            "action": "stop", "nospace": true, "reason": "No space left on device"});
        let Some(VmEvent::DiskError { node, reason, stopped: true }) =
            parse("BLOCK_IO_ERROR", &error)
        else {
            panic!("no disk error")
        };
        assert_eq!((node.as_str(), reason.as_str()), ("disk0", "No space left on device"));
        assert_eq!(parse("STOP", &Value::Null), Some(VmEvent::Stopped));
        assert_eq!(parse("RTC_CHANGE", &json!({"offset": 1})), None);
    }
}
