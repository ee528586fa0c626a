//! The kind of a frame in flight, as far as the order of starts needs to know.

use serde::{Deserialize, Serialize};

/// The kind of a frame, by what its sender waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Segment {
    /// TCP data, SYN or FIN: the sender's timer runs until it is acknowledged.
    Data,
    /// TCP that only acknowledges.
    Acknowledgement,
    /// A frame of any other kind: no timer of the kind that doubles.
    Other,
}

const FIN_OR_SYN: u8 = 0b11;
const VLAN: u16 = 0x8100;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TCP: u8 = 6;

impl Segment {
    /// Parses an Ethernet frame, without virtio's header before it. What is not understood, or cut
    /// short, is [`Segment::Other`].
    pub fn of(frame: &[u8]) -> Segment {
        tcp(frame).map_or(Segment::Other, |(tcp, length)| {
            let (offset, flags) = (usize::from(tcp[12] >> 4) * 4, tcp[13]);
            match flags & FIN_OR_SYN != 0 || length > offset {
                true => Segment::Data,
                false => Segment::Acknowledgement,
            }
        })
    }
}

/// The TCP header, 20 bytes at least, and the length of header and data.
fn tcp(frame: &[u8]) -> Option<(&[u8], usize)> {
    let kind = |at: usize| frame.get(at..at + 2).map(|b| u16::from_be_bytes([b[0], b[1]]));
    let (kind, ip) = match kind(12)? {
        VLAN => (kind(16)?, frame.get(18..)?),
        other => (other, frame.get(14..)?),
    };
    let word = |at: usize| Some(usize::from(u16::from_be_bytes([*ip.get(at)?, *ip.get(at + 1)?])));
    let (header, length) = match kind {
        // A fragment that is not the first has no TCP header.
        IPV4 if *ip.get(9)? == TCP && word(6)? & 0x1fff == 0 => {
            let header = usize::from(ip[0] & 0x0f) * 4;
            (header, word(2)?.checked_sub(header)?)
        }
        // Extension headers are rare, and then no order is asked for.
        IPV6 if *ip.get(6)? == TCP => (40, word(4)?),
        _ => return None,
    };
    let tcp = ip.get(header..)?;
    (tcp.len() >= 20).then_some((tcp, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frame(kind: u16, protocol: u8, flags: u8, data: usize) -> Vec<u8> {
        let mut frame = [&[0; 12][..], &kind.to_be_bytes()].concat();
        let length = (20 + data) as u16;
        match kind {
            IPV6 => {
                frame.extend([0x60, 0, 0, 0]);
                frame.extend(length.to_be_bytes());
                frame.extend([protocol, 64]);
                frame.extend([0; 32]);
            }
            _ => {
                frame.extend([0x45, 0]);
                frame.extend((20 + length).to_be_bytes());
                frame.extend([0, 0, 0x40, 0, 64, protocol]);
                frame.extend([0; 10]);
            }
        }
        frame.extend([0; 12]);
        frame.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame.extend(vec![1; data]);
        // Ethernet fills short frames up: that is no data.
        frame.resize(frame.len().max(60), 0);
        frame
    }

    #[test]
    fn data_and_acknowledgements_are_told_apart() {
        for kind in [IPV4, IPV6] {
            assert_eq!(Segment::of(&frame(kind, TCP, 0x10, 0)), Segment::Acknowledgement);
            assert_eq!(Segment::of(&frame(kind, TCP, 0x18, 1)), Segment::Data);
            assert_eq!(Segment::of(&frame(kind, TCP, 0x12, 0)), Segment::Data, "SYN, ACK");
            assert_eq!(Segment::of(&frame(kind, TCP, 0x11, 0)), Segment::Data, "FIN, ACK");
            assert_eq!(Segment::of(&frame(kind, 17, 0x10, 5)), Segment::Other);
        }
        assert_eq!(Segment::of(&frame(0x0806, TCP, 0, 0)), Segment::Other, "ARP");
        let plain = frame(IPV4, TCP, 0x18, 9);
        let tagged = [&plain[..12], &[0x81, 0, 0, 7], &plain[12..]].concat();
        assert_eq!(Segment::of(&tagged), Segment::Data);
    }

    proptest! {
        #[test]
        fn any_bytes_are_something(
            bytes in proptest::collection::vec(any::<u8>(), 0..90), cut in 0..74usize,
        ) {
            let _ = Segment::of(&bytes);
            prop_assert_eq!(Segment::of(&frame(IPV4, TCP, 0x18, 20)[..cut.min(53)]), Segment::Other);
        }
    }
}
