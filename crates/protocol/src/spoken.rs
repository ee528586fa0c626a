//! Versions of what two programs say to each other: hosts, a daemon and its keepers, one keeper and the next.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Versions that one side speaks, or reads, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoken {
    /// The least one.
    pub least: u32,
    /// The highest one.
    pub highest: u32,
}

impl Spoken {
    /// Whether it is one of them.
    pub fn contains(self, version: u32) -> bool {
        (self.least..=self.highest).contains(&version)
    }

    /// The version that two sides speak with each other; none if they have none in common.
    pub fn agree(self, other: Spoken) -> Option<u32> {
        let used = self.highest.min(other.highest);
        (used >= self.least.max(other.least)).then_some(used)
    }

    /// The remedy that gives both one in common. `other` is of the host of that name.
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
            true => write!(f, "version {}", self.least),
            false => write!(f, "versions {} to {}", self.least, self.highest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn spoken(least: u32, highest: u32) -> Spoken {
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
        assert!(new.contains(17) && new.contains(18) && !new.contains(19) && !next.contains(17));
        assert_eq!(
            (old.to_string(), new.to_string()),
            ("version 17".into(), "versions 17 to 18".into())
        );
    }

    proptest! {
        /// The answer is the same whoever is asked, and both speak it.
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
