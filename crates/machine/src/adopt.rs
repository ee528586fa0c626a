//! A machine whose daemon has died, or whose keeper is replaced, taken over by the next one: the same
//! QEMU, everything around it anew. Its descriptors were kept meanwhile ([`crate::custody`]).

mod descriptors;

use crate::cgroup::{LimitGroup, Limits};
use crate::console::{ConsoleServer, Relay};
use crate::disk_error::CurrentError;
use crate::doorbell::Doorbell;
use crate::hearing::Hearing;
use crate::home::{CONSOLE, CONSOLE_LOG, Home, disk_socket};
use crate::launch::{QEMU_TIMEOUT, open_ports, port_configs};
use crate::machine::Fittings;
use crate::pause::Pauser;
use crate::process::Process;
use crate::qemu_log::QEMU_LOG;
use crate::tpm::{Tpm, TpmNote};
use crate::tracking::logged;
use crate::watching::Watching;
use crate::{Machine, MachineEvent, OnEvent};
use anyhow::Context;
use descriptors::Descriptors;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use understudy_disk::{Disk, DiskError, FileId, NbdServer};
use understudy_memory::agent::AgentLink;
use understudy_memory::{GuestRam, MemoryError, ProcessMemory, RamBlock};
use understudy_network::Port;
use understudy_protocol::BlockId;
use understudy_qemu::qmp::{DeviceState, MonitorSockets, QemuVersion, RunState};
use understudy_qemu::{Accelerator, Kvm, Monitor, Qemu, Role, VmDefinition};
use understudy_threads::{Mutex, RwLock, spawn};

/// Time for QEMU to take what its cards were given before the guest stands still.
const TAKEN_WITHIN: Duration = Duration::from_millis(20);

/// The note with all that must be known of a machine, beside its descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineNote {
    /// The VM as it is on this host.
    pub definition: VmDefinition,
    machine_type: String,
    accelerator: Accelerator,
    qemu_pid: u32,
    /// Offset at which its words begin in its log.
    log_start: u64,
    version: QemuVersion,
    /// First message of its agent.
    hello: Vec<u8>,
    /// The number in QEMU of the device state's file.
    device_state: RawFd,
    /// The numbers in QEMU of the cards' sockets.
    card_ends: Vec<RawFd>,
    blocks: Vec<BlockNote>,
    /// The reason why its agent cannot pause it, if it cannot.
    pause_obstacle: Option<String>,
    /// Whether the cards' taps are kept, too.
    #[serde(default)]
    keeps_taps: bool,
    /// The bytes that each disk is shown with; none by a release that found them out again.
    #[serde(default)]
    disk_bytes: Vec<u64>,
    /// The file that is each disk's image; none by a release that went by the path alone.
    #[serde(default)]
    disk_files: Vec<FileId>,
    /// Its TPM; none either by a release that did not pass it on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tpm: Option<TpmNote>,
}

impl MachineNote {
    /// Whether it has what a release did not understand that passed no TPMs on.
    pub fn has_tpm(&self) -> bool {
        self.tpm.is_some()
    }

    /// The bytes that QEMU sees of each disk, if they are known.
    pub fn disk_bytes(&self) -> Option<&[u64]> {
        let are_all = self.disk_bytes.len() == self.definition.disks.len();
        are_all.then_some(&self.disk_bytes[..])
    }

    /// Refuses disks that are not those that QEMU has.
    fn check_files(&self, disks: &[Arc<Disk>]) -> Result<(), DiskError> {
        disks.iter().zip(&self.disk_files).try_for_each(|(disk, file)| disk.check_file(*file))
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlockNote {
    name: String,
    address: u64,
    bytes: u64,
}

/// A machine to be taken over.
pub struct Adoption<'a> {
    /// The note about it.
    pub note: &'a MachineNote,
    /// Its descriptors, as [`Machine::entrusted`] gave them.
    pub descriptors: Vec<OwnedFd>,
    /// Directory for sockets and logs.
    pub run_dir: &'a Path,
    /// The most that a QEMU of this host may use.
    pub limits: Limits,
    /// The disks, in the definition's order.
    pub disks: Vec<Arc<Disk>>,
    /// Callback, called on a thread of the machine's for everything that happens by itself.
    pub on_event: OnEvent,
}

/// The remains of a machine are not what this program goes on with: trying once more does not help.
#[derive(Debug)]
pub struct NotUnderstood(pub String);

impl fmt::Display for NotUnderstood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotUnderstood {}

impl Machine {
    /// The version of the agent in its QEMU: whoever adopts it must speak it.
    pub fn agent_version(&self) -> u32 {
        self.agent.hello().version
    }

