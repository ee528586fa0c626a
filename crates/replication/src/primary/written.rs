//! The most pages that a QEMU may have written, by what the kernel counts of it anyway.

use anyhow::Context;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::time::Duration;
use understudy_machine::{Machine, Tracker};
use understudy_memory::Faults;

/// The first write to a page takes at least so long where the processor logs it, without a fault.
const LOGGED_WRITE: Duration = Duration::from_nanos(100);

/// Watches one QEMU.
#[derive(Debug)]
pub enum Written {
    /// The first write to a page is a fault.
    ByFaults(Faults),
    /// The processor logs it. To ask for that log wakes QEMU's main loop; its clock tells whether it did much at all.
    ByTime(ClockId),
}

impl Written {
    /// Watches a machine's QEMU, whose writes are tracked so.
    pub fn of(machine: &Machine, tracker: &Tracker) -> anyhow::Result<Written> {
        let pid = machine.qemu_pid();
        match tracker {
            Tracker::Scans(_) => Ok(Written::ByFaults(Faults::open(pid)?)),
            Tracker::Log(_) => {
                let pid = Pid::from_raw(pid.try_into().context("a process id is positive")?);
                let clock = clock_getcpuclockid(pid).context("cannot find QEMU's clock")?;
                Ok(Written::ByTime(clock))
            }
        }
    }

    /// A count that grows by no less than the pages that it writes; none of a QEMU that is gone.
    pub fn most(&self) -> Option<u64> {
        match self {
            Written::ByFaults(faults) => faults.count(),
            Written::ByTime(clock) => clock_gettime(*clock).ok().map(|used| writes_in(used.into())),
        }
    }
}

/// The most pages whose first writes a processor logs in so long.
fn writes_in(used: Duration) -> u64 {
    u64::try_from(used.as_nanos() / LOGGED_WRITE.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_that_logs_writes_ten_pages_in_a_microsecond() {
        assert_eq!(writes_in(Duration::ZERO), 0);
        assert_eq!(writes_in(Duration::from_micros(7)), 70);
    }
}
