//! The guest's pace: the throttle's decisions, carried out and shown.

use crate::clock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tracing::{info, warn};
use understudy_machine::cgroup::VcpuGroup;
use understudy_protocol::VmName;
use understudy_protocol::{Epoch, Policy, Throttle, Time};
use understudy_report::ThrottleReport;
use understudy_threads::{Mutex, lock};

/// The reason why a guest is slowed down.
const OUTRUNS_LINK: &str = "writes faster than the link carries";
const OUTRUNS_BACKUP: &str = "is faster than its backup executes the log";

/// One guest's pace. The capture thread changes it; everybody may ask.
#[derive(Debug)]
pub struct Pace {
    vm: VmName,
    qemu_pid: AtomicU32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    throttle: Throttle,
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

impl Vcpus {
    fn percent(&self) -> u32 {
        match self {
            Vcpus::Limited(_, share) => (share * 100.0).round() as u32,
            Vcpus::Free | Vcpus::OutOfReach(_) => 100,
        }
    }
}

impl Pace {
    /// A guest at full speed, protected under `policy`.
    pub fn new(vm: &VmName, qemu_pid: u32, policy: &Policy) -> Pace {
        Pace {
            vm: vm.to_owned(),
            qemu_pid: AtomicU32::new(qemu_pid),
            state: Mutex::new(State {
                throttle: Throttle::new(policy.transfer_target()),
                vcpus: Vcpus::Free,
            }),
        }
    }

    /// The guest is in another QEMU, at full speed.
    pub fn moved(&self, qemu_pid: u32) {
        let mut state = lock(&self.state);
        self.qemu_pid.store(qemu_pid, Ordering::Release);
        state.vcpus = Vcpus::Free;
    }

    /// An epoch was captured; the first of its pages were queued at `began`. What follows from that for the guest's
    /// speed waits for [`Pace::follow`].
    pub fn captured(&self, epoch: Epoch, pages: u64, began: Time) {
        lock(&self.state).throttle.captured(epoch, pages, began);
    }

    /// Gives the guest the speed that the last epoch asked for.
    pub fn follow(&self) {
        self.apply_throttle(&mut lock(&self.state));
    }

    /// The backup has all epochs up to `epoch`.
    pub fn committed(&self, epoch: Epoch, now: Time) {
        lock(&self.state).throttle.committed(epoch, now);
    }

    /// The time to wait before somebody looks how much the guest has written, if at all.
    pub fn next_look(&self) -> Option<Duration> {
        lock(&self.state).throttle.next_look(clock::now())
    }

    /// The guest has written `dirty` pages so far; true if its epoch is to be cut short.
    pub fn looked(&self, dirty: u64) -> bool {
        let mut state = lock(&self.state);
        let cut_short = state.throttle.looked(dirty, clock::now());
        self.apply_throttle(&mut state);
        cut_short
    }

    /// Limits, in lockstep, the guest to this part of its processor, so that the backup keeps up.
    pub fn limit(&self, share: f64) {
        self.apply(&mut lock(&self.state).vcpus, share, OUTRUNS_BACKUP);
    }

    /// Whether pages may be sent before the pause; see [`Throttle::may_precopy`].
    pub fn may_precopy(&self, found: u64, before: &[u64]) -> bool {
        lock(&self.state).throttle.may_precopy(found, before)
    }

    /// The part of its processors that the guest may use, in percent.
    pub fn vcpu_percent(&self) -> u32 {
        lock(&self.state).vcpus.percent()
    }

    /// Lets the vCPUs run until the guard is dropped: to stand still they must get to run.
    pub fn lift(&self) -> Lifted<'_> {
        if let Vcpus::Limited(group, _) = &lock(&self.state).vcpus {
            self.complain(group.limit(1.0));
        }
        Lifted(self)
    }

    /// Gives the guest its processors back for good.
    pub fn end(&self) {
        lock(&self.state).vcpus = Vcpus::Free;
    }

    /// Returns the report for `status`.
    pub fn report(&self) -> ThrottleReport {
        let state = lock(&self.state);
        let unavailable = match &state.vcpus {
            Vcpus::Free | Vcpus::Limited(..) => None,
            Vcpus::OutOfReach(reason) => Some(reason.clone()),
        };
        ThrottleReport {
            vcpu_percent: state.vcpus.percent(),
            unavailable,
            cut_short: state.throttle.cut_short(),
            link_pages_per_second: state.throttle.capacity(),
        }
    }

    fn apply_throttle(&self, state: &mut State) {
        self.apply(&mut state.vcpus, state.throttle.share(), OUTRUNS_LINK);
    }

    fn apply(&self, vcpus: &mut Vcpus, share: f64, why: &str) {
        match vcpus {
            Vcpus::Free if share < 1.0 => *vcpus = self.begin(share, why),
            Vcpus::Limited(..) if share == 1.0 => {
                info!(vm = %self.vm, "the guest has all of its processors again");
                *vcpus = Vcpus::Free;
            }
            Vcpus::Limited(group, applied) if *applied != share => {
                *applied = share;
                self.complain(group.limit(share));
            }
            Vcpus::OutOfReach(_) if share == 1.0 => *vcpus = Vcpus::Free,
            _ => {}
        }
    }

    fn begin(&self, share: f64, why: &str) -> Vcpus {
        let limited = VcpuGroup::create(self.qemu_pid.load(Ordering::Acquire)).and_then(|group| {
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

    fn complain(&self, result: anyhow::Result<()>) {
        if let Err(error) = result {
            warn!(vm = %self.vm, "the guest's speed stays as it is: {error:#}");
        }
    }
}

/// Lets the vCPUs run without a limit while it lives.
pub struct Lifted<'a>(&'a Pace);

impl Drop for Lifted<'_> {
    fn drop(&mut self) {
        if let Vcpus::Limited(group, share) = &lock(&self.0.state).vcpus {
            self.0.complain(group.limit(*share));
        }
    }
}
