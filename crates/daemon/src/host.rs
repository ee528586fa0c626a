//! The host: every VM that this daemon runs or backs up.

use crate::admission::open_disks;
use crate::arbiter::Arbiter;
use crate::config::HostConfig;
use crate::error::{ErrorKind, HostError};
use crate::group::Membership;
use crate::handshake::Identity;
use crate::machine::{self, Machine};
use crate::membership::{self, Members};
use crate::records::{Record, Records};
use crate::report::{CheckpointTiming, HostStatus, Mode, ProtectRequest, VmStatus};
use crate::resync;
use crate::sync::lock;
use crate::tls::Tls;
use crate::vm::{PrimaryVm, Vm};
use crate::{backup, incoming, primary};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, Output, PrimaryPhase};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::{Accelerator, Capabilities, ClockBase, Role, VmDefinition};

/// How long the guest may take to power off before it is ended.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the backup may take to answer an operator's wish.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(20);

/// One running daemon. All calls block; call them off the async threads.
pub struct Host {
    /// The configuration.
    pub(crate) config: HostConfig,
    pub(crate) identity: Identity,
    pub(crate) arbiter: Option<Arbiter>,
    pub(crate) capabilities: Capabilities,
    pub(crate) agent: PathBuf,
    /// What speaks against protecting VMs on this kernel.
    pub(crate) kernel_problem: Option<String>,
    /// What this host's images are.
    pub(crate) records: Records,
    pub(crate) vms: Mutex<BTreeMap<String, Vm>>,
    /// Whether the last machine of each name is still there, or on its way out.
    pub(crate) presences: Mutex<BTreeMap<String, Weak<()>>>,
    /// Held while a VM is added, so that two cannot take one name.
    pub(crate) adding: Mutex<()>,
    /// Held while a group's protection is set up. Not `adding`: two hosts that
    /// protect to each other would wait for each other.
    pub(crate) protecting: Mutex<()>,
    /// Groups that this host backs up, or did, by the session of their leader.
    pub(crate) backed_groups: Mutex<Vec<Weak<backup::Group>>>,
    /// The other hosts, as far as etcd knows them.
    pub(crate) members: Members,
    /// Set for good when the daemon ends.
    closing: AtomicBool,
}

impl Host {
    /// Checks the machine, claims the state directory, listens for peers.
    pub fn start(config: HostConfig) -> Result<Arc<Host>, HostError> {
        abort_on_panic();
        #[cfg(feature = "fail-points")]
        std::mem::forget(fail::FailScenario::setup());
        let capabilities = Capabilities::probe(&config.qemu_path()?)
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        let agent = config.agent_path()?;
        let kernel_problem =
            understudy_memory::probe().require().err().map(|error| error.to_string());
        if let Some(problem) = &kernel_problem {
            warn!("VMs run here but cannot be protected: {problem}");
        }
        let identity = identify(&config)?;
        prepare_directory(&config.state_dir)?;
        let listeners = config.listen.iter().map(bind).collect::<Result<Vec<_>, _>>()?;
        let arbiter = config.arbiter.as_ref().map(|kind| Arbiter::new(kind, &config.name));
        let arbiter = arbiter
            .transpose()
            .map_err(|error| HostError::new(ErrorKind::Invalid, format!("[arbiter]: {error:#}")))?;
        let records = Records::new(&config.state_dir, &config.name);
        let host = Arc::new(Host {
            records,
            config,
            identity,
            arbiter,
            capabilities,
            agent,
            kernel_problem,
            vms: Mutex::default(),
            presences: Mutex::default(),
            adding: Mutex::default(),
            protecting: Mutex::default(),
            backed_groups: Mutex::default(),
            members: Members::default(),
            closing: AtomicBool::new(false),
        });
        for listener in listeners {
            incoming::listen(&host, listener)?;
        }
        membership::join(&host);
        host.tell_of_the_lost();
        info!("host {} listens on {:?}", host.config.name, host.config.listen);
        Ok(host)
    }

