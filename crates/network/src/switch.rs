//! Frames between the cards of a group (Remus, section 5: VMs that take their
//! checkpoints together).
//!
//! Output commit holds what leaves the group. What a member sends to another
//! one stays inside: both are rolled back together, to a cut that no frame
//! crosses backwards, because every member stands still before any runs on. So
//! it is handed from port to port at once, past the output buffer and the bridge.
//! Only a long TCP segment for a card that takes none goes the way of all output:
//! the kernel cuts it up.

use crate::fabric::addresses;
use crate::mac::MacAddress;
use crate::port::Port;
use crate::shared::Shared;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The cards of a group on one bridge, in the same VLANs. Others are on different networks, as far
/// as is known here, and do not reach each other but through their bridges.
#[derive(Debug)]
pub struct Switch {
    cards: Vec<Card>,
}

#[derive(Debug)]
struct Card {
    mac: MacAddress,
    port: Weak<Shared>,
}

/// The way that a frame goes that a member sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// The frame goes out of the group: it waits for its commit.
    Outside,
    /// The frame goes to this card, now, and nowhere else.
    Inside(usize),
    /// The frame goes to every other card now, and outside when it is committed.
    Both,
}

impl Switch {
    /// Hands frames between these ports from one to the other from now on, each
    /// port until its gate is opened or shut. To be called while every member
    /// stands still, when their output is held.
    pub fn connect<'a>(ports: impl IntoIterator<Item = &'a Port>) {
        let mut networks: BTreeMap<_, Vec<&Port>> = BTreeMap::new();
        for port in ports {
            networks.entry((port.bridge(), port.vlans())).or_default().push(port);
        }
        for ports in networks.values() {
            let card = |port: &&Port| Card { mac: port.mac(), port: port.downgrade() };
            let switch = Arc::new(Switch { cards: ports.iter().map(card).collect() });
            for (place, port) in ports.iter().enumerate() {
                port.take_seat(Seat { switch: switch.clone(), place });
            }
        }
    }

    /// A source that is not the card's own is somebody behind the guest, whom
    /// the bridge must get to know: nothing is special about those frames.
    fn route(&self, from: usize, packet: &[u8]) -> Route {
        let Some((target, source)) = addresses(packet) else { return Route::Outside };
        if source != self.cards[from].mac {
            return Route::Outside;
        }
        if target.is_multicast() {
            return Route::Both;
        }
        let to = self.cards.iter().position(|card| card.mac == target);
        to.filter(|&to| to != from).map_or(Route::Outside, Route::Inside)
    }
}

/// A port's place at the switch.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    switch: Arc<Switch>,
    place: usize,
}

impl Seat {
    /// Passes a frame of this seat's card to the members that it is for.
    /// Returns whether it must go out as well.
    pub fn pass(&self, packet: &[u8]) -> bool {
        match self.switch.route(self.place, packet) {
            Route::Outside => true,
            Route::Inside(to) => !self.give(to, packet),
            Route::Both => {
                for to in (0..self.switch.cards.len()).filter(|&to| to != self.place) {
                    // Long frames are TCP's, never for many: whatever cannot be
                    // given here is not what a driver sends.
                    self.give(to, packet);
                }
                true
            }
        }
    }

    /// Returns whether the card could take the frame.
    fn give(&self, to: usize, packet: &[u8]) -> bool {
        // A port that is gone is a machine that has ended.
        self.switch.cards[to].port.upgrade().is_none_or(|port| port.take_inside(packet))
    }

    /// Whether a frame that came over the bridge is another member's that has been
    /// handed over long before. One for this card alone has not: it went out in
    /// place of that.
    pub fn is_echo(&self, packet: &[u8]) -> bool {
        let own = self.switch.cards[self.place].mac;
        let others = self.switch.cards.iter().map(|card| card.mac).filter(|mac| *mac != own);
        addresses(packet).is_some_and(|(target, source)| {
            target != own && others.into_iter().any(|mac| mac == source)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::HEADER_BYTES;

    fn mac(last: u8) -> MacAddress {
        MacAddress([0x52, 0x54, 0, 0, 0, last])
    }

    fn frame(to: MacAddress, from: MacAddress) -> Vec<u8> {
        [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5]].concat()
    }

    fn switch() -> Arc<Switch> {
        let card = |last| Card { mac: mac(last), port: Weak::new() };
        Arc::new(Switch { cards: (0..3).map(card).collect() })
    }

    #[test]
    fn only_what_is_for_members_alone_stays_inside() {
        let switch = switch();
        assert_eq!(switch.route(0, &frame(mac(2), mac(0))), Route::Inside(2));
        assert_eq!(switch.route(0, &frame(mac(9), mac(0))), Route::Outside, "a stranger");
        assert_eq!(switch.route(0, &frame(mac(0), mac(0))), Route::Outside, "itself");
        assert_eq!(switch.route(0, &frame(MacAddress([0xff; 6]), mac(0))), Route::Both);
        assert_eq!(switch.route(0, &frame(mac(1), mac(7))), Route::Outside, "sent for another");
        assert_eq!(switch.route(0, &[1; HEADER_BYTES + 11]), Route::Outside, "no whole header");
    }

    #[test]
    fn only_other_members_frames_are_echoes() {
        let seat = Seat { switch: switch(), place: 0 };
        assert!(seat.is_echo(&frame(MacAddress([0xff; 6]), mac(1))));
        assert!(!seat.is_echo(&frame(mac(0), mac(9))), "a stranger's");
        assert!(!seat.is_echo(&frame(mac(1), mac(0))), "its own, from a bridge that reflects");
        assert!(!seat.is_echo(&frame(mac(0), mac(1))), "went out in its place: too long to give");
        assert!(!seat.is_echo(&[0; 3]));
    }
}
