//! The meters for a monitoring system, counted at the event, for each VM, for as long as the daemon
//! has it.
//!
//! A session's figures begin anew with each protection, and are read when somebody asks; these only grow, so that a
//! rate over them is right however rarely they are read.

use crate::checkpoint::CheckpointTiming;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeSet;
use std::sync::Arc;
use understudy_protocol::VmName;
use understudy_threads::Common;

/// Upper bounds of the buckets of a pause: some tenths of a millisecond, with a tail.
const PAUSE_SECONDS: [f64; 12] =
    [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Upper bounds of the buckets of the delay of output, and of what it waits for: some milliseconds,
/// and the distance of the backup.
const OUTPUT_SECONDS: [f64; 12] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];
/// Upper bounds of the buckets of an outage: detection takes a tenth of a second at least.
const OUTAGE_SECONDS: [f64; 12] = [0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0];

type OfVm = [(&'static str, String); 1];
type Histograms = Family<OfVm, Histogram, fn() -> Histogram>;

/// The meters of the VMs of a host. Clones share them.
#[derive(Clone, Debug)]
pub struct Meters {
    /// The VMs that have some. Whoever gets them has this lock.
    vms: Arc<Common<BTreeSet<VmName>>>,
    pauses: Histograms,
    checkpoint_waits: Histograms,
    commit_gaps: Histograms,
    output_delays: Histograms,
    outages: Histograms,
    moves: Histograms,
    checkpoints: Family<OfVm, Counter>,
    written_pages: Family<OfVm, Counter>,
    sent_bytes: Family<OfVm, Counter>,
}

/// The meters of one VM.
#[derive(Clone, Debug)]
pub struct VmMeters {
    /// Time for which checkpoints stopped the guest, in seconds.
    pub pauses: Histogram,
    /// Time that the first output of an epoch had waited when its checkpoint began.
    pub checkpoint_waits: Histogram,
    /// Time from the last committed checkpoint of the session to the next one.
    pub commit_gaps: Histogram,
    /// Time that the first output of an epoch waited until it left.
    pub output_delays: Histogram,
    /// Time for which a take-over by this host kept clients waiting.
    pub outages: Histogram,
    /// The same of planned fail-overs.
    pub moves: Histogram,
    /// Committed checkpoints.
    pub checkpoints: Counter,
    /// Pages that checkpoints found written.
    pub written_pages: Counter,
    /// Bytes sent to backups.
    pub sent_bytes: Counter,
}

fn label(vm: &VmName) -> OfVm {
    [("vm", vm.to_string())]
}

impl Default for Meters {
    fn default() -> Meters {
        Meters {
            vms: Arc::default(),
            pauses: Family::new_with_constructor(|| Histogram::new(PAUSE_SECONDS)),
            checkpoint_waits: Family::new_with_constructor(|| Histogram::new(OUTPUT_SECONDS)),
            commit_gaps: Family::new_with_constructor(|| Histogram::new(OUTPUT_SECONDS)),
            output_delays: Family::new_with_constructor(|| Histogram::new(OUTPUT_SECONDS)),
            outages: Family::new_with_constructor(|| Histogram::new(OUTAGE_SECONDS)),
            moves: Family::new_with_constructor(|| Histogram::new(OUTAGE_SECONDS)),
            checkpoints: Family::default(),
            written_pages: Family::default(),
            sent_bytes: Family::default(),
        }
    }
}

impl VmMeters {
    /// The pause of a checkpoint has ended.
    pub fn captured(&self, timing: &CheckpointTiming) {
        self.pauses.observe(timing.total_ms / 1e3);
        self.written_pages.inc_by(timing.pages + timing.precopied_pages);
        if let Some(waited) = timing.output_waited_ms {
            self.checkpoint_waits.observe(waited / 1e3);
        }
    }

    /// The backup has acknowledged a checkpoint, whose output leaves.
    pub fn committed(&self, timing: &CheckpointTiming) {
        self.checkpoints.inc();
        if let Some(waited) = timing.output_waited_ms {
            self.output_delays.observe((waited + timing.total_ms + timing.replicate_ms) / 1e3);
        }
    }
}

impl Meters {
    /// Begins the meters of a VM, if it has none: what was never read at zero shows no growth.
    pub fn begin(&self, vm: &VmName) {
        self.of(vm);
    }

    /// The meters of a VM, which begin at zero the first time.
    pub fn of(&self, vm: &VmName) -> VmMeters {
        let mut vms = self.vms.lock();
        vms.insert(vm.clone());
        let vm = label(vm);
        VmMeters {
            pauses: self.pauses.get_or_create_owned(&vm),
            checkpoint_waits: self.checkpoint_waits.get_or_create_owned(&vm),
            commit_gaps: self.commit_gaps.get_or_create_owned(&vm),
            output_delays: self.output_delays.get_or_create_owned(&vm),
            outages: self.outages.get_or_create_owned(&vm),
            moves: self.moves.get_or_create_owned(&vm),
            checkpoints: self.checkpoints.get_or_create_owned(&vm),
            written_pages: self.written_pages.get_or_create_owned(&vm),
            sent_bytes: self.sent_bytes.get_or_create_owned(&vm),
        }
    }

    /// Forgets those of the VMs that the host does not have any more.
    pub fn retain(&self, has: impl Fn(&VmName) -> bool) {
        self.vms.lock().retain(|vm| {
            let stays = has(vm);
            if !stays {
                self.remove(&label(vm));
            }
            stays
        });
    }

    fn remove(&self, vm: &OfVm) {
        let Meters {
            vms: _,
            pauses,
            checkpoint_waits,
            commit_gaps,
            output_delays,
            outages,
            moves,
            checkpoints,
            written_pages,
            sent_bytes,
        } = self;
        for spans in [pauses, checkpoint_waits, commit_gaps, output_delays, outages, moves] {
            spans.remove(vm);
        }
        for counts in [checkpoints, written_pages, sent_bytes] {
            counts.remove(vm);
        }
    }

    /// Adds them to a page of metrics.
    pub fn register(&self, page: &mut Registry) {
        let help = "How long checkpoints stop the guest";
        page.register_with_unit("vm_pause", help, Unit::Seconds, self.pauses.clone());
        let help = "How long the first output of an epoch has waited when its checkpoint begins";
        page.register_with_unit(
            "vm_checkpoint_wait",
            help,
            Unit::Seconds,
            self.checkpoint_waits.clone(),
        );
        let help = "How long after the last committed checkpoint the next one is; an idle guest's are rare";
        page.register_with_unit("vm_commit_gap", help, Unit::Seconds, self.commit_gaps.clone());
        let help = "How long the first output of an epoch waits until it leaves";
        page.register_with_unit("vm_output_delay", help, Unit::Seconds, self.output_delays.clone());
        let help = "How long take-overs by this host have kept clients waiting, at most";
        page.register_with_unit("vm_outage", help, Unit::Seconds, self.outages.clone());
        let help = "How long planned fail-overs to this host have kept clients waiting, at most";
        page.register_with_unit("vm_move", help, Unit::Seconds, self.moves.clone());
        page.register("vm_checkpoints", "Committed checkpoints", self.checkpoints.clone());
        let help = "Pages that checkpoints found written";
        page.register("vm_written_pages", help, self.written_pages.clone());
        let help = "Sent to backups";
        page.register_with_unit("vm_sent", help, Unit::Bytes, self.sent_bytes.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;
    use understudy_protocol::literal;

    /// Regression: a VM that had left its host stayed on the page for as long as the daemon ran.
    #[test]
    fn a_vm_that_has_left_is_not_on_the_page() {
        let meters = Meters::default();
        let lines = |vm: &str| {
            let (mut page, mut text) = (Registry::default(), String::new());
            meters.register(&mut page);
            encode(&mut text, &page).unwrap();
            text.lines().filter(|line| line.contains(&format!("vm=\"{vm}\""))).count()
        };
        meters.begin(&literal("db"));
        meters.begin(&literal("web"));
        assert!(lines("db") > 9 && lines("db") == lines("web"));
        let there = lines("web");
        meters.retain(|vm| vm.as_str() == "web");
        assert_eq!((lines("db"), lines("web")), (0, there));
        meters.begin(&literal("db"));
        assert_eq!(lines("db"), there);
    }
}
