//! Versions of what daemon and keepers, and one keeper and the next, say to each other.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Versions that one side speaks, or reads, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The least one.
    pub least: u32,
    /// The highest one.
    pub highest: u32,
}

impl Versions {
    /// Whether it is one of them.
    pub fn contains(self, version: u32) -> bool {
        (self.least..=self.highest).contains(&version)
    }

    /// Whether two sides have one in common.
    pub fn meet(self, other: Versions) -> bool {
        self.least.max(other.least) <= self.highest.min(other.highest)
    }
}

impl fmt::Display for Versions {
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

    const fn versions(least: u32, highest: u32) -> Versions {
        Versions { least, highest }
    }

    #[test]
    fn two_releases_in_a_row_have_one_in_common() {
        let (old, new, next) = (versions(1, 1), versions(1, 2), versions(2, 3));
        assert!(old.meet(new) && new.meet(old) && new.meet(next) && !old.meet(next));
        assert!(new.contains(1) && new.contains(2) && !new.contains(3) && !next.contains(1));
        assert_eq!(
            (old.to_string(), new.to_string()),
            ("version 1".into(), "versions 1 to 2".into())
        );
    }
}
