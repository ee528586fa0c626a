//! Start of a keeper by the daemon, and of the VM in it.

use super::note::Program;
use super::order::{Follower, Order};
use super::view::{self, Files};
use super::{Keeper, SOCKET};
use crate::arrivals::Arrival;
use crate::config::HostConfig;
use crate::host::Host;
use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_link::link::Link;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::VmDefinition;
use understudy_replication::handshake::{GroupOffer, Hello, Offer};
use understudy_report::error::{ErrorKind, HostError};

/// Time for a keeper to serve its API.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause between two tries.
const LOOK: Duration = Duration::from_millis(10);
/// The subcommand of this program that is a keeper.
pub const SUBCOMMAND: &str = "keep";
/// Its options that are an order, and the daemon's agent, and those for each of its VM's [`Files`].
const ORDER: &str = "--order";
const AGENT: &str = "--agent";
const DISK: &str = "--disk=";
const READ: &str = "--read=";
/// Variables with which a service manager has told the daemon something, and means nobody else.
const DAEMONS_OWN: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

impl Host {
    /// Whether a VM that is started here now gets a keeper, of its own or its group's. Members of a
    /// `[cluster]` do not: their snapshots are the daemon's affair.
    pub fn starts_in_keeper(&self, vm: &VmName) -> bool {
        let is_member = self.config.clusters.values().any(|it| it.members.contains_key(vm));
        self.config.keepers && self.keeps.is_none() && !is_member
    }

    /// Starts a keeper of a VM, or finds that of its group, and has `start` start the VM through the keeper's socket.
    pub fn start_in_keeper<T>(
        self: &Arc<Self>,
        definition: &VmDefinition,
        start: impl FnOnce(&Path) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let name = &definition.name;
        view::check_seen(&self.config, definition)?;
        let files = self.files_of(definition);
        // Names, cards and memory are this host's, which only the daemon sees as a whole. They are the VM's from here on, so
        // that others need not wait for its start.
        let arrival = {
            let _adding = self.adding.lock();
            self.make_way(definition)?;
            Arrival::expect(&self.arrivals, &self.config.name, definition)
        };
        let (mut follower, socket) = self.keeper_to_start_in(name, &files)?;
        let reached = match &mut follower {
            Follower::New(process) => await_socket(process, name, &socket),
            Follower::OfGroup => Ok(()),
        };
        match reached.and_then(|()| start(&socket)) {
            Ok(started) => {
                arrival.goes_to_keeper();
                self.keep_place(follower, arrival);
                Ok(started)
            }
            Err(error) => {
                self.dismiss(follower, name);
                // It lets go of a name for which it has no VM.
                self.await_last_keeper(name);
                Err(error)
            }
        }
    }

    /// The keeper in which a VM is to be started, and its socket: that of its group, or a new one.
    fn keeper_to_start_in(
        &self,
        vm: &VmName,
        files: &Files,
    ) -> Result<(Follower, PathBuf), HostError> {
        // Of two members that come at once the second finds the keeper of the first.
        let _adding = self.adding.lock();
        let group = self.group_of(vm);
        if let Some(shared) = group.as_ref().and_then(|group| self.keeper_of_group(group)) {
            let socket = shared.reachable()?.clone();
            self.admit(vm, files, &shared)?;
            return Ok((Follower::OfGroup, socket));
        }
        let socket = self.keeper_socket(vm);
        let name = group.as_ref().map(|group| &group.name);
        let mut process = self.spawn_keeper(vm, name, Stdio::null(), None, files)?;
        if group.is_some() {
            // If it ends, whoever wants to start the VM in it finds that out.
            let _ = await_socket(&mut process, vm, &socket);
        }
        Ok((Follower::New(process), socket))
    }

    /// Has a keeper end in which a VM was not started, and what it may have of it, unless others of its group are in it,
    /// or about to be.
    fn dismiss(&self, follower: Follower, vm: &VmName) {
        let Follower::New(process) = follower else { return };
        // Nobody finds it meanwhile.
        let _adding = self.adding.lock();
        let group = self.group_of(vm).map(|group| group.vms).unwrap_or_default();
        let is_in_it = |other: &VmName| {
            let keeper = self.keeper_of(other).and_then(|keeper| keeper.pid);
            keeper == Some(process.id()) || self.arrivals.is_expected(other)
        };
        if !group.iter().any(|other| other != vm && is_in_it(other)) {
            tell_to_end(&process);
        }
        reap_aside(process, vm);
    }

