//! Roster of members: which cards each has, and where it runs.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use understudy_network::{MacAddress, addresses};
use understudy_protocol::HostName;
use understudy_protocol::{CardIndex, Generation};
use understudy_qemu::definition::CardDefinition;
use understudy_snapshot::Member;

/// A member and its cards. Bridges of one name are one network, on whatever hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberCards {
    pub member: Member,
    /// Generation in which its host owns it.
    pub generation: Generation,
    pub cards: Vec<CardDefinition>,
}

/// Place where a member runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Here,
    Host(HostName),
}

#[derive(Debug)]
struct Known {
    place: Place,
    generation: Generation,
    cards: Vec<CardDefinition>,
}

/// Destination of a frame that a member sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// A sender or receiver outside the cluster.
    Outside,
    /// Member that alone is meant, and nobody else.
    One(Member),
    /// Members that are meant, and everybody outside.
    All(Vec<Member>),
}

/// The members that are known to run somewhere.
#[derive(Debug, Default)]
pub struct Roster(BTreeMap<Member, Known>);

impl Roster {
    /// A member runs there, with these cards.
    pub fn set(&mut self, place: Place, known: MemberCards) {
        let MemberCards { member, generation, cards } = known;
        self.0.insert(member, Known { place, generation, cards });
    }

    /// A member runs nowhere.
    pub fn remove(&mut self, member: Member) {
        self.0.remove(&member);
    }

    /// Replaces all the members that run on another host, as it believes.
    pub fn replace(&mut self, host: &HostName, members: Vec<MemberCards>) {
        let there = Place::Host(host.to_owned());
        self.0.retain(|_, known| known.place != there);
        for known in members {
            if self.may_be(&known) {
                self.set(there.clone(), known);
            }
        }
    }

    /// A member runs on a host with which nothing is exchanged: its frames pass outside.
    pub fn leave(&mut self, said: &MemberCards) {
        if self.place(said.member) != Some(&Place::Here) && self.may_be(said) {
            self.remove(said.member);
        }
    }

    /// Whether a member may run where another host says. That one may not have heard yet that
    /// somebody has won the member since; nor may this one.
    fn may_be(&self, said: &MemberCards) -> bool {
        match self.0.get(&said.member) {
            Some(known) if known.place == Place::Here => said.generation > known.generation,
            Some(known) => said.generation >= known.generation,
            None => true,
        }
    }

    /// Place where a member runs; none if that is not known.
    pub fn place(&self, member: Member) -> Option<&Place> {
        self.0.get(&member).map(|known| &known.place)
    }

    /// Words on the members that run here.
    pub fn here(&self) -> Vec<MemberCards> {
        let here = self.0.iter().filter(|(_, known)| known.place == Place::Here);
        let said = |(member, known): (&Member, &Known)| MemberCards {
            member: *member,
            generation: known.generation,
            cards: known.cards.clone(),
        };
        here.map(said).collect()
    }

    /// Route of a frame of a member's card. A source that is not the card's own is somebody
    /// behind the guest: nothing is special about those frames.
    pub fn route(&self, from: Member, card: CardIndex, packet: &[u8]) -> Route {
        let Some((target, source)) = addresses(packet) else { return Route::Outside };
        let Some(own) = self.card(from, card).filter(|own| own.mac == source) else {
            return Route::Outside;
        };
        let others = self.0.iter().filter(|(member, _)| **member != from);
        let on_it = |known: &Known, mac: Option<MacAddress>| {
            let fits = |card: &CardDefinition| mac.is_none_or(|mac| card.mac == mac);
            known.cards.iter().any(|card| card.shares_network_with(own) && fits(card))
        };
        if target.is_multicast() {
            let all = others.filter(|(_, known)| on_it(known, None)).map(|(member, _)| *member);
            return Route::All(all.collect());
        }
        let mut others = others;
        let one = others.find(|(_, known)| on_it(known, Some(target)));
        one.map_or(Route::Outside, |(member, _)| Route::One(*member))
    }

    /// The cards of `to` that get a frame of `from`.
    pub fn takers(&self, from: Member, to: Member, packet: &[u8]) -> Vec<CardIndex> {
        let (Some((target, source)), Some(sender), Some(taker)) =
            (addresses(packet), self.0.get(&from), self.0.get(&to))
        else {
            return Vec::new();
        };
        let Some(network) = sender.cards.iter().find(|card| card.mac == source) else {
            return Vec::new();
        };
        let takes = |card: &CardDefinition| {
            card.shares_network_with(network) && (target.is_multicast() || card.mac == target)
        };
        let cards = (0..).map(CardIndex).zip(&taker.cards);
        cards.filter(|(_, card)| takes(card)).map(|(index, _)| index).collect()
    }

    /// Other member that sent a frame that came to this card.
    pub fn sender(&self, to: Member, card: CardIndex, packet: &[u8]) -> Option<Member> {
        let (_, source) = addresses(packet)?;
        let own = self.card(to, card)?;
        let is_its = |card: &CardDefinition| card.mac == source && card.shares_network_with(own);
        let mut others = self.0.iter().filter(|(member, _)| **member != to);
        others.find(|(_, known)| known.cards.iter().any(is_its)).map(|(member, _)| *member)
    }

