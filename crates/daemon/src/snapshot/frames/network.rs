//! The network of one cluster, as far as it is on this host.
//!
//! One mutex for all of it: a frame's way from the sender's colour to the receiver's queue, or
//! to the queue of a connection, is one step, so that nothing overtakes a sign that its sender
//! has taken a snapshot. Nothing is waited for under it. It comes after the locks of the port
//! that sends, and before those of the port that receives.

mod presence;

pub(super) use presence::Presence;

use super::attested::Word;
use super::outgoing::Outgoing;
use super::roster::{MemberCards, Place, Roster, Route};
use super::{CutListener, Joining};
use anyhow::ensure;
use crossbeam_channel::Receiver;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use tracing::info;
use understudy_link::link::Link;
use understudy_machine::Machine;
use understudy_network::{Fabric as Carrier, Inlet};
use understudy_protocol::VmName;
use understudy_protocol::{CardIndex, Generation};
use understudy_protocol::{GroupName, HostName};
use understudy_qemu::definition::CardDefinition;
use understudy_snapshot::{
    Cut, CutAction, CutEvent, Envelope, Incarnation, Member, SnapshotNumber,
};
use understudy_threads::{Common, MutexGuard};

/// A frame with its header, and the card that it is for if it is for one of several.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub card: Option<CardIndex>,
    pub bytes: Arc<[u8]>,
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Asks for the arbiter's word on a VM that is that host's, which says so, in that generation.
pub(super) type Ask<'a> = &'a dyn Fn(&VmName, &HostName, Generation) -> Word;

/// See the module.
pub(crate) struct Network {
    pub name: GroupName,
    state: Common<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub incarnation: Incarnation,
    /// The members' names.
    pub names: Vec<VmName>,
    pub roster: Roster,
    pub locals: BTreeMap<Member, Local>,
    /// Connections to other hosts, up or not, by host.
    pub outgoing: BTreeMap<HostName, Arc<Outgoing>>,
    /// The last connection from each host, and where its end is heard of.
    pub incoming: BTreeMap<HostName, (Link, Receiver<()>)>,
    /// The members' names as each connected host has them.
    said: BTreeMap<HostName, Vec<VmName>>,
    /// What hosts said last on which the arbiter did not answer.
    unanswered: BTreeMap<HostName, Presence>,
    /// Counts those who joined.
    joined: u64,
    /// Whether a thread looks after it.
    pub tended: bool,
}

/// A member that runs here.
pub(super) struct Local {
    pub cut: Cut<Frame>,
    inlets: Vec<Inlet>,
    /// Tells it from a machine that was this member before.
    joined: u64,
    machine: Weak<()>,
    listener: Arc<dyn CutListener>,
    /// The number on the last envelope of its that went out.
    carried: SnapshotNumber,
}

/// The machine of a member.
struct Body {
    name: VmName,
    cards: Vec<CardDefinition>,
    inlets: Vec<Inlet>,
    /// Machine of the member; dead once it is gone.
    machine: Weak<()>,
}

/// Word that a member's listener is to be told, once no lock is held.
pub(super) struct Call {
    listener: Arc<dyn CutListener>,
    what: What,
}

enum What {
    Take(SnapshotNumber),
    LogComplete(SnapshotNumber),
}

impl Call {
    pub fn make(self) {
        match self.what {
            What::Take(number) => self.listener.take(number),
            What::LogComplete(number) => self.listener.log_complete(number),
        }
    }
}