    /// Starts a VM on this host, unprotected.
    pub fn vm_start(self: &Arc<Self>, definition: VmDefinition) -> Result<VmStatus, HostError> {
        let _adding = lock(&self.adding);
        self.check_free(&definition)?;
        let newest = self.check_images(&definition)?;
        self.boot(definition, newest)
    }

    /// Starts a VM whose name is free on its newest images, `newest` being the newest
    /// generation known of it.
    pub(crate) fn boot(
        self: &Arc<Self>,
        definition: VmDefinition,
        newest: Generation,
    ) -> Result<VmStatus, HostError> {
        let machine_type = self.machine_type(&definition)?;
        let accelerator = self
            .capabilities
            .accelerator(definition.accel)
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        self.check_bridges(&definition)?;
        self.check_memory(definition.memory.bytes())?;
        let lockstep = match definition.lockstep {
            true => Some(self.recording(&definition, accelerator)?),
            false => None,
        };
        let disks = open_disks(&definition)?;
        let former = self.record(&definition.name)?;
        let run_dir = self.vm_directory(&definition.name)?;
        let name = definition.name.clone();
        let plan = machine::Plan {
            definition,
            machine_type,
            accelerator,
            run_dir: &run_dir,
            qemu: &self.capabilities.binary,
            agent: &self.agent,
            run_as: &self.config.run_as,
            disks,
            role: Role::Fresh,
            lockstep,
            former: None,
            on_event: self.event_sink(&name),
        };
        let machine = self.launch(plan).map_err(|error| failed("cannot start the VM", &error))?;
        // Everything works: only now the arbiter's record changes.
        let generation = self.take_ownership(&name, newest)?;
        self.note_active(&machine, generation, former, &run_dir)?;
        let vm = self.add_primary(machine.clone(), generation, None);
        machine.ensure_running().map_err(|error| failed("cannot start the guest", &error))?;
        info!(vm = name, "started");
        Ok(Vm::Primary(vm).status())
    }

    /// How a QEMU of this host records, from now on.
    fn recording(
        &self,
        definition: &VmDefinition,
        accelerator: Accelerator,
    ) -> Result<Lockstep, HostError> {
        self.check_lockstep(definition, accelerator)?;
        Ok(Lockstep { role: LogRole::Record, clock: ClockBase::now() })
    }

