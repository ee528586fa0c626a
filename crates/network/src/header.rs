//! The header that goes before each frame: virtio's network header, which says what is left
//! to do about the frame (`struct virtio_net_hdr_mrg_rxbuf` of
//! `<linux/virtio_net.h>`, little-endian). Whoever carries the frame may pass
//! that work on to whoever takes it, as far as that one has agreed to.

use std::borrow::Cow;

/// Bytes of the header as this crate and its taps have it.
pub const HEADER_BYTES: usize = 12;

/// The longest frame that a card may send: the largest IP packet, an Ethernet
/// header and a VLAN tag.
pub const MAX_FRAME_BYTES: usize = 65_535 + 14 + 4;

/// The longest frame with its header.
pub const MAX_BYTES: usize = HEADER_BYTES + MAX_FRAME_BYTES;

const FLAG_NEEDS_SUM: u8 = 1;
const SEGMENT_TCP4: u8 = 1;
const SEGMENT_TCP6: u8 = 4;
const SEGMENT_ECN: u8 = 0x80;

/// Work on frames that a guest's driver has offered to do itself: the kernel's
/// `TUN_F_…` bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(u32);

impl Offloads {
    /// No offloads: frames come finished, 1514 bytes at most.
    pub const NONE: Offloads = Offloads(0);
    /// Checksums.
    pub const SUMS: Offloads = Offloads(0x01);
    /// Offload of long TCP segments over IPv4, IPv6, and such with congestion marks.
    pub const TCP4: Offloads = Offloads(0x02);
    /// See [`TCP4`](Self::TCP4).
    pub const TCP6: Offloads = Offloads(0x04);
    /// See [`TCP4`](Self::TCP4).
    pub const TCP_ECN: Offloads = Offloads(0x08);

    /// Reads the kernel's bits; none if there is one that cards do not offer. Of
    /// UDP no long frames are taken: they might be for many, and not all members
    /// of a group may want them long.
    pub fn from_bits(bits: u32) -> Option<Offloads> {
        (bits & !0x0f == 0).then_some(Offloads(bits))
    }

    /// The kernel's bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// The offloads of both.
    pub fn and(self, other: Offloads) -> Offloads {
        Offloads(self.0 | other.0)
    }

    fn contains(self, other: Offloads) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The frame behind a header; empty if there is none.
pub fn ethernet(packet: &[u8]) -> &[u8] {
    packet.get(HEADER_BYTES..).unwrap_or_default()
}

/// The frame as a card with these offloads can take it: as it is, or with its
/// checksum filled in. None if only the kernel can make it fit, or judge it.
pub(crate) fn fitted(packet: &[u8], takes: Offloads) -> Option<Cow<'_, [u8]>> {
    let header = Header::of(packet)?;
    if header.segments == 0 && header.flags & FLAG_NEEDS_SUM == 0 {
        return Some(Cow::Borrowed(packet));
    }
    let frame = ethernet(packet);
    let (start, at) = (header.sum_start, header.sum_start + header.sum_offset);
    if header.flags & FLAG_NEEDS_SUM == 0 || at + 2 > frame.len() {
        return None;
    }
    if let Some(needed) = header.needed() {
        return takes.contains(needed?).then_some(Cow::Borrowed(packet));
    }
    if takes.contains(Offloads::SUMS) {
        return Some(Cow::Borrowed(packet));
    }
    let sum = internet_sum(&frame[start..]);
    let mut finished = packet.to_vec();
    finished[..HEADER_BYTES].fill(0);
    finished[HEADER_BYTES + at..][..2].copy_from_slice(&sum.to_be_bytes());
    Some(Cow::Owned(finished))
}

/// The payload of each piece that a long TCP segment stands for. Each piece costs whoever cuts it up,
/// and a guest chooses the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentBytes(u16);

impl SegmentBytes {
    /// Linux sends no less than 48 (`TCP_MIN_SND_MSS`), of which timestamps take 12.
    pub const LEAST: u16 = 36;

    /// What a header says; none if no system asks for it.
    pub fn of(packet: &[u8]) -> Option<SegmentBytes> {
        Header::of(packet)?.segment_bytes
    }

    fn new(bytes: u16) -> Option<SegmentBytes> {
        (bytes >= SegmentBytes::LEAST).then_some(SegmentBytes(bytes))
    }

    pub fn get(self) -> usize {
        self.0.into()
    }
}

struct Header {
    flags: u8,
    segments: u8,
    segment_bytes: Option<SegmentBytes>,
    sum_start: usize,
    sum_offset: usize,
}

impl Header {
    fn of(packet: &[u8]) -> Option<Header> {
        let bytes = packet.first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Some(Header {
            flags: bytes[0],
            segments: bytes[1],
            segment_bytes: SegmentBytes::new(word(4)),
            sum_start: word(6).into(),
            sum_offset: word(8).into(),
        })
    }

