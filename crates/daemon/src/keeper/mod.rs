//! Keepers: each runs one VM of this host in a process of its own, with all that the daemon would run
//! for it, so that the daemon may die without its guest noticing.
//!
//! Which VMs have one is no list of the daemon's: a keeper holds the lock of the [`note`] in its VM's
//! directory for as long as it lives, so that the kernel says it, to this daemon and to the next.
//!
//! | module | is |
//! |--------|----|
//! | [`note`] | what a keeper says of itself, and its lock |
//! | [`start`] | how the daemon starts one |
//! | [`rights`] | what it can do on its host |
//! | [`system_calls`] | what it cannot ask the kernel for |
//! | [`seclusion`] | which processes it reaches |
//! | [`view`] | which files it sees |
//! | [`order`] | what it may do about its VM first |
//! | [`replace`] | how the daemon has one replaced by another while the guest runs |
//! | [`legacy`] | what the one leaves to the other |
//! | [`leave`] | how the one leaves its VM |
//! | [`adopt`] | how the other goes on with it |
//! | [`places`] | what one has of each of its VMs |
//! | [`pass`] | how it hands other hosts' connections to one |
//! | [`watch`] | how it notices the end of one |
//! | [`ending`] | how all end before the host goes down |
//! | [`hung`] | how one ends that does not answer |

mod adopt;
pub mod ending;
mod hung;
mod leave;
mod legacy;
pub mod note;
pub mod order;
mod pass;
pub mod places;
mod replace;
pub mod rights;
pub mod seclusion;
pub mod start;
mod system_calls;
pub mod view;
mod watch;

pub use pass::Passed;
pub use watch::Word;
pub(crate) use watch::{KnownEnds, start as watch};

use crate::config::Groups;
use crate::host::Host;
use crate::vm::Vm;
use note::{End, Found, Program};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};
use understudy_link::link::Link;
use understudy_machine::qemu_log;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, GroupName, HostName, VmName};
use understudy_qemu::VmDefinition;
use understudy_replication::handshake::{Hello, Offer, Purpose};
use understudy_replication::membership::GroupMembers;
use understudy_replication::records::Record;
use understudy_report::Role;
use understudy_report::error::{ErrorKind, HostError};

/// The longest for which a keeper that is told something says nothing at all: it hangs then.
pub const SILENCE: Duration = Duration::from_secs(30);
/// The socket of a keeper's API, in its VM's directory.
const SOCKET: &str = "keeper.sock";
/// The socket through which a keeper gets connections of other hosts, beside it.
const CONNECTIONS: &str = "peers.sock";
/// Time between two looks at whether a keeper's VM is still there.
const LOOK: Duration = Duration::from_millis(100);
/// Time for one whose VM is gone to end.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// A keeper that lives.
#[derive(Clone, Debug)]
pub struct Keeper {
    /// Its VM.
    pub vm: VmName,
    /// Its process; none if it has not said yet.
    pub pid: Option<u32>,
    /// Path of its API.
    pub socket: PathBuf,
    /// The group that its VM shares it with.
    pub group: Option<GroupName>,
    /// Program that it runs, if it names it.
    pub program: Option<Program>,
    /// Reason why this daemon cannot speak with it, if it cannot.
    pub problem: Option<String>,
}

impl Keeper {
    /// Gives it a connection on which the peer has said what it wants and waits for the answer: something about its VM,
    /// or an offer, which was examined, of it or of another VM of its group.
    pub(crate) fn take(&self, link: &Link, offer: Option<&Offer>) -> anyhow::Result<()> {
        link.check_at_rest()?;
        let socket = self.reachable()?;
        pass::pass(&socket.with_file_name(CONNECTIONS), link.as_fd(), offer)?;
        link.send_signal(Kind::BeginAnew, Epoch(0))?;
        Ok(())
    }

