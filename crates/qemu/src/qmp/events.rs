//! What QEMU tells without being asked.

use super::connection::{Connection, Message, QmpError};
use serde_json::Value;
use std::io;

/// Something that happened to a VM.
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

/// Reads a monitor on a thread of its own until QEMU ends, and calls `on_event`
/// there for each event.
pub(super) fn watch_events(
    mut connection: Connection,
    mut on_event: impl FnMut(VmEvent) + Send + 'static,
) -> Result<(), QmpError> {
    connection.without_timeout()?;
    let run = move || {
        loop {
            match connection.message("event") {
                Ok(Message::Event { name, data }) => {
                    if let Some(event) = parse(&name, &data) {
                        on_event(event);
                    }
                }
                Ok(Message::Reply(_)) => {}
                Err(error) => {
                    tracing::debug!(%error, "the events monitor ended");
                    return on_event(VmEvent::Disconnected);
                }
            }
        }
    };
    let thread = understudy_threads::spawn("qemu-events", run);
    thread.map(drop).map_err(|e: io::Error| QmpError::Io(e))
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
