//! The result of `bench pause`.

use super::kvm_counts::KvmCounts;
use super::machine::Machine;
use super::memory::DaemonMemory;
use super::migration::Downtimes;
use super::papers::COLO_PAUSES;
use crate::cli::Writer;
use serde::Serialize;
use std::fmt::Write;
use understudy_report::CheckpointTiming;

/// Everything that `bench pause` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct PauseBench {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// One entry for each size of guest and number of pages, in the order asked for.
    pub points: Vec<Point>,
}

/// Checkpoints of a guest that writes so many pages in each epoch. Times are
/// medians over the epochs, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The guest's memory in MiB.
    pub memory_mib: u32,
    /// Pages that the guest's load rewrites in each epoch; 0 is an idle guest.
    pub pages: u64,
    /// Way in which it writes them; none for an idle guest.
    pub writer: Option<Writer>,
    /// Checkpoints a second that were asked for.
    pub hz: u32,
    /// Epochs measured.
    pub epochs: usize,
    /// Pages copied in the pause.
    pub paused_pages: f64,
    /// Pages copied just before it, while the guest ran.
    pub precopied_pages: f64,
    /// QMP `stop`, until the guest stands still.
    pub stop_ms: f64,
    /// Time of finding the written pages.
    pub scan_ms: f64,
    /// Time of copying them.
    pub copy_ms: f64,
    /// Time of waiting for the device state.
    pub blob_ms: f64,
    /// QMP `cont`, until the guest runs.
    pub cont_ms: f64,
    /// The whole pause.
    pub total_ms: f64,
    /// The 99th percentile of the whole pause.
    pub p99_ms: f64,
    /// Time from the end of the pause until the backup's acknowledgement.
    pub replicate_ms: f64,
    /// Processes that wanted to run in the last minute, when the point ended.
    pub load_average: Option<f64>,
    /// The primary's daemon.
    pub primary_memory: DaemonMemory,
    /// The backup's daemon.
    pub backup_memory: DaemonMemory,
    /// Counts of KVM, if the guest runs on it.
    pub kvm: Option<KvmCounts>,
    /// Live migrations of the same guest with the same load, if any were asked for.
    pub migration: Option<Downtimes>,
}

impl Point {
    /// Medians over `timings`, which must not be empty.
    pub fn from_timings(
        memory_mib: u32,
        pages: u64,
        hz: u32,
        timings: &[CheckpointTiming],
    ) -> Point {
        let at = |share: f64, value: &dyn Fn(&CheckpointTiming) -> f64| {
            let mut values: Vec<f64> = timings.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            quantile(&values, share)
        };
        let median = |value: &dyn Fn(&CheckpointTiming) -> f64| at(0.5, value);
        Point {
            memory_mib,
            pages,
            writer: None,
            hz,
            epochs: timings.len(),
            paused_pages: median(&|timing| timing.pages as f64),
            precopied_pages: median(&|timing| timing.precopied_pages as f64),
            stop_ms: median(&|timing| timing.stop_ms),
            scan_ms: median(&|timing| timing.scan_ms),
            copy_ms: median(&|timing| timing.copy_ms),
            blob_ms: median(&|timing| timing.blob_ms),
            cont_ms: median(&|timing| timing.cont_ms),
            total_ms: median(&|timing| timing.total_ms),
            p99_ms: at(0.99, &|timing| timing.total_ms),
            replicate_ms: median(&|timing| timing.replicate_ms),
            load_average: None,
            primary_memory: DaemonMemory::default(),
            backup_memory: DaemonMemory::default(),
            kvm: None,
            migration: None,
        }
    }

    pub(super) fn writer_name(&self) -> &'static str {
        self.writer.map_or("-", Writer::name)
    }
}

