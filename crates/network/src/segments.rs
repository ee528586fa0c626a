//! The cutting of long TCP segments, as a kernel does it for a card that takes none.

use crate::header::{HEADER_BYTES, MAX_FRAME_BYTES, SegmentBytes, ethernet};

const VLAN: u16 = 0x8100;
const IP4: u16 = 0x0800;
const IP6: u16 = 0x86dd;
const TCP: u8 = 6;
/// Flags of TCP that only the last piece keeps, and only the first.
const FIN_AND_PUSH: u8 = 0x09;
const CWR: u8 = 0x80;

/// The offsets at which the parts of a TCP segment begin in its frame.
struct Layout {
    ip: usize,
    tcp: usize,
    payload: usize,
    is_ip4: bool,
}

impl Layout {
    fn of(frame: &[u8]) -> Option<Layout> {
        let mut ip = 14;
        let mut kind = word(frame, 12)?;
        if kind == VLAN {
            (ip, kind) = (18, word(frame, 16)?);
        }
        let (tcp, protocol) = match kind {
            IP4 => (ip + usize::from(frame.get(ip)? & 0x0f) * 4, *frame.get(ip + 9)?),
            // With other headers between these two no driver asks for it.
            IP6 => (ip + 40, *frame.get(ip + 6)?),
            _ => return None,
        };
        let header = usize::from(*frame.get(tcp + 12)? >> 4) * 4;
        let payload = tcp + header;
        let fits = protocol == TCP && tcp >= ip + 20 && header >= 20 && payload < frame.len();
        fits.then_some(Layout { ip, tcp, payload, is_ip4: kind == IP4 })
    }
}

/// The frames that a long TCP segment stands for, each finished and with a header before it, and made
/// when it is asked for. None if it is not such a segment.
pub(crate) fn cut_up(packet: &[u8]) -> Option<impl Iterator<Item = Vec<u8>>> {
    let frame = ethernet(packet);
    let size = SegmentBytes::of(packet)?.get();
    let layout = Layout::of(frame)?;
    if frame.len() > MAX_FRAME_BYTES {
        return None;
    }
    let (headers, payload) = frame.split_at(layout.payload);
    Some(payload.chunks(size).enumerate().map(move |(n, chunk)| {
        let is_last = (n + 1) * size >= payload.len();
        piece(headers, &layout, (n, n * size), chunk, is_last)
    }))
}

fn piece(
    headers: &[u8],
    layout: &Layout,
    (n, offset): (usize, usize),
    chunk: &[u8],
    is_last: bool,
) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(headers);
    packet.extend_from_slice(chunk);
    let frame = &mut packet[HEADER_BYTES..];
    let tcp_bytes = (frame.len() - layout.tcp) as u16;
    finish_tcp(&mut frame[layout.tcp..], (n, offset), is_last);
    let addresses = if layout.is_ip4 { 12..20 } else { 8..40 };
    let addresses = layout.ip + addresses.start..layout.ip + addresses.end;
    let pseudo = sum(&frame[addresses]) + u64::from(TCP) + u64::from(tcp_bytes);
    let checksum = !folded(pseudo + sum(&frame[layout.tcp..]));
    frame[layout.tcp + 16..][..2].copy_from_slice(&checksum.to_be_bytes());
    finish_ip(&mut frame[layout.ip..], layout, n);
    packet
}

/// Sequence number and flags; the checksum is left at zero.
fn finish_tcp(tcp: &mut [u8], (n, offset): (usize, usize), is_last: bool) {
    let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
    tcp[4..8].copy_from_slice(&sequence.wrapping_add(offset as u32).to_be_bytes());
    if !is_last {
        tcp[13] &= !FIN_AND_PUSH;
    }
    if n > 0 {
        tcp[13] &= !CWR;
    }
    tcp[16..18].fill(0);
}

fn finish_ip(ip: &mut [u8], layout: &Layout, n: usize) {
    if !layout.is_ip4 {
        let length = (ip.len() - 40) as u16;
        ip[4..6].copy_from_slice(&length.to_be_bytes());
        return;
    }
    let (length, id) = (ip.len() as u16, u16::from_be_bytes([ip[4], ip[5]]));
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    ip[4..6].copy_from_slice(&id.wrapping_add(n as u16).to_be_bytes());
    ip[10..12].fill(0);
    let checksum = !folded(sum(&ip[..layout.tcp - layout.ip]));
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
}

fn word(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]))
}

