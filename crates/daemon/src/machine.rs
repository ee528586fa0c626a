//! A machine on this host: one QEMU with everything around it. The same for a
//! VM that runs and for a standby.

use crate::doorbell::Doorbell;
use crate::home::{AGENT, CONSOLE, CONSOLE_LOG, Home, Lent, disk_socket};
use crate::pause::{Pause, Pauser};
use crate::sync::lock;
use anyhow::bail;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_disk::{Disk, NbdServer};
use understudy_memory::agent::{AgentLink, AgentListener};
use understudy_memory::{DirtyTracker, GuestRam, ProcessMemory, RamBlock};
use understudy_network::{CARDS_VARIABLE, GuestEnd, NetworkError, NextGuest, Port, PortConfig};
use understudy_protocol::{BlockId, CardIndex};
use understudy_qemu::command::{Console, Lockstep};
use understudy_qemu::lockstep::{self, LogChannel, LogEnds, LogErrand};
use understudy_qemu::process::Launch;
use understudy_qemu::qmp::{DeviceState, MonitorSockets, RunState, VmEvent};
use understudy_qemu::{
    Accelerator, Monitor, Qemu, Resources, Role, RunAs, VmDefinition, command_line, user,
};

/// How long QEMU may take to start and to answer.
const QEMU_TIMEOUT: Duration = Duration::from_secs(20);

/// What a machine is made of.
pub struct Plan<'a> {
    /// The VM as it is on this host.
    pub definition: VmDefinition,
    /// Versioned machine type.
    pub machine_type: String,
    /// What executes the guest's instructions.
    pub accelerator: Accelerator,
    /// Directory for sockets and logs; exists, and is this VM's own.
    pub run_dir: &'a Path,
    /// QEMU's program.
    pub qemu: &'a Path,
    /// The library preloaded into QEMU.
    pub agent: &'a Path,
    /// Who QEMU runs as.
    pub run_as: &'a RunAs,
    /// The disks, in the definition's order.
    pub disks: Vec<Arc<Disk>>,
    /// Fresh: the VM runs here, its output goes out. Standby: nothing does.
    pub role: Role,
    /// How its QEMU takes part in lockstep; none if it does not.
    pub lockstep: Option<Lockstep>,
    /// The machine in whose place it is to go on: it has the same memory, disks and ports.
    pub former: Option<&'a Machine>,
    /// Called on a thread of the machine's for everything that happens by itself.
    pub on_event: Box<dyn Fn(MachineEvent) + Send>,
}

/// What happens to a machine by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// The guest powered off; QEMU stands still.
    PoweredOff,
    /// QEMU ended, and its last words.
    Died(String),
    /// Something to tell the user.
    Notice(String),
}

/// A QEMU and everything around it. Dropping it ends QEMU.
pub struct Machine {
    definition: VmDefinition,
    machine_type: String,
    accelerator: Accelerator,
    ram: Arc<GuestRam>,
    blocks: Vec<RamBlock>,
    tracker: Mutex<Option<DirtyTracker>>,
    disks: Vec<Arc<Disk>>,
    ports: Vec<Arc<Port>>,
    /// The ports' sockets to this QEMU, while another one has them.
    next_guests: Mutex<Vec<NextGuest>>,
    monitor: Mutex<Monitor>,
    device_state: DeviceState,
    pauser: Pauser,
    lockstep: Option<Lockstep>,
    #[allow(dead_code)] // Until sessions in lockstep use it.
    log: Option<LogChannel>,
    console: Option<PathBuf>,
    doorbell: Arc<Doorbell>,
    /// Another machine has its place.
    retired: AtomicBool,
    process: Arc<Process>,
    // Held open: their ends tell QEMU that this daemon lives.
    agent: AgentLink,
    _servers: Vec<NbdServer>,
    /// Last: fields are dropped in order.
    presence: Arc<()>,
}

/// QEMU's process, and what is known of its end.
struct Process {
    qemu: Qemu,
    /// The end is this daemon's own doing.
    halted: AtomicBool,
    powered_off: AtomicBool,
}

