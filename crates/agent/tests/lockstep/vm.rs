//! One side: a stock QEMU in lockstep, and all that the daemon has of it.

use crate::{DEADLINE, wait_for};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use understudy_disk::{Disk, NbdServer};
use understudy_memory::agent::{AgentLink, AgentListener};
use understudy_memory::{GuestRam, ProcessMemory, RamBlock};
use understudy_network::{CARDS_VARIABLE, Port, PortConfig};
use understudy_protocol::{BlockId, CardIndex, DiskIndex};
use understudy_qemu::command::{
    BootFiles, Console, ConsoleSocket, Lockstep, Resources, Role, command_line,
};
use understudy_qemu::lockstep::{LogChannel, LogRole, obstacles};
use understudy_qemu::process::Launch;
use understudy_qemu::qmp::{DeviceState, Events, MonitorSockets, VmEvent};
use understudy_qemu::{Accelerator, AgentPauser, Capabilities, Monitor, Qemu, VmDefinition};

const DISK_BYTES: u64 = 256 << 20;

/// The default, with the instruction that gives random numbers.
const CPU: &str = "qemu64,+rdrand";

/// Arguments that leave out the kernel's hardening, of which no test speaks: a tenth of what it costs.
const UNHARDENED: &str = "mitigations=off init_on_alloc=0 randomize_kstack_offset=off \
                          hardened_usercopy=off apparmor=0 audit=0 nowatchdog";

/// The last event of a log.
const END: u64 = understudy_lockstep::END as u64;

pub struct Vm {
    pub monitor: Monitor,
    pub pauser: AgentPauser,
    pub log: LogChannel,
    pub disk: Arc<Disk>,
    pub port: Arc<Port>,
    pub blocks: Vec<RamBlock>,
    pub agent: AgentLink,
    pub qemu: Qemu,
    events: Mutex<Events>,
    state: DeviceState,
    _server: NbdServer,
    folder: TempDir,
}

fn guest_file(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest").join(name);
    path.canonicalize().unwrap_or_else(|e| panic!("{}: {e}; run `make guests`", path.display()))
}

fn definition(image: &Path) -> VmDefinition {
    let text = format!(
        "name = \"lock\"\nmemory = \"256M\"\nvcpus = 1\naccel = \"tcg\"\ncpu = \"{CPU}\"\n\
         kernel = \"{}\"\ninitrd = \"{}\"\n\
         append = \"console=ttyS0 quiet cryptomgr.notests {UNHARDENED} us.ip=10.9.0.2/24\"\n\
         [[disk]]\npath = \"{}\"\nformat = \"raw\"\n\
         [[card]]\nmac = \"52:54:00:12:34:56\"\nbridge = \"br0\"\n",
        guest_file("vmlinuz").display(),
        guest_file("initrd.gz").display(),
        image.display(),
    );
    VmDefinition::from_toml(&text, Path::new("/lock.toml")).unwrap()
}

/// The disk of a VM at power-on is a copy of the guest's; one that waits has an empty one.
fn make_disk(folder: &Path, start: Role) -> Arc<Disk> {
    let image = folder.join("disk.raw");
    match start {
        Role::Fresh => {
            let source = guest_file("disk.img");
            let copied = Command::new("cp").arg("--sparse=always").args([&source, &image]).status();
            assert!(copied.unwrap().success());
        }
        Role::Standby => fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap(),
    }
    let disk = Arc::new(Disk::open(DiskIndex(0), &image, DISK_BYTES).unwrap());
    disk.set_read_only(start == Role::Standby);
    disk
}

/// The agent, which cargo built beside this test.
fn agent_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join("libunderstudy_agent.so")
}

impl Vm {
    /// A VM at power-on that records, or one that waits for a machine's state.
    pub fn start(name: &str, role: LogRole) -> Vm {
        let waits = role == LogRole::Replay;
        Vm::start_so(name, role, if waits { Role::Standby } else { Role::Fresh })
    }

    /// A VM that records, and waits for the state of a machine that ran elsewhere.
    pub fn start_successor(name: &str) -> Vm {
        Vm::start_so(name, LogRole::Record, Role::Standby)
    }

