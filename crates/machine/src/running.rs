//! Whether the guest runs, between its checkpoints.

use crate::Machine;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;
use tracing::{error, warn};
use understudy_qemu::qmp::RunState;
use understudy_threads::spawn;

/// Time between two tries to let a guest run whose QEMU does not answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl Machine {
    /// Lets the guest run if it stands still, and neither its host's lease nor a hand-over forbids it.
    pub fn ensure_running(&self) -> anyhow::Result<()> {
        let mut monitor = self.monitor();
        let forbidden = [&self.held, &self.passed_on].iter().any(|it| it.load(Ordering::Relaxed));
        if !forbidden && monitor.status()? != RunState::running {
            monitor.cont()?;
        }
        Ok(())
    }

    /// Has the guest stand still until [`Machine::let_go`]; checkpoints do not change that.
    pub fn hold(&self) -> anyhow::Result<()> {
        self.held.store(true, Ordering::Relaxed);
        // A pause that is under way ends before: the monitor is its own until then.
        Ok(self.monitor().stop()?)
    }

    /// The guest's next stop is its last on this host, until [`Machine::take_back`]. To be called before
    /// that stop: whoever lets the guest run comes before it then, or does not.
    pub fn pass_on(&self) {
        self.passed_on.store(true, Ordering::Relaxed);
    }

    /// The guest is this host's after all.
    pub fn take_back(&self) -> anyhow::Result<()> {
        self.passed_on.store(false, Ordering::Relaxed);
        self.ensure_running()
    }

    /// Lets the guest run again.
    pub fn let_go(&self) -> anyhow::Result<()> {
        self.held.store(false, Ordering::Relaxed);
        self.ensure_running()
    }

    /// Lets a guest run as soon as its QEMU answers: its pause has failed, for a disk that takes too long
    /// perhaps.
    pub fn let_run(self: &Arc<Self>) {
        let machine = self.clone();
        let run = move || {
            while machine.is_alive()
                && !machine.is_powered_off()
                && let Err(error) = machine.ensure_running()
            {
                let vm = &machine.definition().name;
                warn!(%vm, "it may stand still after a pause that failed: {error:#}");
                thread::sleep(ASK_AGAIN);
            }
        };
        if let Err(error) = spawn("let-run", run) {
            error!("a guest may stand still after a pause: cannot start a thread: {error}");
        }
    }
}
