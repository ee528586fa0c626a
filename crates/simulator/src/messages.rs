//! The way of what arrives at a host to the part of it that it is for.

use crate::host::{HostId, Role, SessionId};
use crate::network::ConnectionId;
use crate::world::World;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{Epoch, Generation, PathEvent, PathIndex};
use understudy_session::backup::Event as BackupEvent;
use understudy_session::primary::Event as PrimaryEvent;

impl World {
    /// A message arrives.
    pub(crate) fn receive(&mut self, host: HostId, id: ConnectionId, message: Message) {
        if let Some((session, path)) = self.beats_of(host, id) {
            return self.beats_on(host, session, path, &message);
        }
        match &self.hosts[host.0].role {
            Role::Primary(running) => {
                let session = running.session.as_ref();
                if let Some(session) = session.filter(|s| s.data == id) {
                    return self.primary_receives(host, session.id, &message);
                }
                let offer = running.dialling;
                if let Some(offer) = offer.filter(|o| o.data == id || o.heartbeat == Some(id)) {
                    return self.answer_to_offer(host, offer, &message);
                }
            }
            Role::Backup(standby) if standby.data == id => {
                return self.backup_receives(host, standby.id, message);
            }
            _ => {}
        }
        if message.header.kind == Kind::Hello {
            self.greeted(host, id, &message);
        }
    }

    /// The session, and the path of it, whose signs of life a connection carries.
    fn beats_of(&self, host: HostId, id: ConnectionId) -> Option<(SessionId, PathIndex)> {
        let (session, ways) = match &self.hosts[host.0].role {
            Role::Primary(running) => running.session.as_ref().map(|it| (it.id, &it.ways))?,
            Role::Backup(standby) => (standby.id, &standby.ways),
            Role::Idle | Role::Fenced => return None,
        };
        Some((session, ways.path_of(id)?))
    }

    /// A sign of life over one of a session's paths.
    fn beats_on(&mut self, host: HostId, id: SessionId, path: PathIndex, message: &Message) {
        match message.header.kind {
            Kind::Heartbeat => {
                self.path_event(host, id, PathEvent::Heard(path));
                self.primary_event(host, id, PrimaryEvent::Heard);
                self.backup_event(host, id, BackupEvent::Heard);
            }
            Kind::Welcome => self.path_event(host, id, PathEvent::Connected(path)),
            // The end of the connection comes behind it.
            _ => {}
        }
    }

    /// A new connection says what it is for.
    fn greeted(&mut self, host: HostId, id: ConnectionId, message: &Message) {
        let (session, generation) = read_hello(message);
        let path = self.path_of(id);
        let heartbeat = generation == Generation(0);
        if !heartbeat && self.has_lost_its_disk(host) {
            // Nothing can be prepared there. The offer expires.
            return;
        }
        match &mut self.hosts[host.0].role {
            Role::Idle | Role::Fenced if !heartbeat => {
                self.stand_by(host, session, generation, id);
            }
            Role::Backup(standby) if heartbeat && standby.id == session => {
                standby.ways.beats[usize::from(path.0)] = Some(id);
                self.path_event(host, session, PathEvent::Connected(path));
                self.send(host, id, Message::new(Kind::Welcome, Epoch(0), Vec::new()));
                self.backup_event(host, session, BackupEvent::Heard);
            }
            _ => {
                self.send(host, id, Message::new(Kind::Refuse, Epoch(0), Vec::new()));
                self.close(host, id);
            }
        }
    }

    /// A connection of this host's ended.
    pub(crate) fn connection_ended(&mut self, host: HostId, id: ConnectionId, reason: &str) {
        if let Some((session, path)) = self.beats_of(host, id) {
            return self.beats_ended(host, session, path, reason);
        }
        let reason = reason.to_owned();
        match &self.hosts[host.0].role {
            Role::Primary(running) => {
                let session = running.session.as_ref();
                if let Some(session) = session.filter(|s| s.data == id) {
                    self.primary_event(host, session.id, PrimaryEvent::PeerGone(reason));
                } else if running.dialling.is_some_and(|o| o.data == id || o.heartbeat == Some(id))
                {
                    self.offer_failed(host, "the connection ended");
                }
            }
            Role::Backup(standby) if standby.data == id => {
                self.backup_event(host, standby.id, BackupEvent::DataEnded(0, reason));
            }
            _ => {}
        }
    }
}

/// The first message on a connection; a generation of 0 is a heartbeat's.
pub(crate) fn hello(session: SessionId, generation: Generation) -> Message {
    let payload = [u64::from(session.0).to_le_bytes(), generation.0.to_le_bytes()].concat();
    Message::new(Kind::Hello, Epoch(0), payload)
}

fn read_hello(message: &Message) -> (SessionId, Generation) {
    let word =
        |at: usize| u64::from_le_bytes(message.payload[at..at + 8].try_into().expect("8 bytes"));
    (SessionId(word(0) as u32), Generation(word(8)))
}
