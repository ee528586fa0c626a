//! Flushes, on a thread of their own so that nothing else waits for an fsync.
//!
//! Flushes that wait together share one fsync. During a checkpoint none is waited
//! for, where what the guest tells the world after its flush is held back until the backup
//! has the write as well: a crash of this host loses nothing that was promised. The
//! flush is owed and made up for afterwards. Where nobody holds what the guest says, each
//! flush is waited for.

use crate::durable::errno_of;
use nix::errno::Errno;
use std::io;
use std::mem;
use std::sync::Arc;
use understudy_threads::{Crew, Mutex, Worker, lock};

/// Callback, called once, for how the flush went.
pub(crate) type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

#[derive(Default)]
struct State {
    in_checkpoint: bool,
    /// A backup stands in for the disk: what the guest says waits for it.
    has_backup: bool,
    /// A flush was answered without an fsync.
    owed: bool,
    /// Flushes that the next fsync answers.
    waiting: Vec<Done>,
    /// Flushes that the fsync under way answers.
    syncing: Vec<Done>,
    /// The first failure: every flush from then on reports it.
    failed: Option<Errno>,
}

/// The fsync itself.
pub(crate) type SyncImage = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

struct Shared {
    sync: SyncImage,
    state: Mutex<State>,
}

/// The flusher of one disk; dropping it carries out what is owed and waits for it.
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    /// One thread, while there are flushes.
    thread: Crew<()>,
}

impl Flusher {
    pub(crate) fn new(name: &str, sync: SyncImage) -> Flusher {
        let shared = Arc::new(Shared { sync, state: Mutex::default() });
        let of_thread = shared.clone();
        let worker = move || -> Worker<()> {
            let shared = of_thread.clone();
            Box::new(move |()| shared.flush_all())
        };
        Flusher { shared, thread: Crew::new(format!("flush-{name}"), 1, worker) }
    }

    /// Calls `done` once all completed writes are on stable storage, or at once during
    /// a checkpoint if a backup has it, too.
    pub(crate) fn flush(&self, done: Done) {
        let mut state = lock(&self.shared.state);
        if state.answers_at_once() {
            state.owed = true;
            let result = state.outcome();
            drop(state);
            return done(result);
        }
        state.waiting.push(done);
        drop(state);
        self.thread.hand(());
    }

    /// Begins a checkpoint: from here on flushes are answered at once if there is a backup, those
    /// already waiting included: the pause must not wait for an fsync.
    pub(crate) fn begin_checkpoint(&self) {
        let mut state = lock(&self.shared.state);
        state.in_checkpoint = true;
        if !state.answers_at_once() {
            return;
        }
        let mut answer = mem::take(&mut state.waiting);
        answer.append(&mut state.syncing);
        if answer.is_empty() {
            return;
        }
        state.owed = true;
        let result = state.outcome();
        drop(state);
        answer_all(answer, &result);
    }

    /// Whether what the guest says waits for its backup, from here on.
    pub(crate) fn set_backup(&self, has_backup: bool) {
        // What is owed the end of the checkpoint makes up for.
        lock(&self.shared.state).has_backup = has_backup;
    }

    /// Flushes are carried out again, first of all the one that is owed.
    pub(crate) fn end_checkpoint(&self) {
        let mut state = lock(&self.shared.state);
        state.in_checkpoint = false;
        // Nobody is woken for nothing, after each checkpoint.
        if state.has_work() {
            drop(state);
            self.thread.hand(());
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // Its thread ends behind this.
        self.end_checkpoint();
    }
}

impl Shared {
    /// Flushes until there is nothing more to flush now.
    fn flush_all(&self) {
        while self.flush_once() {}
    }

    /// Flushes once; false if there was nothing to flush.
    fn flush_once(&self) -> bool {
        let mut state = lock(&self.state);
        if !state.has_work() {
            return false;
        }
        state.owed = false;
        state.syncing = mem::take(&mut state.waiting);
        drop(state);

        let result = (self.sync)();
        let mut state = lock(&self.state);
        if let Err(error) = result
            && state.failed.is_none()
        {
            tracing::error!(%error, "flush of the disk image failed: so do all from now on");
            state.failed = Some(errno_of(&error));
        }
        let answer = mem::take(&mut state.syncing);
        if answer.is_empty() {
            return true;
        }
        let result = state.outcome();
        drop(state);
        answer_all(answer, &result);
        true
    }
}

impl State {
    fn has_work(&self) -> bool {
        !self.waiting.is_empty() || (self.owed && !self.answers_at_once())
    }

    fn answers_at_once(&self) -> bool {
        self.in_checkpoint && self.has_backup
    }

    /// Answer that a flush gets now.
    fn outcome(&self) -> io::Result<()> {
        self.failed.map_or(Ok(()), |errno| Err(errno.into()))
    }
}

fn answer_all(answer: Vec<Done>, result: &io::Result<()>) {
    for done in answer {
        done(match result {
            Ok(()) => Ok(()),
            Err(error) => Err(errno_of(error).into()),
        });
    }
}

#[cfg(test)]
#[path = "flusher_tests.rs"]
mod tests;