    /// Gives it a socket on which it hears an order about another VM of its group.
    fn order(&self, socket: &UnixStream) -> anyhow::Result<()> {
        let keeper = self.reachable()?;
        pass::order(&keeper.with_file_name(CONNECTIONS), socket.as_fd())
    }

    /// Its socket; an error if this daemon cannot speak with it.
    pub fn reachable(&self) -> Result<&PathBuf, HostError> {
        match &self.problem {
            None => Ok(&self.socket),
            Some(problem) => {
                let message = format!("the keeper of {} goes on as it was: {problem}", self.vm);
                Err(HostError::new(ErrorKind::Conflict, message))
            }
        }
    }
}

/// The VM of which an entry of the state directory is the directory.
fn vm_of(entry: &fs::DirEntry) -> Option<VmName> {
    entry.file_name().to_str()?.parse().ok()
}

impl Host {
    /// The keeper that this host has of a VM; none in a keeper.
    pub fn keeper_of(&self, vm: &VmName) -> Option<Keeper> {
        if self.keeps.is_some() {
            return None;
        }
        let directory = vm.below(&self.config.state_dir);
        let socket = directory.join(SOCKET);
        let unknown = |problem: String| Keeper {
            vm: vm.clone(),
            pid: None,
            socket: socket.clone(),
            group: None,
            program: None,
            problem: Some(problem),
        };
        match note::look(&directory) {
            Found::Nobody(_) => None,
            Found::Starting => Some(unknown("it is just starting: try again".to_owned())),
            Found::Unknown(problem) => Some(unknown(problem)),
            Found::Lives(note) => Some(Keeper {
                pid: Some(note.pid),
                group: note.group,
                program: note.program,
                problem: self.stranger(&note.host),
                ..unknown(String::new())
            }),
        }
    }

    /// The keeper that a connection is for, if the peer can go on with one. An offer is for none: a
    /// VM that has one already is not to be backed up here.
    pub(crate) fn keeper_for(&self, hello: &Hello) -> Option<Keeper> {
        let named = hello.keeper_of.as_ref()?;
        match &hello.purpose {
            Purpose::Heartbeat { .. } | Purpose::Inbound { .. } | Purpose::Resume { .. } => {
                self.keeper_of(named)
            }
            // The leader may be in it no more.
            Purpose::Kept { membership, .. } => {
                membership.members.iter().find_map(|member| self.keeper_of(&member.vm))
            }
            _ => None,
        }
    }

    /// The keeper that VMs of a group share, if they have one that this daemon knows. Other hosts' groups may have the
    /// same name here; a VM is in one.
    fn keeper_of_group(&self, group: &GroupMembers) -> Option<Keeper> {
        let is_shared = |keeper: &Keeper| keeper.group.as_ref() == Some(&group.name);
        group.vms.iter().find_map(|vm| self.keeper_of(vm).filter(is_shared))
    }

    /// The group whose VMs a VM shares a keeper with: by this host's configuration, or as it is to be protected.
    pub(crate) fn group_of(&self, vm: &VmName) -> Option<GroupMembers> {
        self.group_by(&self.config.groups, vm)
    }

    fn group_by(&self, configured: &Groups, vm: &VmName) -> Option<GroupMembers> {
        let found = configured.iter().find(|(_, vms)| vms.contains(vm));
        let configured = found.map(|(name, vms)| GroupMembers {
            name: name.clone(),
            vms: vms.iter().cloned().collect(),
        });
        configured.or_else(|| self.record(vm).ok()??.group)
    }

    fn stranger(&self, host: &HostName) -> Option<String> {
        let problem = || {
            let name = &self.config.name;
            format!("it is one of host {host}, and this is the daemon of host {name}")
        };
        (*host != self.config.name).then(problem)
    }

    /// All keepers of this host.
    pub fn keepers(&self) -> Vec<Keeper> {
        self.directories().iter().filter_map(|vm| self.keeper_of(vm)).collect()
    }

