//! The messages of the agent in QEMU to a port, between the frames on a card's socket.
//!
//! QEMU takes the socket for a tap. What it asks of a tap by `ioctl` the agent
//! answers in its place, and passes on as a control message: in order with the
//! frames, and with a descriptor beside it, which nothing that a guest sends can
//! carry. A change of the header's length is answered: the agent holds QEMU up
//! and discards what is on its way to it until then, so that no frame is read
//! with the wrong length. `crates/agent/src/card.rs` writes the same format.

use crate::header::{HEADER_BYTES, Offloads};

/// Environment variable with the numbers of the cards' descriptors, parted by
/// commas: the agent answers for these and no others.
pub const CARDS_VARIABLE: &str = "UNDERSTUDY_CARDS";

/// The answer to a change of the header's length. Shorter than any header, so
/// that no frame is like it.
pub(crate) const ANSWER: [u8; 8] = MAGIC;

const MAGIC: [u8; 8] = *b"USTDYNET";
const KIND_HEADER: u32 = 1;
const KIND_OFFLOADS: u32 = 2;

/// The header's length as QEMU has it on the socket: virtio's without or with
/// the count of buffers at its end, which nobody but the guest's driver reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderLength {
    /// 10 bytes: what QEMU begins with.
    Short,
    /// The header as this crate has it.
    Full,
}

impl HeaderLength {
    /// The length in bytes.
    pub fn bytes(self) -> usize {
        match self {
            HeaderLength::Short => HEADER_BYTES - 2,
            HeaderLength::Full => HEADER_BYTES,
        }
    }
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Headers have this length from the next frame on.
    Header(HeaderLength),
    /// The guest's driver does this itself.
    Offloads(Offloads),
}

impl Control {
    /// Reads 16 bytes: magic, kind and value, the latter two little-endian.
    pub fn decode(bytes: &[u8]) -> Option<Control> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (kind, value) = rest.split_first_chunk::<4>()?;
        let value = u32::from_le_bytes(value.try_into().ok()?);
        match u32::from_le_bytes(*kind) {
            KIND_HEADER => [HeaderLength::Short, HeaderLength::Full]
                .into_iter()
                .find(|length| length.bytes() == value as usize)
                .map(Control::Header),
            KIND_OFFLOADS => Offloads::from_bits(value).map(Control::Offloads),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(kind: u32, value: u32) -> Vec<u8> {
        [&MAGIC[..], &kind.to_le_bytes(), &value.to_le_bytes()].concat()
    }

    #[test]
    fn messages_are_read_and_nothing_else_is() {
        let read = |kind, value| Control::decode(&message(kind, value));
        assert_eq!(read(1, 10), Some(Control::Header(HeaderLength::Short)));
        assert_eq!(read(1, 12), Some(Control::Header(HeaderLength::Full)));
        assert_eq!(read(1, 20), None);
        let all = Offloads::from_bits(0x0f).unwrap();
        assert_eq!(read(2, 0x0f), Some(Control::Offloads(all)));
        assert_eq!(read(2, 0x10), None);
        assert_eq!(read(3, 0), None);
        assert_eq!(Control::decode(&message(1, 10)[..15]), None);
        assert_eq!(Control::decode(&[message(1, 10), vec![0]].concat()), None);
        assert_eq!(Control::decode(&ANSWER), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
            kind in 0u32..4,
            value in any::<u32>(),
        ) {
            let _ = Control::decode(&bytes);
            let _ = Control::decode(&message(kind, value));
            let _ = Control::decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
