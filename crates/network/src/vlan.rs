//! The VLANs (IEEE 802.1Q) that a card is in.

use std::fmt;
use std::str::FromStr;

/// The numbers that a VLAN may have.
pub const FIRST_VLAN: u16 = 1;
/// The last of them.
pub const LAST_VLAN: u16 = 4094;

/// Several VLANs: runs of numbers, in order, none touching the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct VlanSet(Vec<(u16, u16)>);

/// A text that is no list of VLANs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no list of VLANs; allowed are numbers from {FIRST_VLAN} to {LAST_VLAN} and ranges of \
     them, like \"10,20-30\""
)]
pub struct VlanSetError(String);

/// The VLANs that a card's port at the bridge carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vlans {
    /// The VLAN of frames without a tag: the guest knows nothing of it.
    pub access: Option<u16>,
    /// VLANs that the guest tags itself.
    pub trunk: VlanSet,
}

impl VlanSet {
    /// The runs: first and last number of each.
    pub fn runs(&self) -> &[(u16, u16)] {
        &self.0
    }

    /// The numbers of all of them.
    pub fn ids(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().flat_map(|&(first, last)| first..=last)
    }
}

impl Vlans {
    /// Whether the card is in none, whatever its bridge does with that.
    pub fn is_empty(&self) -> bool {
        self.access.is_none() && self.trunk.0.is_empty()
    }
}

impl FromStr for VlanSet {
    type Err = VlanSetError;

    fn from_str(text: &str) -> Result<VlanSet, VlanSetError> {
        let wrong = || VlanSetError(text.to_owned());
        let number = |text: &str| {
            let parsed = text.trim().parse().ok();
            parsed.filter(|id| (FIRST_VLAN..=LAST_VLAN).contains(id)).ok_or_else(wrong)
        };
        let run = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            let (first, last) = (number(first)?, number(last)?);
            if first <= last { Ok((first, last)) } else { Err(wrong()) }
        };
        let mut runs: Vec<(u16, u16)> = text.split(',').map(run).collect::<Result<_, _>>()?;
        runs.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::new();
        for (first, last) in runs {
            match merged.last_mut() {
                Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Ok(VlanSet(merged))
    }
}

impl fmt::Display for VlanSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (first, last)) in self.0.iter().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_come_back_in_order_and_wrong_ones_do_not() {
        for (text, same) in
            [("10", "10"), ("20-30,10", "10,20-30"), ("1-4094", "1-4094"), ("5, 6,4-5", "4-6")]
        {
            assert_eq!(text.parse::<VlanSet>().unwrap().to_string(), same);
        }
        for text in ["", "0", "4095", "9-5", "1,", "x", "1-2-3", "-1"] {
            let error = text.parse::<VlanSet>().unwrap_err().to_string();
            assert!(error.contains("\"10,20-30\""), "{error}");
        }
        let set: VlanSet = "3,7-9".parse().unwrap();
        assert_eq!(set.ids().collect::<Vec<_>>(), [3, 7, 8, 9]);
    }
}
