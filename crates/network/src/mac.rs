//! Ethernet hardware addresses.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;

/// The hardware address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

/// The text is not a MAC address that a card may have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is no MAC address for a card: {why}; write it like 52:54:00:12:34:56")]
pub struct MacParseError {
    text: String,
    why: &'static str,
}

impl MacAddress {
    /// Whether it names many cards: a multicast or the broadcast address.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// An address for the host's side of a card's tap.
    ///
    /// A Linux bridge takes the lowest address of its ports for its own, so the
    /// tap gets one of the highest, or the host's address would change as VMs
    /// come and go. The rest is random: a bridge that takes it nevertheless must
    /// not have the address of the same VM's tap on the other host, or the two
    /// hosts could not talk. It must also differ from the guest's, which the
    /// bridge would otherwise take for local.
    pub(crate) fn for_tap(self) -> MacAddress {
        let random = RandomState::new().hash_one(self.0).to_le_bytes();
        let [a, b, c, d, ..] = random;
        let tap = MacAddress([0xfe, 0xff, a, b, c, d]);
        if tap == self { MacAddress([0xfe, 0xff, a, b, c, d ^ 1]) } else { tap }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = MacParseError;

    /// Parses `52:54:00:12:34:56`; refuses multicast and all-zero addresses.
    fn from_str(text: &str) -> Result<Self, MacParseError> {
        let fail = |why| MacParseError { text: text.to_owned(), why };
        let mut bytes = [0u8; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(fail("it has fewer than six parts"))?;
            if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(fail("each part must be two hexadecimal digits"));
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| fail("not hexadecimal"))?;
        }
        if parts.next().is_some() {
            return Err(fail("it has more than six parts"));
        }
        if MacAddress(bytes).is_multicast() {
            return Err(fail("it is a multicast address"));
        }
        if bytes == [0; 6] {
            return Err(fail("it is all zero"));
        }
        Ok(MacAddress(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let mac: MacAddress = "52:54:00:aB:34:56".parse().unwrap();
        assert_eq!(mac.0, [0x52, 0x54, 0, 0xab, 0x34, 0x56]);
        assert_eq!(mac.to_string(), "52:54:00:ab:34:56");
    }

    #[test]
    fn wrong_text_says_why() {
        for (text, why) in [
            ("", "two hexadecimal"),
            ("52:54:00:12:34", "fewer"),
            ("52:54:00:12:34:56:78", "more than six"),
            ("52:54:00:12:34:5g", "two hexadecimal"),
            ("52:54:00:12:34:+5", "two hexadecimal"),
            ("01:54:00:12:34:56", "multicast"),
            ("00:00:00:00:00:00", "all zero"),
        ] {
            let error = text.parse::<MacAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn tap_addresses_are_high_unicast_and_differ_between_hosts() {
        let guest = MacAddress([0x52, 0x54, 0, 1, 2, 3]);
        let (one, other) = (guest.for_tap(), guest.for_tap());
        assert_ne!(one, other);
        for tap in [one, other] {
            assert_ne!(tap, guest);
            assert_eq!((tap.0[0] & 1, &tap.0[..2]), (0, &[0xfe, 0xff][..]));
        }
    }
}
