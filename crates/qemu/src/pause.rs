//! The pause of a checkpoint through the agent inside QEMU.
//!
//! It takes half the time of [`crate::qmp::Checkpoint`], which is there for what the agent
//! cannot do: a QEMU whose functions are not known, and a machine that does not run.
#![allow(unsafe_code)] // Maps a page that QEMU shares.

mod bell;
mod page;

use crate::dirty_log::LoggedBlock;
use crate::qmp::{DeviceState, QemuVersion};
use bell::Bell;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use page::Page;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use understudy_agent_protocol::{ARM, Answer, Hello, LogErrand, Order, PausePage, monotonic};
use understudy_threads::{Mutex, MutexGuard};

/// Versions (major, minor) in which the end-to-end tests have run with pauses by the agent.
/// What a function of QEMU does, and with which arguments, may change with any other.
const PROVEN: [(u32, u32); 1] = [(10, 0)];

/// Time between two looks whether QEMU lives while it is waited for.
pub(crate) const GLANCE: Duration = Duration::from_millis(20);

/// The first thing that the agent is to do.
const STOP: &str = "stop the guest";

/// The reason why a pause through the agent failed. QEMU is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// QEMU ended; [`crate::Qemu::wait`] knows why.
    #[error("QEMU ended during a checkpoint")]
    Ended,
    /// No answer in time.
    #[error("QEMU's main loop did not {what} within {} ms", after.as_millis())]
    Silent {
        /// The step that was waited for.
        what: &'static str,
        /// The time given.
        after: Duration,
    },
    /// An answer that does not belong here.
    #[error("QEMU's agent gave answer {answer} when it was to {what}")]
    Answer {
        /// The step that was waited for.
        what: &'static str,
        /// The answer's number.
        answer: u32,
    },
    /// The agent failed to say what the guest wrote.
    #[error("QEMU's agent could not say what the guest wrote (outcome {0})")]
    DirtyLog(u32),
    /// QEMU failed to save the device state, or to write what a disk's format kept back.
    #[error(
        "QEMU could not save its device state, or what its disks' formats keep back; see its log"
    )]
    NotSaved,
    /// The system refused something.
    #[error("the connection to QEMU's agent failed: {0}")]
    Io(#[from] io::Error),
}

impl From<Errno> for PauseError {
    fn from(error: Errno) -> PauseError {
        PauseError::Io(error.into())
    }
}

/// Whether the agent pauses machines of this version of QEMU.
pub fn is_proven(version: QemuVersion) -> bool {
    PROVEN.contains(&(version.major, version.minor))
}

/// The reason why the agent cannot pause this QEMU, for people; none if it can.
pub fn obstacle(version: QemuVersion, hello: &Hello) -> Option<String> {
    if !is_proven(version) {
        return Some(format!("pauses by the agent are not proven with QEMU {version}"));
    }
    let missing = hello.missing.as_ref()?;
    Some(format!("this build of QEMU {version} does not export {missing}"))
}

/// Pauses one machine through the agent.
#[derive(Debug)]
pub struct AgentPauser {
    page: Page,
    bell: Bell,
    /// Says when QEMU has ended.
    socket: OwnedFd,
    timeout: Duration,
    /// Number of the last probe.
    probe: AtomicU32,
    /// The blocks that the dirty log is about, if this machine has one.
    blocks: Vec<LoggedBlock>,
    /// Lock, held while the dirty log is asked for something.
    dirty_log: Mutex<()>,
}

