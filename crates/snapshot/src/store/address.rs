//! The address of a store, as configurations, commands and other hosts name it.

use super::location::Location;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;
use std::path::{Component, Path};
use std::str::FromStr;
use std::sync::Arc;

/// The address of a store: an absolute directory without `.` or `..`, or `s3://BUCKET/PREFIX`. Each
/// store has one spelling.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StoreAddress(Arc<str>);

/// Text that is no [`StoreAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no store's address: write an absolute path without \"..\", or s3://BUCKET/PREFIX"
)]
pub struct NoAddress(String);

impl StoreAddress {
    /// Whether `other` is this store, or one in a directory or under a prefix of it.
    pub fn has(&self, other: &StoreAddress) -> bool {
        match other.strip_prefix(&**self) {
            Some(rest) => rest.is_empty() || rest.starts_with('/') || self.ends_with('/'),
            None => false,
        }
    }
}

impl FromStr for StoreAddress {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<StoreAddress, NoAddress> {
        /// A length that is enough to recognise it in a message.
        const SHOWN: usize = 80;
        let none = || NoAddress(text.chars().take(SHOWN).collect());
        let plain = text.strip_prefix("file://").unwrap_or(text);
        let plain = match plain.trim_end_matches('/') {
            "" => plain,
            trimmed => trimmed,
        };
        if text.len() > MOST_BYTES || text.chars().any(char::is_control) {
            return Err(none());
        }
        match Location::parse(plain) {
            Ok(Location::Directory(path)) if is_plain(&path) => Ok(StoreAddress(plain.into())),
            #[cfg(feature = "s3")]
            Ok(Location::S3 { .. }) => Ok(StoreAddress(plain.into())),
            _ => Err(none()),
        }
    }
}

/// A length longer than any path's.
const MOST_BYTES: usize = 4096;

/// Absolute, and spelt without detours.
fn is_plain(path: &Path) -> bool {
    let mut spelt = std::path::PathBuf::new();
    let straight = path.components().all(|part| {
        spelt.push(part);
        matches!(part, Component::RootDir | Component::Normal(_))
    });
    path.is_absolute() && straight && spelt.as_os_str() == path.as_os_str()
}

impl TryFrom<String> for StoreAddress {
    type Error = NoAddress;

    fn try_from(text: String) -> Result<StoreAddress, NoAddress> {
        text.parse()
    }
}

impl From<StoreAddress> for String {
    fn from(address: StoreAddress) -> String {
        address.0.as_ref().to_owned()
    }
}

impl Deref for StoreAddress {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> StoreAddress {
        text.parse().unwrap()
    }

    #[test]
    fn a_store_has_one_spelling() {
        for text in ["/srv/snapshots", "/srv/snapshots/", "file:///srv/snapshots"] {
            assert_eq!(&*address(text), "/srv/snapshots");
        }
        assert_eq!(&*address("/"), "/");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let long = format!("/{}", "x".repeat(MOST_BYTES));
        let wrong = [
            "",
            "srv",
            "../srv",
            "/srv/../etc",
            "/srv/./x",
            "/srv//x",
            "/..",
            "file://srv",
            "file:///srv/..",
            "/srv\n",
            "ftp://x",
            "s3://",
            &long,
        ];
        for text in wrong {
            assert!(text.parse::<StoreAddress>().is_err(), "{text:?}");
        }
        let json = serde_json::from_str::<StoreAddress>("\"/srv/../etc\"");
        assert!(json.unwrap_err().to_string().contains("absolute path"));
    }

    #[test]
    fn a_store_has_itself_and_what_is_below() {
        let named = address("/srv/snapshots");
        for (other, has) in [
            ("/srv/snapshots", true),
            ("/srv/snapshots/shop", true),
            ("/srv/snapshots-of-others", false),
            ("/srv", false),
        ] {
            assert_eq!(named.has(&address(other)), has, "{other}");
        }
        assert!(address("/").has(&named));
    }
}