impl Machine {
    /// Starts QEMU; the guest stands still until [`Machine::ensure_running`] or
    /// [`Machine::go_live`].
    pub fn launch(plan: Plan<'_>) -> anyhow::Result<Machine> {
        let doorbell = plan.former.map_or_else(Arc::default, |former| former.doorbell.clone());
        let ram = match plan.former {
            Some(former) => former.ram.clone(),
            None => Arc::new(GuestRam::create(plan.definition.memory.bytes())?),
        };
        let device_state = DeviceState::create()?;
        let user = plan.run_as.next();
        let home = match plan.former {
            Some(_) => Home::prepare_next(plan.run_dir, user)?,
            None => Home::prepare(plan.run_dir, user)?,
        };
        user::give(ram.fd(), user)?;
        user::give(&device_state, user)?;
        let servers = serve_disks(&plan, &home)?;
        let ports = match plan.former {
            Some(former) => former.ports.clone(),
            None => open_ports(&plan, &doorbell)?,
        };
        let (guest_ends, next_guests) = attach(&ports, plan.former.is_some())?;
        let (monitors, qemus_ends) = MonitorSockets::create()?;
        let console = plan.definition.console.then(|| home.lasting_path(CONSOLE));
        let listener = AgentListener::bind(home.path(AGENT))?;
        user::give_socket(listener.path(), user)?;
        let lent = Lent::open(&plan, user)?;
        let (log, qemus_log) = open_log(&plan)?.unzip();
        let args = command_line(
            &plan.definition,
            &Resources {
                machine_type: plan.machine_type.clone(),
                accelerator: plan.accelerator,
                kvm: lent.kvm.as_ref().map(AsRawFd::as_raw_fd),
                boot: lent.boot_files(),
                ram: ram.fd().as_raw_fd(),
                monitors: qemus_ends.numbers(),
                disks: plan.disks.iter().map(|disk| disk_socket(disk).into()).collect(),
                cards: guest_ends.iter().map(|end| end.socket.as_raw_fd()).collect(),
                console: console
                    .is_some()
                    .then(|| Console { socket: CONSOLE.into(), log: CONSOLE_LOG.into() }),
                role: plan.role,
                lockstep: plan.lockstep.clone(),
            },
        );
        let mut inherit: Vec<BorrowedFd<'_>> = vec![ram.fd(), device_state.as_fd()];
        inherit.extend(qemus_ends.descriptors());
        inherit.extend(guest_ends.iter().map(|end| end.socket.as_fd()));
        inherit.extend(lent.descriptors());
        let mut environment = lent.environment();
        if let (Some(ends), Some(lockstep)) = (&qemus_log, &plan.lockstep) {
            inherit.extend(ends.descriptors());
            environment.push(ends.environment(lockstep.role));
            environment.extend(lockstep.clock.environment());
        }
        environment.extend(cards_variable(&guest_ends));
        let qemu = Qemu::launch(&Launch {
            binary: plan.qemu,
            args: &args,
            env: &environment,
            inherit: &inherit,
            log: &plan.run_dir.join("qemu.log"),
            directory: Some(home.directory()),
            user,
        })?;
        drop((qemus_ends, guest_ends, qemus_log));
        let process = Arc::new(Process {
            qemu,
            halted: AtomicBool::new(false),
            powered_off: AtomicBool::new(false),
        });
        let started = connect(&process, &listener, monitors, plan.on_event);
        let (agent, mut monitor) = started.map_err(|error| process.explain(error))?;
        let blocks = ram_blocks(&mut monitor, &process.qemu, ram.clone())?;
        let name = &plan.definition.name;
        let pauser = Pauser::choose(name, &agent, &monitor, &device_state, QEMU_TIMEOUT)?;
        if plan.role == Role::Standby {
            monitor.prepare_standby(&device_state)?;
        }
        Ok(Machine {
            definition: plan.definition,
            machine_type: plan.machine_type,
            accelerator: plan.accelerator,
            ram,
            blocks,
            tracker: Mutex::new(None),
            disks: plan.disks,
            ports,
            next_guests: Mutex::new(next_guests),
            monitor: Mutex::new(monitor),
            device_state,
            pauser,
            lockstep: plan.lockstep,
            log,
            console,
            doorbell,
            retired: AtomicBool::new(false),
            process,
            agent,
            _servers: servers,
            presence: Arc::new(()),
        })
    }

    /// Dead once the machine is gone with all that it had, not a moment before.
    pub fn presence(&self) -> Weak<()> {
        Arc::downgrade(&self.presence)
    }

