//! Memory sizes as text: `512M`, `2G`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::fmt;
use std::str::FromStr;

const MIB: u64 = 1 << 20;

/// The guest's memory must fill whole huge pages.
const GRANULE: u64 = 2 * MIB;

const SMALLEST: u64 = 64 * MIB;

/// A size larger than any host has; keeps sums of sizes far from overflowing.
const LARGEST: u64 = 1 << 44;

/// Size of a guest's main memory: 64 MiB to 16 TiB, a multiple of 2 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemorySize(u64);

/// The text is not a memory size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{text}\" is no memory size: {why}; write mebibytes or gibibytes like \"512M\" or \"2G\""
)]
pub struct MemorySizeError {
    text: String,
    why: &'static str,
}

impl MemorySize {
    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }

    fn from_bytes(bytes: u64) -> Result<MemorySize, &'static str> {
        if bytes < SMALLEST {
            Err("it is less than 64M")
        } else if bytes > LARGEST {
            Err("it is more than 16 TiB")
        } else if bytes % GRANULE != 0 {
            Err("it is not a multiple of 2M")
        } else {
            Ok(MemorySize(bytes))
        }
    }
}

impl FromStr for MemorySize {
    type Err = MemorySizeError;

    fn from_str(text: &str) -> Result<MemorySize, MemorySizeError> {
        let fail = |why| MemorySizeError { text: text.to_owned(), why };
        let (digits, unit) = match text.as_bytes().last() {
            Some(b'M') => (&text[..text.len() - 1], MIB),
            Some(b'G') => (&text[..text.len() - 1], 1024 * MIB),
            _ => return Err(fail("it does not end in M or G")),
        };
        if digits.is_empty() || !digits.bytes().all(|c| c.is_ascii_digit()) {
            return Err(fail("it is not a whole number"));
        }
        let count: u64 = digits.parse().map_err(|_| fail("it is more than 16 TiB"))?;
        let bytes = count.checked_mul(unit).ok_or_else(|| fail("it is more than 16 TiB"))?;
        MemorySize::from_bytes(bytes).map_err(fail)
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 % (1024 * MIB) == 0 {
            write!(f, "{}G", self.0 / (1024 * MIB))
        } else {
            write!(f, "{}M", self.0 / MIB)
        }
    }
}

impl Serialize for MemorySize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemorySize {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<MemorySize, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for (text, bytes) in [("64M", 64 << 20), ("512M", 512 << 20), ("2G", 2 << 30)] {
            let size: MemorySize = text.parse().unwrap();
            assert_eq!(size.bytes(), bytes);
            assert_eq!(size.to_string(), text);
        }
        assert_eq!("2048M".parse::<MemorySize>().unwrap().to_string(), "2G");
    }

    #[test]
    fn wrong_text_says_why() {
        for (text, why) in [
            ("", "M or G"),
            ("512", "M or G"),
            ("512MB", "M or G"),
            ("M", "whole number"),
            ("-1G", "whole number"),
            ("1.5G", "whole number"),
            ("62M", "less than 64M"),
            ("0G", "less than 64M"),
            ("513M", "multiple of 2M"),
            ("17000G", "16 TiB"),
            ("99999999999999999999G", "16 TiB"),
            ("18446744073709551615G", "16 TiB"),
        ] {
            let error = text.parse::<MemorySize>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