    /// The reason why it cannot be adopted by another process, as the end of a sentence; none if it
    /// can.
    pub fn adoption_obstacle(&self) -> Option<&'static str> {
        match () {
            () if self.lockstep.is_some() => Some("its QEMU was made for lockstep"),
            () if self.definition.tpm.is_some() && self.tpm.is_none() => {
                Some("its TPM was left by a release that did not pass it on")
            }
            () if !self.awaits_disks => Some("its QEMU would not wait for its disks"),
            () => None,
        }
    }

    /// All that [`Machine::adopt`] takes. QEMU's pidfd comes first. The VM is neither protected
    /// nor snapshotted, and there is no [obstacle](Machine::adoption_obstacle).
    pub fn entrusted(&self) -> anyhow::Result<(MachineNote, Vec<OwnedFd>)> {
        let monitor = self.monitor();
        let mut descriptors = vec![
            self.process.qemu.as_fd().try_clone_to_owned()?,
            self.ram.fd().try_clone_to_owned()?,
            self.device_state.as_fd().try_clone_to_owned()?,
        ];
        descriptors.extend(monitor.duplicate()?);
        descriptors.extend(self.agent.duplicate()?);
        descriptors.extend(self.pauser.duplicate()?.into_iter().flatten());
        descriptors.extend(self.console_server.as_ref().map(|it| it.duplicate()).transpose()?);
        for port in &self.ports {
            let guest = port.duplicate_guest()?;
            descriptors.extend(guest.context("QEMU has left one of its cards")?);
            descriptors.push(port.duplicate_tap()?);
        }
        let (tpm, its_pidfd) = self.tpm.as_ref().map(Tpm::entrusted).transpose()?.unzip();
        descriptors.extend(its_pidfd);
        let disks = self.disks();
        let block = |block: &RamBlock| BlockNote {
            name: block.name().to_owned(),
            address: block.address_in_qemu(),
            bytes: block.bytes(),
        };
        let note = MachineNote {
            definition: (*self.definition_now()).clone(),
            machine_type: self.machine_type.clone(),
            accelerator: self.accelerator,
            qemu_pid: self.qemu_pid(),
            log_start: self.process.qemu.log_start(),
            version: monitor.version(),
            hello: self.agent.hello().encode().to_vec(),
            device_state: self.device_state.inherited(),
            card_ends: self.card_ends.clone(),
            blocks: self.blocks.iter().map(block).collect(),
            pause_obstacle: self.pause_obstacle().map(str::to_owned),
            keeps_taps: true,
            disk_bytes: disks.iter().map(|disk| disk.export_bytes()).collect(),
            disk_files: disks.iter().map(|disk| disk.file_id()).collect::<Result<_, _>>()?,
            tpm,
        };
        Ok((note, descriptors))
    }

