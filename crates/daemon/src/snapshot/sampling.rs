//! Sampling of working sets in normal running, statistically: of each VM whose memory is guarded a
//! few pages chosen at random are watched; the share of them that is accessed in a period is
//! taken for the share of all (Waldspurger 2002, which HotRestore builds on).

use super::Snapshots;
use crate::host::Host;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::debug;
use tracing::warn;
use understudy_machine::Machine;
use understudy_protocol::PageIndex;
use understudy_protocol::VmName;
use understudy_snapshot::Sampling;

/// Period as long as first accesses are traced after a snapshot: both tell what is touched in such
/// a time.
const PERIOD: Duration = Duration::from_secs(7);

/// Pages that are watched in a period. The first access to each is a fault, of some 20 µs.
const WATCHED: usize = 256;

/// A daemon that ends is not held up for long.
const LOOK: Duration = Duration::from_millis(500);

/// The VMs that are sampled; those of the thread that does.
#[derive(Default)]
struct Samplings(BTreeMap<VmName, Sampled>);

struct Sampled {
    /// A VM that was started anew is another one.
    machine: Weak<()>,
    sampling: Sampling,
}

impl Sampled {
    fn new(machine: &Machine) -> Sampled {
        Sampled { machine: machine.presence(), sampling: Sampling::new(machine.ram().pages()) }
    }
}

impl Samplings {
    /// A period ends, another one begins.
    fn turn(&mut self, machine: &Machine, below: impl FnMut(u64) -> u64) {
        let sampled = self.0.entry(machine.definition().name.clone());
        let sampled = sampled.or_insert_with(|| Sampled::new(machine));
        if !sampled.machine.ptr_eq(&machine.presence()) {
            *sampled = Sampled::new(machine);
        }
        if let Some(accessed) = machine.end_sample() {
            accessed.iter().for_each(|page| sampled.sampling.access(page.0));
            sampled.sampling.end();
        }
        let pages: Vec<_> = sampled.sampling.begin(WATCHED, below).map(PageIndex).collect();
        if !machine.begin_sample(&pages) {
            debug!(vm = %machine.definition().name, "is not sampled");
        }
    }

    /// Forgets those that are gone, and gives the working sets of the others, as far as they are known.
    fn working_sets(&mut self) -> WorkingSets {
        self.0.retain(|_, sampled| sampled.machine.strong_count() > 0);
        let known = self.0.iter().filter_map(|(vm, sampled)| {
            let pages = sampled.sampling.estimate()?;
            Some((vm.clone(), (sampled.machine.clone(), pages)))
        });
        known.collect()
    }
}

/// Working sets in pages, and the machine that each is of.
pub(super) type WorkingSets = BTreeMap<VmName, (Weak<()>, u64)>;

impl Snapshots {
    /// The working set of a machine in pages, if it was sampled for a period at least.
    pub(super) fn sampled(&self, machine: &Machine) -> Option<u64> {
        let (name, presence) = (&machine.definition().name, machine.presence());
        self.look(|known| {
            let (of, pages) = known.working_sets.get(name)?;
            of.ptr_eq(&presence).then_some(*pages)
        })
    }

    /// The same, of the machine that was sampled last under this name, if there still is one.
    pub(crate) fn sampled_pages(&self, vm: &VmName) -> Option<u64> {
        self.look(|known| {
            let (of, pages) = known.working_sets.get(vm)?;
            (of.strong_count() > 0).then_some(*pages)
        })
    }
}

/// Samples the VMs that run on a host, and lets go of what was kept of those that are gone, for as long as there is the host.
pub(crate) fn start(host: &Arc<Host>) {
    let host = Arc::downgrade(host);
    // Of all VMs: it looks at one after the other.
    let started = thread::Builder::new().name("sampling".to_owned()).spawn(move || {
        let random = RandomState::new();
        let (mut drawn, mut due) = (0_u64, Instant::now() + PERIOD);
        let mut samplings = Samplings::default();
        loop {
            thread::sleep(LOOK);
            let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
            if Instant::now() < due {
                continue;
            }
            due = Instant::now() + PERIOD;
            for vm in host.running() {
                samplings.turn(&vm.machine(), |bound| {
                    drawn += 1;
                    random.hash_one(drawn) % bound
                });
            }
            let sampled = samplings.working_sets();
            host.snapshots.note(|known| known.working_sets = sampled);
            host.snapshots.forget_gone();
        }
    });
    if let Err(error) = started {
        warn!(
            "VMs are not sampled, and what was kept of those that are gone stays: cannot start a thread: {error}"
        );
    }
}
