//! What was measured on: figures without it say little.

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
    /// This program's version.
    pub understudy: String,
}

impl Machine {
    /// This machine, with the QEMU that runs as `qemu_pid`.
    pub fn look(understudy: String, qemu: String, qemu_pid: u32) -> Machine {
        let accel = accel(qemu_pid).unwrap_or_else(unknown);
        Machine { understudy, ..Machine::here(qemu, accel) }
    }

    /// This machine and this program, with a QEMU of that version and accelerator.
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

/// How many processes wanted to run over the last minute: whether somebody
/// else kept the machine busy.
pub fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
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
    fn sizes_are_read() {
        assert_eq!(kib("  24683744 kB"), Some(24_683_744));
        assert_eq!(kib("12 MB"), None);
    }
}
