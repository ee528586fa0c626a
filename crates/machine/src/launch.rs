//! The launch of a machine: of its QEMU, and all that QEMU must find.

#[cfg(feature = "fail-points")]
use crate::booted::Booted;
use crate::cgroup::{LimitGroup, Limits};
use crate::console::ConsoleServer;
use crate::disk_error::CurrentError;
use crate::doorbell::Doorbell;
use crate::hearing::Hearing;
use crate::home::{AGENT, CONSOLE, CONSOLE_LOG, Home, Lent, disk_socket};
use crate::machine::Fittings;
use crate::pause::Pauser;
use crate::process::{Process, connect};
use crate::qemu_log::QEMU_LOG;
use crate::tpm::{self, Tpm};
use crate::tracking::logged;
use crate::watching::Watching;
use crate::{Machine, OnEvent};
use anyhow::bail;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use understudy_disk::{Disk, NbdServer};
use understudy_memory::agent::AgentListener;
use understudy_memory::{GuestRam, ProcessMemory, RamBlock};
use understudy_network::{CARDS_VARIABLE, GuestEnd, NetworkError, NextGuest, Port, PortConfig};
use understudy_protocol::VmName;
use understudy_protocol::{BlockId, CardIndex};
use understudy_qemu::command::{Console, ConsoleSocket, Lockstep};
use understudy_qemu::lockstep::{CONSOLE_VARIABLE, LogChannel, LogEnds};
use understudy_qemu::process::Launch;
use understudy_qemu::qmp::{DeviceState, MonitorSockets};
use understudy_qemu::{
    Accelerator, Kvm, Monitor, Qemu, Resources, Role, RunAs, VmDefinition, command_line, user,
};
use understudy_threads::{Mutex, RwLock};

/// Time that QEMU may take to start and to answer.
pub(crate) const QEMU_TIMEOUT: Duration = Duration::from_secs(20);

/// The parts that a machine is made of.
pub struct Plan<'a> {
    /// The VM as it is on this host.
    pub definition: VmDefinition,
    /// Versioned machine type.
    pub machine_type: String,
    /// The accelerator that executes the guest's instructions.
    pub accelerator: Accelerator,
    /// Directory for sockets and logs; exists, and is this VM's own.
    pub run_dir: &'a Path,
    /// QEMU's program.
    pub qemu: &'a Path,
    /// The library preloaded into QEMU.
    pub agent: &'a Path,
    /// User that QEMU runs as.
    pub run_as: &'a RunAs,
    /// The most that QEMU may use.
    pub limits: Limits,
    /// The disks, in the definition's order.
    pub disks: Vec<Arc<Disk>>,
    /// Whether its QEMU may outlive this process, and its disks come back.
    pub may_be_adopted: bool,
    /// The role of QEMU. Fresh: the VM runs here, its output goes out. Standby: nothing does.
    pub role: Role,
    /// Part that its QEMU takes in lockstep; none if it does not.
    pub lockstep: Option<Lockstep>,
    /// The machine in whose place it is to go on: it has the same memory, disks and ports.
    pub former: Option<&'a Machine>,
    /// Its memory, if somebody fills it already; else it is the former machine's, or new.
    pub ram: Option<Arc<GuestRam>>,
    /// Callback, called on a thread of the machine's for everything that happens by itself.
    pub on_event: OnEvent,
}

