//! The envelope of a frame between members.

use crate::format::Malformed;
use crate::{Incarnation, Member, SnapshotNumber};
use understudy_protocol::MOST_COUNTED;

/// Bytes of an envelope before its frame.
pub const ENVELOPE_BYTES: usize = 1 + 2 + 2 + 4 + 8;

/// The first byte of every envelope: version 1.
const VERSION: u8 = 1;

/// Sender, receiver and colour of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Sender.
    pub from: Member,
    /// Receiver. A frame for many goes to each of them in an envelope of its own.
    pub to: Member,
    /// The sender's incarnation.
    pub incarnation: Incarnation,
    /// The last snapshot that the sender had taken.
    pub number: SnapshotNumber,
}

/// An envelope that cannot be read.
pub type BadEnvelope = Malformed;

impl Envelope {
    /// Encodes it as it travels; the frame follows, if there is one.
    pub fn encode(&self) -> [u8; ENVELOPE_BYTES] {
        let mut bytes = [0; ENVELOPE_BYTES];
        bytes[0] = VERSION;
        bytes[1..3].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[3..5].copy_from_slice(&self.to.0.to_le_bytes());
        bytes[5..9].copy_from_slice(&self.incarnation.0.to_le_bytes());
        bytes[9..].copy_from_slice(&self.number.0.to_le_bytes());
        bytes
    }

    /// The envelope, and the frame in it; none is a sign that the sender has taken its snapshot.
    pub fn decode(bytes: &[u8]) -> Result<(Envelope, Option<&[u8]>), BadEnvelope> {
        let mut reader = crate::format::Reader(bytes);
        if reader.u8()? != VERSION {
            return Err(Malformed("an envelope of a version that is not known here"));
        }
        let (from, to) = (Member(reader.u16()?), Member(reader.u16()?));
        let (incarnation, number) = (Incarnation(reader.u32()?), SnapshotNumber(reader.u64()?));
        if number.0 >= MOST_COUNTED {
            return Err(Malformed("a number of a snapshot after which there is none"));
        }
        let frame = Some(reader.0).filter(|frame| !frame.is_empty());
        Ok((Envelope { from, to, incarnation, number }, frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_envelope_comes_back_with_its_frame(
            from in any::<u16>(), to in any::<u16>(), incarnation in any::<u32>(), number in 0..MOST_COUNTED,
            frame in proptest::collection::vec(any::<u8>(), 0..60), cut in 0..ENVELOPE_BYTES,
        ) {
            let (from, to, incarnation) = (Member(from), Member(to), Incarnation(incarnation));
            let envelope = Envelope { from, to, incarnation, number: SnapshotNumber(number) };
            let bytes = [&envelope.encode()[..], &frame].concat();
            let inside = Some(&frame[..]).filter(|frame| !frame.is_empty());
            prop_assert_eq!(Envelope::decode(&bytes), Ok((envelope, inside)));
            prop_assert!(Envelope::decode(&bytes[..cut]).is_err());
        }
    }

    #[test]
    fn another_version_is_refused() {
        assert!(Envelope::decode(&[2; 80]).is_err());
    }

    /// The next snapshot's number was 0.
    #[test]
    fn a_number_after_which_there_is_none_is_refused() {
        let [from, to] = [Member(0), Member(1)];
        let number = SnapshotNumber(u64::MAX);
        let envelope = Envelope { from, to, incarnation: Incarnation(1), number };
        assert!(Envelope::decode(&envelope.encode()).is_err());
        assert!(serde_json::from_str::<SnapshotNumber>(&u64::MAX.to_string()).is_err());
    }
}