/// The smallest of the sorted `values` that at least `share` of them do not
/// exceed.
pub(super) fn quantile(values: &[f64], share: f64) -> f64 {
    let rank = (values.len() as f64 * share).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

impl PauseBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             medians in milliseconds; guest: its memory, primary and backup: the daemons' own at \
             most, MiB\n\n"
        );
        text += "  guest   pages      writer  paused  precop  stop  scan  copy  blob  cont  TOTAL    p99  replic  epochs  \
                 primary  backup\n";
        for p in &self.points {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{:7} {:7} {:>11} {:7.0} {:7.0} {:5.2} {:5.2} {:5.2} {:5.2} {:5.2} {:6.2} {:6.2} {:7.1} {:7} {:8.1} {:7.1}",
                p.memory_mib,
                p.pages,
                p.writer_name(),
                p.paused_pages,
                p.precopied_pages,
                p.stop_ms,
                p.scan_ms,
                p.copy_ms,
                p.blob_ms,
                p.cont_ms,
                p.total_ms,
                p.p99_ms,
                p.replicate_ms,
                p.epochs,
                p.primary_memory.private_peak_mib,
                p.backup_memory.private_peak_mib,
            );
        }
        text + &self.kvm_table() + &self.peers_table()
    }

    /// Table of what KVM counted; these figures, unlike times, do not depend on the machine's
    /// speed.
    fn kvm_table(&self) -> String {
        let counted: Vec<_> = self.points.iter().filter_map(|p| Some((p, p.kvm?))).collect();
        if counted.is_empty() {
            return String::new();
        }
        let mut text = "\nKVM, from one checkpoint to the next; mapped: over before protection\n\
                        pages      writer  written  faults  a page  exits  flushes  mapped\n"
            .to_owned();
        for (point, kvm) in counted {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{:5} {:>11} {:8.0} {:7.0} {:7.2} {:6.0} {:8.1} {:7.2}",
                point.pages,
                point.writer_name(),
                kvm.pages_written,
                kvm.faults,
                kvm.faults_per_page,
                kvm.exits,
                kvm.remote_flushes,
                kvm.mappings_kept,
            );
        }
        text
    }

    /// The pause beside what QEMU itself offers to move a guest.
    fn peers_table(&self) -> String {
        if self.points.iter().all(|point| point.migration.is_none()) {
            return String::new();
        }
        let mut text = format!(
            "\nbeside the downtime of a live migration of the same guest, median (least–most) in \
             milliseconds;\ndefault: QEMU's limits, small: downtime-limit 10 ms, bandwidth \
             unlimited;\nCOLO: {}\n\n  guest   pages      writer   PAUSE       migration, default         \
             migration, small      COLO\n",
            COLO_PAUSES.source
        );
        for p in &self.points {
            let (default, small) = p
                .migration
                .as_ref()
                .map(|m| (m.default.words(), m.small.words()))
                .unwrap_or_default();
            let _ = writeln!(
                text,
                "{:7} {:7} {:>11} {:7.2} {default:>24} {small:>24} {:>9}",
                p.memory_mib,
                p.pages,
                p.writer_name(),
                p.total_ms,
                COLO_PAUSES.words(p.pages),
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timings() -> Vec<CheckpointTiming> {
        let timing = |i: u32| CheckpointTiming {
            pages: i.into(),
            stop_ms: 0.25,
            total_ms: f64::from(i),
            ..Default::default()
        };
        (1..=200).rev().map(timing).collect()
    }

    #[test]
    fn medians_and_the_99th_percentile() {
        let point = Point::from_timings(512, 100, 40, &timings());
        assert_eq!((point.total_ms, point.p99_ms, point.paused_pages), (100.0, 198.0, 100.0));
        assert_eq!((point.stop_ms, point.epochs), (0.25, 200));
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
    }

    #[test]
    fn the_json_has_the_documented_fields() {
        let point = serde_json::to_value(Point::from_timings(512, 100, 40, &timings())).unwrap();
        for field in [
            "pages",
            "stop_ms",
            "scan_ms",
            "copy_ms",
            "blob_ms",
            "cont_ms",
            "total_ms",
            "p99_ms",
            "replicate_ms",
            "epochs",
        ] {
            assert!(point[field].is_number(), "{field}: {point}");
        }
    }
}
