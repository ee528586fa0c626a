//! The guest's pace: what the throttle, or a backup that executes its log, asks for is carried out and shown.

use super::stats::Stats;
use tracing::{info, warn};
use understudy_machine::cgroup::VcpuGroup;
use understudy_protocol::VmName;

/// The reason for which a guest is slowed down, if it is.
#[derive(Clone, Copy, Debug)]
pub enum Outruns {
    /// It writes too much.
    Link,
    /// It executes too much, in lockstep.
    Backup,
}

impl Outruns {
    fn words(self) -> &'static str {
        match self {
            Outruns::Link => "writes faster than the link carries",
            Outruns::Backup => "is faster than its backup executes the log",
        }
    }
}

/// The pace of one guest in one QEMU. The capture thread has it; when it is dropped the guest runs at full speed.
#[derive(Debug)]
pub struct GuestPace<'a> {
    vm: &'a VmName,
    qemu_pid: u32,
    /// Where others see it.
    stats: &'a Stats,
    vcpus: Vcpus,
}

/// The limit that holds for the vCPUs at present.
#[derive(Debug)]
enum Vcpus {
    Free,
    Limited(VcpuGroup, f64),
    /// The vCPUs should be slower than they can be made.
    OutOfReach(String),
}

/// What others see of it.
#[derive(Clone, Debug)]
pub struct Limit {
    /// The part of its processors that the guest may use.
    pub percent: u32,
    /// The reason why it should have less and cannot.
    pub unavailable: Option<String>,
}

impl Limit {
    /// Full speed.
    pub const NONE: Limit = Limit { percent: 100, unavailable: None };
}

/// A limit that is lifted for a moment.
#[must_use]
pub struct Lifted(Vcpus);

impl<'a> GuestPace<'a> {
    /// A guest at full speed.
    pub fn new(vm: &'a VmName, qemu_pid: u32, stats: &'a Stats) -> GuestPace<'a> {
        GuestPace { vm, qemu_pid, stats, vcpus: Vcpus::Free }
    }

    /// The part of its processors that the guest may use, in percent.
    pub fn percent(&self) -> u32 {
        match &self.vcpus {
            Vcpus::Limited(_, share) => (share * 100.0).round() as u32,
            Vcpus::Free | Vcpus::OutOfReach(_) => 100,
        }
    }

    /// Gives the guest this part of its processors.
    pub fn set(&mut self, share: f64, why: Outruns) {
        match &mut self.vcpus {
            Vcpus::Free if share < 1.0 => self.vcpus = self.begin(share, why),
            Vcpus::Limited(..) if share == 1.0 => {
                info!(vm = %self.vm, "the guest has all of its processors again");
                self.vcpus = Vcpus::Free;
            }
            Vcpus::Limited(group, applied) if *applied != share => {
                *applied = share;
                complain(self.vm, group.limit(share));
            }
            Vcpus::OutOfReach(_) if share == 1.0 => self.vcpus = Vcpus::Free,
            _ => return,
        }
        self.show();
    }

    /// Lets the vCPUs run: to stand still they must get to run. If the limit is not restored they have none any more.
    pub fn lift(&mut self) -> Lifted {
        let lifted = std::mem::replace(&mut self.vcpus, Vcpus::Free);
        if let Vcpus::Limited(group, _) = &lifted {
            complain(self.vm, group.limit(1.0));
        }
        Lifted(lifted)
    }

    /// The limit holds again.
    pub fn restore(&mut self, Lifted(vcpus): Lifted) {
        if let Vcpus::Limited(group, share) = &vcpus {
            complain(self.vm, group.limit(*share));
        }
        self.vcpus = vcpus;
    }

    fn show(&self) {
        let unavailable = match &self.vcpus {
            Vcpus::Free | Vcpus::Limited(..) => None,
            Vcpus::OutOfReach(reason) => Some(reason.clone()),
        };
        self.stats.limited(Limit { percent: self.percent(), unavailable });
    }

    fn begin(&self, share: f64, why: Outruns) -> Vcpus {
        let why = why.words();
        let limited = VcpuGroup::create(self.qemu_pid).and_then(|group| {
            group.limit(share)?;
            Ok(group)
        });
        match limited {
            Ok(group) => {
                warn!(vm = %self.vm, "the guest {why}: slowing it down");
                Vcpus::Limited(group, share)
            }
            Err(error) => {
                let reason = format!("{error:#}");
                warn!(
                    vm = %self.vm,
                    "the guest {why} and cannot be slowed down, so that its output, or a fail-over, \
                     takes longer: {reason}"
                );
                Vcpus::OutOfReach(reason)
            }
        }
    }
}

impl Drop for GuestPace<'_> {
    fn drop(&mut self) {
        self.stats.limited(Limit::NONE);
    }
}

fn complain(vm: &VmName, result: anyhow::Result<()>) {
    if let Err(error) = result {
        warn!(%vm, "the guest's speed stays as it is: {error:#}");
    }
}
