//! A QEMU with the agent in it, started as the daemon starts one.
#![allow(unsafe_code)] // One `pre_exec`, to let QEMU inherit two descriptors.

#[allow(dead_code)] // Not every test has a guest.
pub mod linux;

use linux::Linux;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_memory::agent::{AgentLink, AgentListener};
use understudy_memory::{GuestRam, ProcessMemory, RamBlock};
use understudy_protocol::BlockId;

/// Time that anything may take before a test fails.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// [`DEADLINE`] on this machine, which may be an emulated one (`make test-kvm`).
pub fn deadline() -> Duration {
    let factor = std::env::var("UNDERSTUDY_PATIENCE").ok().and_then(|text| text.parse().ok());
    DEADLINE * factor.unwrap_or(1)
}

/// Arguments that leave out what no test speaks of, the kernel's tests of itself and its hardening: a tenth
/// of what it costs.
const UNHARDENED: &str = "cryptomgr.notests mitigations=off init_on_alloc=0 randomize_kstack_offset=off \
                          hardened_usercopy=off apparmor=0 audit=0 nowatchdog";

/// Memory of a machine whose guest is nothing but firmware.
const FIRMWARE_MIB: u64 = 64;

/// Settings for the start of a machine.
pub struct Start<'a> {
    /// QEMU's accelerator.
    pub accel: &'a str,
    /// Its memory in MiB.
    pub mebibytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Linux, with its console on the descriptor; firmware alone without.
    pub linux: Option<Linux>,
    /// Value of `-vga`.
    pub display: &'a str,
    /// Waits for a state to load, as a backup's QEMU does.
    pub incoming: bool,
    /// QEMU's end of a card's socket.
    pub card: Option<OwnedFd>,
    /// The guest's disk, and a card that leads nowhere, by virtio, and whether their queues have event
    /// descriptors.
    pub devices: Option<bool>,
    /// UEFI's code, and the file of its variables, as flash.
    pub uefi: Option<(&'a str, &'a Path)>,
    /// Whether it has a disk on AHCI, all of zeroes, whose reads take a second.
    pub slow_disk: bool,
}

impl Default for Start<'_> {
    fn default() -> Self {
        Start {
            accel: "tcg",
            mebibytes: FIRMWARE_MIB,
            vcpus: 1,
            linux: None,
            display: "none",
            incoming: false,
            card: None,
            devices: None,
            uefi: None,
            slow_disk: false,
        }
    }
}

/// A running QEMU; it ends with the test.
pub struct Machine {
    process: Child,
    qmp: BufReader<UnixStream>,
    ram: Arc<GuestRam>,
    link: Option<AgentLink>,
}

