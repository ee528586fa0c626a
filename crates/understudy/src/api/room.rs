//! Threads for calls that wait. The runtime has so many for all: a part of them is never the API's, so that the daemon
//! proves that it lives, and ends, however many calls hang.

use std::io;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, spawn_blocking};
use understudy_report::{ErrorKind, HostError};

/// Calls at the same time.
const MOST_CALLS: usize = 416;
/// Calls at the same time that wait for snapshot stores.
pub const MOST_AT_STORES: usize = 64;
/// Threads of the runtime that wait, at most.
const THREADS: usize = MOST_CALLS + MOST_AT_STORES + 32;
/// The number of threads: one is for the API, which waits on the host, and one for whoever else
/// does.
const API_THREADS: usize = 2;

static FREE: Semaphore = Semaphore::const_new(MOST_CALLS);

/// Starts what the API of a daemon, or a keeper, runs on.
pub fn runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(API_THREADS)
        .max_blocking_threads(THREADS)
        .enable_all()
        .build()
}

/// Makes a call off the async threads, as soon as there is room for it; it has that until it ends, whether or not somebody
/// still waits for it.
pub async fn call<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    // Never closed.
    let room = FREE.acquire().await;
    call_in(room, call).await
}

/// Makes a call off the async threads in a place that it has until it ends.
pub async fn call_in<T: Send + 'static>(
    place: impl Send + 'static,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    spawn_blocking(move || {
        let _place = place;
        call()
    })
    .await
}

/// Room for calls that wait for snapshot stores: one that hangs takes what is here, and nothing from other calls.
#[derive(Clone)]
pub struct StoreRoom(pub(super) Arc<Semaphore>);

/// A place in it.
pub type AtStore = OwnedSemaphorePermit;

impl Default for StoreRoom {
    fn default() -> StoreRoom {
        StoreRoom(Arc::new(Semaphore::new(MOST_AT_STORES)))
    }
}

impl StoreRoom {
    /// A place for a call at a store; an error if none is free.
    pub fn take(&self, store: &str) -> Result<AtStore, HostError> {
        self.0.clone().try_acquire_owned().map_err(|_| {
            let message = format!(
                "{MOST_AT_STORES} calls wait for snapshot stores already, and {store} is not asked beside them: see \
                 whether a store hangs, or try again when some have ended"
            );
            HostError::new(ErrorKind::Unreachable, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocking;
    use super::*;
    use std::sync::{Arc, RwLock};
    use std::time::Duration;
    use tokio::time::timeout;

    #[test]
    fn calls_that_hang_leave_threads_to_the_daemon() {
        let runtime = runtime().unwrap();
        let held = Arc::new(RwLock::new(()));
        let holding = held.write().unwrap();
        for _ in 0..2 * THREADS {
            let held = held.clone();
            runtime.spawn(blocking(move || {
                drop(held.read());
                Ok(())
            }));
        }
        let own = runtime.block_on(async {
            let own = async {
                while FREE.available_permits() > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                spawn_blocking(|| ()).await
            };
            timeout(Duration::from_secs(60), own).await
        });
        drop(holding);
        own.expect("it waits for the calls").unwrap();
    }
}
