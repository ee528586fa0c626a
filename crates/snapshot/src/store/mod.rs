//! The store where snapshots are kept: a directory, or S3-compatible storage.
//!
//! ```text
//! store                      marks it as one; version; whether it is encrypted
//! chunks/ab/abcd…            named by the hash of their content, keyed if encrypted; written once
//! snapshots/GROUP/7.json     the manifest: written last, removed first
//! writing/GROUP/8            a snapshot that is being written: nothing is swept meanwhile
//! reading/GROUP/7/VM/ID      a member is being restored from it: it is not deleted meanwhile
//! sweeping                   chunks are being removed: no snapshot begins meanwhile
//! clock                      written to learn the time by the store's own clock
//! ```
//!
//! Everything blocks; nothing here may be called from a thread of an async runtime.

mod address;
mod chunks;
mod encryption;
mod error;
mod location;
mod mark;
mod pace;
mod reading;
mod retention;
mod runtime;
mod snapshots;
mod sweep;
mod verify;

pub use address::{NoAddress, StoreAddress};
pub use encryption::{KeyError, StoreKey};
pub use error::StoreError;
pub use reading::Reading;
pub use retention::{Retention, SteadyClock, SteadyTime};
pub use snapshots::{Listed, Writing};
pub use sweep::Swept;
pub use verify::{Problem, Verified};

use crate::format::{HeaderError, open_envelope, seal_envelope};
use encryption::{Mark, Sealer};
use futures_util::TryStreamExt;
use location::Location;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Runtime;

/// Requests under way at once: enough to fill a link to storage that answers after 20 ms.
const CONCURRENT: usize = 32;

/// The most bytes of what is no chunk: a manifest of 64 members needs a third.
const MOST_BYTES: u64 = 64 << 20;

/// What is at a place.
enum Found {
    Nothing,
    Object(Vec<u8>),
    /// Something of so many bytes, which was not read.
    TooLong(u64),
}

/// A store of snapshots, open.
#[derive(Debug)]
pub struct Store {
    location: Location,
    runtime: Arc<Runtime>,
    objects: Arc<dyn ObjectStore>,
    /// Sealer of an encrypted store.
    sealer: Option<Sealer>,
}

impl Store {
    /// Opens a store that is there and not encrypted: a path, `file://…` or `s3://BUCKET/…`.
    pub fn open(location: &str) -> Result<Store, StoreError> {
        Store::open_with(location, None)
    }

    /// The same, with its key if it is encrypted.
    pub fn open_with(location: &str, key: Option<&StoreKey>) -> Result<Store, StoreError> {
        Store::reach(Location::parse(location)?)?.marked(key)
    }

    /// Opens a store that is not encrypted, and makes it one if there is none.
    pub fn create(location: &str) -> Result<Store, StoreError> {
        Store::create_with(location, None)
    }

    /// The same; with a key, one that is encrypted with it.
    pub fn create_with(location: &str, key: Option<&StoreKey>) -> Result<Store, StoreError> {
        let location = Location::parse(location)?;
        // On a thread of its own: what is made there is private.
        let made = runtime::of(&location)?.block_on(location.make());
        made.map_err(|error| location.failed("be made as a directory", error))?;
        let store = Store::reach(location)?;
        if store.get(&store.path("store"))?.is_some() {
            return store.marked(key);
        }
        store.check_conditions()?;
        let body = match key {
            None => "\n".to_owned(),
            Some(key) => Mark::new(key).map_err(|error| store.failed("be sealed", error))?.text(),
        };
        // Who else makes it at the same moment may have made it before: its mark counts.
        store.put_new(&store.path("store"), seal_envelope("store", &body).into_bytes())?;
        store.marked(key)
    }

    /// Refuses storage that does not keep what is there, on which all marks are built.
    fn check_conditions(&self) -> Result<(), StoreError> {
        let word = self.mark_word()?;
        let trial = self.path(&format!("trial-{}", word.at(0).replace(' ', "-")));
        let put = || self.put_new(&trial, b"trial".to_vec());
        // A request whose answer is lost is sent again: only the second one's answer counts.
        let kept = put().and_then(|_| put()).map(|made| !made);
        // Who may not delete has a store that grows, and a small object more in it.
        let _ = self.delete(&trial);
        match kept? {
            true => Ok(()),
            false => Err(StoreError::Overwrites(self.location())),
        }
    }