    /// Takes it over; its QEMU stands still until [`Machine::wake`]. Dropped, it ends QEMU; an
    /// error before its monitor is taken leaves it as it was, but for what it had sent and nobody had
    /// taken yet; a later one ends QEMU.
    pub fn adopt(adoption: Adoption<'_>) -> anyhow::Result<Machine> {
        let Adoption { note, descriptors, run_dir, limits, disks, on_event } = adoption;
        note.check_files(&disks)?;
        let mut descriptors = Descriptors::of(note, descriptors)?;
        let pidfd = descriptors.next()?;
        let ram = Arc::new(GuestRam::adopt(descriptors.next()?)?);
        let device_state = DeviceState::adopt(descriptors.next()?, note.device_state);
        let sockets = MonitorSockets::adopt(descriptors.array()?);
        let pid = i32::try_from(note.qemu_pid)?;
        let agent =
            AgentLink::adopt(descriptors.array()?, &note.hello, pid).map_err(
                |error| match error {
                    MemoryError::AgentHello(why) => {
                        NotUnderstood(format!("QEMU's agent: {why}")).into()
                    }
                    error => anyhow::Error::from(error),
                },
            )?;
        let blocks = ram_blocks(note, &ram)?;
        let pauser = match &note.pause_obstacle {
            Some(obstacle) => Pauser::through_qmp(obstacle),
            None => {
                let logged = logged(note.accelerator, &blocks);
                Pauser::adopt(descriptors.array()?, &agent, QEMU_TIMEOUT, logged)?
            }
        };
        let home = Home::existing(run_dir)?;
        let doorbell = Arc::<Doorbell>::default();
        let (console_server, relay) = match note.definition.console {
            true => Some(adopt_console(&home, run_dir, descriptors.next()?, &doorbell)?),
            false => None,
        }
        .unzip();
        let servers = serve_disks(&disks, &home)?;
        let ports = adopt_ports(note, &mut descriptors, &doorbell)?;
        let tpm = match note.tpm {
            Some(tpm) => Some(Tpm::adopt(tpm, descriptors.next()?, run_dir)),
            None => None,
        };
        // From here on an error ends QEMU, and then its TPM, which is waited for: it may be writing.
        let log = run_dir.join(QEMU_LOG);
        let process = Arc::new(Process {
            qemu: Qemu::adopt(note.qemu_pid, pidfd, log, note.log_start),
            limits: LimitGroup::of_another(&limits, note.qemu_pid),
            halted: AtomicBool::new(false),
            powered_off: AtomicBool::new(false),
            disk_error: CurrentError::default(),
        });
        let heard = process.clone().interpreted(on_event.clone());
        let (monitor, events) = Monitor::adopt(sockets, note.version, QEMU_TIMEOUT)?;
        let hearing = Hearing::begin(events, heard, relay)?;
        let slow = Kvm::of_this_machine().slowness(note.definition.accel, note.accelerator);
        Ok(Machine {
            slow,
            definition: note.definition.clone(),
            machine_type: note.machine_type.clone(),
            accelerator: note.accelerator,
            ram,
            blocks,
            watching: Watching::default(),
            fittings: RwLock::new(Fittings {
                definition: Arc::new(note.definition.clone()),
                servers: servers.into_iter().map(Some).collect(),
                disks,
                next_guests: Vec::new(),
                custody: None,
            }),
            ports,
            card_ends: note.card_ends.clone(),
            monitor: Mutex::new(monitor),
            device_state,
            pauser,
            lockstep: None,
            log: None,
            local: home.local_sockets(&note.definition),
            doorbell,
            awaits_disks: true,
            retired: AtomicBool::new(false),
            held: AtomicBool::new(false),
            passed_on: AtomicBool::new(false),
            process,
            on_event,
            agent,
            _hearing: hearing,
            console_server,
            tpm,
            presence: Arc::new(()),
        })
    }

    /// Lets QEMU go on, and with it the guest. Its monitors answer when it does not wait for
    /// memory or disks any more, which may take long: `failed` hears if they never do.
    pub fn wake(
        self: &Arc<Self>,
        failed: impl FnOnce(anyhow::Error) + Send + 'static,
    ) -> anyhow::Result<()> {
        let machine = self.clone();
        let catch_up = move || -> anyhow::Result<()> {
            let mut monitor = machine.monitor();
            monitor.catch_up()?;
            match monitor.status()? {
                RunState::running => {}
                // Whoever had it before may have heard of that, and had no time to act on it.
                RunState::shutdown => machine.powered_off_meanwhile(),
                // It stops by itself at an error of a disk.
                _ => monitor.cont()?,
            }
            Ok(())
        };
        spawn("catch-up", move || catch_up().unwrap_or_else(failed))?;
        Ok(self.process.qemu.go_on()?)
    }

