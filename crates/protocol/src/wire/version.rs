//! Versions of the wire format, and which one two hosts speak.
//!
//! Each release of a new version speaks the one before it, too, so that hosts are upgraded one after the
//! other. A dialler names the least and the highest that will do for what it wants, and the answer names
//! the one that is used: the highest that both speak. What is new in a version is said to no host with
//! which an older one was agreed.
//!
//! | version | is new |
//! |---|---|
//! | 17 | one version only: whoever speaks it compares the dialler's least version with 17 |
//! | 18 | versions are negotiated; the purpose `clock`; `autostart` in an offered definition |

use std::fmt;

/// A version of the wire format.
pub type WireVersion = u32;

/// Version of the wire format that this release is made for.
pub const WIRE_VERSION: WireVersion = 18;

/// The one before it.
pub const LEAST_WIRE_VERSION: WireVersion = 17;

/// The first version in which the answer names the one that is used.
pub const FIRST_NEGOTIATED: WireVersion = 18;

/// Versions of the wire format that one side speaks, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// The least one.
    pub least: WireVersion,
    /// The highest one.
    pub highest: WireVersion,
}

/// What this release speaks.
pub const SPOKEN: Spoken = Spoken { least: LEAST_WIRE_VERSION, highest: WIRE_VERSION };

impl Spoken {
    /// The version that two sides speak with each other; none if they have none in common.
    pub fn agree(self, other: Spoken) -> Option<WireVersion> {
        let used = self.highest.min(other.highest);
        (used >= self.least.max(other.least)).then_some(used)
    }

    /// What must be done so that both have one in common. `other` is of the host of that name.
    pub fn remedy(self, other: Spoken, name: &str) -> String {
        match other.least > self.highest {
            true => "upgrade this host first, one release after the other".to_owned(),
            false => format!("upgrade host {name} first, one release after the other"),
        }
    }
}

impl fmt::Display for Spoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.highest {
            true => write!(f, "wire version {}", self.least),
            false => write!(f, "wire versions {} to {}", self.least, self.highest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn spoken(least: WireVersion, highest: WireVersion) -> Spoken {
        Spoken { least, highest }
    }

    #[test]
    fn two_releases_in_a_row_speak_the_older_ones_version() {
        let (old, new, next) = (spoken(17, 17), spoken(17, 18), spoken(18, 19));
        assert_eq!(new.agree(old), Some(17));
        assert_eq!(old.agree(new), Some(17));
        assert_eq!(new.agree(new), Some(18));
        assert_eq!(new.agree(next), Some(18));
        assert_eq!(old.agree(next), None);
        assert!(old.remedy(next, "b").starts_with("upgrade this host first"));
        assert!(next.remedy(old, "b").starts_with("upgrade host b first"));
    }

    #[test]
    fn one_back_is_spoken() {
        assert_eq!(SPOKEN.least + 1, SPOKEN.highest);
        assert_eq!(SPOKEN.to_string(), "wire versions 17 to 18");
        assert_eq!(spoken(17, 17).to_string(), "wire version 17");
    }

    proptest! {
        /// Whoever is asked, the answer is the same, and both speak it.
        #[test]
        fn both_sides_come_to_the_same(a in 0..9u32, b in 0..9u32, c in 0..9u32, d in 0..9u32) {
            let (one, other) = (spoken(a, a + b), spoken(c, c + d));
            let used = one.agree(other);
            prop_assert_eq!(used, other.agree(one));
            let both = |version| (a..=a + b).contains(&version) && (c..=c + d).contains(&version);
            prop_assert_eq!(used, (0..20).rev().find(|version| both(*version)));
        }
    }
}