    /// The store as its mark says that it is.
    fn marked(self, key: Option<&StoreKey>) -> Result<Store, StoreError> {
        let location = self.location.to_string();
        let Some(mark) = self.get(&self.path("store"))? else {
            return Err(StoreError::Unknown(location));
        };
        let mark = Mark::parse(self.open_file("store", "store", &mark)?);
        let mark = mark.map_err(|why| StoreError::damaged(format!("store in {location}"), why))?;
        let sealer = Sealer::fitting(&location, mark.as_ref(), key)?;
        Ok(Store { sealer, ..self })
    }

    #[cfg(test)]
    fn sealer(&self) -> Option<&Sealer> {
        self.sealer.as_ref()
    }

    /// The bytes to be stored at a place.
    fn seal(&self, place: &str, content: Vec<u8>) -> Result<Vec<u8>, StoreError> {
        match &self.sealer {
            Some(sealer) => sealer
                .seal(place, content)
                .map_err(|error| self.failed(format!("seal {place}"), error)),
            None => Ok(content),
        }
    }

    /// Opens what was to be stored at a place; none if these bytes were not.
    fn open_sealed(&self, place: &str, stored: Vec<u8>) -> Option<Vec<u8>> {
        match &self.sealer {
            Some(sealer) => sealer.open(place, stored),
            None => Some(stored),
        }
    }

    fn reach(location: Location) -> Result<Store, StoreError> {
        let objects = location.connect()?;
        let runtime = runtime::of(&location)?;
        Ok(Store { location, runtime, objects, sealer: None })
    }

    /// The time by the store's own clock, in seconds since 1970: those who share it may have others, which differ.
    pub fn time(&self) -> Result<u64, StoreError> {
        let path = self.path("clock");
        self.put(&path, Vec::new())?;
        let head = self.block(self.objects.head(&path));
        let head =
            head.map_err(|error| self.not_done(format!("tell the time of {path}"), error))?;
        Ok(u64::try_from(head.last_modified.timestamp()).unwrap_or_default())
    }

    /// The place where it is, for people.
    pub fn location(&self) -> String {
        self.location.to_string()
    }

    fn path(&self, name: &str) -> Path {
        self.location.prefix().parts().chain(Path::from(name).parts()).collect()
    }

    fn failed(&self, doing: impl Into<String>, why: impl ToString) -> StoreError {
        self.location.failed(&doing.into(), why)
    }

    /// The storage did not do what it was asked for.
    fn not_done(&self, doing: String, why: object_store::Error) -> StoreError {
        let (location, passes) = (self.location.to_string(), error::passes(&why));
        StoreError::Failed { location, doing, why: why.to_string(), passes }
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

    /// Reads an object; none if there is no such one.
    fn get(&self, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
        match self.block(self.read(path, MOST_BYTES))? {
            Found::Nothing => Ok(None),
            Found::Object(bytes) => Ok(Some(bytes)),
            Found::TooLong(bytes) => Err(StoreError::damaged(
                format!("{path} in {}", self.location),
                format!("it has {bytes} bytes, and {MOST_BYTES} are possible"),
            )),
        }
    }

    /// Reads an object of so many bytes at most: all of one is allocated at once, whatever wrote it.
    async fn read(&self, path: &Path, most: u64) -> Result<Found, StoreError> {
        let failed = |error| self.not_done(format!("read {path}"), error);
        let found = match self.objects.get(path).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Found::Nothing),
            found => found.map_err(failed)?,
        };
        if found.meta.size > most {
            return Ok(Found::TooLong(found.meta.size));
        }
        Ok(Found::Object(found.bytes().await.map_err(failed)?.into()))
    }

    /// Returns whether it was not there before; it is left alone if it was.
    fn put_new(&self, path: &Path, bytes: Vec<u8>) -> Result<bool, StoreError> {
        let payload = PutPayload::from(bytes);
        match self.block(self.objects.put_opts(path, payload, PutMode::Create.into())) {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(self.not_done(format!("write {path}"), error)),
        }
    }

    /// Writes, whatever is there.
    fn put(&self, path: &Path, bytes: Vec<u8>) -> Result<(), StoreError> {
        let put = self.block(self.objects.put(path, PutPayload::from(bytes)));
        put.map(drop).map_err(|error| self.not_done(format!("write {path}"), error))
    }

    /// Removes what may be gone already.
    fn delete(&self, path: &Path) -> Result<(), StoreError> {
        match self.block(self.objects.delete(path)) {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.not_done(format!("remove {path}"), error)),
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
            Err(error) => Err(self.not_done(format!("list {prefix}"), error)),
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