    /// Whether a keeper is to back up what is offered. A group has that of its leader.
    pub(crate) fn backs_up_in_keeper(&self, hello: &Hello, offer: &Offer) -> bool {
        let name = &offer.definition.name;
        let could_go_on = hello.keeper_of.as_ref() == Some(name);
        let get_keepers = match &offer.group {
            None => self.starts_in_keeper(name),
            Some(GroupOffer { membership, place }) => {
                membership.members.iter().all(|member| self.starts_in_keeper(&member.vm))
                    && (*place == 0 || self.keeper_of(&membership.leader().vm).is_some())
            }
        };
        could_go_on && get_keepers
    }

    /// Gives the connection on which a VM was offered to its keeper: a new one, or that of its group's leader.
    pub(crate) fn back_up_in_keeper(
        self: &Arc<Self>,
        arrival: Arrival,
        offer: &Offer,
        link: &Link,
    ) -> anyhow::Result<()> {
        let (group, files) = (offer.group.as_ref(), self.files_of(&offer.definition));
        if let Some(GroupOffer { membership, place: 1.. }) = group {
            let keeper = self.keeper_of(&membership.leader().vm);
            let keeper = keeper.context("its group's protection has ended meanwhile")?;
            self.admit(arrival.vm(), &files, &keeper)?;
            keeper.take(link, Some(offer))?;
            self.follow_to_keeper(arrival);
            return Ok(());
        }
        let name = arrival.vm().clone();
        let group = group.and_then(|group| group.membership.name.as_ref());
        let mut process = self.spawn_keeper(&name, group, Stdio::null(), None, &files)?;
        let socket = self.keeper_socket(&name);
        let keeper = Keeper {
            vm: name.clone(),
            pid: Some(process.id()),
            socket: socket.clone(),
            group: group.cloned(),
            program: Some(Program::own()),
            problem: None,
        };
        let begun = await_socket(&mut process, &name, &socket)
            .context("no keeper for it")
            .and_then(|()| keeper.take(link, Some(offer)));
        if begun.is_err() {
            self.end(process, &name);
            return begun;
        }
        arrival.goes_to_keeper();
        self.vms.remove(&name);
        reap_aside(process, &name);
        self.follow_to_keeper(arrival);
        Ok(())
    }

