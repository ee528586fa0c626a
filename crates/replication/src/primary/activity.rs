//! The activity of the guest: whether it runs, and how much it has run since its last pause.

use crate::clock;
use anyhow::Context;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use understudy_machine::Machine;
use understudy_machine::cgroup;
use understudy_protocol::{Activity, Time};

/// A line of `stat` up to the state: number, name of at most 15 bytes, state.
const STAT_BYTES: usize = 64;

/// Watches one QEMU. Cheap enough for each checkpoint, off the pause.
#[derive(Debug)]
pub struct Watch {
    /// The processor time of the whole process: the kernel's times of single threads are up
    /// to a tick (4 ms) behind. What QEMU's own threads use makes the guest look busier.
    clock: ClockId,
    vcpus: u32,
    /// `stat` of the vCPU threads and of the main thread: a vCPU that sleeps while the main
    /// thread runs may wait for QEMU's big lock.
    threads: Vec<File>,
}

/// The processor time that QEMU had used at an instant.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    at: Time,
    time: Duration,
}

impl Watch {
    /// Watches a machine's QEMU.
    pub fn new(machine: &Machine) -> anyhow::Result<Watch> {
        let pid = machine.qemu_pid();
        let process = Pid::from_raw(pid.try_into().context("a process id is positive")?);
        let clock = clock_getcpuclockid(process).context("cannot find QEMU's clock")?;
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let stat = |tid: &str| {
            let path = tasks.join(tid).join("stat");
            File::open(&path).with_context(|| format!("cannot open {}", path.display()))
        };
        let vcpus = cgroup::vcpu_threads(pid)?;
        let tids = vcpus.iter().map(String::as_str);
        let main = pid.to_string();
        let threads = tids.chain([main.as_str()]).map(stat).collect::<anyhow::Result<_>>()?;
        let vcpus = vcpus.len().max(1) as u32;
        Ok(Watch { clock, vcpus, threads })
    }

    /// The time that QEMU has used until now.
    pub fn used(&self) -> Used {
        let time = clock_gettime(self.clock).map_or(Duration::ZERO, Duration::from);
        Used { at: clock::now(), time }
    }

    /// The activity of the guest now, and since. One whose QEMU is gone counts as busy.
    pub fn activity(&self, machine: &Machine, since: Used) -> Activity {
        let waits_for_disk = machine.disks().iter().any(|disk| disk.has_requests());
        if waits_for_disk {
            // How much it would do with what it waits for, nobody knows.
            return Activity { idle: false, busy_share: 1.0 };
        }
        let idle = self.threads.iter().all(is_asleep);
        let now = self.used();
        let elapsed = (now.at - since.at) * self.vcpus;
        let used = now.time.saturating_sub(since.time);
        let busy_share = used.as_secs_f64() / elapsed.as_secs_f64().max(1e-9);
        Activity { idle, busy_share: busy_share.min(1.0) }
    }
}

/// Whether a thread waits for something.
fn is_asleep(stat: &File) -> bool {
    let mut text = [0; STAT_BYTES];
    let read = stat.read_at(&mut text, 0).unwrap_or(0);
    // The name, in brackets, may contain anything.
    let end_of_name = text[..read].iter().rposition(|&byte| byte == b')');
    end_of_name.and_then(|end| text.get(end + 2)) == Some(&b'S')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_thread_that_sleeps_is_told_from_one_that_runs() {
        let says = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            is_asleep(&file)
        };
        assert!(says("812 (CPU 0/TCG) S 1 812 812 0 -1 4194304 0 0 0 0 0 0"));
        assert!(says("812 (a) R (b) S 1 812 812 0 -1"));
        assert!(!says("812 (CPU 0/KVM) R 1 812 812 0 -1"));
        assert!(!says("812 (CPU 0/KVM) D 1 812 812 0 -1"));
        assert!(!says(""));
    }
}