    fn start_so(name: &str, role: LogRole, start: Role) -> Vm {
        let folder = tempfile::tempdir().unwrap();
        let capabilities = Capabilities::probe(Path::new("qemu-system-x86_64")).unwrap();
        let disk = make_disk(folder.path(), start);
        let definition = definition(&disk.path());
        let nbd = folder.path().join("disk.nbd");
        let server = NbdServer::serve(disk.clone(), &nbd).unwrap();
        let config = PortConfig {
            card: CardIndex(0),
            mac: definition.cards[0].mac,
            tap: format!("tap-{name}"),
            bridge: "br0".into(),
            vlans: understudy_network::Vlans::default(),
            live: start == Role::Fresh,
            output_limit_bytes: understudy_network::DEFAULT_LIMIT_BYTES,
        };
        let port = Arc::new(Port::open(config, Arc::new(|| {})).unwrap());
        let card = port.attach_guest().unwrap();
        let ram = Arc::new(GuestRam::create(definition.memory.bytes()).unwrap());
        let state = DeviceState::create().unwrap();
        let (sockets, ends) = MonitorSockets::create().unwrap();
        let (log, log_ends) = LogChannel::create(DEADLINE).unwrap();
        let listener = AgentListener::bind(folder.path().join("agent")).unwrap();
        let console = folder.path().join("console");
        let clock = "2026-11-21T00:00:00".to_owned().try_into().unwrap();
        let resources = Resources {
            machine_type: capabilities.machine_type(&definition.machine).unwrap().to_owned(),
            accelerator: Accelerator::Tcg,
            kvm: None,
            boot: BootFiles {
                firmware: None,
                kernel: definition.kernel.clone(),
                initrd: definition.initrd.clone(),
            },
            ram: ram.fd().as_raw_fd(),
            monitors: ends.numbers(),
            disks: vec![nbd],
            cards: vec![card.socket.as_raw_fd()],
            console: Some(Console {
                socket: ConsoleSocket::Listen(console.clone()),
                log: Some(folder.path().join("console.log")),
            }),
            tpm: None,
            awaits_disks: false,
            role: start,
            lockstep: Some(Lockstep { role, clock }),
        };
        let mut inherit: Vec<BorrowedFd> = vec![ram.fd(), state.as_fd(), card.socket.as_fd()];
        inherit.extend(ends.descriptors());
        inherit.extend(log_ends.descriptors());
        let qemu = Qemu::launch(&Launch {
            binary: &capabilities.binary,
            args: &command_line(&definition, &resources),
            env: &[
                ("LD_PRELOAD".into(), agent_library().into()),
                (AgentListener::VARIABLE.into(), listener.path().into()),
                log_ends.environment(role),
                (CARDS_VARIABLE.into(), card.socket.as_raw_fd().to_string().into()),
            ],
            inherit: &inherit,
            log: &folder.path().join("qemu.log"),
            directory: None,
            user: None,
            descriptors: None,
        })
        .unwrap();
        drop((ends, log_ends, card));
        let agent = listener
            .accept(Instant::now() + DEADLINE)
            .unwrap_or_else(|error| panic!("{error}: {:?}", qemu.wait(DEADLINE / 30)));
        let (mut monitor, events) = Monitor::connect(sockets, DEADLINE)
            .unwrap_or_else(|error| panic!("{error}: {:?}", qemu.wait(DEADLINE / 30)));
        let refusals = obstacles(&definition, Accelerator::Tcg, Some(monitor.version()));
        assert_eq!(refusals, Vec::<String>::new());
        let pauser = AgentPauser::arm(agent.socket(), &state, DEADLINE, Vec::new()).unwrap();
        let blocks = ram_blocks(&mut monitor, &qemu, &ram);
        if start == Role::Standby {
            monitor.prepare_standby(&state).unwrap();
        }
        drain_console(&console);
        Vm {
            monitor,
            pauser,
            log,
            disk,
            port,
            blocks,
            agent,
            qemu,
            events: Mutex::new(events),
            state,
            _server: server,
            folder,
        }
    }

    pub fn run_until_ready(&mut self) {
        self.monitor.cont().unwrap();
        wait_for("the guest to boot", || self.boots() == 1);
    }

    /// Times that the guest has said that it is ready.
    pub fn boots(&self) -> usize {
        String::from_utf8_lossy(&self.console_since(0)).matches("UNDERSTUDY-GUEST-READY").count()
    }

    pub fn is_powered_off(&self) -> bool {
        let mut is_powered_off = false;
        let hear = |event| is_powered_off |= matches!(event, VmEvent::Shutdown { .. });
        self.events.lock().unwrap().take(hear);
        is_powered_off
    }

    /// Everything that the guest has written to its console.
    pub fn console_bytes(&self) -> usize {
        self.console_since(0).len()
    }

    pub fn console_since(&self, start: usize) -> Vec<u8> {
        let said = fs::read(self.folder.path().join("console.log")).unwrap_or_default();
        said[start.min(said.len())..].to_vec()
    }

    /// The VM's output goes out from now on, and what is sent to it comes in.
    pub fn open_network(&self) {
        self.port.open_gate();
        self.port.go_live();
        self.port.announce(&[]);
    }

    /// The device state that a pause has saved, of this length.
    pub fn device_state(&self, bytes: u64) -> Vec<u8> {
        let mut state = Vec::new();
        self.state.read_first(bytes, &mut state).unwrap();
        state
    }

    /// Loads a device state; the machine stays stopped.
    pub fn load(&mut self, state: &[u8]) {
        self.state.fill(state).unwrap();
        self.disk.set_read_only(false);
        self.monitor.load(&self.state).unwrap_or_else(|error| {
            panic!("{error}: {:?}", self.qemu.wait(Duration::from_secs(3)))
        });
    }

    /// Whether QEMU finds no more in its log.
    pub fn is_at_end(&self) -> bool {
        self.log.status().event == END
    }

    pub fn await_end_of_log(&self) {
        wait_for("the end of the log", || self.is_at_end());
    }

    /// Whether QEMU has ended.
    pub fn has_ended(&self) -> bool {
        self.qemu.try_wait().unwrap().is_some()
    }

    pub fn kill(&self) {
        self.port.shut();
        self.qemu.kill().unwrap();
    }
}

fn ram_blocks(monitor: &mut Monitor, qemu: &Qemu, ram: &Arc<GuestRam>) -> Vec<RamBlock> {
    let process = Arc::new(ProcessMemory::open(qemu.pid() as i32).unwrap());
    let mut infos = monitor.ram_blocks().unwrap();
    infos.sort_by(|a, b| (!a.is_main(), &a.name).cmp(&(!b.is_main(), &b.name)));
    let block = |(n, info): (usize, understudy_qemu::qmp::RamBlockInfo)| match info.is_main() {
        true => RamBlock::main(info.name, info.address, ram.clone()),
        // The mapped length: what is in use differs before the firmware ran.
        false => RamBlock::auxiliary(
            BlockId(n as u16),
            info.name,
            info.address,
            info.max_bytes,
            process.clone(),
        ),
    };
    infos.into_iter().enumerate().map(block).collect()
}

/// Reads all along: QEMU waits for a console that is full.
fn drain_console(socket: &Path) {
    let mut console = UnixStream::connect(socket).unwrap();
    thread::spawn(move || std::io::copy(&mut console, &mut std::io::sink()));
}
