//! A host: its disk, which outlives a crash, and its part in the VM, which does not.

use crate::backup;
use crate::guest::{BLOCKS, Blocks, Guest, LineageId, Port};
use crate::network::ConnectionId;
use crate::primary::Session;
use crate::random::Random;
use std::fmt;
use std::time::Duration;
use understudy_protocol::repair::Repair;
use understudy_protocol::validity::{ImageRecord, ImageRole};
use understudy_protocol::{Generation, HostName, Lease, PrimaryPhase, Time};
use understudy_session::backup::Standby;

/// A host by number; the trace calls them a, b, c.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostId(pub usize);

impl HostId {
    /// Its name at the arbiter and in records.
    pub fn name(self) -> HostName {
        self.to_string().parse().expect("a letter is a host's name")
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", char::from(b'a' + self.0 as u8))
    }
}

/// One protection of the VM, on both of its hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u32);

/// A running copy of the VM, so that events of a former one are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyId(pub u32);

/// A host.
#[derive(Debug)]
pub struct Host {
    /// Whether it has power and a daemon.
    pub up: bool,
    /// Counts restarts.
    pub life: u32,
    /// Whether it ever ran the VM.
    pub ran: bool,
    /// Time from which it stood still.
    pub stalled_from: Time,
    /// Time before which nothing runs here.
    pub stalled_until: Time,
    /// For so long it has stood still.
    pub slept: Duration,
    /// For so long its clock stood still with it.
    pub clock_stood: Duration,
    /// What is applied here waits for the disk until then.
    pub disk_hangs_until: Time,
    /// Time since which it has waited.
    pub disk_hangs_from: Time,
    /// Time until which what is put on record here waits.
    pub record_hangs_until: Time,
    /// Number of times that what is applied here fails.
    pub disk_fails: u32,
    /// The image of the VM's disk.
    pub image: Image,
    /// Role that it has for the VM.
    pub role: Role,
    /// Standbys that are no more: a grant may still come to them.
    pub former: Vec<Former>,
    /// Host whose backup it is, or was last.
    pub backs: Option<HostId>,
}

/// The remains of a standby that has forgotten the VM.
#[derive(Debug)]
pub struct Former {
    /// Its session.
    pub id: SessionId,
    /// State machine that decided.
    pub core: Standby,
    /// Host that was its primary.
    pub primary: HostId,
}

/// The role of a host for the VM.
#[derive(Debug)]
pub enum Role {
    /// Has no part in it.
    Idle,
    /// Runs it.
    Primary(Box<Running>),
    /// Keeps an understudy of it.
    Backup(Box<backup::Standby>),
    /// Ran it until another host took it.
    Fenced,
}

/// The VM on the host that runs it.
#[derive(Debug)]
pub struct Running {
    /// Tells copies apart.
    pub copy: CopyId,
    /// CPU and memory.
    pub guest: Guest,
    /// Changes whenever the guest stops or starts, so that old steps are void.
    pub runs: u32,
    /// Whether the guest stands still.
    pub paused: bool,
    /// The card.
    pub port: Port,
    /// The generation at which this host owns the VM.
    pub generation: Generation,
    /// Its protection, if any.
    pub session: Option<Session>,
    /// An offer that is being made.
    pub dialling: Option<Dialling>,
    /// Its lease.
    pub lease: Lease,
    /// Time until which output leaves.
    pub limit: Option<Time>,
    /// Search for the next backup.
    pub repair: Repair,
    /// Whether somebody looks whether it is protected again.
    pub is_watched: bool,
    /// Whether its QEMU records a log, or can.
    pub records: bool,
    /// Whether the operator wants it protected.
    pub wanted: bool,
    /// The guest does nothing until then.
    pub sick_until: Time,
}