impl Machine {
    /// Starts QEMU; the guest stands still until [`Machine::ensure_running`] or
    /// [`Machine::go_live`].
    #[cfg_attr(not(feature = "fail-points"), expect(unused_mut))]
    pub fn launch(mut plan: Plan<'_>) -> anyhow::Result<Machine> {
        let doorbell = plan.former.map_or_else(Arc::default, |former| former.doorbell.clone());
        let ram = match (&plan.ram, plan.former) {
            (Some(filled), _) => filled.clone(),
            (None, Some(former)) => former.ram.clone(),
            (None, None) => Arc::new(GuestRam::create(plan.definition.memory.bytes())?),
        };
        let device_state = DeviceState::create()?;
        let user = plan.run_as.next();
        let home = match plan.former {
            Some(_) => Home::prepare_next(plan.run_dir, user)?,
            None => Home::prepare(plan.run_dir, user)?,
        };
        user::give(ram.fd(), user)?;
        user::give(&device_state, user)?;
        #[cfg(feature = "fail-points")]
        let booted = Booted::take(&mut plan, &ram, user)?;
        let servers = serve_disks(&plan, &home)?;
        let ports = match plan.former {
            Some(former) => former.ports.clone(),
            None => open_ports(&plan.definition, plan.role, &doorbell)?,
        };
        let (guest_ends, next_guests) = attach(&ports, plan.former.is_some())?;
        let card_ends: Vec<RawFd> = guest_ends.iter().map(|end| end.socket.as_raw_fd()).collect();
        let (monitors, qemus_ends) = MonitorSockets::create()?;
        let local = home.local_sockets(&plan.definition);
        let serve = || {
            let (path, log) = (home.path(CONSOLE), plan.run_dir.join(CONSOLE_LOG));
            let doorbell = doorbell.clone();
            ConsoleServer::serve(&path, &log, Box::new(move || doorbell.ring()))
        };
        let (console, console_end) = plan.definition.console.then(serve).transpose()?.unzip();
        let (console_server, relay) = console.unzip();
        let (tpm, tpm_end) = Tpm::start(&plan, user)?.unzip();
        let listener = AgentListener::bind(home.path(AGENT))?;
        user::give_socket(listener.path(), user)?;
        let lent = Lent::open(&plan, user)?;
        let (log, qemus_log) = open_log(&plan)?.unzip();
        // Only what could be adopted.
        let awaits_disks = plan.may_be_adopted && plan.lockstep.is_none();
        #[cfg_attr(not(feature = "fail-points"), expect(unused_mut))]
        let mut args = command_line(
            &plan.definition,
            &Resources {
                machine_type: plan.machine_type.clone(),
                accelerator: plan.accelerator,
                kvm: lent.kvm.as_ref().map(AsRawFd::as_raw_fd),
                boot: lent.boot_files(),
                ram: ram.fd().as_raw_fd(),
                monitors: qemus_ends.numbers(),
                disks: plan.disks.iter().map(|disk| disk_socket(disk).into()).collect(),
                cards: card_ends.clone(),
                console: console_end.as_ref().map(|end| Console {
                    socket: ConsoleSocket::Connected(end.as_raw_fd()),
                    log: None,
                }),
                tpm: tpm_end.as_ref().map(AsRawFd::as_raw_fd),
                awaits_disks,
                role: plan.role,
                lockstep: plan.lockstep.clone(),
            },
        );
        let mut inherit: Vec<BorrowedFd<'_>> = vec![ram.fd(), device_state.as_fd()];
        inherit.extend(qemus_ends.descriptors());
        inherit.extend(guest_ends.iter().map(|end| end.socket.as_fd()));
        inherit.extend(console_end.as_ref().map(|end| end.as_fd()));
        inherit.extend(tpm_end.as_ref().map(|end| end.as_fd()));
        inherit.extend(lent.descriptors());
        #[cfg(feature = "fail-points")]
        if let Some(booted) = &booted {
            args.extend(Booted::arguments());
            inherit.push(booted.descriptor());
        }
        let mut environment = lent.environment();
        if let (Some(ends), Some(lockstep)) = (&qemus_log, &plan.lockstep) {
            inherit.extend(ends.descriptors());
            environment.push(ends.environment(lockstep.role));
            environment.extend(lockstep.clock.environment());
            environment.extend(console_end.as_ref().map(console_variable));
        }
        environment.extend(cards_variable(&guest_ends));
        let qemu = Qemu::launch(&Launch {
            binary: plan.qemu,
            args: &args,
            env: &environment,
            inherit: &inherit,
            log: &plan.run_dir.join(QEMU_LOG),
            directory: Some(home.directory()),
            user,
            descriptors: Some(plan.limits.descriptors),
        })?;
        let limits =
            LimitGroup::impose(&plan.limits, qemu.pid(), &plan.definition, plan.accelerator);
        drop((qemus_ends, guest_ends, qemus_log, console_end, tpm_end));
        let process = Arc::new(Process {
            qemu,
            limits,
            halted: AtomicBool::new(false),
            powered_off: AtomicBool::new(false),
            disk_error: CurrentError::default(),
        });
        let started = connect(&process, &listener, monitors);
        let explain = |error| tpm::explain(process.explain(error), plan.run_dir);
        let (agent, mut monitor, events) = started.map_err(explain)?;
        let heard = process.clone().interpreted(plan.on_event.clone());
        let hearing = Hearing::begin(events, heard, relay)?;
        #[cfg(feature = "fail-points")]
        if let Some(booted) = &booted {
            booted.load(&mut monitor).map_err(|error| process.explain(error))?;
        }
        let blocks = ram_blocks(&mut monitor, &process.qemu, ram.clone())?;
        let name = &plan.definition.name;
        let logged = logged(plan.accelerator, &blocks);
        let pauser = Pauser::choose(name, &agent, &monitor, &device_state, QEMU_TIMEOUT, logged)?;
        pauser.have_written_back(plan.definition.keeps_writes_back());
        if plan.role == Role::Standby {
            monitor.prepare_standby(&device_state)?;
        }
        let slow = Kvm::of_this_machine().slowness(plan.definition.accel, plan.accelerator);
        Ok(Machine {
            slow,
            fittings: RwLock::new(Fittings {
                definition: Arc::new(plan.definition.clone()),
                servers: servers.into_iter().map(Some).collect(),
                disks: plan.disks,
                next_guests,
                custody: None,
            }),
            definition: plan.definition,
            machine_type: plan.machine_type,
            accelerator: plan.accelerator,
            ram,
            blocks,
            watching: Watching::default(),
            ports,
            card_ends,
            monitor: Mutex::new(monitor),
            device_state,
            pauser,
            lockstep: plan.lockstep,
            log,
            local,
            doorbell,
            awaits_disks,
            retired: AtomicBool::new(false),
            held: AtomicBool::new(false),
            passed_on: AtomicBool::new(false),
            process,
            tpm,
            on_event: plan.on_event,
            agent,
            _hearing: hearing,
            console_server,
            presence: Arc::new(()),
        })
    }
}

