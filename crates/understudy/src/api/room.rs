//! Threads for calls that wait. The runtime has so many for all: a part of them is never the API's, so that the daemon
//! proves that it lives, and ends, however many calls hang.

use std::io;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

/// Calls at the same time.
const MOST_CALLS: usize = 480;
/// Threads of the runtime that wait, at most.
const THREADS: usize = MOST_CALLS + 32;
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
    spawn_blocking(move || {
        let _room = room;
        call()
    })
    .await
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