impl AgentPauser {
    /// Arms the agent at the other end of `socket`, once for a QEMU, when its monitors
    /// answer. Device states will be saved in `state`, which must be empty or the last one
    /// saved so. `timeout` is for each step of a pause. `blocks` are those of the dirty log, for
    /// a machine on KVM; none without one.
    pub fn arm(
        socket: BorrowedFd<'_>,
        state: &DeviceState,
        timeout: Duration,
        blocks: Vec<LoggedBlock>,
    ) -> Result<AgentPauser, PauseError> {
        let page = Page::create(&blocks)?;
        let (bell, qemus) = Bell::new()?;
        let descriptors = [page.memfd.as_raw_fd(), qemus.as_raw_fd(), state.as_fd().as_raw_fd()];
        let beside = [ControlMessage::ScmRights(&descriptors)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<UnixAddr>(socket.as_raw_fd(), &[IoSlice::new(&ARM)], &beside, flags, None)?;
        AgentPauser::of(page, bell, socket, timeout, blocks)
    }

    fn of(
        page: Page,
        bell: Bell,
        socket: BorrowedFd<'_>,
        timeout: Duration,
        blocks: Vec<LoggedBlock>,
    ) -> Result<AgentPauser, PauseError> {
        let (socket, probe) = (socket.try_clone_to_owned()?, AtomicU32::default());
        let dirty_log = Mutex::default();
        Ok(AgentPauser { page, bell, socket, timeout, probe, blocks, dirty_log })
    }

    /// Asks QEMU's main loop for a sign of life. In a pause it comes behind it.
    pub fn probe(&self) -> Result<(), PauseError> {
        let number = self.probe.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        self.page.probe.store(number, Ordering::Release);
        self.bell.ring()?;
        Ok(())
    }

    /// Whether the last one was answered; none before the first.
    pub fn echoed(&self) -> Option<bool> {
        match self.probe.load(Ordering::Relaxed) {
            0 => None,
            number => Some(self.page.echo.load(Ordering::Acquire) == number),
        }
    }

    /// The page and the bell, for [`AgentPauser::adopt`] in another process.
    pub fn duplicate(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.page.memfd.try_clone()?, self.bell.duplicate()?])
    }

    /// Adopts one that another process has armed, with the same blocks; no pause was under way when
    /// it died.
    pub fn adopt(
        [page, bell]: [OwnedFd; 2],
        socket: BorrowedFd<'_>,
        timeout: Duration,
        blocks: Vec<LoggedBlock>,
    ) -> Result<AgentPauser, PauseError> {
        let page = Page::of(page, Page::bytes(&blocks))?;
        let pauser = AgentPauser::of(page, Bell::adopt(bell), socket, timeout, blocks)?;
        // Numbers go on where the process before left off.
        pauser.probe.store(pauser.page.echo.load(Ordering::Acquire), Ordering::Relaxed);
        // A process of an older version may have left the order of a pause that was refused.
        if pauser.page.answer.get() == Answer::Refused as u32 {
            pauser.page.give(Order::Stay);
        }
        Ok(pauser)
    }

    /// Has the guest's clocks show the present when it first runs here, `age` after it last ran on
    /// the host that it comes from.
    pub fn continue_clocks(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.page.taken.store(monotonic().saturating_sub(age), Ordering::Release);
    }

    /// The times at which the agent heard of the last pause, had stopped the guest, saved its state
    /// and let it run again: nanoseconds of `CLOCK_MONOTONIC`.
    pub fn stamps(&self) -> [u64; 4] {
        let stamp = |answer: Answer| self.page.stamps[answer as usize].load(Ordering::Relaxed);
        [Answer::None, Answer::Stopped, Answer::Saved, Answer::Running].map(stamp)
    }

    /// Whether the formats of disks keep writes back inside QEMU ([`crate::VmDefinition::keeps_writes_back`]): pauses
    /// have them written.
    pub fn have_written_back(&self, kept: bool) {
        self.page.writes_back.store(u32::from(kept), Ordering::Relaxed);
    }

    /// The blocks that the dirty log is about; nothing if this machine has none.
    pub fn blocks(&self) -> &[LoggedBlock] {
        &self.blocks
    }

    pub(crate) fn page(&self) -> &PausePage {
        &self.page
    }

    /// Bitmaps of the blocks, whose sizes QEMU has no say in.
    pub(crate) fn dirty_bitmaps(&self) -> impl Iterator<Item = &[AtomicU64]> {
        let pages = self.blocks.iter().map(|block| block.pages);
        self.page.table(self.blocks.len()).bitmaps(pages)
    }

    pub(crate) fn dirty_log_turn(&self) -> MutexGuard<'_, ()> {
        self.dirty_log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Stops the guest; none if it does not run, for another reason than a pause. While the
    /// result lives, QEMU's main loop does nothing else and its monitors do not answer.
    ///
    /// One pause at a time: whoever pauses holds the machine's [`crate::Monitor`].
    pub fn begin(&self) -> Result<Option<AgentPause<'_>>, PauseError> {
        self.begin_with(LogErrand::None)
    }

    /// The same for a QEMU in lockstep, whose log begins or ends with this pause. A guest that
    /// does not run is paused, too, and stays as it is. None if this QEMU cannot: a backup, or
    /// one that does not record (after a take-over only [`LogErrand::None`] is possible).
    ///
    /// Without an errand the log must not be attached: a primary in lockstep has no
    /// checkpoints. Where the log ends: [`AgentPauser::begin_at_end`].
    pub fn begin_with(&self, errand: LogErrand) -> Result<Option<AgentPause<'_>>, PauseError> {
        let mut pause = self.ring(errand)?;
        let answer = pause.await_answer(Answer::None, STOP)?;
        pause.stood(answer)
    }

    /// The same with [`LogErrand::Detach`]. `read`, which is called now and then, is to take the log
    /// in: the guest cannot be stopped while there is no room for what it logs. `detached` is called
    /// when all of it has left QEMU, whose requests to disks are waited for then.
    pub fn begin_at_end(
        &self,
        read: &mut dyn FnMut(),
        detached: impl FnOnce(),
    ) -> Result<Option<AgentPause<'_>>, PauseError> {
        let mut pause = self.ring(LogErrand::Detach)?;
        let mut answer = pause.await_answer_while(Answer::None, STOP, read)?;
        if answer != Answer::Refused {
            detached();
        }
        if answer == Answer::Detached {
            answer = pause.await_answer(Answer::Detached, STOP)?;
        }
        pause.stood(answer)
    }

    fn ring(&self, errand: LogErrand) -> Result<AgentPause<'_>, PauseError> {
        self.page.begin(errand);
        self.bell.ring()?;
        Ok(AgentPause { pauser: self, is_due: true })
    }

    /// Waits for another answer than `seen`, and calls `meanwhile` now and then.
    fn await_answer(
        &self,
        seen: Answer,
        what: &'static str,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, PauseError> {
        let begun = Instant::now();
        let after = self.timeout;
        loop {
            let answer = self.page.answer.wait(seen as u32, GLANCE);
            if answer != seen as u32 {
                let unknown = PauseError::Answer { what, answer };
                return Answer::from_number(answer).ok_or(unknown);
            }
            meanwhile();
            if has_ended(self.socket.as_fd())? {
                return Err(PauseError::Ended);
            }
            if begun.elapsed() > after {
                return Err(PauseError::Silent { what, after });
            }
        }
    }
}

