//! Threads that come when there is work, and go when there has been none for a while.

use crate::Waitable;
use crate::scope::{Scope, current, within};
use std::cell::Cell;
use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

/// A thread without work waits for more for so long: work that comes often finds one there.
const LINGER: Duration = Duration::from_secs(2);

thread_local! {
    /// The crew that this thread is of.
    static OWN: Cell<*const ()> = const { Cell::new(ptr::null()) };
}

/// Does jobs, one after the other, on one thread.
pub type Worker<T> = Box<dyn FnMut(T) + Send>;

/// The threads for one kind of work, which belong to what the thread that made it belongs to.
/// Dropped, it waits until all that was handed to it is done.
pub struct Crew<T: Send + 'static>(Arc<Shared<T>>);

struct Shared<T> {
    name: String,
    most: usize,
    scope: Option<Scope>,
    worker: Box<dyn Fn() -> Worker<T> + Send + Sync>,
    /// State whose waiters are woken when there is work, or a thread has ended.
    state: Arc<Waitable<State<T>>>,
}

struct State<T> {
    jobs: VecDeque<T>,
    threads: usize,
    /// Number of these that do nothing more.
    leaving: usize,
    idle: usize,
    closed: bool,
}

impl<T: Send + 'static> Crew<T> {
    /// A crew of `most` threads at most, none yet. Each of them makes a worker for itself.
    pub fn new(
        name: impl Into<String>,
        most: usize,
        worker: impl Fn() -> Worker<T> + Send + Sync + 'static,
    ) -> Crew<T> {
        let state = State { jobs: VecDeque::new(), threads: 0, leaving: 0, idle: 0, closed: false };
        let (name, worker) = (name.into(), Box::new(worker));
        let (scope, state) = (current(), Arc::new(Waitable::new(state)));
        Crew(Arc::new(Shared { name, most, scope, worker, state }))
    }

    /// Has a thread do this. If the system has none left, and the crew neither, it is done here.
    pub fn hand(&self, job: T) {
        let needs_thread = self.0.state.change(|state| {
            state.jobs.push_back(job);
            let there = state.threads - state.leaving;
            let needs_thread = state.idle < state.jobs.len() && there < self.0.most;
            state.threads += usize::from(needs_thread);
            needs_thread
        });
        if !needs_thread {
            return;
        }
        let presence = Presence {
            shared: Some(self.0.clone()),
            state: self.0.state.clone(),
            is_leaving: false,
        };
        let started = Builder::new().name(self.0.name.clone()).spawn(|| presence.begin());
        let is_alone = |state: &State<T>| state.threads == state.leaving;
        if started.is_err() && is_alone(&self.0.state.lock()) {
            let mut worker = (self.0.worker)();
            while let Some(job) = self.0.take() {
                worker(job);
            }
        }
    }
}

impl<T: Send + 'static> Drop for Crew<T> {
    fn drop(&mut self) {
        let state = &self.0.state;
        state.change(|state| state.closed = true);
        // A job may have held the last of what the crew belongs to: it does not wait for itself.
        let own = usize::from(OWN.get() == Arc::as_ptr(&self.0).cast());
        drop(state.wait_while(state.lock(), |state| state.threads > own));
    }
}

/// A thread of the crew, or one that is about to be.
struct Presence<T> {
    /// The crew; none once it holds nothing of it any more.
    shared: Option<Arc<Shared<T>>>,
    state: Arc<Waitable<State<T>>>,
    is_leaving: bool,
}

impl<T> Presence<T> {
    fn begin(self) {
        match self.shared.as_ref().and_then(|shared| shared.scope.clone()) {
            Some(scope) => within(&scope, || self.work()),
            None => self.work(),
        }
    }

    /// The thread's life.
    fn work(mut self) {
        let Some(shared) = &self.shared else { return };
        OWN.set(Arc::as_ptr(shared).cast());
        let mut worker = (shared.worker)();
        while let Some(job) = self.next() {
            worker(job);
        }
    }

    /// Waits for a job; none when it is time to go.
    fn next(&mut self) -> Option<T> {
        let mut state = self.state.lock();
        state.idle += 1;
        let idle = |state: &mut State<T>| state.jobs.is_empty() && !state.closed;
        let mut state = self.state.wait_while_for(state, LINGER, idle);
        state.idle -= 1;
        let job = state.jobs.pop_front();
        if job.is_none() {
            // Under the same lock: nobody may count on it for a job that comes now.
            state.leaving += 1;
            self.is_leaving = true;
        }
        job
    }
}

impl<T> Drop for Presence<T> {
    fn drop(&mut self) {
        // The crew's end waits for this thread, and for all that it holds: an image, perhaps.
        drop(self.shared.take());
        self.state.change(|state| {
            state.threads -= 1;
            state.leaving -= usize::from(self.is_leaving);
        });
    }
}

impl<T> Shared<T> {
    fn take(&self) -> Option<T> {
        self.state.lock().jobs.pop_front()
    }
}