    /// The VM as it is on this host.
    pub fn definition(&self) -> &VmDefinition {
        &self.definition
    }

    /// The versioned machine type.
    pub fn machine_type(&self) -> &str {
        &self.machine_type
    }

    /// What executes the guest's instructions.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The guest's main memory.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// All RAM blocks; a block's id is its place here, the same on both hosts.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// The disks, in the definition's order.
    pub fn disks(&self) -> &[Arc<Disk>] {
        &self.disks
    }

    /// The cards, in the definition's order.
    pub fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    /// Rings when there is output to release; the session rings it too.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// The monitor; a checkpoint holds it for its length.
    pub fn monitor(&self) -> MutexGuard<'_, Monitor> {
        lock(&self.monitor)
    }

    /// Stops the guest for a checkpoint. Its monitor is the caller's: nobody else may ask
    /// anything meanwhile. In lockstep the log may begin or end there.
    pub fn pause<'m>(
        &'m self,
        monitor: &'m mut Monitor,
        errand: LogErrand,
    ) -> anyhow::Result<Pause<'m>> {
        self.pauser.begin(monitor, &self.device_state, errand)
    }

    /// Why this QEMU cannot be in lockstep, by the way it was built; none if it can.
    pub fn lockstep_obstacle(&self) -> Option<String> {
        lockstep::build_obstacle(self.agent.hello())
    }

    /// Why pauses go through the monitor and take longer; none if they do not.
    pub fn pause_obstacle(&self) -> Option<&str> {
        self.pauser.obstacle()
    }

    /// How its QEMU was started for lockstep; none if it cannot take part.
    pub fn lockstep(&self) -> Option<&Lockstep> {
        self.lockstep.as_ref()
    }

    /// The way of its log, if its QEMU can take part in lockstep.
    #[allow(dead_code)] // Until sessions in lockstep use it.
    pub fn log(&self) -> Option<&LogChannel> {
        self.log.as_ref()
    }

    /// Unix socket of the console.
    pub fn console(&self) -> Option<&Path> {
        self.console.as_deref()
    }

    /// QEMU's process.
    pub fn qemu_pid(&self) -> u32 {
        self.process.qemu.pid()
    }

    /// How a QEMU that does not run any more ended, for people.
    pub fn last_words(&self) -> String {
        self.process.last_words()
    }

    /// Whether QEMU runs.
    pub fn is_alive(&self) -> bool {
        matches!(self.process.qemu.try_wait(), Ok(None))
    }

    /// Whether the guest powered off. QEMU refuses to go on with it then.
    pub fn is_powered_off(&self) -> bool {
        self.process.powered_off.load(Ordering::Acquire)
    }

    /// The dirty tracker, attached at its first use; one user at a time.
    pub fn tracker(&self) -> anyhow::Result<MutexGuard<'_, Option<DirtyTracker>>> {
        let mut tracker = lock(&self.tracker);
        if tracker.is_none() {
            let uffd = self.agent.userfaultfd().clone();
            *tracker = Some(DirtyTracker::attach(self.agent.pid(), uffd, &self.blocks)?);
        }
        Ok(tracker)
    }

    /// Lets the guest run if it stands still.
    pub fn ensure_running(&self) -> anyhow::Result<()> {
        let mut monitor = self.monitor();
        if monitor.status()? != RunState::running {
            monitor.cont()?;
        }
        Ok(())
    }

    /// Starts the guest of a standby from `device_state`; its memory and disks
    /// are those of the same epoch. From here on its output goes out, behind `before`,
    /// which it sent on its former host. Returns how many of those were sent.
    pub fn go_live(
        &self,
        device_state: &[u8],
        before: &[(CardIndex, Vec<u8>)],
    ) -> anyhow::Result<u64> {
        let began = Instant::now();
        for disk in &self.disks {
            disk.set_read_only(false);
        }
        self.device_state.fill(device_state)?;
        self.monitor()
            .go_live(&self.device_state)
            .map_err(|error| self.process.explain(error.into()))?;
        let sent = self.open_network(before)?;
        info!(
            vm = self.definition.name,
            "live after {:.1} ms",
            began.elapsed().as_secs_f64() * 1e3
        );
        Ok(sent)
    }

    /// The guest runs here: its output goes out from here on, behind `before`, which it sent
    /// on its former host. Returns how many of those were sent.
    pub fn open_network(&self, before: &[(CardIndex, Vec<u8>)]) -> anyhow::Result<u64> {
        let mut sent = 0;
        for port in &self.ports {
            port.go_live();
            // First of all, so that what follows finds its way back.
            port.announce()?;
            let own = before.iter().filter(|(card, _)| *card == port.card());
            sent += own.filter(|(_, frame)| port.resend(frame)).count() as u64;
            port.open_gate();
        }
        Ok(sent)
    }

    /// Loads the state of a machine whose memory and disks are complete; the guest stands still.
    /// In lockstep: its QEMU writes the disks itself from now on.
    pub fn load(&self, device_state: &[u8]) -> anyhow::Result<()> {
        for disk in &self.disks {
            disk.set_read_only(false);
        }
        self.device_state.fill(device_state)?;
        let loaded = self.monitor().load(&self.device_state);
        loaded.map_err(|error| self.process.explain(error.into()))
    }

    /// Presses the power button.
    pub fn press_power_button(&self) -> anyhow::Result<()> {
        Ok(self.monitor().system_powerdown()?)
    }

    /// Takes the ports over from the machine in whose place this one goes on.
    pub(crate) fn take_ports(&self) {
        let next_guests = std::mem::take(&mut *lock(&self.next_guests));
        for (port, next) in self.ports.iter().zip(next_guests) {
            port.hand_over(next);
        }
    }

    /// Ends this copy for good. Nothing leaves it afterwards.
    pub fn halt(&self) {
        // Not if they are another machine's: it has taken them, or not given them yet.
        if !self.is_retired() && lock(&self.next_guests).is_empty() {
            for port in &self.ports {
                port.shut();
            }
        }
        self.end();
    }

    /// Ends this copy for good; another has its place, and its ports.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.end();
    }

    fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    fn end(&self) {
        let halted_before = self.process.halted.swap(true, Ordering::AcqRel);
        if !halted_before {
            if let Err(error) = self.process.qemu.kill() {
                warn!(vm = self.definition.name, "ending QEMU: {error}");
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.halt();
    }
}

fn serve_disks(plan: &Plan<'_>, home: &Home) -> anyhow::Result<Vec<NbdServer>> {
    let mut servers = Vec::new();
    for disk in &plan.disks {
        if plan.role == Role::Standby && plan.former.is_none() {
            disk.set_read_only(true);
        }
        let socket = home.path(&disk_socket(disk));
        servers.push(NbdServer::serve(disk.clone(), &socket)?);
        home.give_socket(&socket)?;
    }
    Ok(servers)
}

fn open_ports(plan: &Plan<'_>, doorbell: &Arc<Doorbell>) -> anyhow::Result<Vec<Arc<Port>>> {
    let mut ports = Vec::new();
    for (i, card) in plan.definition.cards.iter().enumerate() {
        let doorbell = doorbell.clone();
        let config = PortConfig {
            card: CardIndex(i as u16),
            mac: card.mac,
            tap: tap_name(&plan.definition.name, i),
            bridge: card.bridge.clone(),
            live: plan.role == Role::Fresh,
            output_limit_bytes: understudy_network::DEFAULT_LIMIT_BYTES,
        };
        ports.push(Arc::new(Port::open(config, Arc::new(move || doorbell.ring()))?));
    }
    Ok(ports)
}

/// QEMU's ends of the ports' sockets; the ports' own ends only if another QEMU has the ports.
fn attach(
    ports: &[Arc<Port>],
    later: bool,
) -> Result<(Vec<GuestEnd>, Vec<NextGuest>), NetworkError> {
    if later {
        let prepared = ports.iter().map(|port| port.prepare_guest());
        return Ok(prepared.collect::<Result<Vec<_>, _>>()?.into_iter().unzip());
    }
    let ends = ports.iter().map(|port| port.attach_guest()).collect::<Result<_, _>>()?;
    Ok((ends, Vec::new()))
}

fn open_log(plan: &Plan<'_>) -> std::io::Result<Option<(LogChannel, LogEnds)>> {
    plan.lockstep.as_ref().map(|_| LogChannel::create(QEMU_TIMEOUT)).transpose()
}

/// Tells the agent which descriptors it must answer for.
fn cards_variable(guest_ends: &[GuestEnd]) -> Option<(OsString, OsString)> {
    let numbers: Vec<_> = guest_ends.iter().map(|end| end.socket.as_raw_fd().to_string()).collect();
    (!numbers.is_empty()).then(|| (CARDS_VARIABLE.into(), numbers.join(",").into()))
}

/// An interface name has at most 15 bytes: the VM's name, cut, a check sum of
/// the whole name where it was cut, and the card.
fn tap_name(vm: &str, card: usize) -> String {
    if vm.len() <= 10 {
        return format!("{vm}.{card}");
    }
    let sum = vm.bytes().fold(0u16, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("{}{sum:04x}.{card}", &vm[..6])
}

fn connect(
    process: &Arc<Process>,
    listener: &AgentListener,
    monitors: MonitorSockets,
    on_event: Box<dyn Fn(MachineEvent) + Send>,
) -> anyhow::Result<(AgentLink, Monitor)> {
    let agent = listener.accept(Instant::now() + QEMU_TIMEOUT)?;
    let pid = process.qemu.pid();
    if u32::try_from(agent.pid()) != Ok(pid) {
        bail!("process {} answered in the place of QEMU {pid}", agent.pid());
    }
    let process = process.clone();
    let monitor = Monitor::connect(monitors, QEMU_TIMEOUT, move |event| {
        if let Some(event) = process.interpret(event) {
            on_event(event);
        }
    })?;
    Ok((agent, monitor))
}

impl Process {
    fn interpret(&self, event: VmEvent) -> Option<MachineEvent> {
        if self.halted.load(Ordering::Acquire) {
            return None;
        }
        match event {
            VmEvent::Stopped | VmEvent::Resumed => None,
            VmEvent::Shutdown { .. } => {
                self.powered_off.store(true, Ordering::Release);
                Some(MachineEvent::PoweredOff)
            }
            VmEvent::Reset { .. } => Some(MachineEvent::Notice("the guest rebooted".to_owned())),
            VmEvent::Panicked => {
                Some(MachineEvent::Notice("the guest's kernel panicked".to_owned()))
            }
            VmEvent::DiskError { node, reason, stopped } => {
                let then = if stopped { "; the guest stands still" } else { "" };
                Some(MachineEvent::Notice(format!("an error on {node}: {reason}{then}")))
            }
            VmEvent::Disconnected => Some(MachineEvent::Died(self.last_words())),
        }
    }

    /// How QEMU ended, for people.
    fn last_words(&self) -> String {
        match self.qemu.wait(Duration::from_secs(1)) {
            Ok(Some(exit)) => exit.to_string(),
            _ => "QEMU closed its monitor".to_owned(),
        }
    }

    /// Adds what QEMU itself said, if it has ended.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match self.qemu.wait(Duration::from_millis(500)) {
            Ok(Some(exit)) => error.context(exit.to_string()),
            _ => error,
        }
    }
}

