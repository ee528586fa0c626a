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
//! | 18 | versions are negotiated; the purpose `clock`; `autostart` in an offered definition; a device state in parts; the number of a backup's refusal |

use crate::Spoken;

/// A version of the wire format.
pub type WireVersion = u32;

/// Version of the wire format that this release is made for.
pub const WIRE_VERSION: WireVersion = 18;

/// The one before it.
pub const LEAST_WIRE_VERSION: WireVersion = 17;

/// The first version in which the answer names the one that is used.
pub const FIRST_NEGOTIATED: WireVersion = 18;

/// The first version with [`Kind::DeviceStatePart`](super::Kind::DeviceStatePart).
pub const FIRST_WITH_STATE_PARTS: WireVersion = 18;

/// The first version in which a backup's [`Kind::Refuse`](super::Kind::Refuse) may have a number.
pub const FIRST_WITH_FAILED_MIRRORS: WireVersion = 18;

/// The versions that this release speaks.
pub const SPOKEN: Spoken = Spoken { least: LEAST_WIRE_VERSION, highest: WIRE_VERSION };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_back_is_spoken() {
        assert_eq!(SPOKEN.least + 1, SPOKEN.highest);
        assert_eq!(SPOKEN.to_string(), "versions 17 to 18");
    }
}
