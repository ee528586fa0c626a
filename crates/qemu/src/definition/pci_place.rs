//! The place of a device on the guest's PCI buses: its guest may have named it after that.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A bus of QEMU's, a slot of it and a function of that: `pcie.0:02.0`, `pci.1:00.0`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PciPlace {
    bus: String,
    slot: u8,
    function: u8,
}

/// The text is no place on a PCI bus.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no place on a PCI bus; write the bus's name, the slot (00 to 1f) and the function \
     (0 to 7), like \"pci.1:00.0\""
)]
pub struct PciPlaceError(String);

impl PciPlace {
    /// The place of a device; none if there is no such slot or function, or a bus cannot have
    /// that name.
    pub fn new(bus: &str, slot: u8, function: u8) -> Option<PciPlace> {
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let valid = !bus.is_empty() && bus.chars().all(named) && slot < 32 && function < 8;
        valid.then(|| PciPlace { bus: bus.to_owned(), slot, function })
    }

    /// The bus's name in QEMU.
    pub fn bus(&self) -> &str {
        &self.bus
    }

    /// The place that a device's options give it, if they give one; without a bus on `root`.
    pub fn of_options(device: &str, root: &str) -> Option<PciPlace> {
        let find = |key: &str| {
            let mut options = device.split(',').filter_map(|option| option.split_once('='));
            options.rfind(|(name, _)| *name == key).map(|(_, value)| value)
        };
        let address = find("addr")?;
        let (slot, function) = address.split_once('.').unwrap_or((address, "0"));
        let number = |text: &str| u8::from_str_radix(text.trim_start_matches("0x"), 16).ok();
        PciPlace::new(find("bus").unwrap_or(root), number(slot)?, number(function)?)
    }

    /// Whether both are functions of one slot.
    pub(crate) fn shares_slot(&self, other: &PciPlace) -> bool {
        (&self.bus, self.slot) == (&other.bus, other.slot)
    }

    /// The place as QEMU's options have it.
    pub fn options(&self) -> String {
        format!("bus={},addr={:#04x}.{:#x}", self.bus, self.slot, self.function)
    }
}

impl FromStr for PciPlace {
    type Err = PciPlaceError;

    fn from_str(text: &str) -> Result<PciPlace, PciPlaceError> {
        let parse = || {
            let (bus, place) = text.split_once(':')?;
            let (slot, function) = place.split_once('.')?;
            let number = |digits: &str| {
                let hex = digits.chars().all(|c| c.is_ascii_hexdigit());
                u8::from_str_radix(digits, 16).ok().filter(|_| hex)
            };
            PciPlace::new(bus, number(slot)?, number(function)?)
        };
        parse().ok_or_else(|| PciPlaceError(text.to_owned()))
    }
}

impl fmt::Display for PciPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:02x}.{}", self.bus, self.slot, self.function)
    }
}

impl Serialize for PciPlace {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciPlace {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<PciPlace, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_and_written() {
        let place: PciPlace = "pci.1:1f.7".parse().unwrap();
        assert_eq!(place.to_string(), "pci.1:1f.7");
        assert_eq!(place.options(), "bus=pci.1,addr=0x1f.0x7");
    }

    #[test]
    fn what_is_none_is_refused() {
        for text in
            ["", "pci.1", "pci.1:00", "pci.1:20.0", "pci.1:00.8", "pci,x:0.0", ":0.0", "a:+1.0"]
        {
            let error = text.parse::<PciPlace>().unwrap_err().to_string();
            assert!(error.contains("pci.1:00.0"), "{text}: {error}");
        }
    }
}
