//! The changes of the disks that both hosts are known to have.
//!
//! In lockstep each guest writes its own image. The guest's writes to a disk come in one order on
//! both hosts, since both guests do the same, and a host carries them out in that order: so
//! "the first *n* writes to this disk" are the same ones there and here.

/// The number for each disk of the guest's writes that, since its log began, are in a host's image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written(pub Vec<u64>);

/// The fault of a message of counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are no counts")]
pub struct BadCounts(usize);

impl Written {
    /// Encodes them as a message.
    pub fn encode(&self) -> Vec<u8> {
        self.0.iter().flat_map(|count| count.to_le_bytes()).collect()
    }

    /// Reads what [`Written::encode`] made.
    pub fn decode(message: &[u8]) -> Result<Written, BadCounts> {
        if message.len() % 8 != 0 {
            return Err(BadCounts(message.len()));
        }
        let count = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Ok(Written(message.chunks_exact(8).map(count).collect()))
    }

    /// Whether this host has all that `other` counts.
    pub fn has(&self, other: &Written) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(have, of)| have >= of)
    }
}

/// The rounds after which changes that were set aside may be forgotten: once the other host has
/// them all.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    other: Option<Written>,
    aside: Option<Written>,
    stopped: bool,
}

impl Rounds {
    /// The other host has so much.
    pub fn told(&mut self, written: Written) {
        self.other = Some(written);
    }

    /// Notes what this host had written when it was set aside; none, if that cannot be told:
    /// nothing is forgotten any more.
    pub fn set_aside(&mut self, written: Option<Written>) {
        self.stopped |= written.is_none();
        self.aside = written;
    }

    /// Whether what was set aside may be forgotten, if anything was; something else is to be set
    /// aside then.
    pub fn may_forget(&self) -> bool {
        match (&self.other, &self.aside) {
            _ if self.stopped => false,
            (_, None) => true,
            (Some(other), Some(aside)) => other.has(aside),
            (None, Some(_)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_other_host_has_is_forgotten_and_nothing_else() {
        let aside = |counts: [u64; 2]| Some(Written(counts.to_vec()));
        let mut rounds = Rounds::default();
        assert!(rounds.may_forget(), "nothing was set aside");
        rounds.set_aside(aside([5, 6]));
        assert!(!rounds.may_forget(), "the other host has said nothing");
        rounds.told(Written(vec![5, 5]));
        assert!(!rounds.may_forget(), "a write to the second disk is missing");
        rounds.told(Written(vec![9, 6]));
        assert!(rounds.may_forget());
        rounds.set_aside(aside([9, 7]));
        assert!(!rounds.may_forget());
        rounds.set_aside(None);
        rounds.told(Written(vec![99, 99]));
        assert!(!rounds.may_forget(), "nobody knows what was set aside");
    }

    #[test]
    fn counts_come_back_and_wrong_lengths_do_not() {
        let written = Written(vec![1, u64::MAX]);
        assert_eq!(Written::decode(&written.encode()), Ok(written.clone()));
        assert!(Written::decode(&written.encode()[1..]).is_err());
    }
}
