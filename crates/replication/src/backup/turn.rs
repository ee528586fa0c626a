//! The turn to the other way of keeping up, on the backup.
//!
//! A QEMU that can do it is started beside the one that there is, on the same memory and disks,
//! and waits. With the turn's epoch, when that is applied, it takes the former's place.

use super::failure::OwnFailure;
use super::medium::{FIRST, Media};
use super::session::Session;
use crate::lockstep::backup::{self as lockstep, Following};
use crate::messages::{LogTurn, ToPrimary};
use crate::turn::{Answer, Order, Wanted};
use anyhow::{Context, ensure};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_machine::Machine;
use understudy_machine::succession::{check_blocks, copy_small_blocks};
use understudy_protocol::Epoch;
use understudy_report::Mode;
use understudy_session::backup::Orders as TurnOrders;
use understudy_threads::{lock, spawn};

/// Time that the turn before may take to be carried out.
const APPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two looks whether it has been.
const GLANCE: Duration = Duration::from_millis(10);

/// Starts the other QEMU beside a machine.
pub type Launch = Box<dyn Fn(&Machine, &Wanted) -> anyhow::Result<Beside> + Send + Sync>;

/// A machine beside the one that there is.
pub struct Beside {
    /// Machine that waits for its state.
    pub machine: Arc<Machine>,
    /// Callback for when it has the other's place.
    pub adopt: Box<dyn FnOnce() + Send>,
}

/// Ready for the turn.
pub struct Other {
    beside: Beside,
    wanted: Wanted,
}

impl Other {
    fn parts(&self) -> (Arc<Machine>, Wanted) {
        (self.beside.machine.clone(), self.wanted.clone())
    }
}

/// The orders of the primary beside the epochs.
#[derive(Default)]
pub(super) struct Orders {
    /// Of turns.
    pub turns: TurnOrders<Other>,
    /// Media that it puts into drives.
    pub media: Media<understudy_machine::Medium>,
}

/// A test makes the other QEMU one that does not start.
fn fail_in_a_test() -> anyhow::Result<()> {
    fail::fail_point!("turn-launch", |_| anyhow::bail!("a test says so"));
    Ok(())
}

impl Session {
    /// The primary is about to turn, or is not after all.
    pub(super) fn take_order(self: &Arc<Self>, order: Order) -> anyhow::Result<()> {
        let (number, called_off) =
            lock(&self.present).orders.turns.take().map_err(anyhow::Error::msg)?;
        // Not under the lock: that ends a QEMU.
        drop(called_off);
        let Order::Prepare(wanted) = order else { return Ok(()) };
        if !lock(&self.present).orders.turns.begin_to_prepare() {
            let why = "it is still preparing for the order before: try again in a while".to_owned();
            self.say(&ToPrimary::TurnAnswer(Answer::Refused(why)));
            return Ok(());
        }
        let session = self.clone();
        let prepare = move || {
            let answer = match session.prepare(number, *wanted) {
                Ok(()) => Answer::Ready,
                Err(error) => Answer::Refused(format!("{error:#}")),
            };
            // Before the answer, after which the primary may order anew.
            lock(&session.present).orders.turns.end_to_prepare();
            session.say(&ToPrimary::TurnAnswer(answer));
        };
        let begun = spawn(format!("turn-{}", self.vm), prepare).context("cannot start a thread");
        Ok(begun.map(drop).map_err(OwnFailure::other)?)
    }

    fn prepare(&self, number: u64, wanted: Wanted) -> anyhow::Result<()> {
        let deadline = Instant::now() + APPLY_TIMEOUT;
        while !lock(&self.present).orders.turns.may_prepare() {
            ensure!(Instant::now() < deadline, "the turn before is not carried out yet");
            thread::sleep(GLANCE);
        }
        ensure!(self.mode() != wanted.mode, "the session is in that mode already");
        let former = self.machine();
        fail_in_a_test()?;
        let beside = (self.launch)(&former, &wanted)?;
        check_blocks(&former, &beside.machine)?;
        let other = Other { beside, wanted };
        let called_off = lock(&self.present).orders.turns.offer(number, other).err();
        ensure!(called_off.is_none(), "it was called off");
        Ok(())
    }

    /// The log will begin with this epoch.
    pub(super) fn expect_log(&self, epoch: Epoch) -> anyhow::Result<()> {
        ensure!(epoch > FIRST, "a log begins before the first synchronisation has ended");
        ensure!(self.following().is_none(), "a log begins behind another one");
        let disk_reads = self.check_other(Mode::Lockstep)?.disk_reads;
        let following = Following::new(disk_reads, self.machine().disks().len(), epoch);
        lock(&self.present).following = Some(Arc::new(following));
        Ok(())
    }

    /// The log will end with this epoch, which is on its way, and this rest of it.
    pub(super) fn expect_end_of_log(&self, epoch: Epoch, rest: Vec<u8>) -> anyhow::Result<()> {
        self.check_other(Mode::Checkpoint)?;
        self.following().context("a log ended that had not begun")?.expect_end(epoch, rest)
    }

    /// Whether the turn is possible, before it is acknowledged: what it needs stays until then.
    fn check_other(&self, mode: Mode) -> anyhow::Result<Wanted> {
        let fits = |other: &Other| other.wanted.mode == mode;
        let expected = lock(&self.present).orders.turns.expect(fits).map(Other::parts);
        let (machine, wanted) = expected.map_err(anyhow::Error::msg)?;
        ensure!(machine.is_alive(), OwnFailure::Turn(ended(&machine)));
        Ok(wanted)
    }

    /// An epoch is committed that is this turn: what it needs.
    pub(super) fn commit_turn(&self, turn: LogTurn) -> Option<Other> {
        if let (LogTurn::Ends, Some(following)) = (turn, self.following()) {
            // The apply thread may be waiting for it.
            following.end_at_checkpoint();
        }
        lock(&self.present).orders.turns.commit()
    }

    /// The other QEMU takes the place of the one that there is, which has ended then.
    pub(super) fn change_over(&self, other: Option<Other>) -> anyhow::Result<()> {
        let Other { beside, wanted } = other.context("the turn is not possible")?;
        let (former, next) = (self.machine(), beside.machine);
        ensure!(next.is_alive(), ended(&next));
        copy_small_blocks(former.blocks(), next.blocks())?;
        next.take_place_aside();
        former.retire();
        {
            let mut present = lock(&self.present);
            (present.machine, present.wish) = (next, Some(wanted.wish));
        }
        (beside.adopt)();
        info!(vm = %self.vm, "replicates in mode {:?} from now on", wanted.mode);
        Ok(())
    }

    /// Executes what is left of the log, which has ended. What the guest wrote is on the
    /// mirrors then, which are the primary's again.
    pub(super) fn leave_log(&self, following: &Arc<Following>) -> anyhow::Result<()> {
        let machine = self.machine();
        self.execute_rest(following)?;
        following.leave();
        lockstep::stop(&machine)?;
        for disk in machine.disks() {
            disk.set_read_only(true);
            disk.set_changes(None);
        }
        let mut present = lock(&self.present);
        if present.following.as_ref().is_some_and(|current| Arc::ptr_eq(current, following)) {
            present.following = None;
        }
        Ok(())
    }

    /// Forgets the other machine: none waits beside any more.
    pub(super) fn forget_other(&self) {
        let other = lock(&self.present).orders.turns.close();
        drop(other);
    }
}

fn ended(other: &Machine) -> String {
    format!("the QEMU for the turn ended: {}", other.last_words())
}