impl Network {
    pub fn new(name: &GroupName) -> Arc<Network> {
        Arc::new(Network { name: name.to_owned(), state: Common::default() })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A machine is a member from now on.
    pub fn join(self: &Arc<Self>, machine: &Machine, joining: Joining) -> anyhow::Result<()> {
        let member = joining.member;
        ensure!(member.index() < joining.members.len(), "there is no member {}", member.0);
        let body = Body {
            name: machine.definition().name.clone(),
            cards: machine.definition().cards.clone(),
            inlets: machine.ports().iter().map(|port| port.inlet()).collect(),
            machine: machine.presence(),
        };
        let joined = self.state().join(body, joining, &self.name)?;
        for port in machine.ports() {
            let seat = CardSeat { network: self.clone(), member, joined, card: port.card() };
            port.set_fabric(Some(Arc::new(seat)));
        }
        Ok(())
    }

    /// Problems of its host.
    pub fn problems(&self) -> Vec<String> {
        let state = self.state();
        let problem = |words| {
            format!(
                "cluster {}: {words}: their frames do not go through the cluster, and it cannot be snapshotted",
                self.name
            )
        };
        state.other_lists().map(problem).collect()
    }

    /// A host says who runs there. Of members that are known to run elsewhere the arbiter is asked, which is
    /// waited for.
    pub(super) fn learn(&self, host: &HostName, presence: Presence, ask: Ask<'_>) {
        let words = self.ask(host, &presence, ask);
        self.state().learn(host, presence, &words);
    }

    /// Asks the arbiter again what it has not answered.
    pub(super) fn ask_again(&self, ask: Ask<'_>) {
        let unanswered = self.state().unanswered.clone();
        for (host, presence) in unanswered {
            let words = self.ask(&host, &presence, ask);
            let mut state = self.state();
            // It may have said something else meanwhile.
            if state.unanswered.get(&host) != Some(&presence) {
                continue;
            }
            state.learn(&host, presence, &words);
            if let (false, Some(way)) =
                (state.unanswered.contains_key(&host), state.outgoing.get(&host))
            {
                // What it has sent before did not count.
                state.tell(way, true);
            }
        }
    }

    fn ask(&self, host: &HostName, presence: &Presence, ask: Ask<'_>) -> BTreeMap<Member, Word> {
        let doubtful = self.state().doubtful(host, presence);
        let mut is_silent = false;
        let word = |(said, vm): (MemberCards, VmName)| {
            // It is not waited for once for each of them.
            let word = if is_silent { Word::Silent } else { ask(&vm, host, said.generation) };
            is_silent = word == Word::Silent;
            (said.member, word)
        };
        doubtful.into_iter().map(word).collect()
    }

    /// Envelopes come from one that was sent here, or from a member here.
    pub fn carry(&self, message: &[u8]) {
        let calls = self.state().carry(message);
        calls.into_iter().for_each(Call::make);
    }
}

impl State {
    fn join(&mut self, body: Body, joining: Joining, name: &GroupName) -> anyhow::Result<u64> {
        let Joining { members, member, generation, incarnation, number, listener } = joining;
        ensure!(
            incarnation >= self.incarnation || self.locals.is_empty(),
            "cluster {name} has been restored since: this is incarnation {}, the message is of {}",
            self.incarnation.0,
            incarnation.0
        );
        ensure!(
            self.locals.is_empty() || incarnation != self.incarnation || members == self.names,
            "the members of the cluster {name} that run here are {}; it has {} now: start them anew",
            listed(&self.names),
            listed(&members)
        );
        if incarnation != self.incarnation {
            *self = State {
                incarnation,
                outgoing: std::mem::take(&mut self.outgoing),
                incoming: std::mem::take(&mut self.incoming),
                said: std::mem::take(&mut self.said),
                tended: self.tended,
                joined: self.joined,
                ..State::default()
            };
        }
        let cut = Cut::new(member, members.len(), incarnation, number);
        self.names = members;
        self.joined += 1;
        let joined = self.joined;
        let Body { name: vm, cards, inlets, machine } = body;
        let local = Local { cut, inlets, joined, machine, listener, carried: number };
        self.locals.insert(member, local);
        self.roster.set(Place::Here, MemberCards { member, generation, cards });
        info!(%vm, "a member of the cluster {name}");
        self.tell_all(true);
        Ok(joined)
    }

    /// A member runs here no more.
    pub fn leave(&mut self, member: Member) {
        if self.locals.remove(&member).is_some() {
            self.roster.remove(member);
            self.tell_all(false);
        }
    }

    /// A connection to a host that has none yet.
    pub fn new_way(&mut self, peer: &HostName) -> Option<Arc<Outgoing>> {
        if self.outgoing.contains_key(peer) {
            return None;
        }
        let way = Outgoing::new();
        self.outgoing.insert(peer.to_owned(), way.clone());
        Some(way)
    }

    /// Ends the network on this host, once no member is here any more.
    pub fn end(&mut self) {
        std::mem::take(&mut self.outgoing).values().for_each(|way| way.end());
        (self.roster, self.tended) = (Roster::default(), false);
    }

    /// Members whose machines are gone leave.
    pub fn reap(&mut self) {
        let gone = |local: &Local| match local.inlets.is_empty() {
            true => local.machine.strong_count() == 0,
            false => !local.inlets.iter().any(Inlet::is_open),
        };
        let gone: Vec<Member> =
            self.locals.iter().filter(|(_, local)| gone(local)).map(|(own, _)| *own).collect();
        gone.into_iter().for_each(|member| self.leave(member));
    }