/// An offer to a backup that has not been answered yet.
#[derive(Clone, Copy, Debug)]
pub struct Dialling {
    /// Host to which it is made.
    pub peer: HostId,
    /// The future session.
    pub session: SessionId,
    /// Its data connection.
    pub data: ConnectionId,
    /// Its heartbeat connection, once the backup is ready.
    pub heartbeat: Option<ConnectionId>,
}

/// A disk image: what is written, and what of it would survive a power loss.
#[derive(Clone, Debug)]
pub struct Image {
    /// Blocks as reads see them.
    pub blocks: Blocks,
    /// Blocks as they are on stable storage.
    pub synced: Blocks,
    /// The history that wrote it last.
    pub lineage: LineageId,
    /// Role that it has, and since when; always on stable storage.
    pub record: Option<(ImageRole, Generation)>,
    /// Generation from which the VM was about to be claimed for a start on it.
    pub claimed_from: Option<Generation>,
}

impl Image {
    /// An image without content.
    pub fn blank() -> Image {
        let blocks = [0; BLOCKS];
        Image { blocks, synced: blocks, lineage: LineageId(0), record: None, claimed_from: None }
    }

    /// The host's record of it.
    pub fn record_of(&self, host: HostId) -> Option<ImageRecord> {
        let (role, generation) = self.record?;
        let claimed_from = self.claimed_from;
        Some(ImageRecord { host: host.name(), role, generation, claimed_from })
    }

    /// Puts everything on stable storage.
    pub fn sync(&mut self) {
        self.synced = self.blocks;
    }

    /// The power fails: of what was not synced, anything may be there.
    pub fn lose_power(&mut self, random: &mut Random) {
        for (block, synced) in self.blocks.iter_mut().zip(&mut self.synced) {
            if random.percent(50) {
                *block = *synced;
            }
            *synced = *block;
        }
    }
}

impl Host {
    /// A host that has just been started.
    pub fn new() -> Host {
        let (stalled_from, stalled_until) = (Time::default(), Time::default());
        let (image, role) = (Image::blank(), Role::Idle);
        Host {
            up: true,
            life: 0,
            ran: false,
            stalled_from,
            stalled_until,
            slept: Duration::ZERO,
            clock_stood: Duration::ZERO,
            disk_hangs_until: Time::default(),
            disk_hangs_from: Time::default(),
            record_hangs_until: Time::default(),
            disk_fails: 0,
            image,
            role,
            former: Vec::new(),
            backs: None,
        }
    }

    /// The VM, if it runs here.
    pub fn running(&mut self) -> Option<&mut Running> {
        match &mut self.role {
            Role::Primary(running) => Some(running),
            _ => None,
        }
    }

    /// Whether it keeps a copy of a VM that another host has won, or may have.
    pub fn is_frozen(&self) -> bool {
        let Role::Primary(running) = &self.role else { return false };
        running.lease.has_run_out() || self.has_lost()
    }

    /// Whether it keeps a copy of a VM that another host has won.
    pub fn has_lost(&self) -> bool {
        let Role::Primary(running) = &self.role else { return false };
        let session = running.session.as_ref();
        session.is_some_and(|session| matches!(session.core.phase(), PrimaryPhase::Frozen(_)))
    }

    /// The session of that id, if the VM runs here under it.
    pub fn session(&mut self, id: SessionId) -> Option<&mut Session> {
        self.running()?.session.as_mut().filter(|session| session.id == id)
    }

    /// The time until which its next errand waits, if it is a standby's.
    pub fn errand_hangs_until(&self) -> Time {
        let records = match &self.role {
            Role::Backup(standby) => standby.is_recording(),
            _ => false,
        };
        let record = if records { self.record_hangs_until } else { Time::default() };
        self.disk_hangs_until.max(record)
    }

    /// The standby of that session, if it is here.
    pub fn standby(&mut self, id: SessionId) -> Option<&mut backup::Standby> {
        match &mut self.role {
            Role::Backup(standby) if standby.id == id => Some(standby),
            _ => None,
        }
    }
}
