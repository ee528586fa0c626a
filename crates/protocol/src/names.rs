//! Names of VMs, hosts and groups. They come from users, peers, records and stores, and become
//! files, directories and keys: a value of these types cannot be anything else than a name.
//!
//! No name is empty, begins with `.`, or has `/`, a control character, or more bytes than its
//! kind allows: joined to a directory it is one entry of that directory.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Text that is no name of the kind that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {kind}; allowed are {allowed}")]
pub struct NameError {
    /// The text; its beginning if it is long.
    text: String,
    kind: &'static str,
    allowed: &'static str,
}

impl NameError {
    fn new(text: &str, kind: &'static str, allowed: &'static str) -> NameError {
        /// The length that is enough to recognise it in a message.
        const SHOWN: usize = 80;
        let mut shown: String = text.chars().take(SHOWN).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        NameError { text: shown, kind, allowed }
    }
}

macro_rules! name_type {
    ($(#[$about:meta])* $name:ident, $kind:literal, $allowed:literal, $read:path) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The entry of this name in a directory.
            pub fn below(&self, directory: &Path) -> PathBuf {
                directory.join(&*self.0)
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<$name, NameError> {
                $read(text).map($name).ok_or_else(|| NameError::new(text, $kind, $allowed))
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<$name, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0.as_ref().to_owned()
            }
        }

        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        // Ordered and hashed as its text is: maps are looked up by text, too.
        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                &*self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                &*self.0 == *other
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

name_type! {
    /// The name of a VM: 1 to 32 letters, digits, `-` and `_`. Unique on a host.
    VmName, "is no name for a VM", "1 to 32 letters, digits, '-' and '_'", read_vm_name
}

name_type! {
    /// The name of a host: 1 to 63 letters, digits and `-`, not starting with `-`. Capitals are read as small letters: a
    /// certificate is for a name in whatever case, and two names are never told apart by that alone.
    HostName,
    "is not a host name",
    "1 to 63 letters (a to z), digits and -, not starting with -",
    read_host_name
}

name_type! {
    /// The name of a group of VMs, protected or snapshotted as one: 1 to 64 letters, digits, `-`,
    /// `_` and `.`, not starting with `.`. Every VM's name is one, too.
    GroupName,
    "cannot be the name of a group",
    "1 to 64 letters, digits, '-', '_' and '.', and no '.' at the beginning",
    read_group_name
}

/// A name that stands in the program itself, as in tests and benchmarks.
///
/// # Panics
/// If the text is none.
pub fn literal<T: FromStr<Err = NameError>>(text: &'static str) -> T {
    text.parse().expect("a name in the program is one")
}

impl From<&VmName> for GroupName {
    fn from(vm: &VmName) -> GroupName {
        GroupName(vm.0.clone())
    }
}

fn read_vm_name(text: &str) -> Option<Arc<str>> {
    let is_sound = text.bytes().all(|byte| is_plain(byte) || byte == b'_');
    (is_sound && (1..=32).contains(&text.len())).then(|| text.into())
}

/// Records of versions before this one, and configurations, have capitals.
fn read_host_name(text: &str) -> Option<Arc<str>> {
    let is_sound = text.bytes().all(is_plain) && !text.starts_with('-');
    (is_sound && (1..=63).contains(&text.len())).then(|| text.to_ascii_lowercase().into())
}

fn read_group_name(text: &str) -> Option<Arc<str>> {
    let allowed = |byte| is_plain(byte) || byte == b'_' || byte == b'.';
    let is_sound = text.bytes().all(allowed) && !text.starts_with('.');
    (is_sound && (1..=64).contains(&text.len())).then(|| text.into())
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Component;

    const NO_NAMES: [&str; 14] = [
        "",
        ".",
        "..",
        ".hidden",
        "/",
        "/etc",
        "a/b",
        "../../etc/cron.d",
        "a\0b",
        "a b",
        "a\nb",
        "ä",
        "a\\b",
        "%2e%2e",
    ];

    #[test]
    fn what_is_no_name_is_refused_and_says_what_is_allowed() {
        for text in NO_NAMES {
            assert!(text.parse::<VmName>().is_err(), "{text:?}");
            assert!(text.parse::<HostName>().is_err(), "{text:?}");
            assert!(text.parse::<GroupName>().is_err(), "{text:?}");
        }
        assert!("x".repeat(33).parse::<VmName>().is_err());
        assert!("x".repeat(64).parse::<HostName>().is_err());
        assert!("x".repeat(65).parse::<GroupName>().is_err());
        assert!("-a".parse::<HostName>().is_err());
        assert!("Db".parse::<VmName>().is_ok());
        let words = "../a".parse::<VmName>().unwrap_err().to_string();
        assert_eq!(
            words,
            "\"../a\" is no name for a VM; allowed are 1 to 32 letters, digits, '-' and '_'"
        );
        let long = "/".repeat(1 << 20).parse::<VmName>().unwrap_err().to_string();
        assert!(long.len() < 250, "{long}");
    }

    // A host that was named with capitals had to take a new name, and nobody read what it had noted under the old one.
    #[test]
    fn a_hosts_name_is_the_same_in_whatever_case() {
        let noted: HostName = serde_json::from_str("\"Rack1-A\"").unwrap();
        assert_eq!(noted, literal::<HostName>("rack1-a"));
        assert_eq!(serde_json::to_string(&noted).unwrap(), "\"rack1-a\"");
        assert_ne!(literal::<VmName>("Db"), literal::<VmName>("db"));
    }

    #[test]
    fn names_are_text_in_messages() {
        let name: VmName = serde_json::from_str("\"db_1\"").unwrap();
        assert_eq!(serde_json::to_string(&name).unwrap(), "\"db_1\"");
        let traversal = serde_json::from_str::<VmName>("\"../../../etc/cron.d\"").unwrap_err();
        assert!(traversal.to_string().contains("is no name for a VM"), "{traversal}");
        assert_eq!(GroupName::from(&name), "db_1");
        assert_eq!("shop-1.eu".parse::<GroupName>().unwrap(), "shop-1.eu");
    }

    proptest! {
        #[test]
        fn every_name_is_one_entry_of_its_directory(text in ".{0,70}|[-a-zA-Z0-9_./]{1,66}") {
            let directory = Path::new("/state");
            let paths = [
                text.parse::<VmName>().map(|name| name.below(directory)),
                text.parse::<HostName>().map(|name| name.below(directory)),
                text.parse::<GroupName>().map(|name| name.below(directory)),
            ];
            for path in paths.into_iter().flatten() {
                prop_assert_eq!(path.parent(), Some(directory));
                let last = path.components().next_back();
                prop_assert!(matches!(last, Some(Component::Normal(name)) if name.eq_ignore_ascii_case(&text)));
            }
        }
    }
}