    fn card(&self, member: Member, card: CardIndex) -> Option<&CardDefinition> {
        self.0.get(&member)?.cards.get(usize::from(card.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_network::HEADER_BYTES;
    use understudy_protocol::literal;

    fn mac(last: u8) -> MacAddress {
        MacAddress([0x52, 0x54, 0, 0, 0, last])
    }

    fn card(last: u8, bridge: &str) -> CardDefinition {
        CardDefinition::new(mac(last), bridge, Default::default())
    }

    fn frame(to: MacAddress, from: MacAddress) -> Vec<u8> {
        [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5]].concat()
    }

    const ALL: MacAddress = MacAddress([0xff; 6]);
    const A: Member = Member(0);
    const B: Member = Member(1);
    const C: Member = Member(2);
    const FIRST: CardIndex = CardIndex(0);

    fn known(member: Member, generation: u64, cards: Vec<CardDefinition>) -> MemberCards {
        MemberCards { member, generation: Generation(generation), cards }
    }

    /// A and B here, B with two cards on one bridge and one on another; C elsewhere.
    fn roster() -> Roster {
        let mut roster = Roster::default();
        roster.set(Place::Here, known(A, 1, vec![card(10, "br0")]));
        let cards = vec![card(20, "br0"), card(21, "br0"), card(22, "br1")];
        roster.set(Place::Here, known(B, 1, cards));
        let there = known(C, 1, vec![card(30, "br0")]);
        roster.replace(&literal("b"), vec![there, known(A, 1, vec![])]);
        roster
    }

    #[test]
    fn only_what_is_between_members_is_carried() {
        let roster = roster();
        let route = |to, from| roster.route(A, FIRST, &frame(to, from));
        assert_eq!(route(mac(30), mac(10)), Route::One(C));
        assert_eq!(route(mac(21), mac(10)), Route::One(B));
        assert_eq!(route(ALL, mac(10)), Route::All(vec![B, C]));
        assert_eq!(route(mac(22), mac(10)), Route::Outside, "another network");
        assert_eq!(route(mac(99), mac(10)), Route::Outside, "a stranger");
        assert_eq!(route(mac(10), mac(10)), Route::Outside, "itself");
        assert_eq!(route(mac(30), mac(77)), Route::Outside, "sent for somebody behind it");
        assert_eq!(roster.route(A, FIRST, &[1; HEADER_BYTES + 11]), Route::Outside);
        let own = roster.route(B, FIRST, &frame(mac(21), mac(20)));
        assert_eq!(own, Route::Outside, "from card to card of one member");
    }

    #[test]
    fn a_frame_gets_to_the_cards_that_it_is_for() {
        let roster = roster();
        let takers = |frame: &[u8]| roster.takers(A, B, frame);
        assert_eq!(takers(&frame(mac(21), mac(10))), [CardIndex(1)]);
        assert_eq!(takers(&frame(ALL, mac(10))), [CardIndex(0), CardIndex(1)]);
        assert_eq!(takers(&frame(mac(30), mac(10))), []);
        assert_eq!(takers(&frame(mac(21), mac(77))), [], "not from a card of A");
    }

    #[test]
    fn a_frame_is_known_by_its_source() {
        let roster = roster();
        let sender = |card, from| roster.sender(B, CardIndex(card), &frame(ALL, mac(from)));
        assert_eq!((sender(0, 10), sender(0, 30)), (Some(A), Some(C)));
        assert_eq!(sender(2, 10), None, "A is not on that network");
        assert_eq!(sender(0, 21), None, "its own");
        assert_eq!(sender(0, 99), None, "a stranger's");
    }

    #[test]
    fn what_a_host_says_replaces_what_it_said_and_nothing_that_is_here() {
        let mut roster = roster();
        assert_eq!(roster.place(A), Some(&Place::Here), "no other host has won it");
        assert_eq!(roster.place(C), Some(&Place::Host(literal("b"))));
        roster.replace(&literal("c"), vec![known(C, 1, vec![])]);
        roster.replace(&literal("b"), vec![]);
        assert_eq!(roster.place(C), Some(&Place::Host(literal("c"))), "it has moved");
        roster.replace(&literal("c"), vec![]);
        assert_eq!(roster.place(C), None);
        let here = roster.here();
        assert_eq!(here.iter().map(|known| known.member).collect::<Vec<_>>(), [A, B]);
    }

    #[test]
    fn a_member_is_where_it_was_won_last() {
        let mut roster = roster();
        let c = Some(Place::Host(literal("c")));
        roster.replace(&literal("c"), vec![known(C, 2, vec![])]);
        roster.replace(&literal("b"), vec![known(C, 1, vec![])]);
        assert_eq!(roster.place(C), c.as_ref(), "host b has not heard of it");
        roster.replace(&literal("b"), vec![]);
        assert_eq!(roster.place(C), c.as_ref(), "now it has");
        roster.replace(&literal("c"), vec![known(A, 2, vec![])]);
        assert_eq!(roster.place(A), c.as_ref(), "this host has not heard of it");
        assert_eq!(roster.here().len(), 1);
    }
}
