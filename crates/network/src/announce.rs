//! The frame that tells switches behind which port a guest now lives.

use crate::mac::MacAddress;
use crate::vlan::Vlans;
use std::time::Duration;

/// Pauses between the announcements, as QEMU's own `announce-self` makes them:
/// the first frame goes at once, the repeats guard against its loss.
pub(crate) const PAUSES: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(250),
    Duration::from_millis(350),
];

const ETHERTYPE_RARP: u16 = 0x8035;
const ETHERTYPE_VLAN: u16 = 0x8100;
/// VLANs of a trunk in which a card is announced.
const MOST_TAGGED: usize = 64;
const HARDWARE_ETHERNET: u16 = 1;
const PROTOCOL_IPV4: u16 = 0x0800;
const REQUEST_REVERSE: u16 = 3;

/// Builds a broadcast RARP request (RFC 903) from `mac`, padded to the shortest
/// Ethernet frame. Every switch that carries it learns the port; no host needs
/// to understand it.
pub fn announcement(mac: MacAddress) -> [u8; 60] {
    let mut frame = [0u8; 60];
    frame[0..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_RARP.to_be_bytes());
    frame[14..16].copy_from_slice(&HARDWARE_ETHERNET.to_be_bytes());
    frame[16..18].copy_from_slice(&PROTOCOL_IPV4.to_be_bytes());
    frame[18] = 6; // bytes in a hardware address
    frame[19] = 4; // bytes in a protocol address
    frame[20..22].copy_from_slice(&REQUEST_REVERSE.to_be_bytes());
    frame[22..28].copy_from_slice(&mac.0); // sender
    frame[32..38].copy_from_slice(&mac.0); // target: who am I?
    frame
}

/// An announcement for each VLAN in which a card is: without a tag where the bridge adds or needs
/// none. Not for each of a long trunk's, which would hold a take-over up: there switches learn from
/// what the guest sends.
pub fn announcements(mac: MacAddress, vlans: &Vlans) -> impl Iterator<Item = Vec<u8>> + '_ {
    let frame = announcement(mac);
    let untagged = (vlans.access.is_some() || vlans.is_empty()).then(|| frame.to_vec());
    untagged.into_iter().chain(tagged_ids(vlans).map(move |id| tagged(&frame, id)))
}

/// Whether a card is announced by these where frames of this VLAN are heard, or nothing of it is without
/// a tag. VLAN 0 is none, but a priority.
pub(crate) fn covers(vlans: &Vlans, vlan: Option<u16>) -> bool {
    let Some(id) = vlan.filter(|id| *id != 0) else { return true };
    Some(id) == vlans.access || tagged_ids(vlans).any(|announced| announced == id)
}

fn tagged_ids(vlans: &Vlans) -> impl Iterator<Item = u16> + '_ {
    vlans.trunk.ids().filter(|id| Some(*id) != vlans.access).take(MOST_TAGGED)
}

/// A frame with the tag of a VLAN.
pub(crate) fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let tag = [ETHERTYPE_VLAN.to_be_bytes(), vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_is_the_rarp_request_of_rfc_903() {
        let frame = announcement(MacAddress([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]));
        let expected: [u8; 42] = [
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, // to everybody
            0x52, 0x54, 0x00, 0x12, 0x34, 0x56, // from the guest
            0x80, 0x35, // RARP
            0x00, 0x01, 0x08, 0x00, 0x06, 0x04, 0x00, 0x03, // Ethernet, IPv4, request
            0x52, 0x54, 0x00, 0x12, 0x34, 0x56, 0x00, 0x00, 0x00, 0x00, // sender
            0x52, 0x54, 0x00, 0x12, 0x34, 0x56, 0x00, 0x00, 0x00, 0x00, // target
        ];
        assert_eq!(frame[..42], expected);
        assert_eq!(frame[42..], [0; 18]);
    }

    #[test]
    fn each_vlan_of_a_card_hears_of_it_once() {
        let mac = MacAddress([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
        let plain = announcement(mac).to_vec();
        let of = |access, trunk: &str| {
            let trunk = if trunk.is_empty() { Default::default() } else { trunk.parse().unwrap() };
            announcements(mac, &Vlans { access, trunk }).collect::<Vec<_>>()
        };
        assert_eq!(of(None, ""), std::slice::from_ref(&plain));
        assert_eq!(of(Some(20), ""), std::slice::from_ref(&plain));
        let trunk = of(Some(20), "20-21");
        assert_eq!((&trunk[0], trunk.len()), (&plain, 2));
        assert_eq!(trunk[1][..18], [&plain[..12], &[0x81, 0, 0, 21, 0x80, 0x35]].concat());
        assert_eq!(trunk[1][18..], plain[14..]);
        assert_eq!(of(None, "7").len(), 1);
        assert_eq!(of(None, "1-4094").len(), MOST_TAGGED);
    }
}
