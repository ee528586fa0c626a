//! The threads that wait for what all stores of the process answer, and make its files.
//!
//! Files are made with mode 0600 and directories with 0700, whatever umask the process was started
//! with: a snapshot holds all that its guests have in memory. The library that writes them leaves
//! the mode to the umask, which belongs to a process. So each of these threads has one of its own.

use super::StoreError;
use super::location::Location;
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use tokio::runtime::{Builder, Runtime};

const WORKERS: usize = 2;

/// The runtime, once there was one, for as long as the process lives. Were there a runtime for each
/// store, its end would detach threads that end at that moment: in glibc (2.36, bug 19951) that may
/// read what is freed, and the daemon would die of it.
static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

/// The runtime of a store.
pub(super) fn of(location: &Location) -> Result<Arc<Runtime>, StoreError> {
    start().map_err(|error| location.failed("start its threads", error))
}

fn start() -> io::Result<Arc<Runtime>> {
    let mut shared = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*shared {
        return Ok(runtime.clone());
    }
    // A thread of the runtime has nobody to tell that it cannot: so one tries before.
    let tried = thread::Builder::new().spawn(be_private)?.join();
    tried.map_err(|_| io::Error::other("the thread that tries its umask panicked"))??;
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(WORKERS).thread_name("store").enable_all();
    builder.on_thread_start(|| be_private().expect("another thread could"));
    Ok(shared.insert(Arc::new(builder.build()?)).clone())
}

/// Makes what the calling thread creates private to this user.
fn be_private() -> io::Result<()> {
    unshare(CloneFlags::CLONE_FS)?;
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    Ok(())
}
