//! The way from what a user writes to the library that reaches it.

use super::StoreError;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A request that fails is repeated so often, and for so long, before that is an error: what
/// waits for it then says so, and asks again where it can.
#[cfg(feature = "s3")]
const RETRIES: usize = 3;
#[cfg(feature = "s3")]
const RETRY_TIME: std::time::Duration = std::time::Duration::from_secs(15);

#[derive(Debug)]
pub(super) enum Location {
    Directory(PathBuf),
    #[cfg(feature = "s3")]
    S3 {
        url: String,
        prefix: Path,
    },
}

impl Location {
    pub fn parse(text: &str) -> Result<Location, StoreError> {
        let unknown = || StoreError::Location(text.to_owned());
        match text.split_once("://") {
            None if text.is_empty() => Err(unknown()),
            None => Ok(Location::Directory(text.into())),
            Some(("file", path)) if path.starts_with('/') => Ok(Location::Directory(path.into())),
            #[cfg(feature = "s3")]
            Some(("s3", rest)) => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                let prefix = Path::parse(prefix).map_err(|_| unknown())?;
                if bucket.is_empty() {
                    return Err(unknown());
                }
                Ok(Location::S3 { url: format!("s3://{bucket}"), prefix })
            }
            Some(_) => Err(unknown()),
        }
    }

    /// Makes the directory, if it is one, on a thread of the runtime.
    pub async fn make(&self) -> io::Result<()> {
        match self {
            Location::Directory(path) => {
                let path = path.clone();
                tokio::task::spawn_blocking(|| std::fs::create_dir_all(path)).await?
            }
            #[cfg(feature = "s3")]
            Location::S3 { .. } => Ok(()),
        }
    }

    pub fn connect(&self) -> Result<Arc<dyn ObjectStore>, StoreError> {
        match self {
            Location::Directory(path) => {
                if !path.is_dir() {
                    return Err(StoreError::Unknown(self.to_string()));
                }
                // What was put is on stable storage, its name too: a chunk that others reckon with
                // must outlive a power failure. With many at once it costs little.
                let opened = LocalFileSystem::new_with_prefix(path);
                let store = opened.map_err(|error| self.failed("open", error))?;
                Ok(Arc::new(store.with_fsync(true)))
            }
            // Credentials, endpoint and region as for other programs: from AWS_… variables.
            #[cfg(feature = "s3")]
            Location::S3 { url, .. } => {
                // The one that the rest of the program uses. Somebody may have done it before.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let builder = object_store::aws::AmazonS3Builder::from_env().with_url(url);
                let builder = builder.with_retry(object_store::RetryConfig {
                    max_retries: RETRIES,
                    retry_timeout: RETRY_TIME,
                    ..Default::default()
                });
                let store = builder.build().map_err(|error| self.failed("be reached", error))?;
                Ok(Arc::new(store))
            }
        }
    }

    /// The prefix that all paths begin with.
    pub fn prefix(&self) -> Path {
        match self {
            Location::Directory(_) => Path::default(),
            #[cfg(feature = "s3")]
            Location::S3 { prefix, .. } => prefix.clone(),
        }
    }

    pub fn failed(&self, doing: &str, why: impl ToString) -> StoreError {
        let (location, doing) = (self.to_string(), doing.to_owned());
        StoreError::Failed { location, doing, why: why.to_string(), passes: false }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Directory(path) => path.display().fmt(f),
            #[cfg(feature = "s3")]
            Location::S3 { url, prefix } => write!(f, "{url}/{prefix}"),
        }
    }
}
