//! The time that a guest in lockstep sees.
#![allow(unsafe_code)] // Reads the processor's time stamp counter.

use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};
use time::UtcDateTime;
use understudy_agent_protocol::TICKS_VARIABLE;

/// The time at which a guest's clocks begin, and how its time stamp counter runs. Both hosts' QEMUs
/// have the same, wherever and whenever they are started. As text `2026-11-21T00:00:00`, with the
/// counter's rate after a space if it has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ClockBase {
    first: String,
    tick_rate: Option<TickRate>,
}

/// Ticks of a time stamp counter in 2^32 ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickRate(pub u64);

impl TickRate {
    /// This host's, which a guest that does not count instructions sees. Takes a tenth of a
    /// second, for an error of some millionths.
    pub fn of_this_host() -> TickRate {
        let now = || (TickRate::counter(), Instant::now());
        let (first, began) = now();
        thread::sleep(Duration::from_millis(100));
        let (last, ended) = now();
        let nanoseconds = (ended - began).as_nanos();
        TickRate(((((last - first) as u128) << 32) / nanoseconds) as u64)
    }

    /// This host's counter now.
    pub fn counter() -> i64 {
        // SAFETY: every processor that runs this has it.
        unsafe { std::arch::x86_64::_rdtsc() as i64 }
    }

    /// The nanoseconds in which the counter goes on so far.
    pub fn nanoseconds(self, ticks: i64) -> i64 {
        ((i128::from(ticks) << 32) / i128::from(self.0.max(1))) as i64
    }

    /// The counter after so many nanoseconds.
    pub fn ticks(self, nanoseconds: i64) -> i64 {
        ((i128::from(nanoseconds) * i128::from(self.0)) >> 32) as i64
    }
}

impl ClockBase {
    /// The present time, and a counter that counts nanoseconds.
    pub fn now() -> ClockBase {
        let now = UtcDateTime::now();
        let (date, (hour, minute, second)) = (now.date(), now.as_hms());
        let first = format!("{date}T{hour:02}:{minute:02}:{second:02}");
        ClockBase { first, tick_rate: None }
    }

    /// Gives it a counter of this rate, which a guest has got used to.
    pub fn with_tick_rate(self, rate: TickRate) -> ClockBase {
        ClockBase { tick_rate: Some(rate), ..self }
    }

    /// The counter's rate, if it is not one a nanosecond.
    pub fn tick_rate(&self) -> Option<TickRate> {
        self.tick_rate
    }

    /// The variable for [`crate::process::Launch::env`], where the agent must know of the counter.
    pub fn environment(&self) -> Option<(OsString, OsString)> {
        let TickRate(rate) = self.tick_rate?;
        Some((TICKS_VARIABLE.into(), rate.to_string().into()))
    }

    /// The time that the guest's clock shows first, in UTC, as QEMU's `-rtc base=` reads it.
    pub fn first(&self) -> &str {
        &self.first
    }
}

impl fmt::Display for ClockBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tick_rate {
            Some(TickRate(rate)) => write!(f, "{} {rate}", self.first),
            None => f.write_str(&self.first),
        }
    }
}

impl From<ClockBase> for String {
    fn from(base: ClockBase) -> String {
        base.to_string()
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
        let wrong = || format!("{text:?} is no time of day like 2026-11-21T00:00:00");
        let (first, rate) = match text.split_once(' ') {
            Some((first, rate)) => (first, Some(rate.parse().map_err(|_| wrong())?)),
            None => (text.as_str(), None),
        };
        if first.len() != pattern.len() || !first.as_bytes().iter().zip(pattern).all(fits) {
            return Err(wrong());
        }
        Ok(ClockBase { first: first.to_owned(), tick_rate: rate.map(TickRate) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_present_time_is_one_and_further_options_are_none() {
        let now = ClockBase::now();
        let ticking = now.clone().with_tick_rate(TickRate(11_150_000_000));
        for clock in [now, ticking] {
            assert_eq!(ClockBase::try_from(clock.to_string()).unwrap(), clock);
            assert!(!clock.first().contains(' '));
        }
        for wrong in
            ["utc", "2026-11-21", "2026-11-21T00:00:00,clock=host", "2026-11-21T00:00:00 x", ""]
        {
            assert!(ClockBase::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }
}