impl Machine {
    /// Starts a q35 machine whose guest has not run yet.
    pub fn start(start: Start) -> Machine {
        let bytes = start.mebibytes << 20;
        let directory = tempfile::tempdir().unwrap();
        let listener = AgentListener::bind(directory.path().join("agent.sock")).unwrap();
        let ram = Arc::new(GuestRam::create(bytes).unwrap());
        let (qmp, qmp_of_qemu) = UnixStream::pair().unwrap();
        qmp.set_read_timeout(Some(deadline())).unwrap();

        let memory = ram.fd().as_raw_fd();
        let mut command = Command::new("qemu-system-x86_64");
        command
            .arg("-machine")
            .arg(format!("q35,accel={},memory-backend=ram", start.accel))
            .args(["-nodefaults", "-S", "-display", "none", "-vga", start.display])
            .args(["-m", &start.mebibytes.to_string(), "-smp", &start.vcpus.to_string()])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=ram,size={bytes},mem-path=/proc/self/fd/{memory},\
                 share=on,prealloc=off"
            ))
            .arg("-chardev")
            .arg(format!("socket,id=qmp,fd={}", qmp_of_qemu.as_raw_fd()))
            .args(["-mon", "chardev=qmp,mode=control"])
            .env("LD_PRELOAD", agent_library())
            .env(AgentListener::VARIABLE, listener.path());
        if start.incoming {
            command.args(["-incoming", "defer"]);
            // A device state has no such section.
            command.args(["-global", "migration.send-configuration=off"]);
        }
        let mut inherited = vec![memory, qmp_of_qemu.as_raw_fd()];
        if let Some(card) = &start.card {
            let number = card.as_raw_fd();
            command
                .args(["-netdev", &format!("tap,id=card0,fd={number}")])
                .args(["-device", "virtio-net-pci,netdev=card0,romfile=,mac=52:54:00:12:34:56"])
                .env("UNDERSTUDY_CARDS", number.to_string());
            inherited.push(number);
        }
        if start.slow_disk {
            command
                .arg("-blockdev")
                .arg("driver=null-co,node-name=slow,size=1048576,read-zeroes=on,latency-ns=1000000000")
                .args(["-device", "ide-hd,drive=slow,bus=ide.0,bootindex=0"]);
        }
        if let Some((code, variables)) = start.uefi {
            let flash = |file: &str, more: &str| format!("if=pflash,format=raw,file={file}{more}");
            command
                .args(["-drive", &flash(code, ",readonly=on")])
                .args(["-drive", &flash(&variables.display().to_string(), "")]);
        }
        if let Some(event_descriptors) = start.devices {
            let virtio = if event_descriptors { "" } else { ",ioeventfd=off" };
            let files = &start.linux.as_ref().expect("Linux, which has drivers").files;
            let disk = files.join("disk.img");
            command
                .arg("-drive")
                .arg(format!("if=none,id=disk0,format=raw,snapshot=on,file={}", disk.display()))
                .args(["-device", &format!("virtio-blk-pci,drive=disk0{virtio}")])
                .args(["-netdev", "hubport,id=net0,hubid=0"])
                .args(["-device", &format!("virtio-net-pci,netdev=net0,romfile={virtio}")]);
        }
        if let Some(Linux { files, console }) = &start.linux {
            let number = console.as_raw_fd();
            command
                .arg("-kernel")
                .arg(files.join("vmlinuz"))
                .arg("-initrd")
                .arg(files.join("initrd.gz"))
                .args(["-append", &format!("console=ttyS0 quiet no_timer_check {UNHARDENED}")])
                .args(["-chardev", &format!("socket,id=console,fd={number}")])
                .args(["-serial", "chardev:console"]);
            inherited.push(number);
        }
        inherit(&mut command, inherited);
        let process = command.spawn().expect("qemu-system-x86_64 is installed");

        let mut machine = Machine { process, qmp: BufReader::new(qmp), ram, link: None };
        machine.link = Some(listener.accept(Instant::now() + deadline()).unwrap());
        assert_eq!(machine.link().pid(), machine.process.id() as i32);
        machine.next_line(); // The greeting.
        machine.qmp("qmp_capabilities");
        machine
    }

    pub fn link(&self) -> &AgentLink {
        self.link.as_ref().expect("the link is open")
    }

    /// Closes the daemon's side of the agent's socket.
    pub fn drop_link(&mut self) {
        self.link = None;
    }

    /// Runs a QMP command.
    pub fn qmp(&mut self, command: &str) -> Value {
        self.qmp_with(command, json!({}))
    }

    /// Runs a QMP command with arguments.
    pub fn qmp_with(&mut self, command: &str, arguments: Value) -> Value {
        self.write(&json!({ "execute": command, "arguments": arguments }));
        loop {
            let answer: Value = serde_json::from_str(&self.next_line()).unwrap();
            if let Some(value) = answer.get("return") {
                return value.clone();
            }
            assert!(answer.get("error").is_none(), "{command}: {answer}");
        }
    }

    /// Sends a QMP command, and does not wait for it.
    pub fn send(&mut self, command: &str) {
        self.write(&json!({ "execute": command }));
    }

    fn write(&mut self, command: &Value) {
        let line = command.to_string() + "\n";
        self.qmp.get_mut().write_all(line.as_bytes()).unwrap();
    }

    /// Reads on until QEMU reports this event.
    pub fn await_event(&mut self, name: &str) {
        loop {
            let line: Value = serde_json::from_str(&self.next_line()).unwrap();
            if line["event"] == name {
                return;
            }
        }
    }

    /// Sends something to the agent.
    pub fn send_to_agent(&mut self, bytes: &[u8]) {
        let socket = self.link().socket().try_clone_to_owned().unwrap();
        UnixStream::from(socket).write_all(bytes).unwrap();
    }

    /// Kills QEMU.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.qmp.read_line(&mut line).unwrap();
        line
    }

    /// All RAM blocks of the machine.
    pub fn blocks(&mut self) -> Vec<RamBlock> {
        let answer = self.qmp("x-query-ramblock");
        let table = answer["human-readable-text"].as_str().unwrap();
        let memory = Arc::new(ProcessMemory::open(self.link().pid()).unwrap());
        let mut next_id = 1;
        let parse = |line: &str| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let hexadecimal = |field: &str| u64::from_str_radix(&field[2..], 16).unwrap();
            let (name, used, address) = (fields[0], hexadecimal(fields[4]), hexadecimal(fields[6]));
            if name == "ram" {
                return RamBlock::main(name, address, Arc::clone(&self.ram));
            }
            let id = BlockId(next_id);
            next_id += 1;
            RamBlock::auxiliary(id, name, address, used, Arc::clone(&memory))
        };
        table.lines().skip(1).map(parse).collect()
    }

    /// Asks QEMU to leave; gives its exit code.
    pub fn quit(&mut self) -> Option<i32> {
        self.qmp("quit");
        self.wait_for_exit().code()
    }

    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("QEMU to end", || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Both fail if it has ended already, which is fine.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Clears close-on-exec of `descriptors` in the child.
fn inherit(command: &mut Command, descriptors: Vec<RawFd>) {
    let clear = move || {
        for &fd in &descriptors {
            // SAFETY: changes a flag of a descriptor; async-signal-safe.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure only calls `fcntl`, which is allowed between fork and exec.
    unsafe { command.pre_exec(clear) };
}

/// The agent, which cargo built beside this test.
pub fn agent_library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libunderstudy_agent.so");
    assert!(library.exists(), "no agent at {}", library.display());
    library
}

/// Waits until `condition` holds.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + deadline();
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
