//! Costs of a pause to a guest on KVM, counted part by part: system calls of QEMU, by name for
//! those to KVM, exits of the guest, and what KVM does for them that is dear. Each for the pauses
//! of the agent and for those through QMP, for 1, 2 and 4 virtual CPUs, with and without event
//! descriptors for the queues of virtio's devices.
//!
//! Played by `make test-kvm`: it asserts only what others rely on, and prints a table.

#[allow(dead_code)] // It has what the other tests need.
mod machine;

use machine::linux::boot;
use machine::{Machine, Start, deadline};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use understudy_qemu::pause::AgentPauser;
use understudy_qemu::qmp::DeviceState;

/// Pauses that are counted.
const PAUSES: u64 = 10;
/// Time between two pauses, while the guest idles.
const BETWEEN: Duration = Duration::from_millis(100);
const TRACING: &str = "/sys/kernel/tracing";
/// Work of KVM in a pause that makes processors wait for each other.
const DEAR: [&str; 3] =
    ["synchronize_srcu_expedited", "kvm_vcpu_kick", "kvm_make_all_cpus_request"];

#[test]
#[ignore = "needs KVM that runs guests, and tracefs; `make test-kvm` plays it"]
fn counts_of_a_pauses_parts() {
    for vcpus in [1, 2, 4] {
        for event_descriptors in [true, false] {
            let mut guest = Guest::boot(vcpus, event_descriptors);
            let state = DeviceState::create().unwrap();
            let link = guest.machine.link().socket();
            let agent = AgentPauser::arm(link, &state, deadline(), Vec::new()).unwrap();
            let by_agent = guest.count(|_, moments| {
                let mut pause = agent.begin().unwrap().expect("the guest runs");
                pause.saved().unwrap();
                pause.resume().unwrap();
                moments.extend(agent.stamps());
            });
            let scratch = tempfile::tempdir().unwrap();
            let file = scratch.path().join("state");
            let through_qmp = guest.count(|machine, moments| {
                moments.push(now());
                machine.qmp("stop");
                moments.push(now());
                let arguments = serde_json::json!({ "filename": file, "live": false });
                machine.qmp_with("xen-save-devices-state", arguments);
                moments.push(now());
                machine.qmp("cont");
                moments.push(now());
            });
            let descriptors = if event_descriptors { "with" } else { "without" };
            for (way, counts) in [("agent", &by_agent), ("QMP", &through_qmp)] {
                println!("{vcpus} vCPUs, {descriptors} event descriptors, by {way}");
                counts.print();
            }
            let waits = |counts: &Counts| counts.sum(DEAR[0]);
            println!();
            if !event_descriptors {
                assert_eq!(waits(&by_agent), 0, "nothing waits for all processors in a pause");
            }
            assert_eq!(guest.machine.quit(), Some(0));
        }
    }
}

/// Nanoseconds of the clock that the trace has.
fn now() -> u64 {
    understudy_agent_protocol::monotonic()
}

/// A guest with one disk and one card, that idles.
struct Guest {
    machine: Machine,
    trace: Trace,
}

impl Guest {
    fn boot(vcpus: u32, event_descriptors: bool) -> Guest {
        let devices = Some(event_descriptors);
        let start = Start { accel: "kvm", mebibytes: 256, vcpus, devices, ..Start::default() };
        let (machine, _) = boot(start);
        let trace = Trace::begin(machine.link().pid());
        Guest { machine, trace }
    }

    /// Counts what happens in `PAUSES` pauses; each tells four moments: its begin, and the ends
    /// of stop, save and resume.
    fn count(&mut self, mut pause: impl FnMut(&mut Machine, &mut Vec<u64>)) -> Counts {
        let mut moments = Vec::new();
        // The first one finds everything cold.
        pause(&mut self.machine, &mut Vec::new());
        self.trace.clear();
        for _ in 0..PAUSES {
            thread::sleep(BETWEEN);
            pause(&mut self.machine, &mut moments);
        }
        thread::sleep(BETWEEN);
        let mut counts = Counts::default();
        for line in self.trace.read().lines() {
            if let Some((at, what)) = parse(line) {
                counts.add(&moments, at, what);
            }
        }
        counts
    }
}

const PARTS: [&str; 3] = ["stop", "save", "resume"];

/// Counts of what happened in each part, in all pauses.
#[derive(Default)]
struct Counts(BTreeMap<String, [u64; PARTS.len()]>);

impl Counts {
    fn add(&mut self, moments: &[u64], at: u64, what: String) {
        for pause in moments.chunks(PARTS.len() + 1) {
            let part = pause.windows(2).position(|ends| (ends[0]..=ends[1]).contains(&at));
            if let Some(part) = part {
                self.0.entry(what.clone()).or_default()[part] += 1;
            }
        }
    }

    fn sum(&self, what: &str) -> u64 {
        self.0.get(what).map_or(0, |parts| parts.iter().sum())
    }