    /// The guest powered off, and nobody knows whether in order.
    fn powered_off_meanwhile(&self) {
        if !self.process.powered_off.swap(true, Ordering::AcqRel) {
            (self.on_event)(MachineEvent::PoweredOff { in_order: false });
        }
    }

    /// Leaves it to whoever has its custody: its QEMU stands still, and nothing here touches it,
    /// its disks or its cards any more. What the guest has sent has left. This process ends now;
    /// dropped, the machine would end QEMU.
    pub fn leave_to_next(&self) {
        for port in &self.ports {
            port.drain();
        }
        // Requests that are not answered are made again.
        let servers: Vec<_> =
            self.fittings_to_change().servers.iter_mut().map(Option::take).collect();
        drop(servers);
    }

    /// Prepares for [`Machine::leave_to_next`], while the guest runs: what the cards receive waits in their taps, and
    /// this process's end will not take long.
    pub fn prepare_to_leave(&self) -> io::Result<()> {
        for port in &self.ports {
            // What QEMU has not taken by then stays in its socket.
            port.hold_inbound(TAKEN_WITHIN);
        }
        self.stop_watching();
        self.ram.forget_pages()
    }

    /// Keeps it after all; lets QEMU go on, if it stands still.
    pub fn stay(&self) -> io::Result<()> {
        self.ports.iter().for_each(|port| port.resume_inbound());
        self.process.qemu.go_on()
    }
}

/// The cards, on their taps if these were kept, else on new ones. What the guest had sent is held, and what came for it waits,
/// until [`Machine::open_network`]: it may be another host's by now.
fn adopt_ports(
    note: &MachineNote,
    descriptors: &mut Descriptors,
    doorbell: &Arc<Doorbell>,
) -> anyhow::Result<Vec<Arc<Port>>> {
    if !note.keeps_taps {
        let ports = open_ports(&note.definition, Role::Standby, doorbell)?;
        for port in &ports {
            port.adopt_guest(descriptors.array()?).context("cannot serve a card")?;
        }
        return Ok(ports);
    }
    let mut ports = Vec::new();
    for config in port_configs(&note.definition, Role::Standby) {
        let (guest, tap, doorbell) = (descriptors.array()?, descriptors.next()?, doorbell.clone());
        let port = Port::adopt(config, guest, tap, Arc::new(move || doorbell.ring()))?;
        ports.push(Arc::new(port));
    }
    Ok(ports)
}

fn adopt_console(
    home: &Home,
    run_dir: &Path,
    end: OwnedFd,
    doorbell: &Arc<Doorbell>,
) -> anyhow::Result<(ConsoleServer, Relay)> {
    let (path, log) = (home.path(CONSOLE), run_dir.join(CONSOLE_LOG));
    let doorbell = doorbell.clone();
    ConsoleServer::adopt(&path, &log, Box::new(move || doorbell.ring()), end.into())
}

/// Serves the disks at the sockets where QEMU looks for them.
fn serve_disks(disks: &[Arc<Disk>], home: &Home) -> anyhow::Result<Vec<NbdServer>> {
    let serve = |disk: &Arc<Disk>| -> anyhow::Result<NbdServer> {
        let socket = home.path(&disk_socket(disk));
        let server = NbdServer::serve(disk.clone(), &socket)?;
        home.give_socket(&socket)?;
        Ok(server)
    };
    disks.iter().map(serve).collect()
}

fn ram_blocks(note: &MachineNote, ram: &Arc<GuestRam>) -> anyhow::Result<Vec<RamBlock>> {
    let process = Arc::new(ProcessMemory::open(i32::try_from(note.qemu_pid)?)?);
    let block = |(at, block): (usize, &BlockNote)| match at {
        0 => RamBlock::main(&block.name, block.address, ram.clone()),
        _ => {
            let id = BlockId(at as u16);
            RamBlock::auxiliary(id, &block.name, block.address, block.bytes, process.clone())
        }
    };
    Ok(note.blocks.iter().enumerate().map(block).collect())
}