    /// The offload that a long frame asks of its taker; none if it is not long, and none within if
    /// nobody has agreed to such.
    fn needed(&self) -> Option<Option<Offloads>> {
        let marks =
            if self.segments & SEGMENT_ECN == 0 { Offloads::NONE } else { Offloads::TCP_ECN };
        let kind = match self.segments & !SEGMENT_ECN {
            0 => return None,
            SEGMENT_TCP4 => Offloads::TCP4,
            SEGMENT_TCP6 => Offloads::TCP6,
            _ => return Some(None),
        };
        Some(self.segment_bytes.map(|_| Offloads::SUMS.and(kind).and(marks)))
    }
}

/// The Internet checksum (RFC 1071), as it is written into a packet: never zero,
/// which for UDP would mean that there is none.
fn internet_sum(bytes: &[u8]) -> u16 {
    let pairs = bytes.chunks_exact(2);
    let last = pairs.remainder().first().map_or(0, |&byte| u64::from(byte) << 8);
    let mut sum =
        pairs.fold(last, |sum, pair| sum + u64::from(u16::from_be_bytes([pair[0], pair[1]])));
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    match !(sum as u16) {
        0 => 0xffff,
        sum => sum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: Offloads = Offloads(0x0f);

    fn packet(header: [u8; HEADER_BYTES], frame: &[u8]) -> Vec<u8> {
        [&header[..], frame].concat()
    }

    fn long(kind: u8) -> Vec<u8> {
        packet([1, kind, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0], &[7; 3000])
    }

    #[test]
    fn a_finished_frame_suits_every_card() {
        let plain = packet([0; HEADER_BYTES], &[1; 60]);
        assert_eq!(fitted(&plain, Offloads::NONE).as_deref(), Some(&plain[..]));
        assert_eq!(fitted(&[0; 5], ALL), None, "no whole header");
    }

    #[test]
    fn a_long_frame_suits_only_who_agreed_to_its_kind() {
        for (kind, bits) in [(1, 0x03), (4, 0x05), (0x81, 0x0b), (0x84, 0x0d)] {
            let takes = Offloads::from_bits(bits).unwrap();
            assert!(fitted(&long(kind), takes).is_some(), "{kind}");
            assert!(fitted(&long(kind), ALL).is_some(), "{kind}");
            for missing in 0..4 {
                let less = Offloads(bits & !(1 << missing));
                assert!(less == takes || fitted(&long(kind), less).is_none(), "{kind} {less:?}");
            }
        }
        assert_eq!(fitted(&long(3), ALL), None, "UDP");
        assert_eq!(fitted(&long(5), ALL), None, "UDP of another kind");
        for too_small in [0, SegmentBytes::LEAST - 1] {
            let mut packet = long(1);
            packet[4..6].copy_from_slice(&too_small.to_le_bytes());
            assert_eq!(fitted(&packet, ALL), None, "{too_small}");
        }
        let mut no_sum = long(1);
        no_sum[0] = 0;
        assert_eq!(fitted(&no_sum, ALL), None);
    }

    /// A UDP packet whose checksum field holds that of the pseudo header alone,
    /// as a kernel leaves it.
    #[test]
    fn a_missing_checksum_is_filled_in_for_who_wants_it_finished() {
        let mut frame = vec![0; 34];
        frame.extend([0x1b, 0x58, 0x1b, 0x59, 0, 11, 0x12, 0x34, b'a', b'b', b'c']);
        let part = packet([1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0], &frame);
        assert_eq!(fitted(&part, ALL).as_deref(), Some(&part[..]));
        let whole = fitted(&part, Offloads::NONE).unwrap();
        assert_eq!(whole[..HEADER_BYTES], [0; HEADER_BYTES]);
        // 1b58 + 1b59 + 000b + 1234 + 6162 + 6300 = 10d52 -> 0d53; its complement:
        assert_eq!(whole[HEADER_BYTES + 40..][..2], [0xf2, 0xac]);
        let mut beyond = part.clone();
        beyond[8] = 10;
        assert_eq!(fitted(&beyond, ALL), None, "a place behind the frame's end");
    }

    #[test]
    fn a_checksum_is_never_written_as_none() {
        assert_eq!(internet_sum(&[0xff, 0xff]), 0xffff);
        assert_eq!(internet_sum(&[]), 0xffff);
        assert_eq!(internet_sum(&[0x12]), 0xedff);
    }

    #[test]
    fn only_offloads_that_cards_offer_are_known() {
        assert_eq!(Offloads::from_bits(0x0f).map(Offloads::bits), Some(0x0f));
        for udp in [0x10, 0x20, 0x41] {
            assert_eq!(Offloads::from_bits(udp), None);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            takes in 0u32..16,
        ) {
            let _ = fitted(&bytes, Offloads(takes));
        }
    }
}
