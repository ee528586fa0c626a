//! Roster of members: which cards each has, and where it runs.

use super::attested::Word;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use understudy_network::{MacAddress, addresses};
use understudy_protocol::HostName;
use understudy_protocol::{CardIndex, Generation};
use understudy_qemu::command::MAX_CARDS;
use understudy_qemu::definition::CardDefinition;
use understudy_snapshot::Member;

/// A member and its cards. Bridges of one name are one network, on whatever hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberCards {
    pub member: Member,
    /// Generation in which its host owns it.
    pub generation: Generation,
    #[serde(deserialize_with = "cards")]
    pub cards: Vec<CardDefinition>,
}

/// Cards of a VM: each frame of a cluster goes past all of them.
fn cards<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<CardDefinition>, D::Error> {
    let cards = Vec::deserialize(from)?;
    match cards.len() <= MAX_CARDS {
        true => Ok(cards),
        false => Err(D::Error::custom(format!("a VM has {MAX_CARDS} cards at most"))),
    }
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
    /// A member runs there, with these cards. Of one that runs here, they are nobody else's.
    pub fn set(&mut self, place: Place, known: MemberCards) {
        let MemberCards { member, generation, cards } = known;
        if place == Place::Here {
            self.0.retain(|_, other| {
                other.place == Place::Here || !share_address(&other.cards, &cards)
            });
        }
        self.0.insert(member, Known { place, generation, cards });
    }

    /// A member runs nowhere.
    pub fn remove(&mut self, member: Member) {
        self.0.remove(&member);
    }

    /// Replaces all the members that run on another host, as it says. `words` are the arbiter's on those
    /// that are known to run elsewhere.
    pub fn replace(
        &mut self,
        host: &HostName,
        members: Vec<MemberCards>,
        words: &BTreeMap<Member, Word>,
    ) {
        let there = Place::Host(host.to_owned());
        self.0.retain(|_, known| known.place != there);
        for known in members {
            let word = words.get(&known.member).copied();
            if self.may_be(&known, word) && !self.has_anothers_address(&known) {
                self.set(there.clone(), known);
            }
        }
    }

    /// A member runs on a host with which nothing is exchanged: its frames pass outside.
    pub fn leave(&mut self, said: &MemberCards, word: Option<Word>) {
        if self.place(said.member) != Some(&Place::Here) && self.may_be(said, word) {
            self.remove(said.member);
        }
    }

    /// Whether a member may run where another host says. That one may not have heard yet that
    /// somebody has won the member since; nor may this one; or it does not say the truth.
    fn may_be(&self, said: &MemberCards, word: Option<Word>) -> bool {
        let Some(known) = self.0.get(&said.member) else { return true };
        match word {
            Some(Word::Yes) => true,
            // Nobody takes over what runs here.
            Some(Word::Nobody) => known.place != Place::Here && said.generation >= known.generation,
            Some(Word::No | Word::Silent) | None => false,
        }
    }

    fn has_anothers_address(&self, said: &MemberCards) -> bool {
        let mut others = self.0.iter().filter(|(member, _)| **member != said.member);
        others.any(|(_, known)| share_address(&known.cards, &said.cards))
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

/// Whether two cards of these have one address in one network.
fn share_address(some: &[CardDefinition], others: &[CardDefinition]) -> bool {
    let is_its = |one: &CardDefinition, other: &CardDefinition| {
        one.mac == other.mac && one.shares_network_with(other)
    };
    some.iter().any(|one| others.iter().any(|other| is_its(one, other)))
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

    fn says(member: Member, word: Word) -> BTreeMap<Member, Word> {
        BTreeMap::from([(member, word)])
    }

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
        roster.replace(&literal("b"), vec![there, known(A, 1, vec![])], &says(A, Word::No));
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
        roster.replace(&literal("c"), vec![known(C, 1, vec![])], &says(C, Word::Yes));
        roster.replace(&literal("b"), vec![], &BTreeMap::new());
        assert_eq!(roster.place(C), Some(&Place::Host(literal("c"))), "it has moved");
        roster.replace(&literal("c"), vec![], &BTreeMap::new());
        assert_eq!(roster.place(C), None);
        let here = roster.here();
        assert_eq!(here.iter().map(|known| known.member).collect::<Vec<_>>(), [A, B]);
    }

    /// Regression: any known host had what was for a member, and cut it off, by a great generation.
    #[test]
    fn a_member_is_where_the_arbiter_says() {
        let mut roster = roster();
        let (b, c) = (Some(Place::Host(literal("b"))), Some(Place::Host(literal("c"))));
        let mut say = |host: &str, member, generation, word| {
            let said = vec![known(member, generation, vec![])];
            roster.replace(&host.parse().unwrap(), said, &says(member, word));
            roster.place(member).cloned()
        };
        assert_eq!(say("c", C, 1 << 47, Word::No), b, "it is none of its");
        assert_eq!(say("c", C, 1 << 47, Word::Silent), b, "nobody says so");
        assert_eq!(say("c", C, 1, Word::Yes), c, "it was won");
        assert_eq!(say("b", C, 2, Word::No), c, "host b has not heard of it");
        for word in [Word::No, Word::Silent, Word::Nobody] {
            assert_eq!(say("c", A, 1 << 47, word), Some(Place::Here), "{word:?}");
        }
        assert_eq!(say("c", A, 2, Word::Yes), c, "this host has not heard of it");
        assert_eq!(roster.here().len(), 1);
    }

    #[test]
    fn without_an_arbiter_the_newest_is_believed_of_what_is_not_here() {
        let mut roster = roster();
        let nobody = says(C, Word::Nobody);
        roster.replace(&literal("c"), vec![known(C, 0, vec![])], &nobody);
        assert_eq!(roster.place(C), Some(&Place::Host(literal("b"))));
        roster.replace(&literal("c"), vec![known(C, 1, vec![])], &nobody);
        assert_eq!(roster.place(C), Some(&Place::Host(literal("c"))));
    }

    #[test]
    fn no_other_member_has_the_address_of_one() {
        let mut roster = roster();
        let d = Member(3);
        let said = |last, bridge| vec![known(d, 1, vec![card(40, "br0"), card(last, bridge)])];
        for taken in [10, 22, 30] {
            let bridge = if taken == 22 { "br1" } else { "br0" };
            roster.replace(&literal("d"), said(taken, bridge), &BTreeMap::new());
            assert_eq!(roster.place(d), None, "{taken}");
        }
        roster.replace(&literal("d"), said(22, "br0"), &BTreeMap::new());
        assert_eq!(roster.place(d), Some(&Place::Host(literal("d"))), "another network");
        roster.set(Place::Here, known(A, 1, vec![card(40, "br0")]));
        assert_eq!(roster.place(d), None, "it is here");
    }
}
