//! Real QEMUs for the tests: a VM whose guest is one boot sector.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{BufReader, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use understudy_network::Tap;
use understudy_qemu::command::{Console, ConsoleSocket, Resources, Role, command_line};
use understudy_qemu::definition::CardDefinition;
use understudy_qemu::process::Launch;
use understudy_qemu::qmp::{DeviceState, Events, MonitorSockets, RamBlockInfo, VmEvent};
use understudy_qemu::{Accelerator, Capabilities, Monitor, Qemu, VmDefinition};

/// A time longer than anything takes on an overloaded machine.
pub const LONG: Duration = Duration::from_secs(180);

/// Prints '>' once, then for ever the low four bits of a counter as 'A' to 'P'.
/// The counter lives in memory at 0x7e00; each letter comes after about 65 000
/// turns of an empty loop.
const BOOT_SECTOR: &[u8] = &[
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0xb0, 0x3e, // mov al, '>'
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xee, // out dx, al
    0x66, 0xff, 0x06, 0x00, 0x7e, // next: inc dword [0x7e00]
    0xba, 0xfd, 0x03, // mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x20, // test al, 0x20
    0x74, 0xfb, // jz wait
    0xa0, 0x00, 0x7e, // mov al, [0x7e00]
    0x24, 0x0f, // and al, 15
    0x04, 0x41, // add al, 'A'
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xee, // out dx, al
    0xb9, 0xff, 0xff, // mov cx, 0xffff
    0xe2, 0xfe, // loop $
    0xeb, 0xe1, // jmp next
];

pub static CAPABILITIES: LazyLock<Capabilities> =
    LazyLock::new(|| Capabilities::probe(Path::new("qemu-system-x86_64")).expect("QEMU"));

/// Writes 0x2000 (sleep, now) to the power management port that SeaBIOS sets up.
const POWER_OFF: &[u8] = &[
    0xba, 0x04, 0x06, // mov dx, 0x604
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0xef, // out dx, ax
    0xf4, // halt: hlt
    0xeb, 0xfd, // jmp halt
];

/// A definition with one bootable disk of this format.
pub fn definition(folder: &Path, format: &str) -> VmDefinition {
    define(folder, format, BOOT_SECTOR)
}

/// A definition of a guest that powers off at once.
pub fn power_off_definition(folder: &Path) -> VmDefinition {
    define(folder, "raw", POWER_OFF)
}

fn define(folder: &Path, format: &str, code: &[u8]) -> VmDefinition {
    let raw = folder.join("boot.raw");
    let mut sector = code.to_vec();
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector.resize(1 << 20, 0);
    std::fs::write(&raw, sector).unwrap();
    if format == "qcow2" {
        run("qemu-img", &["convert", "-O", "qcow2", "boot.raw", "boot.qcow2"], folder);
    }
    let text = format!(
        "name = \"test\"\nmemory = \"64M\"\nvcpus = 2\naccel = \"tcg\"\n\
         [[disk]]\npath = \"boot.{format}\"\nformat = \"{format}\"\n"
    );
    VmDefinition::from_toml(&text, &folder.join("vm.toml")).unwrap()
}

