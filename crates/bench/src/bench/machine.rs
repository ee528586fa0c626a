//! Machine on which something was measured: figures without it say little.

use serde::{Deserialize, Serialize};
use std::fs;

/// The machine, and what was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Processors that this program may use.
    pub cpus: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// The kernel's release.
    pub kernel: String,
    /// QEMU's version.
    pub qemu: String,
    /// QEMU's accelerator: tcg or kvm.
    pub accel: String,
    /// Version of this program.
    pub understudy: String,
}

impl Machine {
    /// Looks at this machine, with the QEMU that runs as `qemu_pid`.
    pub fn look(understudy: String, qemu: String, qemu_pid: u32) -> Machine {
        let accel = accel(qemu_pid).unwrap_or_else(unknown);
        Machine { understudy, ..Machine::here(qemu, accel) }
    }

    /// Facts of this machine and this program, with a QEMU of that version and accelerator.
    pub fn here(qemu: String, accel: String) -> Machine {
        let uname = nix::sys::utsname::uname();
        let release = uname.map(|uname| uname.release().to_string_lossy().into_owned());
        let memory_kib = field("/proc/meminfo", "MemTotal").and_then(|text| kib(&text));
        Machine {
            cpu: field("/proc/cpuinfo", "model name").unwrap_or_else(unknown),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory_kib.unwrap_or_default() / 1024,
            kernel: release.unwrap_or_else(|_| unknown()),
            qemu,
            accel,
            understudy: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Number of processes that wanted to run over the last minute: whether somebody
/// else kept the machine busy.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// Work of all processors since the machine's start, in clock ticks.
#[derive(Clone, Copy, Debug)]
pub struct ProcessorTimes {
    processors: usize,
    idle: u64,
    stolen: u64,
    all: u64,
}

/// Work of the processors in a stretch of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessorUse {
    /// Number of them that were at work, in the mean: the machine's number of them is the most
    /// there can be.
    pub busy: f64,
    /// Number of them that another machine on the same host had instead.
    pub stolen: f64,
}

impl ProcessorTimes {
    /// Times until now; none where the kernel does not say.
    pub fn look() -> Option<ProcessorTimes> {
        ProcessorTimes::parse(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// proc_stat(5): user nice system idle iowait irq softirq steal, and guests' times, which
    /// the first two have in them.
    fn parse(text: &str) -> Option<ProcessorTimes> {
        let mut lines = text.lines();
        let numbers = lines.next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
        let ticks: Vec<u64> = numbers.map(str::parse).collect::<Result<_, _>>().ok()?;
        let &[_, _, _, idle, waiting, _, _, stolen] = &ticks[..] else { return None };
        let processors = lines.take_while(|line| line.starts_with("cpu")).count();
        Some(ProcessorTimes { processors, idle: idle + waiting, stolen, all: ticks.iter().sum() })
    }

    /// Use from then to `later`; none if no tick lies between.
    pub fn until(self, later: ProcessorTimes) -> Option<ProcessorUse> {
        let processors = self.processors as f64;
        let all = later.all.checked_sub(self.all).filter(|&ticks| ticks > 0)? as f64;
        let share = |ticks: u64| ticks as f64 / all * processors;
        let stolen = later.stolen.saturating_sub(self.stolen);
        let idle = later.idle.saturating_sub(self.idle);
        Some(ProcessorUse { busy: processors - share(idle + stolen), stolen: share(stolen) })
    }
}

/// The value of the first line `NAME: VALUE` of a file in `/proc`.
pub fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(found, _)| found.trim() == name)?;
    Some(value.trim().to_owned())
}

/// The number in `123 kB`.
pub fn kib(text: &str) -> Option<u64> {
    text.strip_suffix("kB")?.trim().parse().ok()
}

fn accel(qemu_pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{qemu_pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line).into_owned();
    let (_, rest) = line.split_once("\0-accel\0")?;
    rest.split([',', '\0']).next().map(str::to_owned)
}

fn unknown() -> String {
    "unknown".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::look("1".into(), "2".into(), std::process::id());
        assert!(machine.cpus >= 1 && machine.memory_mib > 0);
        assert_eq!(machine.accel, "unknown", "a test is no QEMU");
        assert!(load_average().is_some());
    }

    #[test]
    fn the_use_of_processors_is_what_they_were_neither_idle_nor_stolen() {
        let before =
            ProcessorTimes::parse("cpu  100 0 50 1000 20 0 5 7 0 0\ncpu0\ncpu1\nintr").unwrap();
        let after =
            ProcessorTimes::parse("cpu  160 0 60 1050 30 0 5 37 0 0\ncpu0\ncpu1\n").unwrap();
        // 160 ticks: 70 at work, 60 idle or waiting, 30 stolen.
        let usage = before.until(after).unwrap();
        assert!((usage.busy - 2.0 * 70.0 / 160.0).abs() < 1e-9, "{usage:?}");
        assert!((usage.stolen - 2.0 * 30.0 / 160.0).abs() < 1e-9, "{usage:?}");
        assert_eq!(before.until(before), None);
        assert!(ProcessorTimes::parse("cpu0 1 2 3").is_none());
        assert!(ProcessorTimes::look().is_some());
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(kib("  24683744 kB"), Some(24_683_744));
        assert_eq!(kib("12 MB"), None);
    }
}