    fn print(&self) {
        println!("  {:34} {:>8} {:>8} {:>8}", "a pause", PARTS[0], PARTS[1], PARTS[2]);
        for (what, parts) in &self.0 {
            let [stop, save, resume] = parts.map(|count| count as f64 / PAUSES as f64);
            println!("  {what:34} {stop:8.1} {save:8.1} {resume:8.1}");
        }
    }
}

/// The kernel's trace of one process's threads.
struct Trace(PathBuf);

impl Trace {
    fn begin(pid: i32) -> Trace {
        let trace = Trace(Path::new(TRACING).join(format!("instances/understudy-{pid}")));
        fs::create_dir(&trace.0).expect("tracefs is mounted");
        let threads: Vec<String> = fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .map(|task| task.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        let threads = threads.join(" ");
        trace.write("buffer_size_kb", "16384");
        trace.write("trace_clock", "mono");
        trace.write("set_event_pid", &threads);
        trace.write("events/raw_syscalls/sys_enter/enable", "1");
        trace.write("events/kvm/kvm_exit/enable", "1");
        trace.write("set_ftrace_pid", &threads);
        trace.write("set_ftrace_filter", &DEAR.join(" "));
        trace.write("current_tracer", "function");
        trace
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap_or_else(|e| panic!("{file}: {text}: {e}"));
    }

    fn clear(&self) {
        self.write("trace", "");
    }

    fn read(&self) -> String {
        fs::read_to_string(self.0.join("trace")).unwrap()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // All files in it belong to the kernel, and go with it.
        let _ = Command::new("rmdir").arg(&self.0).status();
    }
}

/// Time and event that a line of the trace tells.
fn parse(line: &str) -> Option<(u64, String)> {
    // ` CPU 0/KVM-412 [000] d..1. 71.123456: sys_enter: NR 16 (1b, ae80, 0, …)`
    let (before, said) = line.split_once(": ")?;
    let seconds: f64 = before.split_whitespace().last()?.parse().ok()?;
    let what = match said.split_once(':') {
        Some(("sys_enter", call)) => system_call(call),
        Some(("kvm_exit", reason)) => {
            let reason = reason.split_whitespace().skip_while(|word| *word != "reason").nth(1);
            format!("exit: {}", reason.unwrap_or("?"))
        }
        _ => said.split(" <-").next()?.trim().to_owned(),
    };
    Some(((seconds * 1e9) as u64, what))
}

/// A system call, by name where it is one to KVM.
fn system_call(call: &str) -> String {
    let mut words =
        call.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let number = words.nth(1).unwrap_or("?");
    let request = words.nth(1).and_then(|word| u32::from_str_radix(word, 16).ok());
    match (number, request) {
        ("16", Some(request)) if request >> 8 & 0xff == 0xae => {
            format!("ioctl {}", kvm_request(request & 0xff))
        }
        ("16", Some(request)) => format!("ioctl {request:#x}"),
        (number, _) => format!("system call {number}"),
    }
}

/// Name in `<linux/kvm.h>`.
fn kvm_request(number: u32) -> String {
    let name = match number {
        0x42 => "GET_DIRTY_LOG",
        0x61 => "IRQ_LINE",
        0x62 => "GET_IRQCHIP",
        0x63 => "SET_IRQCHIP",
        0x67 => "IRQ_LINE_STATUS",
        0x6a => "SET_GSI_ROUTING",
        0x76 => "IRQFD",
        0x79 => "IOEVENTFD",
        0x7b => "SET_CLOCK",
        0x7c => "GET_CLOCK",
        0x80 => "RUN",
        0x81 => "GET_REGS",
        0x82 => "SET_REGS",
        0x83 => "GET_SREGS",
        0x84 => "SET_SREGS",
        0x88 => "GET_MSRS",
        0x89 => "SET_MSRS",
        0x8e => "GET_LAPIC",
        0x8f => "SET_LAPIC",
        0x98 => "GET_MP_STATE",
        0x99 => "SET_MP_STATE",
        0x9f => "GET_VCPU_EVENTS",
        0xa0 => "SET_VCPU_EVENTS",
        0xa1 => "GET_DEBUGREGS",
        0xa2 => "SET_DEBUGREGS",
        0xa4 => "GET_XSAVE",
        0xa5 => "SET_XSAVE",
        0xa6 => "GET_XCRS",
        0xa7 => "SET_XCRS",
        0xad => "KVMCLOCK_CTRL",
        0xb7 => "SMI",
        0xbe => "GET_NESTED_STATE",
        0xbf => "SET_NESTED_STATE",
        0xcc => "GET_SREGS2",
        0xcd => "SET_SREGS2",
        0xcf => "GET_XSAVE2",
        other => return format!("KVM {other:#x}"),
    };
    format!("KVM_{name}")
}