fn run(program: &str, args: &[&str], folder: &Path) {
    let output = Command::new(program).args(args).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A stand-in for the data plane's NBD server. It serves the image as it is:
/// QEMU's own layers interpret it.
pub struct NbdServer {
    child: Child,
    pub socket: PathBuf,
}

impl NbdServer {
    pub fn start(folder: &Path, image: &Path, name: &str) -> NbdServer {
        let socket = folder.join(name);
        let child = Command::new("qemu-nbd")
            .args(["--persistent", "--shared=0", "--format=raw", "--socket"])
            .args([&socket, image])
            .spawn()
            .unwrap();
        let server = NbdServer { child, socket };
        eventually("qemu-nbd listens", || UnixStream::connect(&server.socket).ok());
        server
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a condition, with a deadline.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not in time: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Taps for the cards, in a network of their own: without the agent, a card needs a real one.
fn open_taps(cards: &[CardDefinition]) -> Vec<Tap> {
    if cards.is_empty() {
        return Vec::new();
    }
    unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
    run("ip", &["link", "add", "br0", "type", "bridge"], Path::new("/"));
    run("ip", &["link", "set", "br0", "up"], Path::new("/"));
    let open = |(n, card): (_, &CardDefinition)| Tap::open(&format!("card{n}"), "br0", card.mac);
    cards.iter().enumerate().map(|card| open(card).expect("a tap")).collect()
}

/// A running VM, all of whose disks are on one server, with everything the daemon would hold of it.
pub struct Vm {
    pub monitor: Monitor,
    pub qemu: Qemu,
    pub ram: File,
    pub state: DeviceState,
    pub events: mpsc::Receiver<VmEvent>,
    output: mpsc::Receiver<u8>,
    _folder: TempDir,
}

impl Vm {
    pub fn start(definition: &VmDefinition, disk: &NbdServer, role: Role) -> Vm {
        let folder = tempfile::tempdir().unwrap();
        let ram: File = memfd_create(c"guest-ram", MFdFlags::MFD_CLOEXEC).unwrap().into();
        ram.set_len(definition.memory.bytes()).unwrap();
        let state = DeviceState::create().unwrap();
        let (sockets, ends) = MonitorSockets::create().unwrap();
        let [first, second, third] = ends.descriptors();
        let taps = open_taps(&definition.cards);
        let console = folder.path().join("console");
        let args = command_line(
            definition,
            &Resources {
                machine_type: CAPABILITIES.machine_type(&definition.machine).unwrap().to_owned(),
                accelerator: Accelerator::Tcg,
                kvm: None,
                boot: Default::default(),
                ram: ram.as_raw_fd(),
                monitors: ends.numbers(),
                disks: vec![disk.socket.clone(); definition.disks.len()],
                cards: taps.iter().map(|tap| tap.as_fd().as_raw_fd()).collect(),
                console: Some(Console {
                    socket: ConsoleSocket::Listen(console.clone()),
                    log: Some(folder.path().join("console.log")),
                }),
                tpm: None,
                awaits_disks: false,
                role,
                lockstep: None,
            },
        );
        let mut inherit = vec![ram.as_fd(), state.as_fd(), first, second, third];
        inherit.extend(taps.iter().map(Tap::as_fd));
        let qemu = Qemu::launch(&Launch {
            binary: &CAPABILITIES.binary,
            args: &args,
            env: &[],
            inherit: &inherit,
            log: &folder.path().join("qemu.log"),
            directory: None,
            user: None,
            descriptors: None,
        })
        .unwrap();
        drop(ends);
        let (monitor, told) = Monitor::connect(sockets, LONG)
            .unwrap_or_else(|error| panic!("{error}: {:?}", qemu.wait(LONG)));
        let (sender, events) = mpsc::channel();
        thread::spawn(move || hear(told, &sender));
        let output = read_console(&console);
        Vm { monitor, qemu, ram, state, events, output, _folder: folder }
    }

    /// Waits for the boot sector's first output.
    pub fn await_boot(&mut self) {
        while self.next_output() != b'>' {}
    }

    pub fn next_output(&mut self) -> u8 {
        self.output.recv_timeout(LONG).expect("output in time")
    }

    pub fn await_event(&self, wanted: impl Fn(&VmEvent) -> bool) -> VmEvent {
        loop {
            let event = self.events.recv_timeout(LONG).expect("an event in time");
            if wanted(&event) {
                return event;
            }
        }
    }

    /// The whole machine as of a checkpoint: main memory, the other RAM blocks,
    /// the device state.
    pub fn checkpoint(&mut self) -> Machine {
        let blocks = self.monitor.ram_blocks().unwrap();
        let mut checkpoint = self.monitor.begin_checkpoint(&self.state).unwrap();
        checkpoint.stopped().unwrap();
        let mut ram = vec![0; self.ram.metadata().unwrap().len() as usize];
        self.ram.read_exact_at(&mut ram, 0).unwrap();
        let pid = self.qemu.pid();
        let others = blocks.into_iter().filter(|block| !block.is_main());
        let others = others.map(|block| (read_block(pid, &block), block)).collect();
        checkpoint.saved().unwrap();
        let mut state = Vec::new();
        self.state.read_into(&mut state).unwrap();
        checkpoint.resume().unwrap();
        Machine { ram, others, state }
    }

    /// Gives a standby this machine's memory and device state.
    pub fn prepare(&mut self, machine: &Machine) {
        self.ram.write_all_at(&machine.ram, 0).unwrap();
        let here = self.monitor.ram_blocks().unwrap();
        for (contents, block) in &machine.others {
            let place = here.iter().find(|place| place.name == block.name).expect("same machine");
            assert!(block.bytes <= place.max_bytes);
            write_block(self.qemu.pid(), place.address, contents);
        }
        self.monitor.prepare_standby(&self.state).unwrap();
        self.state.fill(&machine.state).unwrap();
    }

    /// Makes a standby this machine, and lets it run.
    pub fn become_machine(&mut self, machine: &Machine) {
        self.prepare(machine);
        self.monitor
            .go_live(&self.state)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.qemu.wait(LONG)));
    }
}

/// Hears all that QEMU tells until it ends.
fn hear(mut told: Events, sender: &mpsc::Sender<VmEvent>) {
    while told.take(|event| drop(sender.send(event))) {
        let mut fds = [PollFd::new(told.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).unwrap();
    }
}

/// Reads all along: a full console would hold the guest up.
fn read_console(socket: &Path) -> mpsc::Receiver<u8> {
    let console = UnixStream::connect(socket).unwrap();
    let (sender, output) = mpsc::channel();
    thread::spawn(move || {
        for byte in BufReader::new(console).bytes() {
            let Ok(byte) = byte else { return };
            if sender.send(byte).is_err() {
                return;
            }
        }
    });
    output
}

pub struct Machine {
    pub ram: Vec<u8>,
    pub others: Vec<(Vec<u8>, RamBlockInfo)>,
    pub state: Vec<u8>,
}

impl Machine {
    /// The boot sector's counter.
    pub fn counter(&self) -> u32 {
        u32::from_le_bytes(self.ram[0x7e00..0x7e04].try_into().unwrap())
    }
}

fn read_block(pid: u32, block: &RamBlockInfo) -> Vec<u8> {
    let mut contents = vec![0; block.bytes as usize];
    let remote = [RemoteIoVec { base: block.address as usize, len: contents.len() }];
    let pid = Pid::from_raw(pid as i32);
    let read = process_vm_readv(pid, &mut [IoSliceMut::new(&mut contents)], &remote).unwrap();
    assert_eq!(read, block.bytes as usize);
    contents
}

/// Some blocks are write-protected in QEMU: only /proc/PID/mem can write them.
fn write_block(pid: u32, address: u64, contents: &[u8]) {
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    memory.write_all_at(contents, address).unwrap();
}