    /// Stops a VM: ACPI power-off and a deadline, or at once with `force`.
    pub fn vm_stop(self: &Arc<Self>, name: &str, force: bool) -> Result<(), HostError> {
        match self.vm(name)? {
            Vm::Primary(vm) => {
                if !force {
                    return self.power_off(&vm);
                }
                let fellows = self.fellows(&vm);
                self.end_protection(&vm)?;
                self.leave_group(&vm, &fellows);
                self.remove_primary(&vm);
            }
            Vm::Backup(session) if force => session.give_up("the operator ended the backup"),
            Vm::Backup(session) => {
                let message = format!(
                    "this host only backs {name} up: run `understudy unprotect {name}` on {}, \
                     or use --force to end the backup here",
                    session.primary
                );
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            Vm::Fenced(_) => {
                lock(&self.vms).remove(name);
            }
        }
        Ok(())
    }

    /// Starts protecting a VM; returns when the peer has accepted and the first
    /// synchronisation runs. `status` shows its progress.
    pub fn protect(
        self: &Arc<Self>,
        name: &str,
        request: ProtectRequest,
    ) -> Result<VmStatus, HostError> {
        let vm = self.primary(name)?;
        let _protecting = lock(&vm.protecting);
        // The operator decides: nothing else is tried meanwhile.
        vm.repairer.ended();
        vm.repairer.trust_lockstep();
        let begun = self.begin_alone(&vm, request);
        if let Err(error) = &begun {
            if vm.is_degraded() {
                vm.repairer.lost(&error.to_string());
            }
        }
        begun.map(|()| Vm::Primary(vm.clone()).status())
    }

    /// Protects a VM to another host, as its operator wished.
    pub(crate) fn protect_again(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        to: &str,
    ) -> Result<(), HostError> {
        let _protecting = lock(&vm.protecting);
        let wish = vm.repairer.wish().filter(|_| !self.is_closing()).ok_or_else(|| {
            HostError::new(ErrorKind::Conflict, "nobody wants it protected any more".to_owned())
        })?;
        let mut request = ProtectRequest { to: to.to_owned(), ..wish };
        if request.mode == Mode::Lockstep && vm.repairer.distrusts_lockstep() {
            request.mode = Mode::Checkpoint;
            vm.events.note(format!(
                "the backup diverged twice in a row: protected with checkpoints, until `understudy \
                 protect {name} --mode lockstep`",
                name = vm.name()
            ));
        }
        self.begin_alone(vm, request)
    }

    /// Begins the protection of a VM by itself.
    fn begin_alone(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        request: ProtectRequest,
    ) -> Result<(), HostError> {
        self.check_protectable(vm)?;
        self.make_fit(vm, request.mode)?;
        let plan = self.plan_protection(vm, &request)?;
        let membership = Membership::of_one(vm.name(), plan.generation);
        let group = primary::Group::new(membership, plan.timeout, request.output);
        // Before protection can be lost again.
        let former = vm.repairer.wish();
        vm.repairer.set_wish(Some(request));
        self.begin_protection(vm, plan, (group, 0)).inspect_err(|_| vm.repairer.set_wish(former))
    }

    /// Refuses to protect what is protected, or cannot be.
    pub(crate) fn check_protectable(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let name = vm.name();
        if let Some(session) = vm.active_session() {
            let message = format!(
                "{name} is protected to {} already: run `understudy unprotect {name}` first",
                session.peer
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        match &self.kernel_problem {
            Some(problem) => Err(HostError::new(ErrorKind::Invalid, problem.clone())),
            None => Ok(()),
        }
    }

    /// Begins the protection of the member of a group at this place.
    pub(crate) fn begin_protection(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        plan: primary::Plan,
        group: (Arc<primary::Group>, usize),
    ) -> Result<(), HostError> {
        let (name, peer) = (vm.name().to_owned(), plan.peer.clone());
        let output = plan.wish.output;
        let host = Arc::downgrade(self);
        let owner = Arc::downgrade(vm);
        let over = move |phase| {
            if let (Some(host), Some(vm)) = (host.upgrade(), owner.upgrade()) {
                host.protection_over(&vm, phase);
            }
        };
        let session = primary::protect(vm.machine(), plan, group, over)
            .map_err(|error| refused(&format!("cannot protect {name} to {peer}"), &error))?;
        vm.begin(session);
        vm.events.note(format!("protection to {peer} begins"));
        if output == Output::Unheld {
            let words = "NOT PROTECTED: output is not held, as asked for; a fail-over undoes what \
                         clients have seen";
            warn!(vm = name, "{words}");
            vm.events.note(words);
        }
        Ok(())
    }

    /// Ends protection on both hosts, of a group as a whole; the VM runs on here. For a VM whose
    /// protection is lost: takes note that this is how it shall be.
    pub fn unprotect(&self, name: &str) -> Result<VmStatus, HostError> {
        let vm = self.primary(name)?;
        let _protecting = lock(&vm.protecting);
        if vm.active_session().is_none() && !vm.is_degraded() {
            let message = format!("{name} is not protected");
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        let fellows = self.fellows(&vm);
        vm.repairer.set_wish(None);
        vm.repairer.ended();
        self.end_protection(&vm)?;
        for vm in fellows.iter().chain([&vm]) {
            vm.repairer.set_wish(None);
            vm.accept_unprotected();
            vm.events.note("protection ended as asked for");
        }
        Ok(Vm::Primary(vm.clone()).status())
    }

    /// Planned fail-over: hands the VM, and its group, to the backup without losing anything.
    /// Returns when the backup runs it.
    pub fn failover(&self, name: &str) -> Result<(), HostError> {
        let vm = self.primary(name)?;
        let session = vm.active_session().ok_or_else(|| {
            let message = format!("{name} is not protected: there is no backup to hand it to");
            HostError::new(ErrorKind::Conflict, message)
        })?;
        if session.phase() != PrimaryPhase::Protected {
            let message = format!("{name} is still being synchronised: wait until it is protected");
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        session.request_hand_over();
        let ended = session.wait_for_phase(PEER_TIMEOUT, |phase| {
            matches!(phase, PrimaryPhase::Halted(_) | PrimaryPhase::Alone(_))
        });
        match ended {
            Ok(PrimaryPhase::Halted(_)) => self.await_handed_over(&vm),
            Ok(phase) | Err(phase) => {
                let message = format!("{name} was not handed over: {phase:?}");
                Err(HostError::new(ErrorKind::Unreachable, message))
            }
        }
    }

    /// One VM's status.
    pub fn vm_status(&self, name: &str) -> Result<VmStatus, HostError> {
        Ok(self.vm(name)?.status())
    }

    /// The last checkpoints' timings, oldest first (at most 4 096 are kept).
    pub fn timings(&self, name: &str) -> Result<Vec<CheckpointTiming>, HostError> {
        Ok(self.primary(name)?.timings())
    }

    /// Everything on this host.
    pub fn status(&self) -> HostStatus {
        let vms: Vec<Vm> = lock(&self.vms).values().cloned().collect();
        HostStatus {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            qemu_version: self.capabilities.version.to_string(),
            vms: vms.iter().map(Vm::status).collect(),
        }
    }

    /// Ends the daemon's work: protected VMs are handed to their backups, the
    /// others end, and so do backups. Nothing is left behind.
    pub fn shutdown(self: &Arc<Self>) {
        self.closing.store(true, Ordering::Release);
        let names: Vec<String> = lock(&self.vms).keys().cloned().collect();
        for name in names {
            if self.failover(&name).is_ok() {
                continue;
            }
            if let Err(error) = self.vm_stop(&name, true) {
                warn!(vm = name, "{error}");
            }
        }
        if let Some(etcd) = self.arbiter.as_ref().and_then(Arbiter::etcd) {
            self.members.leave(etcd);
        }
    }

    /// Whether the daemon is about to end.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The guest may run on the machine's images at this generation from now on.
    pub(crate) fn note_active(
        &self,
        machine: &Machine,
        generation: Generation,
        former: Option<Record>,
        directory: &Path,
    ) -> Result<(), HostError> {
        let mut record = self.records.of(ImageRole::Active, generation, machine.definition());
        if let Some(former) = former {
            record.sessions = resync::reopen(&former, machine.disks(), directory);
            record.peer = former.peer;
        }
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

    /// VMs that ran here when the last daemon ended.
    fn tell_of_the_lost(&self) {
        for record in self.records.all() {
            if record.image.role == ImageRole::Active {
                let vm = &record.definition.name;
                warn!(vm, "ran here when this host's daemon ended: `understudy recover {vm}`");
            }
        }
    }

    /// A VM by name.
    pub(crate) fn vm(&self, name: &str) -> Result<Vm, HostError> {
        lock(&self.vms).get(name).cloned().ok_or_else(|| {
            let message = format!("there is no VM {name:?} on host {}", self.config.name);
            HostError::new(ErrorKind::NotFound, message)
        })
    }

    pub(crate) fn primary(&self, name: &str) -> Result<Arc<PrimaryVm>, HostError> {
        match self.vm(name)? {
            Vm::Primary(vm) => Ok(vm),
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

    fn power_off(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        vm.machine()
            .press_power_button()
            .map_err(|error| failed("cannot press the power button", &error))?;
        let name = vm.name();
        let deadline = Instant::now() + POWER_OFF_TIMEOUT;
        // The guest's power-off removes the VM.
        while lock(&self.vms).contains_key(name) {
            if Instant::now() > deadline {
                let message = format!(
                    "{name} did not power off within {} s: use --force to end it",
                    POWER_OFF_TIMEOUT.as_secs()
                );
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub(crate) fn plan_protection(
        &self,
        vm: &PrimaryVm,
        request: &ProtectRequest,
    ) -> Result<primary::Plan, HostError> {
        let invalid = |message: String| Err(HostError::new(ErrorKind::Invalid, message));
        let machine = vm.machine();
        let definition = machine.definition();
        let Some(arbiter) = self.arbiter.clone() else {
            return invalid(
                "this host's configuration has no [arbiter]: without one, nobody may decide who \
                 owns a VM after a failure"
                    .to_owned(),
            );
        };
        let known = self.known_hosts();
        let Some(addresses) = known.get(&request.to) else {
            let known: Vec<&str> = known.keys().map(String::as_str).collect();
            return invalid(format!(
                "{:?} is not a peer of this host; its [peers] are: {}",
                request.to,
                known.join(", ")
            ));
        };
        if request.output == Output::Unheld && !self.config.allow_unheld_output {
            return invalid(
                "output that is not held is not protected: this host does that for measurements \
                 only, and only if its configuration says allow_unheld_output = true under \
                 [experiments]"
                    .to_owned(),
            );
        }
        let policy = request.policy.or(definition.policy).unwrap_or_default();
        policy.validate().map_err(|error| HostError::new(ErrorKind::Invalid, error))?;
        request.encoding.validate().map_err(|error| HostError::new(ErrorKind::Invalid, error))?;
        let generation = match vm.generation() {
            // Started without an arbiter's record.
            Generation(0) => {
                let generation = self.take_ownership(&definition.name, Generation(0))?;
                self.note_generation_of(&machine, generation)?;
                generation
            }
            generation => generation,
        };
        let directory = self.vm_directory(&definition.name)?;
        Ok(primary::Plan {
            identity: self.identity.clone(),
            peer: request.to.clone(),
            addresses: addresses.clone(),
            generation,
            mode: request.mode,
            policy,
            encoding: request.encoding,
            timeout: self.config.detection_timeout,
            arbiter,
            qemu_version: self.capabilities.version.to_string(),
            session: resync::fresh_session(&self.config.name, &definition.name)
                .map_err(internal)?,
            sessions: resync::track(&machine, &self.records, &directory)
                .map_err(|error| failed("cannot note the changes of the disks", &error))?,
            records: self.records.clone(),
            wish: request.clone(),
        })
    }
}

fn identify(config: &HostConfig) -> Result<Identity, HostError> {
    let load = |files| Tls::load(files, &config.name).map(Arc::new);
    let tls = config
        .tls
        .as_ref()
        .map(load)
        .transpose()
        .map_err(|error| HostError::new(ErrorKind::Invalid, format!("[tls]: {error:#}")))?;
    if config.insecure {
        warn!("insecure = true: whoever reaches this host may read and change its VMs");
    }
    Ok(Identity { name: config.name.clone(), tls })
}

fn bind(address: &SocketAddr) -> Result<TcpListener, HostError> {
    TcpListener::bind(address).map_err(|error| {
        let message = format!(
            "cannot listen on {address}: {error}; is another daemon running, or the address not this host's?"
        );
        HostError::new(ErrorKind::Conflict, message)
    })
}

fn internal(error: std::io::Error) -> HostError {
    HostError::new(ErrorKind::Internal, error.to_string())
}

pub(crate) fn prepare_directory(path: &Path) -> Result<(), HostError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| {
        let message = format!("cannot create the directory {}: {error}", path.display());
        HostError::new(ErrorKind::Invalid, message)
    })
}

/// A daemon that lost a thread cannot keep its promises: it ends, QEMU ends with
/// it, and the backups take over.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// An error of this host's own doing.
pub(crate) fn failed(what: &str, error: &anyhow::Error) -> HostError {
    HostError::new(ErrorKind::Internal, format!("{what}: {error:#}"))
}

/// An error that the peer, or the way to it, caused.
fn refused(what: &str, error: &anyhow::Error) -> HostError {
    let kind = if error.chain().any(|cause| cause.is::<crate::link::Refused>()) {
        ErrorKind::Refused
    } else {
        ErrorKind::Unreachable
    };
    HostError::new(kind, format!("{what}: {error:#}"))
}
