//! The host: every VM that this daemon runs or backs up.

mod status;

use crate::agent_file::AgentFile;
use crate::arrivals::Arrivals;
use crate::autostart::{self, Awaited};
use crate::boot::Past;
use crate::config::{ClusterConfig, HostConfig};
use crate::containment::{self, Panics};
use crate::gate::address;
use crate::gate::lobby::Lobby;
use crate::inventory::Inventory;
use crate::keeper::KnownEnds;
use crate::keeper::note::Claim;
use crate::keeper::places::{Door, Kept};
use crate::lease::{Petting, Watchdog};
use crate::lifecycle::{check_goes_on, check_stays, stands_still};
use crate::lost;
use crate::membership::{self, Membership};
use crate::orphans::Orphans;
use crate::peers::{self, Peers};
use crate::snapshot::{Snapshots, start_sampling, start_schedules, start_sweeping};
use crate::state_dir::StateDir;
use crate::vm::{PrimaryVm, Vm};
use crate::{
    arbiter_watch, bridges, expiry, gate, keeper, lease, memory_pressure, strangers, webhook,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tracing::{info, warn};
use understudy_arbiter::Arbiter;
use understudy_arbiter::descriptors;
use understudy_link::tls::{self, ApiTls, Tls};
use understudy_machine::Machine;
use understudy_machine::qemu_log;
use understudy_protocol::Generation;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::programs::Missing;
use understudy_qemu::{Capabilities, Installed, cache};
use understudy_replication::handshake::Identity;
use understudy_replication::records::Records;
use understudy_replication::resync;
use understudy_report::CheckpointTiming;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::{EventKind, Journal};
use understudy_report::meters::Meters;
use understudy_threads::Common;

/// Time that the backup may take to answer an operator's wish.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(20);

/// Time for which an address may still be in use by the daemon before this one, or not be this
/// host's yet.
pub const ADDRESS_PATIENCE: Duration = Duration::from_secs(15);

/// One running daemon. All calls block; call them off the async threads.
pub struct Host {
    /// The configuration.
    pub(crate) config: HostConfig,
    /// VMs that this process keeps; none if it is the daemon.
    pub(crate) keeps: Option<Kept>,
    /// The daemon's hold on its state directory; none in a keeper.
    _state_dir: Option<StateDir>,
    pub(crate) identity: Identity,
    pub(crate) arbiter: Option<Arbiter>,
    pub(crate) capabilities: Capabilities,
    /// The QEMU of which they are.
    pub(crate) installed: Installed,
    pub(crate) agent: AgentFile,
    /// Reason that speaks against protecting VMs on this kernel.
    pub(crate) kernel_problem: Option<String>,
    /// Records of what this host's images are.
    pub(crate) records: Records,
    /// The VMs that it runs, backs up or has lost, and all else that it knows by their names.
    pub(crate) vms: Inventory,
    /// Lock that is held while a VM is added, so that two cannot take one name.
    pub(crate) adding: Common<()>,
    /// VMs that it is about to back up, or to claim; changed under `adding`.
    pub(crate) arrivals: Arrivals,
    /// Connections of hosts that are not known yet.
    pub(crate) lobby: Arc<Lobby>,
    /// Its membership, as far as etcd knows it.
    pub(crate) membership: Membership,
    /// State of what it does for snapshots and restores.
    pub(crate) snapshots: Snapshots,
    /// Watchdog that resets this host when nobody looks after leases.
    pub(crate) watchdog: Petting,
    /// Guests that outlived the last daemon.
    pub(crate) orphans: Orphans,
    /// Ends of keepers that it knows and could not clear.
    pub(crate) known_ends: KnownEnds,
    /// VMs that are to come up with this host.
    pub(crate) awaited: Awaited,
    /// Journal of what happened.
    pub(crate) events: Journal,
    /// Counters of its VMs.
    pub(crate) meters: Meters,
    /// Sender to which panics in threads of VMs are told.
    pub(crate) panics: Panics,
    /// Set for good when the daemon ends.
    pub(crate) closing: AtomicBool,
    /// The daemon ends, and waits for no protection any more.
    pub(crate) powering_off: AtomicBool,
    /// Set for good when it ends without waiting for guests to power off.
    pub(crate) hurried: AtomicBool,
}

impl Host {
    /// Checks the machine, claims the state directory, listens for peers.
    pub fn start(config: HostConfig) -> Result<Arc<Host>, HostError> {
        // Whoever has the addresses and the state directory is this host's daemon: nothing is touched before.
        let listeners =
            config.listen.iter().map(address::bind_for_peers).collect::<Result<Vec<_>, _>>()?;
        let state_dir = StateDir::take(&config.state_dir, ADDRESS_PATIENCE)?;
        let host = Host::new(config, None, Some(state_dir))?;
        host.refuse_strangers()?;
        // Before anybody can ask for these VMs.
        let (orphans, silent) = host.find_orphans();
        keeper::watch(&host).map_err(internal)?;
        host.end_dead_restores();
        host.forget_dead_insistence();
        for listener in listeners {
            gate::listen(&host, listener)?;
        }
        host.look_after_itself()?;
        membership::join(&host);
        expiry::start(&host);
        webhook::start(&host);
        start_schedules(&host);
        start_sampling(&host);
        let records = host.records.all();
        // Begun before anybody starts one of these VMs.
        records.iter().for_each(|record| host.seal_left_lists(record));
        strangers::tell(&records, &host.config.name);
        lost::start(&host, &records).map_err(internal)?;
        orphans.into_iter().for_each(|orphan| host.take_back(orphan));
        silent.iter().try_for_each(|vm| host.take_back_silent(vm)).map_err(internal)?;
        host.look_after_unread().map_err(internal)?;
        autostart::start(&host, records).map_err(internal)?;
        info!("host {} listens on {:?}", host.config.name, host.config.listen);
        Ok(host)
    }

    /// Checks the machine, to run one VM of this host, or those of its group, and nothing else. The
    /// host's addresses, its other VMs and what all share are the daemon's.
    pub fn keep(
        config: HostConfig,
        vm: &VmName,
        group: Option<GroupName>,
        door: Door,
    ) -> Result<Arc<Host>, HostError> {
        let claim = Claim::of(&config, vm, group.as_ref())?;
        let host = Host::keep_later(config, group, door)?;
        host.open_first_place(claim, vm)?;
        Ok(host)
    }

    /// The same for a VM that another process still keeps.
    pub fn keep_later(
        config: HostConfig,
        group: Option<GroupName>,
        door: Door,
    ) -> Result<Arc<Host>, HostError> {
        let host = Host::new(config, Some(Kept::new(group, door)), None)?;
        keeper::rights::try_in_a_test(&host.config);
        host.look_after_itself()?;
        membership::look_on(&host);
        Ok(host)
    }

    /// Starts what daemon and keepers do alike, for as long as they live.
    fn look_after_itself(self: &Arc<Self>) -> Result<(), HostError> {
        if let Some(tls) = &self.identity.tls {
            tls::renewal::start(Arc::downgrade(tls));
        }
        peers::watch(self);
        arbiter_watch::start(self);
        start_sweeping(self);
        bridges::start(self).map_err(internal)?;
        qemu_log::start(self, Host::logged_directories).map_err(internal)?;
        lease::start(self).map_err(internal)
    }

    fn new(
        config: HostConfig,
        keeps: Option<Kept>,
        state_dir: Option<StateDir>,
    ) -> Result<Arc<Host>, HostError> {
        understudy_threads::contain_panics();
        memory_pressure::spare_daemon();
        descriptors::raise_limit();
        descriptors::fill();
        #[cfg(feature = "fail-points")]
        std::mem::forget(fail::FailScenario::setup());
        let qemu = config.qemu_path().map_err(not_found)?;
        let installed = Installed::now(&qemu);
        let capabilities = cache::capabilities(&qemu, cache::directory().as_deref())
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        let agent = AgentFile::open(&config.agent_path().map_err(not_found)?)?;
        let kernel_problem =
            understudy_memory::probe().require().err().map(|error| error.to_string());
        if let Some(problem) = &kernel_problem {
            warn!("VMs run here but cannot be protected: {problem}");
        }
        let identity = identify(&config)?;
        prepare_directory(&config.state_dir)?;
        let records = Records::new(&config.state_dir, &config.name);
        let arbiter = config.arbiter.as_ref().map(|kind| {
            let arbiter = Arbiter::new(kind, &config.name)?;
            match keeps {
                Some(_) => arbiter.recalled_from(&config.state_dir),
                None => arbiter.remembered_in(&config.state_dir, records.are_none()?),
            }
        });
        let arbiter = arbiter
            .transpose()
            .map_err(|error| HostError::new(ErrorKind::Invalid, format!("[arbiter]: {error:#}")))?;
        let (panics, told) = crossbeam_channel::unbounded();
        let vms = Inventory::default();
        vms.note(|all| all.findings.peers = Peers::of(&config));
        let host = Arc::new(Host {
            records,
            config,
            keeps,
            _state_dir: state_dir,
            identity,
            arbiter,
            capabilities,
            installed,
            agent,
            kernel_problem,
            adding: Common::default(),
            arrivals: Arrivals::of(&vms),
            lobby: Arc::default(),
            membership: Membership::new(),
            snapshots: Snapshots::of(&vms),
            watchdog: Petting::new(),
            orphans: Orphans::of_inventory(&vms),
            known_ends: KnownEnds::of(&vms),
            awaited: Awaited::of(&vms),
            vms,
            events: Journal::default(),
            meters: Meters::default(),
            panics,
            closing: AtomicBool::new(false),
            powering_off: AtomicBool::new(false),
            hurried: AtomicBool::new(false),
        });
        containment::start(&host, told).map_err(internal)?;
        Ok(host)
    }

    /// Arms the watchdog, if one is configured. To be called last of all at the start: a daemon that
    /// ends behind this without [`Host::shutdown`] has its host reset.
    pub fn arm_watchdog(&self) -> Result<(), HostError> {
        let Some(path) = &self.config.watchdog else { return Ok(()) };
        let armed = Watchdog::arm(path, self.config.lease).map_err(|error| {
            HostError::new(ErrorKind::Invalid, format!("detection.watchdog: {error:#}"))
        })?;
        self.watchdog.begin(armed);
        Ok(())
    }

    /// The last checkpoints' timings, oldest first (at most 4 096 are kept).
    pub fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError> {
        Ok(self.primary(name)?.timings())
    }

    /// Certificate with which its API is served over the network, if it has one.
    pub fn api_tls(&self) -> Option<ApiTls> {
        self.identity.tls.clone().map(ApiTls::new)
    }

    /// Journal of what has happened on this host.
    pub fn events(&self) -> Journal {
        self.events.clone()
    }

    /// Records what has happened to the host. From a keeper its daemon hears events of VMs alone: it is told as one of each
    /// that it keeps.
    pub(crate) fn tell_of_host(&self, kind: EventKind) {
        match &self.keeps {
            None => self.events.record(kind),
            Some(kept) => kept.vms().iter().for_each(|vm| self.events.of(vm).record(kind.clone())),
        }
    }

    /// Counters of this host's VMs for a monitoring system.
    pub fn meters(&self) -> Meters {
        self.meters.retain(|vm| self.vms.has(vm));
        self.meters.clone()
    }

    /// The guest may run on the machine's images at this generation from now on.
    pub(crate) fn note_active(
        &self,
        machine: &Machine,
        generation: Generation,
        past: &Past,
        directory: &Path,
    ) -> Result<(), HostError> {
        let mut record = self.records.of(ImageRole::Active, generation, &machine.definition_now());
        if let Some(former) = past.record() {
            record.sessions = resync::reopen(former, &machine.disks(), directory);
        }
        record.peer = past.peer.clone();
        autostart::put_wish(&mut record, past.wish.as_ref());
        self.records.write(&record).map_err(internal)
    }

    /// The guest goes on running on the machine's images at this generation.
    pub(crate) fn note_generation_of(
        &self,
        machine: &Machine,
        generation: Generation,
    ) -> Result<(), HostError> {
        let name = &machine.definition().name;
        self.records.change(name, |record| record.image.generation = generation).map_err(internal)
    }

    /// A group that this host's configuration has.
    pub(crate) fn cluster(&self, name: &GroupName) -> Result<&ClusterConfig, HostError> {
        self.config.clusters.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.config.clusters.keys().map(GroupName::as_str).collect();
            let known = match known.is_empty() {
                true => "it has none".to_owned(),
                false => format!("it has {}", known.join(", ")),
            };
            let message = format!(
                "the configuration of host {} has no [cluster.{name}]; {known}",
                self.config.name
            );
            HostError::new(ErrorKind::NotFound, message)
        })
    }

    /// A VM by name.
    pub(crate) fn vm(&self, name: &VmName) -> Result<Vm, HostError> {
        let known = self.vms.get(name);
        known.or_else(|| self.just_lost(name)).ok_or_else(|| {
            let awaited = || self.awaited.why(name).map(|why| format!("is to come up here: {why}"));
            let kept = || {
                self.keeper_of(name).map(|_| {
                    "runs in a keeper of its own, for which the daemon does not do that: stop it, or \
                     see \"Keepers\" in docs/operating.md"
                        .to_owned()
                })
            };
            let lost = || self.why_lost(name);
            let why = self.orphans.why(name).or_else(kept).or_else(awaited).or_else(lost);
            let message = match why {
                Some(why) => format!("{name} {why}"),
                None => format!("there is no VM {name:?} on host {}", self.config.name),
            };
            HostError::new(ErrorKind::NotFound, message)
        })
    }

    /// The VMs that this host runs.
    pub(crate) fn running(&self) -> Vec<Arc<PrimaryVm>> {
        // Not under the lock: that may wait for one of them.
        let mut running = self.primaries();
        running.retain(|vm| vm.kept().is_none());
        running
    }

    /// A VM that runs on this host, and whose lease has not run out: what commands are about.
    pub(crate) fn going_primary(&self, name: &VmName) -> Result<Arc<PrimaryVm>, HostError> {
        let vm = self.primary(name)?;
        check_stays(&vm)?;
        check_goes_on(&vm).map(|()| vm)
    }

    /// A VM that runs on this host.
    pub(crate) fn primary(&self, name: &VmName) -> Result<Arc<PrimaryVm>, HostError> {
        match self.vm(name)? {
            Vm::Primary(vm) => match vm.kept() {
                None => Ok(vm),
                Some(reason) => Err(stands_still(name, &reason)),
            },
            Vm::Backup(session) => {
                let message = format!("{name} runs on {}: ask there", session.primary);
                Err(HostError::new(ErrorKind::Conflict, message))
            }
            Vm::Fenced(vm) => {
                let message = format!("{name} no longer runs on this host: {}", vm.reason);
                Err(HostError::new(ErrorKind::Conflict, message))
            }
        }
    }
}

pub(crate) fn not_found(missing: Missing) -> HostError {
    HostError::new(ErrorKind::NotFound, missing.0)
}

pub(crate) fn identify(config: &HostConfig) -> Result<Identity, HostError> {
    let load = |files| Tls::load(files, &config.name).map(Arc::new);
    let tls = config
        .tls
        .as_ref()
        .map(load)
        .transpose()
        .map_err(|error| HostError::new(ErrorKind::Invalid, format!("[tls]: {error:#}")))?;
    if config.insecure {
        warn!("insecure = true: anyone who reaches this host can read and change its VMs");
    }
    Ok(Identity { name: config.name.clone(), tls, keepers: config.keepers })
}

pub(crate) fn internal(error: std::io::Error) -> HostError {
    HostError::new(ErrorKind::Internal, error.to_string())
}

pub(crate) fn prepare_directory(path: &Path) -> Result<(), HostError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| {
        let message = format!("cannot create the directory {}: {error}", path.display());
        HostError::new(ErrorKind::Invalid, message)
    })
}

/// An error of this host's own doing.
pub(crate) fn failed(what: &str, error: &anyhow::Error) -> HostError {
    HostError::new(ErrorKind::Internal, format!("{what}: {error:#}"))
}
