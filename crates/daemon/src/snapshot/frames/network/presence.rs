//! Who runs where: what this host says of the members here, and what others say of theirs.

use super::super::attested::Word;
use super::super::outgoing::Outgoing;
use super::super::roster::{MemberCards, Place};
use super::{Local, State, listed};
use crate::config::MOST_MEMBERS;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tracing::warn;
use understudy_protocol::{HostName, VmName};
use understudy_snapshot::{Envelope, Incarnation, Member};

/// Word of a host on the members that run on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Presence {
    pub incarnation: Incarnation,
    #[serde(deserialize_with = "members")]
    pub members: Vec<MemberCards>,
    /// The names of all members, by which they are numbered there; none of a version before this.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "names")]
    pub names: Option<Vec<VmName>>,
    /// Whether the other host is to say the same of its own.
    pub answer: bool,
}

fn members<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<MemberCards>, D::Error> {
    let members = Vec::deserialize(from)?;
    each_once(&members, |known: &MemberCards| known.member).map_err(D::Error::custom)?;
    Ok(members)
}

fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<VmName>>, D::Error> {
    let names: Option<Vec<VmName>> = Option::deserialize(from)?;
    each_once(names.as_deref().unwrap_or_default(), VmName::clone).map_err(D::Error::custom)?;
    Ok(names)
}

fn each_once<T, K: Ord>(members: &[T], key: impl Fn(&T) -> K) -> Result<(), String> {
    let once: BTreeSet<K> = members.iter().map(key).collect();
    match once.len() == members.len() && members.len() <= MOST_MEMBERS {
        true => Ok(()),
        false => Err(format!("a cluster has no member twice, and {MOST_MEMBERS} at most")),
    }
}

impl State {
    /// Whether a host numbers the members by another list: to it they are others.
    pub(super) fn has_other_list(&self, host: &HostName) -> bool {
        self.said.get(host).is_some_and(|said| *said != self.names)
    }

    /// Members that run on a host, as it says, by the numbers that they have here: its list may be another.
    fn as_here(&self, presence: &Presence) -> Vec<MemberCards> {
        let said = presence.names.as_ref().unwrap_or(&self.names);
        let as_here = |known: &MemberCards| {
            let name = said.get(known.member.index())?;
            let member = self.names.iter().position(|own| own == name)?;
            Some(MemberCards { member: Member(member as u16), ..known.clone() })
        };
        presence.members.iter().filter_map(as_here).collect()
    }

    /// Words on the hosts whose list of members is another than that of those here.
    pub fn other_lists(&self) -> impl Iterator<Item = String> {
        let others = self.said.iter().filter(|(host, _)| self.has_other_list(host));
        others.filter(|_| !self.locals.is_empty()).map(|(host, said)| {
            format!(
                "its members are {} here, and {} on host {host}",
                listed(&self.names),
                listed(said)
            )
        })
    }

    /// What a host says is not known any more.
    pub fn forget(&mut self, host: &HostName) {
        self.said.remove(host);
        self.unanswered.remove(host);
    }

    pub(super) fn tell_all(&self, answer: bool) {
        self.outgoing.values().for_each(|way| self.tell(way, answer));
    }

    /// Says who runs here, then gives each pair's number, which is never left out.
    pub fn tell(&self, way: &Outgoing, answer: bool) {
        way.put_presence(&self.presence(answer), &self.signs());
    }

    /// A connection to a host is there; gives its number.
    pub fn open(&self, way: &Outgoing) -> u64 {
        way.open(&self.presence(true), &self.signs())
    }

    fn presence(&self, answer: bool) -> Presence {
        let (incarnation, names) = (self.incarnation, Some(self.names.clone()));
        Presence { incarnation, members: self.roster.here(), names, answer }
    }

    /// Envelopes without a frame, for each member here and each that is not.
    fn signs(&self) -> Vec<Envelope> {
        let others = || (0..self.names.len()).map(|other| Member(other as u16));
        let away = |other: &Member| !self.locals.contains_key(other);
        let of_one = |(from, local): (&Member, &Local)| {
            let (from, incarnation, number) = (*from, self.incarnation, local.carried);
            others().filter(away).map(move |to| Envelope { from, to, incarnation, number })
        };
        self.locals.iter().flat_map(of_one).collect()
    }

    /// Members that by a host's word run there, and are known to run elsewhere.
    pub(super) fn doubtful(
        &self,
        host: &HostName,
        presence: &Presence,
    ) -> Vec<(MemberCards, VmName)> {
        if presence.incarnation != self.incarnation || self.locals.is_empty() {
            return Vec::new();
        }
        let is_elsewhere = |place: &Place| *place != Place::Host(host.clone());
        let doubtful = self.as_here(presence).into_iter().filter_map(|said| {
            let name = self.names.get(said.member.index())?;
            self.roster.place(said.member).filter(|&place| is_elsewhere(place))?;
            Some((said, name.clone()))
        });
        doubtful.collect()
    }

    /// A host says who runs there; these are the arbiter's words on it.
    pub(super) fn learn(
        &mut self,
        host: &HostName,
        mut presence: Presence,
        words: &BTreeMap<Member, Word>,
    ) {
        match presence.names.clone() {
            Some(names) => self.said.insert(host.clone(), names),
            None => self.said.remove(host),
        };
        self.unanswered.remove(host);
        // An older incarnation is over; a newer one is for those who begin it here.
        if presence.incarnation != self.incarnation || self.locals.is_empty() {
            return;
        }
        let answers = std::mem::take(&mut presence.answer);
        let of =
            |said: &MemberCards| words.get(&said.member).is_none_or(|word| *word == Word::Silent);
        // Also of one that was known nowhere when it was asked.
        if self.doubtful(host, &presence).iter().any(|(said, _)| of(said)) {
            self.unanswered.insert(host.clone(), presence.clone());
        }
        let mut members = self.as_here(&presence);
        let strangers = match self.has_other_list(host) {
            true => std::mem::take(&mut members),
            false => Vec::new(),
        };
        self.roster.replace(host, members, words);
        for stranger in &strangers {
            self.roster.leave(stranger, words.get(&stranger.member).copied());
        }
        // What was won elsewhere is about to end here.
        let roster = &self.roster;
        self.locals.retain(|member, _| roster.place(*member) == Some(&Place::Here));
        match self.outgoing.get(host) {
            Some(way) if answers => self.tell(way, false),
            Some(_) => {}
            None => warn!(
                "members of a cluster run on host {host}, which is not known here: name it under \
                 [peers], or they do not hear the members here"
            ),
        }
    }
}
