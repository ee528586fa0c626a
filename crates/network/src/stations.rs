//! Addresses in whose names a guest sends beside its cards' own: of bridges, macvlans and containers in
//! it; and the cards' own in VLANs that the guest itself tags. Switches must learn of these, too, where
//! the guest is after a take-over.

use crate::announce::{announcement, covers, tagged};
use crate::header::ethernet;
use crate::mac::MacAddress;
use crate::vlan::Vlans;
use std::time::Duration;
use understudy_protocol::{CardIndex, Time};

/// The number of stations of a card that are remembered, those that sent last.
pub const MOST_STATIONS: usize = 64;
/// A switch has forgotten an address that was silent for so long (IEEE 802.1D's default), and floods.
const REMEMBERED: Duration = Duration::from_secs(300);

const ADDRESS_BYTES: usize = 6;

/// An address behind a card, in the VLAN that its frames name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Station {
    card: CardIndex,
    mac: MacAddress,
    vlan: Option<u16>,
}

impl Station {
    /// The sender of a frame with its header; none of one that no switch learns from.
    fn of(card: CardIndex, packet: &[u8]) -> Option<Station> {
        let frame = ethernet(packet);
        let mac = MacAddress(*frame.get(ADDRESS_BYTES..)?.first_chunk()?);
        let vlan = match frame.get(2 * ADDRESS_BYTES..)?.first_chunk()? {
            [0x81, 0x00, high, low] => Some(u16::from_be_bytes([high & 0x0f, *low])),
            _ => None,
        };
        let sends = !mac.is_multicast() && mac.0 != [0; ADDRESS_BYTES];
        sends.then_some(Station { card, mac, vlan })
    }

    /// The card that it is behind.
    pub fn card(&self) -> CardIndex {
        self.card
    }

    /// The frame that announces it.
    pub(crate) fn announcement(&self) -> Vec<u8> {
        let frame = announcement(self.mac).to_vec();
        match self.vlan {
            Some(vlan) => tagged(&frame, vlan),
            None => frame,
        }
    }
}

/// The stations of a guest that have sent of late.
#[derive(Clone, Debug)]
pub struct Stations {
    /// The cards' own addresses, which are announced anyway in the VLANs that are theirs.
    own: Vec<(MacAddress, Vlans)>,
    seen: Vec<(Station, Time)>,
}

impl Stations {
    /// No stations yet, of a guest whose cards have these addresses, and are in these VLANs.
    pub fn new(own: Vec<(MacAddress, Vlans)>) -> Stations {
        Stations { own, seen: Vec::new() }
    }

    /// Whether a card's own announcements tell of it.
    fn is_announced(&self, station: &Station) -> bool {
        let mut own = self.own.iter();
        own.any(|(mac, vlans)| *mac == station.mac && covers(vlans, station.vlan))
    }

    /// The guest has sent a frame, with its header, through a card.
    pub fn sent(&mut self, now: Time, card: CardIndex, packet: &[u8]) {
        let Some(station) = Station::of(card, packet).filter(|it| !self.is_announced(it)) else {
            return;
        };
        if let Some((_, last)) = self.seen.iter_mut().find(|(known, _)| *known == station) {
            *last = now;
            return;
        }
        self.seen.retain(|(_, last)| now - *last <= REMEMBERED);
        let of_card = self.seen.iter().enumerate().filter(|(_, (it, _))| it.card == card);
        if of_card.clone().count() >= MOST_STATIONS {
            let oldest = of_card.min_by_key(|(_, (_, last))| *last).map(|(at, _)| at);
            if let Some(at) = oldest {
                self.seen.swap_remove(at);
            }
        }
        self.seen.push((station, now));
    }

    /// The guest was sent a frame, with its header, through a card: whoever sent that is not behind the card any more.
    /// An address that machines share, as routers do, is not to be announced for one that has lost it.
    pub fn received(&mut self, card: CardIndex, packet: &[u8]) {
        if let Some(elsewhere) = Station::of(card, packet) {
            self.seen.retain(|(known, _)| *known != elsewhere);
        }
    }

