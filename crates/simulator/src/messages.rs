//! The way of what arrives at a host to the part of it that it is for.

use crate::host::{HostId, Role, SessionId};
use crate::network::ConnectionId;
use crate::world::World;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{Epoch, Generation};
use understudy_session::backup::Event as BackupEvent;
use understudy_session::primary::Event as PrimaryEvent;

impl World {
    /// A message arrives.
    pub(crate) fn receive(&mut self, host: HostId, id: ConnectionId, message: Message) {
        match &self.hosts[host.0].role {
            Role::Primary(running) => {
                let session = running.session.as_ref();
                if let Some(session) = session.filter(|s| s.data == id || s.heartbeat == id) {
                    return self.primary_receives(host, session.id, &message);
                }
                let offer = running.dialling;
                if let Some(offer) = offer.filter(|o| o.data == id || o.heartbeat == Some(id)) {
                    return self.answer_to_offer(host, offer, &message);
                }
            }
            Role::Backup(standby) if standby.data == id || standby.heartbeat == Some(id) => {
                return self.backup_receives(host, standby.id, message);
            }
            _ => {}
        }
        if message.header.kind == Kind::Hello {
            self.greeted(host, id, &message);
        }
    }

    /// A new connection says what it is for.
    fn greeted(&mut self, host: HostId, id: ConnectionId, message: &Message) {
        let (session, generation) = read_hello(message);
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
                standby.heartbeat = Some(id);
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
        let reason = reason.to_owned();
        match &self.hosts[host.0].role {
            Role::Primary(running) => {
                let session = running.session.as_ref();
                if let Some(session) = session.filter(|s| s.data == id || s.heartbeat == id) {
                    let event = match session.data == id {
                        true => PrimaryEvent::PeerGone(reason),
                        false => PrimaryEvent::LostAside(reason),
                    };
                    self.primary_event(host, session.id, event);
                } else if running.dialling.is_some_and(|o| o.data == id || o.heartbeat == Some(id))
                {
                    self.offer_failed(host, "the connection ended");
                }
            }
            Role::Backup(standby) if standby.data == id || standby.heartbeat == Some(id) => {
                let event = match standby.data == id {
                    true => BackupEvent::DataEnded(0, reason),
                    false => BackupEvent::PeerLost(reason),
                };
                self.backup_event(host, standby.id, event);
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