fn serve_disks(plan: &Plan<'_>, home: &Home) -> anyhow::Result<Vec<NbdServer>> {
    let mut servers = Vec::new();
    for disk in &plan.disks {
        if plan.role == Role::Standby && plan.former.is_none() {
            disk.set_read_only(true);
        }
        let socket = home.path(&disk_socket(disk));
        servers.push(match plan.former {
            Some(_) => NbdServer::serve_aside(disk.clone(), &socket)?,
            None => NbdServer::serve(disk.clone(), &socket)?,
        });
        home.give_socket(&socket)?;
    }
    Ok(servers)
}

pub(crate) fn open_ports(
    definition: &VmDefinition,
    role: Role,
    doorbell: &Arc<Doorbell>,
) -> anyhow::Result<Vec<Arc<Port>>> {
    let mut ports = Vec::new();
    for config in port_configs(definition, role) {
        let doorbell = doorbell.clone();
        ports.push(Arc::new(Port::open(config, Arc::new(move || doorbell.ring()))?));
    }
    Ok(ports)
}

/// The configurations of the VM's cards on this host.
pub(crate) fn port_configs(
    definition: &VmDefinition,
    role: Role,
) -> impl Iterator<Item = PortConfig> {
    definition.cards.iter().enumerate().map(move |(i, card)| PortConfig {
        card: CardIndex(i as u16),
        mac: card.mac,
        tap: tap_name(&definition.name, i),
        bridge: card.bridge.clone(),
        vlans: card.vlans(),
        live: role == Role::Fresh,
        output_limit_bytes: understudy_network::DEFAULT_LIMIT_BYTES,
    })
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

/// Tells the agent of a QEMU in lockstep which descriptor is the console's.
fn console_variable(end: &UnixStream) -> (OsString, OsString) {
    (CONSOLE_VARIABLE.into(), end.as_raw_fd().to_string().into())
}

/// Tells the agent which descriptors it must answer for.
fn cards_variable(guest_ends: &[GuestEnd]) -> Option<(OsString, OsString)> {
    let numbers: Vec<_> = guest_ends.iter().map(|end| end.socket.as_raw_fd().to_string()).collect();
    (!numbers.is_empty()).then(|| (CARDS_VARIABLE.into(), numbers.join(",").into()))
}

/// An interface name has at most 15 bytes: the VM's name, cut, a check sum of
/// the whole name where it was cut, and the card.
fn tap_name(vm: &VmName, card: usize) -> String {
    if vm.len() <= 10 {
        return format!("{vm}.{card}");
    }
    let sum = vm.bytes().fold(0u16, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    format!("{}{sum:04x}.{card}", &vm[..6])
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
    use understudy_protocol::literal;

    #[test]
    fn tap_names_fit_and_differ() {
        assert_eq!(tap_name(&literal("db"), 0), "db.0");
        let (a, b) = (
            tap_name(&literal("customer-database-1"), 13),
            tap_name(&literal("customer-database-2"), 13),
        );
        assert!(a.len() <= 15 && b.len() <= 15);
        assert_ne!(a, b);
    }
}
