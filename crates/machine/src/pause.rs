//! The pause of a machine for a checkpoint: by the agent inside QEMU where that is proven,
//! else through the monitor. That takes longer, and is no less safe.

mod written_back;

use crate::attention::{Attended, Attention, HangDetector, Signs};
use crate::machine::Machine;
use anyhow::{Context, anyhow, bail};
use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::{debug, info, warn};
use understudy_memory::agent::AgentLink;
use understudy_protocol::VmName;
use understudy_qemu::Monitor;
use understudy_qemu::dirty_log::LoggedBlock;
use understudy_qemu::lockstep::LogErrand;
use understudy_qemu::pause::{AgentPause, AgentPauser, obstacle};
use understudy_qemu::qmp::{Checkpoint, DeviceState};
use written_back::WrittenBack;

/// Environment variable that, set to `qmp`, has the daemon pause through the monitor: to tell, when
/// something goes wrong, whether the agent is the cause.
const VARIABLE: &str = "UNDERSTUDY_PAUSE";

/// Pauses one machine.
#[derive(Debug)]
pub struct Pauser {
    /// The agent's part (shared with the tracker), or why it has none.
    agent: Result<Arc<AgentPauser>, String>,
    attention: Attention,
}

impl Pauser {
    /// The best one for this QEMU, whose monitors answer.
    pub fn choose(
        vm: &VmName,
        agent: &AgentLink,
        monitor: &Monitor,
        state: &DeviceState,
        timeout: Duration,
        logged: Vec<LoggedBlock>,
    ) -> anyhow::Result<Pauser> {
        let forced = env::var_os(VARIABLE).is_some_and(|value| value == "qmp");
        let obstacle = match forced {
            true => Some(format!("{VARIABLE}=qmp asks for it")),
            false => obstacle(monitor.version(), agent.hello()),
        };
        if let Some(obstacle) = obstacle {
            warn!(%vm, "pauses through QMP, which take longer and delay the guest's clocks: {obstacle}");
            return Ok(Pauser::by(Err(obstacle)));
        }
        let pauser = AgentPauser::arm(agent.socket(), state, timeout, logged)
            .context("cannot arm QEMU's agent for pauses")?;
        Ok(Pauser::by(Ok(Arc::new(pauser))))
    }

    fn by(agent: Result<Arc<AgentPauser>, String>) -> Pauser {
        Pauser { agent, attention: Attention::default() }
    }

    /// Makes the pauser of another daemon's QEMU, which could not be paused in a better way.
    pub fn through_qmp(obstacle: &str) -> Pauser {
        Pauser::by(Err(obstacle.to_owned()))
    }

    /// Makes the pauser of a QEMU whose agent another daemon has armed.
    pub fn adopt(
        descriptors: [OwnedFd; 2],
        agent: &AgentLink,
        timeout: Duration,
        logged: Vec<LoggedBlock>,
    ) -> anyhow::Result<Pauser> {
        let pauser = AgentPauser::adopt(descriptors, agent.socket(), timeout, logged);
        Ok(Pauser::by(Ok(Arc::new(pauser.context("cannot pause QEMU through its agent")?))))
    }

    /// Does the same as [`AgentPauser::have_written_back`]. The monitor's `stop` does so in any
    /// case; whether it could, [`WrittenBack`] sees.
    pub fn have_written_back(&self, kept: bool) {
        if let Ok(agent) = &self.agent {
            agent.have_written_back(kept);
        }
    }

    /// The agent inside QEMU, if it does the pauses.
    pub fn agent(&self) -> Option<&Arc<AgentPauser>> {
        self.agent.as_ref().ok()
    }

    /// The descriptors that [`Pauser::adopt`] takes, if it is the agent.
    pub fn duplicate(&self) -> io::Result<Option<[OwnedFd; 2]>> {
        self.agent.as_ref().ok().map(|agent| agent.duplicate()).transpose()
    }

    /// The reason why pauses go through the monitor; none if they do not.
    pub fn obstacle(&self) -> Option<&str> {
        self.agent.as_ref().err().map(String::as_str)
    }

    /// Looks whether QEMU answers, `passed` after the last look; see [`HangDetector::look`], and [`Signs`] for
    /// what excuses it.
    pub fn look(
        &self,
        detector: &mut HangDetector,
        passed: Duration,
        excused: bool,
        tpm_works: bool,
    ) -> Duration {
        let agent = self.agent.as_ref().ok();
        let echoed = agent.and_then(|agent| agent.echoed());
        let signs = Signs { attention: &self.attention, echoed, excused, tpm_works };
        let (silent, probe_is_due) = detector.look(&signs, passed);
        if let Some(agent) = agent.filter(|_| probe_is_due)
            && let Err(error) = agent.probe()
        {
            debug!("cannot probe QEMU: {error}");
        }
        silent
    }