    /// Reason why frames do not reach every member; none if they do.
    pub fn lacks(&self) -> Option<String> {
        let members = (0..self.names.len()).map(|member| Member(member as u16));
        let lacks = |member: Member| {
            let name = &self.names[member.index()];
            match self.roster.place(member) {
                Some(Place::Here) => None,
                Some(Place::Host(host))
                    if self.outgoing.get(host).is_some_and(|way| way.is_up()) =>
                {
                    None
                }
                Some(Place::Host(host)) => {
                    Some(format!("{name} runs on host {host}, to which there is no connection"))
                }
                None => Some(format!("{name} runs on no host that is connected with this one")),
            }
        };
        let lacking = members.into_iter().find_map(lacks)?;
        Some(self.other_lists().next().unwrap_or(lacking))
    }

    /// Takes a message on: to a member here, or to the host where the member is.
    fn carry(&mut self, message: &[u8]) -> Vec<Call> {
        let Ok((envelope, frame)) = Envelope::decode(message) else { return Vec::new() };
        if let Some(local) = self.locals.get_mut(&envelope.from) {
            local.carried = local.carried.max(envelope.number);
        }
        if self.locals.contains_key(&envelope.to) {
            return self.arrived(envelope, frame);
        }
        if let Some(Place::Host(host)) = self.roster.place(envelope.to) {
            if let Some(way) = self.outgoing.get(host) {
                way.put(message, frame.is_some());
            }
        }
        Vec::new()
    }

    /// An envelope has come over a connection from this host.
    pub fn received(&mut self, host: &HostName, message: &[u8]) -> anyhow::Result<Vec<Call>> {
        let (envelope, frame) = Envelope::decode(message)?;
        // Who runs elsewhere sends nothing from there.
        let is_its = |place: &Place| matches!(place, Place::Host(at) if at == host);
        if self.has_other_list(host) || !self.roster.place(envelope.from).is_some_and(is_its) {
            return Ok(Vec::new());
        }
        Ok(self.arrived(envelope, frame))
    }

    fn arrived(&mut self, envelope: Envelope, frame: Option<&[u8]>) -> Vec<Call> {
        let frame = frame.map(|bytes| Frame { card: None, bytes: bytes.into() });
        self.event(envelope.to, CutEvent::Arrived(envelope, frame)).0
    }

    /// One event of a member here; gives who is to be told, and what it sends.
    pub fn event(&mut self, own: Member, event: CutEvent<Frame>) -> (Vec<Call>, Vec<Envelope>) {
        let (mut actions, mut calls, mut signs) = (Vec::new(), Vec::new(), Vec::new());
        let Some(local) = self.locals.get_mut(&own) else { return (calls, signs) };
        local.cut.handle(event, &mut actions);
        for action in actions {
            let what = match action {
                CutAction::Transmit(envelope) => {
                    signs.push(envelope);
                    continue;
                }
                CutAction::Deliver { from, frame } => {
                    for card in self.roster.takers(from, own, &frame.bytes) {
                        local.inlet(card).inspect(|inlet| inlet.deliver(&frame.bytes));
                    }
                    continue;
                }
                CutAction::Take(number) => What::Take(number),
                CutAction::LogComplete(number) => What::LogComplete(number),
            };
            calls.push(Call { listener: local.listener.clone(), what });
        }
        (calls, signs)
    }
}

impl Local {
    pub fn inlet(&self, card: CardIndex) -> Option<&Inlet> {
        self.inlets.get(usize::from(card.0))
    }
}

/// Names, for people.
pub(in super::super) fn listed(names: &[VmName]) -> String {
    names.iter().map(VmName::to_string).collect::<Vec<_>>().join(", ")
}

/// A card of a member, as its port sees the network.
struct CardSeat {
    network: Arc<Network>,
    member: Member,
    joined: u64,
    card: CardIndex,
}

impl Carrier for CardSeat {
    fn sent(&self, packet: &[u8], keep: &mut dyn FnMut(&[&[u8]])) -> bool {
        let state = self.network.state();
        // Another machine is the member now: nobody listens to this one any more.
        let local = state.locals.get(&self.member).filter(|local| local.joined == self.joined);
        let Some(local) = local else { return false };
        let mut send = |to| keep(&[&local.cut.envelope(to).encode(), packet]);
        match state.roster.route(self.member, self.card, packet) {
            Route::Outside => true,
            Route::One(to) => {
                send(to);
                false
            }
            Route::All(members) => {
                members.into_iter().for_each(send);
                true
            }
        }
    }

    fn carry(&self, message: &[u8]) {
        self.network.carry(message);
    }

    fn is_echo(&self, packet: &[u8]) -> bool {
        let state = self.network.state();
        state.roster.sender(self.member, self.card, packet).is_some()
    }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
