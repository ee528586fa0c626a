//! QEMU's process, and what it says by itself.

use crate::cgroup::LimitGroup;
use crate::disk_error::{CurrentError, DiskError, Told};
use crate::launch::QEMU_TIMEOUT;
use crate::{MachineEvent, OnEvent};
use anyhow::bail;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use understudy_memory::agent::{AgentLink, AgentListener};
use understudy_qemu::qmp::{Events, MonitorSockets, VmEvent};
use understudy_qemu::{Monitor, Qemu};

/// QEMU's process, and what is known of its end.
pub(crate) struct Process {
    pub(crate) qemu: Qemu,
    /// The limits of what it may use; behind it, so that its groups are empty when they are
    /// removed.
    pub(crate) limits: LimitGroup,
    /// The end is this daemon's own doing.
    pub(crate) halted: AtomicBool,
    pub(crate) powered_off: AtomicBool,
    /// The error of a disk at which the guest stands.
    pub(crate) disk_error: CurrentError,
}

/// Memory of whoever interprets what QEMU says.
#[derive(Default)]
struct Heard {
    /// When the machine was reset last.
    last_reset: Option<Instant>,
    told: Told,
}

/// Firmware that finds itself started again resets the machine once more: the same reboot.
const SAME_REBOOT: Duration = Duration::from_secs(10);

impl Process {
    fn interpret(&self, event: VmEvent, heard: &mut Heard) -> Option<MachineEvent> {
        if self.halted.load(Ordering::Acquire) {
            return None;
        }
        match event {
            VmEvent::Stopped => None,
            VmEvent::Resumed => {
                self.disk_error.resumed();
                None
            }
            // QEMU ends, which is told next.
            VmEvent::Shutdown { guest: false, .. } => None,
            VmEvent::Shutdown { guest: true, reason } => {
                self.powered_off.store(true, Ordering::Release);
                Some(MachineEvent::PoweredOff { in_order: reason == "guest-shutdown" })
            }
            VmEvent::Reset { .. } => {
                let again = resets_again(&mut heard.last_reset, Instant::now());
                (!again).then_some(MachineEvent::Rebooted)
            }
            VmEvent::Panicked => Some(MachineEvent::Panicked),
            VmEvent::DiskError { node, reason, stopped } => {
                let error = DiskError { node, reason };
                let text = error.to_string();
                if !stopped {
                    return Some(MachineEvent::Notice(text));
                }
                self.disk_error.stopped(&error);
                let is_to_tell = heard.told.is_to_tell(error, Instant::now());
                is_to_tell.then_some(MachineEvent::DiskFailed(text))
            }
            VmEvent::Disconnected => Some(MachineEvent::Died(self.last_words())),
        }
    }

    /// Does what is to be done about QEMU's events.
    pub(crate) fn interpreted(
        self: Arc<Self>,
        on_event: OnEvent,
    ) -> impl FnMut(VmEvent) + Send + 'static {
        let mut heard = Heard::default();
        move |event| {
            if let Some(event) = self.interpret(event, &mut heard) {
                on_event(event);
            }
        }
    }

    /// The way in which QEMU ended, for people.
    pub(crate) fn last_words(&self) -> String {
        let words = match self.qemu.wait(Duration::from_secs(1)) {
            Ok(Some(exit)) => exit.to_string(),
            _ => "QEMU closed its monitor".to_owned(),
        };
        match self.limits.went_beyond() {
            Some(reason) => format!("{words}: {reason}"),
            None => words,
        }
    }

    /// Adds what QEMU itself said, if it has ended.
    pub(crate) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match self.qemu.wait(Duration::from_millis(500)) {
            Ok(Some(exit)) => error.context(exit.to_string()),
            _ => error,
        }
    }
}

/// Whether a reset at this instant belongs to the reboot before.
fn resets_again(last: &mut Option<Instant>, now: Instant) -> bool {
    last.replace(now).is_some_and(|last| now.saturating_duration_since(last) < SAME_REBOOT)
}

pub(crate) fn connect(
    process: &Arc<Process>,
    listener: &AgentListener,
    monitors: MonitorSockets,
) -> anyhow::Result<(AgentLink, Monitor, Events)> {
    let agent = listener.accept(Instant::now() + QEMU_TIMEOUT)?;
    let pid = process.qemu.pid();
    if u32::try_from(agent.pid()) != Ok(pid) {
        bail!("process {} answered in the place of QEMU {pid}", agent.pid());
    }
    let (monitor, events) = Monitor::connect(monitors, QEMU_TIMEOUT)?;
    Ok((agent, monitor, events))
}
