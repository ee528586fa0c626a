//! Where snapshots are kept: a directory, or S3-compatible storage.
//!
//! ```text
//! store                      marks it as one; version
//! chunks/ab/abcd…            named by the hash of their content, written once
//! snapshots/GROUP/7.json     the manifest: written last, removed first
//! writing/GROUP/8            a snapshot that is being written: nothing is swept meanwhile
//! sweeping                   chunks are being removed: no snapshot begins meanwhile
//! ```
//!
//! Everything blocks; nothing here may be called from a thread of an async runtime.

mod chunks;
mod error;
mod location;
mod pace;
mod retention;
mod snapshots;
mod sweep;
mod verify;

pub use error::StoreError;
pub use retention::Retention;
pub use snapshots::{Listed, Writing};
pub use sweep::Swept;
pub use verify::{Problem, Verified};

use crate::format::{HeaderError, open_envelope, seal_envelope};
use futures_util::TryStreamExt;
use location::Location;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::runtime::Runtime;

/// Requests under way at once: enough to fill a link to storage that answers after 20 ms.
const CONCURRENT: usize = 32;

/// Threads that wait for what all stores of the process answer.
const WORKERS: usize = 2;

/// A store of snapshots, open.
#[derive(Debug)]
pub struct Store {
    location: Location,
    runtime: Arc<Runtime>,
    objects: Arc<dyn ObjectStore>,
}

/// The threads of all stores, once there was one, for as long as the process lives. Were there a
/// runtime for each, its end would detach threads that end at that moment: in glibc (2.36,
/// bug 19951) that may read what is freed, and the daemon would die of it.
static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

fn runtime() -> io::Result<Arc<Runtime>> {
    let mut shared = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*shared {
        return Ok(runtime.clone());
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(WORKERS).thread_name("store").enable_all().build()?;
    Ok(shared.insert(Arc::new(runtime)).clone())
}

impl Store {
    /// Opens a store that is there: a path, `file://…` or `s3://BUCKET/…`.
    pub fn open(location: &str) -> Result<Store, StoreError> {
        let store = Store::reach(Location::parse(location)?)?;
        let Some(mark) = store.get(&store.path("store"))? else {
            return Err(StoreError::Unknown(store.location.to_string()));
        };
        store.open_file("store", "store", &mark)?;
        Ok(store)
    }

    /// Opens a store, and makes it one if there is none.
    pub fn create(location: &str) -> Result<Store, StoreError> {
        let location = Location::parse(location)?;
        location.make()?;
        let store = Store::reach(location)?;
        // Who else makes it at the same moment writes the same.
        store.put_new(&store.path("store"), seal_envelope("store", "\n").into_bytes())?;
        match store.get(&store.path("store"))? {
            Some(mark) => store.open_file("store", "store", &mark)?,
            None => return Err(StoreError::Unknown(store.location.to_string())),
        };
        Ok(store)
    }

    fn reach(location: Location) -> Result<Store, StoreError> {
        let objects = location.connect()?;
        let runtime = runtime().map_err(|error| StoreError::Failed {
            location: location.to_string(),
            doing: "start its threads".into(),
            why: error.to_string(),
        })?;
        Ok(Store { location, runtime, objects })
    }

    /// Where it is, for people.
    pub fn location(&self) -> String {
        self.location.to_string()
    }

    fn path(&self, name: &str) -> Path {
        self.location.prefix().parts().chain(Path::from(name).parts()).collect()
    }

    fn failed(&self, doing: impl Into<String>, why: impl ToString) -> StoreError {
        let location = self.location.to_string();
        StoreError::Failed { location, doing: doing.into(), why: why.to_string() }
    }

    fn block<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// The body of a file that begins with our header.
    fn open_file<'a>(
        &self,
        kind: &str,
        what: &str,
        bytes: &'a [u8],
    ) -> Result<&'a str, StoreError> {
        open_envelope(kind, bytes).map_err(|error| {
            let what = format!("{what} in {}", self.location);
            match error {
                HeaderError::Version(found) => StoreError::Version { what, found },
                HeaderError::Foreign => StoreError::damaged(what, "it is not understudy's"),
                HeaderError::Checksum => StoreError::damaged(what, "its checksum is wrong"),
            }
        })
    }

    /// None if there is no such object.
    fn get(&self, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
        let read = self.block(async { self.objects.get(path).await?.bytes().await });
        match read {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(format!("read {path}"), error)),
        }
    }

    /// Returns whether it was not there before; it is left alone if it was.
    fn put_new(&self, path: &Path, bytes: Vec<u8>) -> Result<bool, StoreError> {
        let payload = PutPayload::from(bytes);
        match self.block(self.objects.put_opts(path, payload, PutMode::Create.into())) {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(self.failed(format!("write {path}"), error)),
        }
    }

    /// Removes what may be gone already.
    fn delete(&self, path: &Path) -> Result<(), StoreError> {
        match self.block(self.objects.delete(path)) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed(format!("remove {path}"), error)),
        }
    }

    /// All objects below a path.
    fn list(&self, name: &str) -> Result<Vec<Path>, StoreError> {
        self.block(self.listed(&self.path(name)))
    }

    /// All that lies in a folder, in folders of it too.
    async fn listed(&self, prefix: &Path) -> Result<Vec<Path>, StoreError> {
        match self.objects.list(Some(prefix)).map_ok(|meta| meta.location).try_collect().await {
            Ok(found) => Ok(found),
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(self.failed(format!("list {prefix}"), error)),
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
