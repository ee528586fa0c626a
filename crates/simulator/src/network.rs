//! Connections between hosts, as TCP gives them: in order, or broken; late, or
//! held up by a partition; the tail of what was sent may be lost.

use crate::host::{HostId, Role};
use crate::primary::Session;
use crate::world::{Event, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{PathIndex, Time};

/// A connection by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId(usize);

/// All connections, and the state of the ways between hosts.
#[derive(Debug)]
pub struct Network {
    connections: Vec<Connection>,
    /// Partitions that cut the way from one host to another just now, or one path of it.
    cuts: Vec<(HostId, HostId, Option<PathIndex>)>,
    /// Paths that carry nothing larger than heartbeats.
    pub holes: Vec<(HostId, HostId, PathIndex)>,
    /// Time added to every delay.
    pub extra_delay: Duration,
    /// Time between the arrivals of two messages of data.
    pub spacing: Duration,
    /// The next message to arrive is damaged.
    pub damage: bool,
    /// Connections that carry nothing just now to the end that was dialled; or (true) are not
    /// read there.
    stuck: Vec<(ConnectionId, bool)>,
}

#[derive(Debug)]
struct Connection {
    ends: [HostId; 2],
    path: PathIndex,
    /// Whether it carries more than heartbeats.
    bulk: bool,
    open: [bool; 2],
    /// The pipe towards each end.
    pipes: [Pipe; 2],
}

#[derive(Debug, Default)]
struct Pipe {
    items: VecDeque<Item>,
    /// An arrival is in the event queue.
    scheduled: bool,
    /// The receiving thread has a message in hand.
    reading: bool,
    /// Messages that have arrived and were read.
    taken: u64,
}

#[derive(Debug)]
struct Item {
    arrives: Time,
    /// The message; none if the other end closed.
    message: Option<Message>,
}

impl Network {
    /// A network without connections.
    pub fn new() -> Network {
        let (extra_delay, spacing) = (Duration::ZERO, Duration::ZERO);
        let (connections, stuck) = (Vec::new(), Vec::new());
        let (cuts, holes) = (Vec::new(), Vec::new());
        Network { connections, cuts, holes, extra_delay, spacing, damage: false, stuck }
    }

    fn is_cut(&self, from: HostId, to: HostId) -> bool {
        self.cuts.contains(&(from, to, None))
    }

    fn is_path_cut(&self, from: HostId, to: HostId, path: PathIndex) -> bool {
        self.is_cut(from, to) || self.cuts.contains(&(from, to, Some(path)))
    }

    /// The host at the other end.
    pub fn other(&self, id: ConnectionId, host: HostId) -> HostId {
        self.connections[id.0].ends[1 - self.end_of(id, host)]
    }

    fn end_of(&self, id: ConnectionId, host: HostId) -> usize {
        usize::from(self.connections[id.0].ends[1] == host)
    }
}

impl World {
    /// Whether nothing gets from one host to the other just now.
    pub(crate) fn is_cut(&self, from: HostId, to: HostId) -> bool {
        self.network.is_cut(from, to)
    }

    /// Whether messages get through both ways just now.
    pub(crate) fn reaches(&self, host: HostId, other: HostId) -> bool {
        let cut = self.network.is_cut(host, other) || self.network.is_cut(other, host);
        !cut && self.hosts[other.0].up
    }

    /// Whether a connection can be made over a path just now.
    pub(crate) fn passes(&self, host: HostId, other: HostId, path: PathIndex) -> bool {
        let cut = |from, to| self.network.is_path_cut(from, to, path);
        !cut(host, other) && !cut(other, host) && self.hosts[other.0].up
    }

    /// Opens a connection; the first message on it says what it is for.
    pub(crate) fn dial(&mut self, from: HostId, to: HostId, bulk: bool) -> ConnectionId {
        let pipes = [Pipe::default(), Pipe::default()];
        let (ends, open, path) = ([from, to], [true; 2], PathIndex(0));
        self.network.connections.push(Connection { ends, path, bulk, open, pipes });
        ConnectionId(self.network.connections.len() - 1)
    }

    /// Opens one for heartbeats over a path.
    pub(crate) fn dial_over(&mut self, from: HostId, to: HostId, path: PathIndex) -> ConnectionId {
        let id = self.dial(from, to, false);
        self.network.connections[id.0].path = path;
        id
    }

    /// The path that a connection goes over.
    pub(crate) fn path_of(&self, id: ConnectionId) -> PathIndex {
        self.network.connections[id.0].path
    }

    /// A session's data goes on over another path: what has not arrived is sent again. That it was not read
    /// goes with it.
    pub(crate) fn carry_over(&mut self, id: ConnectionId, path: PathIndex) {
        self.network.connections[id.0].path = path;
        self.network.stuck.retain(|stuck| *stuck != (id, false));
        for end in 0..2 {
            let again = self.path_random.millis(0, 20);
            self.schedule_arrival(id, end, again);
        }
    }

    /// The number of messages to the end that was dialled which are sent, and not read. None, into the void.
    pub(crate) fn on_the_wire(&self, id: ConnectionId) -> usize {
        let connection = &self.network.connections[id.0];
        if connection.open[0] { connection.pipes[1].items.len() } else { 0 }
    }

    /// Sends on a connection; into the void if it is closed.
    pub(crate) fn send(&mut self, host: HostId, id: ConnectionId, message: Message) {
        let end = self.network.end_of(id, host);
        if self.network.connections[id.0].open[end] {
            self.put(id, 1 - end, Some(message));
        }
    }

    /// Closes a host's end. What it sent before still arrives.
    pub(crate) fn close(&mut self, host: HostId, id: ConnectionId) {
        let end = self.network.end_of(id, host);
        if std::mem::replace(&mut self.network.connections[id.0].open[end], false) {
            self.put(id, 1 - end, None);
        }
    }

    fn put(&mut self, id: ConnectionId, end: usize, message: Option<Message>) {
        let (low, high) = self.schedule.latency;
        let delay = self.random.micros(low, high) + self.network.extra_delay;
        let connection = &mut self.network.connections[id.0];
        let is_data = connection.bulk && end == 1;
        let spacing = if is_data { self.network.spacing } else { Duration::ZERO };
        let pipe = &mut connection.pipes[end];
        let earliest = pipe.items.back().map_or(Time::default(), |last| last.arrives + spacing);
        let arrives = earliest.max(self.now + delay);
        pipe.items.push_back(Item { arrives, message });
        self.schedule_arrival(id, end, Duration::ZERO);
    }

    fn schedule_arrival(&mut self, id: ConnectionId, end: usize, delay: Duration) {
        let now = self.now;
        let pipe = &mut self.network.connections[id.0].pipes[end];
        if let (false, Some(item)) = (pipe.scheduled || pipe.reading, pipe.items.front()) {
            pipe.scheduled = true;
            let at = item.arrives.max(now + delay);
            self.at(at, Event::Arrival(id, end));
        }
    }

    pub(crate) fn arrival_host(&self, id: ConnectionId, end: usize) -> HostId {
        self.network.connections[id.0].ends[end]
    }

    pub(crate) fn arrival(&mut self, id: ConnectionId, end: usize) {
        let connection = &mut self.network.connections[id.0];
        let (to, from, path) = (connection.ends[end], connection.ends[1 - end], connection.path);
        connection.pipes[end].scheduled = false;
        if !self.hosts[to.0].up {
            connection.pipes[end].items.clear();
            return;
        }
        if self.network.is_path_cut(from, to, path) {
            return; // Sent again when the partition heals.
        }
        if end == 1 && self.network.stuck.iter().any(|(stuck, _)| *stuck == id) {
            return; // As long as that lasts.
        }
        let hole = self.is_hole(from, to) || self.network.holes.contains(&(from, to, path));
        if end == 1 && self.network.connections[id.0].bulk && hole {
            return; // For good, or as long as that path carries the data.
        }
        if end == 1 && self.reads_nothing(to, id) {
            return; // Until it has applied something.
        }
        let connection = &mut self.network.connections[id.0];
        let Some(item) = connection.pipes[end].items.pop_front() else { return };
        connection.pipes[end].taken += 1;
        let open = connection.open[end];
        if end == 1 {
            self.made_room(from, id);
        }
        if open && item.message.is_some() && self.random.percent(15) {
            return self.read_slowly(id, end, item);
        }
        self.schedule_arrival(id, end, Duration::ZERO);
        match item.message {
            Some(_) if !open => self.reset(id, 1 - end),
            Some(message) if std::mem::take(&mut self.network.damage) => {
                self.coverage.damaged += 1;
                self.damaged_arrival(to, id, message);
            }
            Some(message) => self.receive(to, id, message),
            None if open => {
                self.close(to, id);
                self.connection_ended(to, id, "the connection ended");
            }
            None => {}
        }
    }

    /// A thread has read a message and takes its time: meanwhile others may have
    /// closed the connection.
    fn read_slowly(&mut self, id: ConnectionId, end: usize, item: Item) {
        let Some(message) = item.message else { return };
        let to = self.arrival_host(id, end);
        let read = self.random.micros(10, 5_000);
        let handled = self.now + self.paced(to, read);
        self.network.connections[id.0].pipes[end].reading = true;
        let life = self.hosts[to.0].life;
        self.at(handled, Event::Read(to, life, id, message));
    }

    pub(crate) fn read(&mut self, to: HostId, life: u32, id: ConnectionId, message: Message) {
        if self.hosts[to.0].life == life {
            self.receive(to, id, message);
        }
        let end = self.network.end_of(id, to);
        self.network.connections[id.0].pipes[end].reading = false;
        self.schedule_arrival(id, end, Duration::ZERO);
    }

    /// Delivers what is not what was sent: the receiver must notice.
    fn damaged_arrival(&mut self, to: HostId, id: ConnectionId, mut message: Message) {
        let at = self.random.index(message.payload.len().max(1));
        match message.payload.get_mut(at) {
            Some(byte) => *byte ^= 1 << self.random.below(8),
            None => message.payload.push(0),
        }
        if message.header.check(&message.payload).is_ok() {
            return self.violation("a damaged message passed its check".to_owned());
        }
        self.close(to, id);
        self.connection_ended(to, id, "a damaged message arrived");
    }

    /// Tells an end that the other does not know the connection (any more).
    fn reset(&mut self, id: ConnectionId, end: usize) {
        if self.network.connections[id.0].open[end] {
            self.put(id, end, None);
        }
    }

    /// The connection breaks: a tail of what is under way is lost both ways, and
    /// each end hears of it in its own time.
    pub(crate) fn break_connection(&mut self, id: ConnectionId) {
        for end in 0..2 {
            self.lose_tail(id, end);
            if self.network.connections[id.0].open[end] {
                let delay = self.random.millis(0, 150);
                self.network.extra_delay += delay;
                self.put(id, end, None);
                self.network.extra_delay -= delay;
            }
        }
    }

    fn lose_tail(&mut self, id: ConnectionId, end: usize) {
        let length = self.network.connections[id.0].pipes[end].items.len();
        let kept = self.random.index(length + 1);
        self.network.connections[id.0].pipes[end].items.truncate(kept);
    }

    /// All of a host's connections end with its daemon (`tell`: the kernel says
    /// so to the peers) or with its power.
    pub(crate) fn drop_connections(&mut self, host: HostId, tell: bool) {
        for index in 0..self.network.connections.len() {
            let connection = &self.network.connections[index];
            let Some(end) = connection.ends.iter().position(|end| *end == host) else { continue };
            if !connection.open[end] {
                continue;
            }
            let id = ConnectionId(index);
            self.lose_tail(id, 1 - end);
            if tell {
                self.close(host, id);
            }
            self.network.connections[index].open[end] = false;
        }
    }

    /// Cuts the way from one host to the other.
    pub(crate) fn cut(&mut self, from: HostId, to: HostId) {
        self.network.cuts.push((from, to, None));
    }

    /// Nothing gets over this path any more.
    pub(crate) fn cut_path(&mut self, from: HostId, to: HostId, path: PathIndex) {
        self.network.cuts.push((from, to, Some(path)));
    }

    /// A path carries everything again.
    pub(crate) fn path_heals(&mut self, from: HostId, to: HostId, path: PathIndex) {
        self.network.holes.retain(|hole| *hole != (from, to, path));
        self.heal_cut((from, to, Some(path)));
    }

    /// Undoes one [`World::cut`]; what waited is sent again.
    pub(crate) fn heal(&mut self, from: HostId, to: HostId) {
        self.heal_cut((from, to, None));
    }

    fn heal_cut(&mut self, healed: (HostId, HostId, Option<PathIndex>)) {
        let (_, to, _) = healed;
        let cuts = &mut self.network.cuts;
        if let Some(at) = cuts.iter().position(|cut| *cut == healed) {
            cuts.swap_remove(at);
        }
        for index in 0..self.network.connections.len() {
            if let Some(end) = (0..2).find(|end| self.network.connections[index].ends[*end] == to) {
                let retransmission = self.random.millis(0, 250);
                self.schedule_arrival(ConnectionId(index), end, retransmission);
            }
        }
    }

    /// Lets no more through to the end that was dialled, or (`unread`) nobody reads it there.
    pub(crate) fn stall_data(&mut self, id: ConnectionId, unread: bool) {
        self.network.stuck.push((id, unread));
        self.coverage.data_stalls += 1;
    }

    /// The end that was dialled reads on.
    pub(crate) fn read_on(&mut self, id: ConnectionId) {
        self.schedule_arrival(id, 1, Duration::ZERO);
    }

    /// Undoes [`World::stall_data`], of one connection or of all.
    pub(crate) fn let_data_flow(&mut self, which: Option<ConnectionId>) {
        let stuck = std::mem::take(&mut self.network.stuck);
        for (id, unread) in stuck {
            match which.is_none_or(|which| which == id) {
                true => self.schedule_arrival(id, 1, Duration::ZERO),
                false => self.network.stuck.push((id, unread)),
            }
        }
    }

    /// The number of messages that have arrived at the system of the end that was dialled.
    pub(crate) fn delivered(&self, id: ConnectionId) -> u64 {
        let connection = &self.network.connections[id.0];
        let pipe = &connection.pipes[1];
        let unread =
            self.network.stuck.contains(&(id, true)) || self.reads_nothing(connection.ends[1], id);
        let here = pipe.items.iter().take_while(|item| unread && item.arrives <= self.now);
        pipe.taken + here.count() as u64
    }

    /// The number that will have, once all that was sent so far has.
    pub(crate) fn sent(&self, id: ConnectionId) -> u64 {
        let pipe = &self.network.connections[id.0].pipes[1];
        pipe.taken + pipe.items.len() as u64
    }

    /// Whether a message of that kind is on its way from this host, over a connection that both ends have.
    pub(crate) fn has_unread(&self, from: HostId, id: ConnectionId, kind: Kind) -> bool {
        let connection = &self.network.connections[id.0];
        let to = 1 - self.network.end_of(id, from);
        let is = |item: &Item| item.message.as_ref().is_some_and(|it| it.header.kind == kind);
        connection.open == [true; 2] && connection.pipes[to].items.iter().any(is)
    }

    /// Every partition ends.
    pub(crate) fn heal_all(&mut self) {
        self.network.holes.clear();
        while let Some(&cut) = self.network.cuts.first() {
            self.heal_cut(cut);
        }
    }

    /// The connections of the VM's protection just now: data, heartbeat.
    pub(crate) fn session_connections(&self) -> Vec<ConnectionId> {
        let of_role = |role: &Role| match role {
            Role::Primary(running) => running.session.as_ref().map(Session::connections),
            _ => None,
        };
        self.hosts.iter().find_map(|host| of_role(&host.role)).unwrap_or_default()
    }
}