    /// Keeps the place of a VM that has been handed to a keeper, until that keeps the name, and knows what it is for
    /// as long as it does.
    pub(super) fn follow_to_keeper(self: &Arc<Self>, arrival: Arrival) {
        let (host, vm) = (Arc::downgrade(self), arrival.vm().clone());
        let mut word = self.word_of_keepers();
        let follow = move || {
            let deadline = Instant::now() + PATIENCE;
            let mut has_it = arrival.is_in_keeper();
            word.tell();
            while let Some(host) = host.upgrade() {
                match host.keeper_of(arrival.vm()) {
                    Some(_) if !has_it => {
                        has_it = true;
                        arrival.goes_to_keeper();
                        host.vms.remove(arrival.vm());
                        word.tell();
                    }
                    None if has_it || Instant::now() > deadline => return,
                    _ => {}
                }
                drop(host);
                match has_it {
                    true => word.wait(false),
                    false => thread::sleep(LOOK),
                }
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("keeper-{vm}")).spawn(follow) {
            warn!(%vm, "its place is not kept: {error}");
        }
    }

    /// Files of a VM that are devices, as its definition has them, and as this host has them on record. Not to be called
    /// under the lock `adding`.
    pub(crate) fn files_of(&self, definition: &VmDefinition) -> Files {
        let record = self.record(&definition.name).ok().flatten();
        let known = [definition].into_iter().chain(record.as_ref().map(|it| &it.definition));
        Files::of(known).that_are_devices(&self.config.run_as)
    }

    /// Lets a keeper see what a VM has that is to come into it.
    pub(super) fn admit(
        &self,
        vm: &VmName,
        files: &Files,
        keeper: &Keeper,
    ) -> Result<(), HostError> {
        keeper.pid.map_or(Ok(()), |pid| view::admit(&self.config, vm, files, pid))
    }

    /// Lets a VM's keeper open a medium that is a device, which it is to put into a drive.
    pub fn admit_medium(
        &self,
        vm: &VmName,
        medium: &Path,
        keeper: &Keeper,
    ) -> Result<(), HostError> {
        let files = Files { disks: vec![medium.to_owned()], ..Files::default() };
        self.admit(vm, &files.that_are_devices(&self.config.run_as), keeper)
    }

    /// Finds nothing of the host's that speaks against a keeper of a VM. To be called under the lock `adding`.
    pub(crate) fn make_way(&self, definition: &VmDefinition) -> Result<(), HostError> {
        self.notice_end_of_keeper(&definition.name);
        self.check_free(definition)?;
        self.arrivals.forget_kept(&definition.name);
        self.check_memory(definition.memory.bytes())
    }

    /// Has a keeper end what it may have started, in order, and waits a moment for it.
    fn end(&self, keeper: Child, vm: &VmName) {
        tell_to_end(&keeper);
        reap_aside(keeper, vm);
        self.await_last_keeper(vm);
    }

    pub(super) fn keeper_socket(&self, vm: &VmName) -> PathBuf {
        vm.below(&self.config.state_dir).join(SOCKET)
    }

    /// Starts the process of a keeper, perhaps with an order, for a VM with these files.
    pub(super) fn spawn_keeper(
        &self,
        vm: &VmName,
        group: Option<&GroupName>,
        input: Stdio,
        order: Option<&Order>,
        files: &Files,
    ) -> Result<Child, HostError> {
        // It reads the file as it is now, and nobody who asked for the VM would hear what is wrong with it.
        HostConfig::load(&self.config.file).map_err(|error| {
            HostError::new(ErrorKind::Invalid, format!("no keeper can begin: {error}"))
        })?;
        // Also if the program's file was replaced by another version.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("understudy")
            .arg(SUBCOMMAND)
            .arg("--config")
            .arg(&self.config.file)
            .arg(AGENT)
            .arg(self.agent.path_from_outside())
            .args(["--vm", vm])
            .args(group.iter().flat_map(|group| ["--group", group.as_str()]))
            .args(order.into_iter().flat_map(|order| [ORDER.to_owned(), order.to_string()]));
        let (disks, read) = (files.disks.iter(), files.read.iter());
        for (option, path) in disks.map(|it| (DISK, it)).chain(read.map(|it| (READ, it))) {
            let mut option = OsString::from(option);
            option.push(path);
            command.arg(option);
        }
        for variable in DAEMONS_OWN {
            command.env_remove(variable);
        }
        command.stdin(input).spawn().map_err(|error| {
            let message = format!("cannot start a keeper for {vm}: {error}");
            HostError::new(ErrorKind::Internal, message)
        })
    }
}

pub(super) fn await_socket(
    keeper: &mut Child,
    vm: &VmName,
    socket: &Path,
) -> Result<(), HostError> {
    let failed = |message: String| Err(HostError::new(ErrorKind::Internal, message));
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(socket).is_err() {
        if let Ok(Some(status)) = keeper.try_wait() {
            return failed(format!(
                "the keeper of {vm} has ended ({status}): the daemon's log has its words"
            ));
        }
        if Instant::now() > deadline {
            return failed(format!(
                "the keeper of {vm} does not answer on {} after {} s",
                socket.display(),
                PATIENCE.as_secs()
            ));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn tell_to_end(keeper: &Child) {
    let _ = kill(Pid::from_raw(keeper.id() as i32), Signal::SIGTERM);
}

/// Waits for the end of a keeper in a thread. Without it an ended one stays in the process table for as
/// long as this daemon lives.
pub(super) fn reap_aside(keeper: Child, vm: &VmName) {
    let (name, waited) = (vm.clone(), thread::Builder::new().name(format!("keeper-{vm}")));
    if let Err(error) = waited.spawn(move || reap(keeper, &name)) {
        warn!(%vm, "nobody waits for the end of its keeper: {error}");
    }
}

pub(crate) fn reap(mut keeper: Child, vm: &VmName) {
    if let Err(error) = keeper.wait() {
        warn!(%vm, "cannot wait for the end of its keeper: {error}");
    }
}
