//! The scope that a thread belongs to.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::panic::{self, PanicHookInfo};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

/// Whether [`contain_panics`] was called.
static CONTAINED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static CURRENT: RefCell<Option<Scope>> = const { RefCell::new(None) };
}

/// The owner of threads.
pub trait Owner: Send + Sync {
    /// Takes note that one of its threads has panicked, with these words. Called on that thread
    /// before it unwinds, so that it still holds its locks: nothing may be waited for here.
    fn panicked(&self, words: &str);

    /// Whether its threads may see what another one has left half done, because they change
    /// nothing that depends on it.
    fn only_looks(&self) -> bool;
}

/// A thread's belonging. Clones belong to the same owner.
#[derive(Clone)]
pub struct Scope(Arc<dyn Owner>);

impl Scope {
    /// The belonging to this owner.
    pub fn new(owner: impl Owner + 'static) -> Scope {
        Scope(Arc::new(owner))
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scope")
    }
}

/// The scope that this thread belongs to.
pub fn current() -> Option<Scope> {
    // A thread that is just ending has nothing left.
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Whether this thread may see what another one has left half done.
pub(crate) fn only_looks() -> bool {
    current().is_none_or(|scope| scope.0.only_looks())
}

/// Runs `body` as a part of this scope.
pub fn within<T>(scope: &Scope, body: impl FnOnce() -> T) -> T {
    let _former = Former(CURRENT.replace(Some(scope.clone())));
    body()
}

/// The scope that this thread belonged to, and does again when this is dropped.
struct Former(Option<Scope>);

impl Drop for Former {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// The same body, which on whatever thread it runs belongs to what this thread belongs to.
pub fn inherit<T>(body: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let scope = current();
    move || match scope {
        Some(scope) => within(&scope, body),
        None => body(),
    }
}

/// Starts a thread that belongs to what this one belongs to.
///
/// # Errors
/// If the system has no thread left.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(inherit(body))
}

/// Has every panic from now on told to its thread's owner; one in a thread without an owner ends
/// the process.
pub fn contain_panics() {
    if CONTAINED.swap(true, Ordering::AcqRel) {
        return;
    }
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        report(info);
        match current() {
            // It may stop the whole daemon, and a panic of one VM would hide it.
            #[cfg(feature = "lock-order")]
            _ if words(info).starts_with(crate::locks::BOTH_ORDERS) => process::abort(),
            Some(Scope(owner)) => owner.panicked(&words(info)),
            None => process::abort(),
        }
    }));
}

fn words(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("a panic without words");
    info.location().map_or_else(|| text.to_owned(), |place| format!("{text} ({place})"))
}
