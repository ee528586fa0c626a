//! What the clock of a guest in lockstep shows first.

use serde::{Deserialize, Serialize};
use std::fmt;
use time::UtcDateTime;

/// A time of day, in UTC, as QEMU's `-rtc base=` reads it: `2026-11-21T00:00:00`. It is the
/// same on both hosts, wherever and whenever their QEMUs are started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClockBase(String);

impl ClockBase {
    /// The present time.
    pub fn now() -> ClockBase {
        let now = UtcDateTime::now();
        let (date, (hour, minute, second)) = (now.date(), now.as_hms());
        ClockBase(format!("{date}T{hour:02}:{minute:02}:{second:02}"))
    }
}

impl fmt::Display for ClockBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ClockBase> for String {
    fn from(base: ClockBase) -> String {
        base.0
    }
}

impl TryFrom<String> for ClockBase {
    type Error = String;

    /// A peer may send anything, and QEMU's options are separated by commas.
    fn try_from(text: String) -> Result<ClockBase, String> {
        let pattern = b"dddd-dd-ddTdd:dd:dd";
        let fits = |(&byte, &like): (&u8, &u8)| match like {
            b'd' => byte.is_ascii_digit(),
            like => byte == like,
        };
        if text.len() == pattern.len() && text.as_bytes().iter().zip(pattern).all(fits) {
            return Ok(ClockBase(text));
        }
        Err(format!("{text:?} is no time of day like 2026-11-21T00:00:00"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_time_is_one_and_further_options_are_none() {
        let now = String::from(ClockBase::now());
        assert_eq!(ClockBase::try_from(now.clone()).unwrap().to_string(), now);
        for wrong in ["utc", "2026-11-21", "2026-11-21T00:00:00,clock=host", ""] {
            assert!(ClockBase::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }
}
