//! What operators, and the hosts on their behalf, do: protect, hand over, end
//! protection, recover.

use crate::host::{Dialling, HostId, Role, SessionId};
use crate::network::ConnectionId;
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{BackupEvent, Epoch, Generation, PrimaryEvent, PrimaryPhase, Verdict};

/// An offer that is not answered by then is withdrawn.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

impl World {
    /// The host looks for a backup of the VM that it runs.
    pub(crate) fn seek_backup(&mut self, host: HostId) {
        let Some(copy) = self.hosts[host.0].running().map(|running| running.copy) else { return };
        let soon = self.random.millis(5, 300);
        self.after(soon, Event::SeekBackup(host, copy));
    }

    /// Offers the VM to another host, if it needs a backup.
    pub(crate) fn offer(&mut self, host: HostId, copy: crate::host::CopyId) {
        let peer = (host.0 + 1 + self.random.index(self.hosts.len() - 1)) % self.hosts.len();
        let Some(running) = self.hosts[host.0].running() else { return };
        let idle = running.session.is_none() && running.dialling.is_none();
        if running.copy != copy || !idle || !running.wanted {
            return;
        }
        let generation = running.generation;
        self.sessions += 1;
        let (peer, session) = (HostId(peer), SessionId(self.sessions));
        let data = self.dial(host, peer);
        if let Some(running) = self.hosts[host.0].running() {
            running.dialling = Some(Dialling { peer, session, data, heartbeat: None });
        }
        self.send(host, data, hello(Kind::Hello, session, generation));
        self.after(OFFER_TIMEOUT, Event::OfferExpires(host, session));
    }

    pub(crate) fn offer_expires(&mut self, host: HostId, session: SessionId) {
        let dialling = self.hosts[host.0].running().and_then(|running| running.dialling);
        if dialling.is_some_and(|dialling| dialling.session == session) {
            self.withdraw_offer(host);
        }
    }

    fn withdraw_offer(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(dialling) = running.dialling.take() else { return };
        self.close(host, dialling.data);
        if let Some(heartbeat) = dialling.heartbeat {
            self.close(host, heartbeat);
        }
        self.seek_backup(host);
    }

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

    fn answer_to_offer(&mut self, host: HostId, offer: Dialling, message: &Message) {
        match message.header.kind {
            Kind::Ready => {
                let heartbeat = self.dial(host, offer.peer);
                if let Some(running) = self.hosts[host.0].running() {
                    running.dialling = Some(Dialling { heartbeat: Some(heartbeat), ..offer });
                }
                let attach = hello(Kind::Hello, offer.session, Generation(0));
                self.send(host, heartbeat, attach);
            }
            Kind::Welcome => self.start_session(host),
            _ => self.withdraw_offer(host),
        }
    }

    /// A new connection says what it is for.
    fn greeted(&mut self, host: HostId, id: ConnectionId, message: &Message) {
        let (session, generation) = read_hello(message);
        let heartbeat = generation == Generation(0);
        match &mut self.hosts[host.0].role {
            Role::Idle | Role::Fenced if !heartbeat => {
                self.stand_by(host, session, generation, id);
            }
            Role::Backup(standby) if heartbeat && standby.id == session => {
                standby.heartbeat = Some(id);
                self.send(host, id, Message::new(Kind::Welcome, Epoch(0), Vec::new()));
                self.backup_event(host, session, BackupEvent::Heard, None);
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
                    self.primary_event(host, session.id, PrimaryEvent::PeerGone(reason));
                } else if running.dialling.is_some_and(|o| o.data == id || o.heartbeat == Some(id))
                {
                    self.withdraw_offer(host);
                }
            }
            Role::Backup(standby) if standby.data == id || standby.heartbeat == Some(id) => {
                self.backup_event(host, standby.id, BackupEvent::PeerGone(reason), None);
            }
            _ => {}
        }
    }

    /// The operator wants the VM to move.
    pub(crate) fn ask_hand_over(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            let Some(running) = self.hosts[host.0].running() else { continue };
            let Some(session) = &mut running.session else { continue };
            session.hand_over = *session.core.phase() == PrimaryPhase::Protected;
            let id = session.id;
            self.consider_checkpoint(host, id);
        }
    }

    /// The operator ends protection, for a while.
    pub(crate) fn unprotect(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            let Some(running) = self.hosts[host.0].running() else { continue };
            running.wanted = false;
            if let Some(id) = running.session.as_ref().map(|session| session.id) {
                self.primary_event(host, id, PrimaryEvent::Unprotect);
            }
        }
        let later = self.random.millis(100, 1_200);
        self.after(later, Event::WantedAgain);
    }

    /// The operator wants protection.
    pub(crate) fn want_protection(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            if let Some(running) = self.hosts[host.0].running() {
                running.wanted = true;
                self.seek_backup(host);
            }
        }
    }

    /// If the VM is nowhere and all hosts are up, the operator brings it up from
    /// the image that the hosts' records name.
    pub(crate) fn recover_if_lost(&mut self) {
        let gone = |role: &Role| matches!(role, Role::Idle | Role::Fenced);
        if !self.hosts.iter().all(|host| host.up && gone(&host.role)) {
            return;
        }
        if self.must_survive {
            return self.violation("one failure lost a VM that was protected".to_owned());
        }
        let Some(host) = self.valid_image() else { return };
        if !self.arbiter.reachable(host) {
            return;
        }
        let Verdict::Granted(generation) = self.arbiter.acquire(host, self.arbiter.generation)
        else {
            return;
        };
        self.note(host, || format!("recovers the VM at generation {generation}"));
        self.coverage.recoveries += 1;
        let lineage = self.hosts[host.0].image.lineage;
        self.coverage.recoveries_from_mirror += u64::from(lineage.0 > 0);
        self.oracle.forget_shown();
        let origin = self.oracle.tip(lineage);
        self.boot(host, generation, Some(origin));
    }
}

/// The first message on a connection; a generation of 0 is a heartbeat's.
fn hello(kind: Kind, session: SessionId, generation: Generation) -> Message {
    let payload = [u64::from(session.0).to_le_bytes(), generation.0.to_le_bytes()].concat();
    Message::new(kind, Epoch(0), payload)
}

fn read_hello(message: &Message) -> (SessionId, Generation) {
    let word =
        |at: usize| u64::from_le_bytes(message.payload[at..at + 8].try_into().expect("8 bytes"));
    (SessionId(word(0) as u32), Generation(word(8)))
}