/// The sum of RFC 1071, not folded yet.
fn sum(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks_exact(2);
    let last = pairs.remainder().first().map_or(0, |&byte| u64::from(byte) << 8);
    pairs.fold(last, |sum, pair| sum + u64::from(u16::from_be_bytes([pair[0], pair[1]])))
}

fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum as u16
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Regression: root in a guest had its whole cluster wait while each of its frames became 60 000.
    #[test]
    fn no_segment_stands_for_more_frames_than_a_system_sends() {
        let of_size = |size| cut_up(&segment(true, false, &[7; 60_000], size)).map(Iterator::count);
        for too_small in [0, 1, SegmentBytes::LEAST - 1] {
            assert_eq!(of_size(too_small), None, "{too_small}");
        }
        assert_eq!(of_size(SegmentBytes::LEAST), Some(1667));
    }

    /// A segment of these bytes over IPv4 or IPv6, whose checksums are left to others.
    pub(crate) fn segment(is_ip4: bool, vlan: bool, payload: &[u8], size: u16) -> Vec<u8> {
        let mut packet = vec![1, 1, 0, 0, size.to_le_bytes()[0], size.to_le_bytes()[1]];
        packet.resize(HEADER_BYTES + 12, 0);
        if vlan {
            packet.extend([0x81, 0, 0, 7]);
        }
        packet.extend(if is_ip4 { IP4 } else { IP6 }.to_be_bytes());
        if is_ip4 {
            packet.extend([0x45, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 64, TCP, 0, 0]);
            packet.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        } else {
            packet.extend([0x60, 0, 0, 0, 0, 0, TCP, 64]);
            packet.extend([0xfd; 32]);
        }
        packet.extend([0x1b, 0x58, 0x1b, 0x59, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1]);
        packet.extend([0x60, 0x99, 0xff, 0xff, 0xaa, 0xbb, 0, 0, 1, 1, 1, 1]);
        packet.extend(payload);
        packet
    }

    /// Checks a piece's sums and lengths; gives its sequence number, flags and payload.
    fn read(packet: &[u8]) -> (u32, u8, Vec<u8>) {
        assert_eq!(packet[..HEADER_BYTES], [0; HEADER_BYTES], "finished");
        let frame = ethernet(packet);
        let layout = Layout::of(frame).unwrap();
        let (ip, tcp) = (&frame[layout.ip..], &frame[layout.tcp..]);
        let addresses = if layout.is_ip4 {
            assert_eq!(folded(sum(&ip[..20])), 0xffff);
            assert_eq!(usize::from(word(ip, 2).unwrap()), ip.len());
            &ip[12..20]
        } else {
            assert_eq!(usize::from(word(ip, 4).unwrap()), ip.len() - 40);
            &ip[8..40]
        };
        let pseudo = sum(addresses) + u64::from(TCP) + tcp.len() as u64;
        assert_eq!(folded(pseudo + sum(tcp)), 0xffff);
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        (sequence, tcp[13], frame[layout.payload..].to_vec())
    }

    proptest! {
        #[test]
        fn the_pieces_are_the_segment(
            is_ip4 in any::<bool>(), vlan in any::<bool>(), size in SegmentBytes::LEAST..3000,
            payload in proptest::collection::vec(any::<u8>(), 1..9000),
        ) {
            let whole = segment(is_ip4, vlan, &payload, size);
            let pieces: Vec<_> = cut_up(&whole).unwrap().collect();
            let mut joined = Vec::new();
            for (n, piece) in pieces.iter().enumerate() {
                let (sequence, flags, part) = read(piece);
                prop_assert_eq!(sequence, 0xffff_ff00_u32.wrapping_add(joined.len() as u32));
                let last = n + 1 == pieces.len();
                prop_assert_eq!(flags & FIN_AND_PUSH != 0, last);
                prop_assert_eq!(flags & CWR != 0, n == 0);
                prop_assert!(part.len() == usize::from(size) || last);
                joined.extend(part);
            }
            prop_assert_eq!(joined, payload);
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200), is_ip4 in any::<bool>(),
        ) {
            let _ = cut_up(&bytes).map(Iterator::count);
            if let Some(kind) = bytes.get_mut(HEADER_BYTES + 12..HEADER_BYTES + 14) {
                kind.copy_from_slice(&if is_ip4 { IP4 } else { IP6 }.to_be_bytes());
            }
            let _ = cut_up(&bytes).map(Iterator::count);
        }
    }
}