    /// The stations that are to be announced.
    pub fn get(&self, now: Time) -> Vec<Station> {
        let fresh = self.seen.iter().filter(|(_, last)| now - *last <= REMEMBERED);
        fresh.map(|(station, _)| *station).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::HEADER_BYTES;

    const CARD: CardIndex = CardIndex(0);
    const OWN: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 1]);

    fn at(seconds: u64) -> Time {
        Time(Duration::from_secs(seconds))
    }

    fn mac(number: u8) -> MacAddress {
        MacAddress([2, 0x42, 0, 0, 0, number])
    }

    fn packet(from: MacAddress, tag: &[u8]) -> Vec<u8> {
        [&[0; HEADER_BYTES][..], &[0xff; 6], &from.0, tag, &[8, 0], &[0; 46]].concat()
    }

    #[test]
    fn whoever_is_behind_a_card_is_remembered_with_its_vlan() {
        let mut stations = Stations::new(vec![(OWN, Vlans::default())]);
        stations.sent(at(1), CARD, &packet(OWN, &[]));
        stations.sent(at(1), CARD, &packet(MacAddress([0xff; 6]), &[]));
        stations.sent(at(1), CARD, &packet(MacAddress([0; 6]), &[]));
        stations.sent(at(1), CARD, &[0; HEADER_BYTES + 10]);
        assert_eq!(stations.get(at(1)), [], "its own, and what no switch learns");
        stations.sent(at(1), CARD, &packet(mac(1), &[]));
        stations.sent(at(2), CARD, &packet(mac(1), &[]));
        stations.sent(at(2), CARD, &packet(mac(2), &[0x81, 0, 0x60, 7]));
        let found = stations.get(at(2));
        let frames: Vec<_> = found.iter().map(Station::announcement).collect();
        let plain = announcement(mac(2)).to_vec();
        assert_eq!(frames[0], announcement(mac(1)));
        assert_eq!(frames[1], [&plain[..12], &[0x81, 0, 0, 7], &plain[12..]].concat());
        assert_eq!(frames.len(), 2);
    }

    /// What tags its frames itself was not heard in its VLANs until it sent something there.
    #[test]
    fn an_own_address_is_remembered_in_vlans_in_which_its_card_is_not_announced() {
        let tag = |id: u16| [&[0x81, 0][..], &id.to_be_bytes()].concat();
        let remembered = |access, trunk: &str, ids: &[u16]| {
            let trunk = if trunk.is_empty() { Default::default() } else { trunk.parse().unwrap() };
            let mut stations = Stations::new(vec![(OWN, Vlans { access, trunk })]);
            stations.sent(at(1), CARD, &packet(OWN, &[]));
            ids.iter().for_each(|id| stations.sent(at(1), CARD, &packet(OWN, &tag(*id))));
            stations.get(at(1)).iter().map(|it| it.vlan).collect::<Vec<_>>()
        };
        assert_eq!(remembered(None, "", &[0, 7, 9]), [Some(7), Some(9)], "0 is a priority");
        assert_eq!(remembered(Some(20), "20-21", &[20, 21]), []);
        assert_eq!(
            remembered(None, "1-4094", &[64, 65]),
            [Some(65)],
            "the first of them are announced"
        );
    }

    /// The address was announced by the take-over, and the switches sent its frames to a guest that
    /// did not want them.
    #[test]
    fn an_address_that_sends_from_elsewhere_is_behind_the_card_no_more() {
        let mut stations = Stations::new(vec![(OWN, Vlans::default())]);
        stations.sent(at(1), CARD, &packet(mac(1), &[]));
        stations.sent(at(1), CARD, &packet(mac(2), &[]));
        stations.received(CardIndex(1), &packet(mac(1), &[]));
        assert_eq!(stations.get(at(2)).len(), 2, "another card hears what the guest itself sends");
        stations.received(CARD, &packet(mac(1), &[0x81, 0, 0, 7]));
        assert_eq!(stations.get(at(2)).len(), 2, "in another VLAN it is another");
        stations.received(CARD, &packet(mac(1), &[]));
        let left = stations.get(at(2));
        assert_eq!(left.iter().map(|it| it.mac).collect::<Vec<_>>(), [mac(2)]);
        stations.sent(at(3), CARD, &packet(mac(1), &[]));
        assert_eq!(stations.get(at(3)).len(), 2, "and it may come back");
    }

    #[test]
    fn so_many_are_remembered_and_for_so_long() {
        let mut stations = Stations::new(vec![(OWN, Vlans::default())]);
        for number in 0..=MOST_STATIONS as u8 {
            stations.sent(at(number.into()), CARD, &packet(mac(number), &[]));
        }
        stations.sent(at(65), CardIndex(1), &packet(mac(200), &[]));
        let found = stations.get(at(65));
        assert_eq!(found.len(), MOST_STATIONS + 1, "of each card");
        assert!(!found.iter().any(|it| it.mac == mac(0)), "the one that was silent longest");
        assert_eq!(stations.get(at(64 + 300)).len(), 2);
        assert_eq!(stations.get(at(66 + 300)), []);
    }
}