fn unexpected(answer: Answer, what: &'static str) -> PauseError {
    PauseError::Answer { what, answer: answer as u32 }
}

/// A guest that stands still. QEMU begins at once to save its device state. Without
/// [`AgentPause::resume`] the guest stays stopped.
#[must_use = "the guest stays stopped"]
#[derive(Debug)]
pub struct AgentPause<'p> {
    pauser: &'p AgentPauser,
    /// Whether the agent waits for an order.
    is_due: bool,
}

impl<'p> AgentPause<'p> {
    /// The guest stands still, by this answer; none if QEMU has refused.
    fn stood(mut self, answer: Answer) -> Result<Option<AgentPause<'p>>, PauseError> {
        match answer {
            Answer::Refused => {
                self.is_due = false;
                // The next ring of the bell, for a probe or the log, would be one for a pause.
                self.pauser.page.give(Order::Stay);
                Ok(None)
            }
            // It may be further by now.
            Answer::Stopped | Answer::Saved | Answer::NotSaved => Ok(Some(self)),
            other => Err(unexpected(other, STOP)),
        }
    }

    /// Waits until the device state is in its file, and returns its length.
    pub fn saved(&mut self) -> Result<u64, PauseError> {
        const WHAT: &str = "save the device state";
        match self.await_answer(Answer::Stopped, WHAT)? {
            Answer::Saved => {}
            Answer::NotSaved => return Err(PauseError::NotSaved),
            other => return Err(unexpected(other, WHAT)),
        }
        match self.pauser.page.device_state_bytes.load(Ordering::Relaxed) {
            0 => Err(PauseError::NotSaved),
            bytes => Ok(bytes),
        }
    }

    /// The bytes of log, after [`AgentPause::saved`], that had passed the agent where the log
    /// begins ([`LogErrand::Attach`]) or ends ([`LogErrand::Detach`]).
    pub fn log_position(&self) -> u64 {
        self.pauser.page.log_position.load(Ordering::Relaxed)
    }

    /// Lets the guest run again, after [`AgentPause::saved`]; returns when it does. A guest
    /// that did not run before does not now.
    pub fn resume(mut self) -> Result<(), PauseError> {
        self.is_due = false;
        self.pauser.page.give(Order::Resume);
        match self.await_answer(Answer::Saved, "let the guest run")? {
            Answer::Running => {
                self.pauser.page.trace();
                Ok(())
            }
            Answer::Staying => Ok(()),
            other => Err(unexpected(other, "let the guest run")),
        }
    }

    /// Waits for another answer than `seen`. An error ends the pause.
    fn await_answer(&mut self, seen: Answer, what: &'static str) -> Result<Answer, PauseError> {
        self.await_answer_while(seen, what, &mut || ())
    }

    fn await_answer_while(
        &mut self,
        seen: Answer,
        what: &'static str,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, PauseError> {
        let answer = self.pauser.await_answer(seen, what, meanwhile);
        if answer.is_err() {
            self.is_due = false;
            self.pauser.page.give(Order::Stay);
        }
        answer
    }
}

impl Drop for AgentPause<'_> {
    fn drop(&mut self) {
        if !self.is_due {
            return;
        }
        self.pauser.page.give(Order::Stay);
        // The monitors answer again when this is heard.
        let mut seen = Answer::None;
        while seen != Answer::Staying {
            match self.await_answer(seen, "leave the guest stopped") {
                Ok(answer) => seen = answer,
                Err(error) => return tracing::warn!("{error}"),
            }
        }
    }
}

/// The agent never sends anything after its hello, so what can be read is the end.
pub(crate) fn has_ended(socket: BorrowedFd<'_>) -> Result<bool, PauseError> {
    match poll(&mut [PollFd::new(socket, PollFlags::POLLIN)], PollTimeout::ZERO) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_known_qemu_that_has_all_is_paused_by_the_agent() {
        let version = |major, minor| QemuVersion { major, minor, micro: 2 };
        let whole = Hello::default();
        assert_eq!(obstacle(version(10, 0), &whole), None);
        let lacking = Hello { missing: Some("vm_state_notify".to_owned()), ..whole.clone() };
        assert!(obstacle(version(10, 0), &lacking).unwrap().contains("export vm_state_notify"));
        assert!(obstacle(version(9, 2), &whole).unwrap().contains("not proven with QEMU 9.2.2"));
    }
}