fn ram_blocks(
    monitor: &mut Monitor,
    qemu: &Qemu,
    ram: Arc<GuestRam>,
) -> anyhow::Result<Vec<RamBlock>> {
    let mut infos = monitor.ram_blocks()?;
    // Main memory first, the others by name: the same order on both hosts.
    infos.sort_by(|a, b| (!a.is_main(), &a.name).cmp(&(!b.is_main(), &b.name)));
    if !infos.first().is_some_and(|info| info.is_main()) {
        bail!("QEMU lists no main memory among its RAM blocks");
    }
    let process = Arc::new(ProcessMemory::open(qemu.pid() as i32)?);
    let blocks = infos.into_iter().enumerate().map(|(i, info)| {
        if i == 0 {
            return RamBlock::main(info.name, info.address, ram.clone());
        }
        // All that is mapped: what is in use of it differs before the firmware ran.
        let id = BlockId(i as u16);
        RamBlock::auxiliary(id, info.name, info.address, info.max_bytes, process.clone())
    });
    Ok(blocks.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tap_names_fit_and_differ() {
        assert_eq!(tap_name("db", 0), "db.0");
        let (a, b) = (tap_name("customer-database-1", 13), tap_name("customer-database-2", 13));
        assert!(a.len() <= 15 && b.len() <= 15);
        assert_ne!(a, b);
    }
}