    /// Stops the guest and has QEMU begin to save its device state. An errand is for a QEMU in
    /// lockstep, and only the agent can do it. `expect` is called before the monitor stops the guest.
    pub(crate) fn begin<'a>(
        &'a self,
        monitor: &'a mut Monitor,
        state: &'a DeviceState,
        errand: LogErrand,
        expect: impl FnOnce() -> Option<WrittenBack>,
    ) -> anyhow::Result<Pause<'a>> {
        let attended = self.attention.begin();
        if let Ok(agent) = &self.agent {
            match agent.begin_with(errand)? {
                Some(pause) => {
                    attended.answered();
                    return Ok(Pause { method: Method::Agent(pause), state, held: None, attended });
                }
                None if errand != LogErrand::None => bail!(refused(errand)),
                None => info!("the guest does not run; this checkpoint goes through QMP"),
            }
        }
        if let (Err(obstacle), true) = (&self.agent, errand != LogErrand::None) {
            bail!(needed(obstacle));
        }
        let written_back = expect();
        let mut checkpoint = monitor.begin_checkpoint(state)?;
        checkpoint.stopped()?;
        attended.answered();
        let method = Method::Monitor(checkpoint, written_back);
        Ok(Pause { method, state, held: None, attended })
    }

    /// Stops a guest in lockstep where its log ends; see [`AgentPauser::begin_at_end`].
    pub fn begin_at_end<'a>(
        &'a self,
        state: &'a DeviceState,
        read: &mut dyn FnMut(),
        detached: impl FnOnce(),
    ) -> anyhow::Result<Pause<'a>> {
        let attended = self.attention.begin();
        let agent = self.agent.as_ref().map_err(|obstacle| anyhow!(needed(obstacle)))?;
        let Some(pause) = agent.begin_at_end(read, detached)? else {
            bail!(refused(LogErrand::Detach));
        };
        attended.answered();
        Ok(Pause { method: Method::Agent(pause), state, held: None, attended })
    }
}

fn refused(errand: LogErrand) -> String {
    format!("QEMU's agent refused a pause to {errand:?} the log")
}

fn needed(obstacle: &str) -> String {
    format!("lockstep needs pauses by the agent inside QEMU: {obstacle}")
}

impl Machine {
    /// Stops the guest for a checkpoint. Its monitor is the caller's: nobody else may ask
    /// anything meanwhile. In lockstep the log may begin there.
    pub fn pause<'m>(
        &'m self,
        monitor: &'m mut Monitor,
        errand: LogErrand,
    ) -> anyhow::Result<Pause<'m>> {
        let expect = || WrittenBack::expect(self);
        let pause = self.pauser.begin(monitor, &self.device_state, errand, expect)?;
        Ok(pause.unless(&self.held))
    }

    /// Stops the guest where its log ends, of which `read` is to take in what comes meanwhile. QEMU
    /// learns of errors of its disks only behind that: they would be in no log.
    pub fn pause_at_end<'m>(
        &'m self,
        _monitor: &'m mut Monitor,
        read: &mut dyn FnMut(),
    ) -> anyhow::Result<Pause<'m>> {
        let let_pass = || self.disks().iter().for_each(|disk| disk.let_pass());
        let pause = self.pauser.begin_at_end(&self.device_state, read, let_pass)?;
        Ok(pause.unless(&self.held))
    }
}

/// A guest that stands still. Without [`Pause::resume`] it stays so.
#[must_use = "the guest stays stopped"]
pub struct Pause<'a> {
    method: Method<'a>,
    state: &'a DeviceState,
    held: Option<&'a AtomicBool>,
    /// Attention, last: the pause ends before.
    attended: Attended<'a>,
}

enum Method<'a> {
    Agent(AgentPause<'a>),
    /// The monitor, which does not say whether the disks have what their formats kept back.
    Monitor(Checkpoint<'a>, Option<WrittenBack>),
}

impl<'a> Pause<'a> {
    /// The same, after which the guest stays stopped if this is set by then.
    pub(crate) fn unless(self, held: &'a AtomicBool) -> Pause<'a> {
        Pause { held: Some(held), ..self }
    }

    /// Waits until QEMU has saved its device state, and reads it. Gives the bytes of log that
    /// had passed QEMU where its log begins or ends; 0 if it is not in lockstep.
    pub fn saved(&mut self, device_state: &mut Vec<u8>) -> anyhow::Result<u64> {
        self.attended.owes();
        match &mut self.method {
            Method::Agent(pause) => {
                let bytes = pause.saved()?;
                self.attended.answered();
                self.state.read_first(bytes, device_state)?;
                Ok(pause.log_position())
            }
            Method::Monitor(checkpoint, written_back) => {
                checkpoint.saved()?;
                self.attended.answered();
                written_back.as_ref().map_or(Ok(()), WrittenBack::check)?;
                self.state.read_into(device_state)?;
                Ok(0)
            }
        }
    }

    /// Lets the guest run again, after [`Pause::saved`], unless it is held; returns when it does.
    pub fn resume(self) -> anyhow::Result<()> {
        if self.held.is_some_and(|held| held.load(Ordering::Relaxed)) {
            return Ok(());
        }
        self.attended.owes();
        match self.method {
            Method::Agent(pause) => pause.resume()?,
            Method::Monitor(checkpoint, _) => checkpoint.resume()?,
        }
        Ok(())
    }
}