    /// The VMs that have a directory here.
    fn directories(&self) -> Vec<VmName> {
        let entries = fs::read_dir(&self.config.state_dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| vm_of(&entry)).collect()
    }

    /// Directories where logs of QEMU may be too long that this process bounds: a keeper those of
    /// its VMs, the daemon all others.
    pub(crate) fn logged_directories(&self) -> Vec<PathBuf> {
        let state_dir = &self.config.state_dir;
        let Some(kept) = &self.keeps else {
            let directories = self.directories().into_iter().map(|vm| vm.below(state_dir));
            // Each second: what is read of a keeper comes last.
            let is_meant =
                |directory: &PathBuf| qemu_log::is_due(directory) && !note::lives_in(directory);
            return directories.filter(is_meant).collect();
        };
        kept.vms().iter().map(|vm| vm.below(state_dir)).collect()
    }

    /// Refuses a state directory in which another host's keepers live.
    pub(crate) fn refuse_strangers(&self) -> Result<(), HostError> {
        for vm in self.directories() {
            let Found::Lives(note) = note::look(&vm.below(&self.config.state_dir)) else {
                continue;
            };
            if let Some(problem) = self.stranger(&note.host) {
                let message = format!(
                    "{} is another host's: a keeper of {vm} lives there, and {problem}; correct \
                     `name` or `state_dir` in the configuration",
                    self.config.state_dir.display()
                );
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
        }
        Ok(())
    }

    /// The definition of a keeper's VM, once it is known.
    pub(crate) fn kept_definition(&self, keeper: &Keeper) -> Option<VmDefinition> {
        let recorded = || Some(self.record(&keeper.vm).ok()??.definition);
        self.arrivals.kept(&keeper.vm).or_else(recorded)
    }

    /// Role of this host for a keeper's VM, for when the keeper itself does not say.
    pub fn kept_role(&self, keeper: &Keeper) -> Role {
        match self.recorded_mirror(&keeper.vm) {
            Some(_) => Role::Backup,
            None => Role::Primary,
        }
    }

    /// The host whose VM this one backs up in a keeper, as far as that is on record.
    pub(crate) fn backs_up_for(&self, vm: &VmName) -> Option<HostName> {
        self.recorded_mirror(vm)?.peer
    }

    fn recorded_mirror(&self, vm: &VmName) -> Option<Record> {
        let record = self.record(vm).ok().flatten()?;
        matches!(record.image.role, ImageRole::Mirror | ImageRole::Syncing).then_some(record)
    }

    /// Waits a moment for a VM's last keeper, if that may be about to end.
    pub(crate) fn await_last_keeper(&self, vm: &VmName) {
        let deadline = Instant::now() + END_PATIENCE;
        while self.keeper_of(vm).is_some() && Instant::now() < deadline {
            thread::sleep(LOOK);
        }
    }

    /// Refuses a name that is not that of the VM which this process keeps.
    pub(crate) fn check_kept_name(&self, name: &VmName) -> Result<(), HostError> {
        self.keeps.as_ref().map_or(Ok(()), |kept| kept.check(name))
    }

    pub(super) fn end_of_kept(&self, vm: &VmName) -> Option<End> {
        if self.snapshots.is_restoring(vm) || self.arrivals.has(vm) {
            return None;
        }
        // The lobby is asked at the same moment: who is in it puts the VM there before it leaves.
        self.vms.look_at(vm, |there| match there {
            // Somebody may be about to have it back the VM up.
            None if !self.lobby.is_empty() => None,
            None => Some(End::Gone),
            Some(Vm::Fenced(fenced)) => {
                let (generation, reason) = (fenced.generation, fenced.reason.clone());
                Some(End::Fenced { generation, reason, elsewhere: fenced.elsewhere })
            }
            Some(Vm::Primary(_) | Vm::Backup(_)) => None,
        })
    }
}

fn conflict(message: String) -> HostError {
    HostError::new(ErrorKind::Conflict, message)
}
