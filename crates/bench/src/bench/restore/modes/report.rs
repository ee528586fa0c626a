//! Medians and ratios.

use super::Sample;
use super::plan::Way;
use super::restore::Measured;
use crate::bench::restore::aim::Aim;
use crate::bench::suite::statistics::median;
use clap::ValueEnum;
use serde::Serialize;
use std::collections::BTreeMap;

/// The pause of a snapshot of a guest with so much memory is to be at most so long.
const PAUSE_AIM_MS: f64 = 3.0;
const PAUSE_AIM_MIB: u32 = 512;
/// A restore is to be so many times shorter than one that loads everything.
const RESTORE_AIM: f64 = 4.0;
/// Aim: at most so many times longer than its share of the bytes takes.
const SHARE_AIM: f64 = 1.3;

/// Findings of the section. Times are medians, in milliseconds, by this machine's clock.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Memory of each guest in MiB.
    pub guest_memory_mib: u32,
    /// Measurements of each way.
    pub runs: BTreeMap<Way, usize>,
    /// Time from the command until the guest ran. Plain QEMU's is without its start.
    pub restore_ms: BTreeMap<Way, f64>,
    /// Time until a client outside had an answer.
    pub answer_ms: BTreeMap<Way, f64>,
    /// Time until nothing was left to load.
    pub whole_ms: BTreeMap<Way, f64>,
    /// Share of the pages with content that the start waited for.
    pub loaded_share: BTreeMap<Way, f64>,
    /// Factor by which it is shorter than with all loaded before the start.
    pub faster_than_eager: BTreeMap<Way, f64>,
    /// The restore at the default, beside what its share of the bytes takes: 1 is as long.
    pub beside_share: Option<f64>,
    /// Time for which a snapshot stopped the guest.
    pub pause_ms: Option<f64>,
    /// Time that it took to take it.
    pub snapshot_ms: Option<f64>,
    /// Time for which plain QEMU's `migrate file:` stopped the guest.
    pub saved_ms: Option<f64>,
    /// Measurements that failed.
    pub mode_failures: Vec<String>,
}

impl Report {
    /// Report of these measurements.
    pub(super) fn of(guest_memory_mib: u32, samples: &[Sample]) -> Report {
        let taken = |way: Way| {
            let of_way = samples.iter().filter(move |sample| sample.step.way == way);
            of_way.filter_map(|sample| sample.outcome.as_ref().ok()).collect::<Vec<&Measured>>()
        };
        let figures = |figure: &dyn Fn(&Measured) -> Option<f64>| {
            let of = |way: &Way| {
                let values: Vec<f64> = taken(*way).into_iter().filter_map(figure).collect();
                Some((*way, median(&values)?))
            };
            Way::value_variants().iter().filter_map(of).collect::<BTreeMap<Way, f64>>()
        };
        let restore_ms = figures(&|taken| Some(taken.restore_ms));
        let ours = |figure: &dyn Fn(&Measured) -> f64| {
            let ways = Way::value_variants().iter().filter(|way| way.mode().is_some());
            let values: Vec<f64> = ways.flat_map(|&way| taken(way)).map(figure).collect();
            median(&values)
        };
        let failed = |sample: &Sample| {
            let error = sample.outcome.as_ref().err()?;
            Some(format!("{}: {error}", sample.step))
        };
        let mut report = Report {
            guest_memory_mib,
            runs: Way::value_variants().iter().map(|&way| (way, taken(way).len())).collect(),
            answer_ms: figures(&|taken| Some(taken.answer_ms)),
            whole_ms: figures(&|taken| Some(taken.whole_ms)),
            loaded_share: figures(&|taken| {
                // Of eager, zeros too.
                let share = taken.pages_before_start? as f64 / taken.pages.max(1) as f64;
                Some(share.min(1.0))
            }),
            faster_than_eager: faster(&restore_ms),
            beside_share: None,
            pause_ms: ours(&|taken| taken.pause_ms),
            snapshot_ms: ours(&|taken| taken.snapshot_ms),
            saved_ms: figures(&|taken| Some(taken.pause_ms)).get(&Way::Incoming).copied(),
            restore_ms,
            mode_failures: samples.iter().filter_map(failed).collect(),
        };
        report.beside_share = report.beside_share();
        report
    }

    fn beside_share(&self) -> Option<f64> {
        let share = self.loaded_share.get(&Way::Hot)?;
        let ideal = share * self.restore_ms.get(&Way::Eager)?;
        (ideal > 0.0).then(|| self.restore_ms.get(&Way::Hot).map(|hot| hot / ideal)).flatten()
    }

    /// Aims of the section.
    pub fn aims(&self) -> Vec<Aim> {
        let mut aims = Vec::new();
        if let (Some(pause), PAUSE_AIM_MIB) = (self.pause_ms, self.guest_memory_mib) {
            aims.push(Aim::at_most("pause of a snapshot of 512 MiB, ms", pause, PAUSE_AIM_MS));
        }
        if let Some(&times) = self.faster_than_eager.get(&Way::Hot) {
            aims.push(Aim::at_least("hot, times faster than eager", times, RESTORE_AIM));
        }
        let of = |way| self.restore_ms.get(&way).copied();
        if let (Some(hot), Some(incoming)) = (of(Way::Hot), of(Way::Incoming)) {
            let times = incoming / hot.max(f64::MIN_POSITIVE);
            aims.push(Aim::at_least("hot, times faster than -incoming", times, RESTORE_AIM));
        }
        if let Some(times) = self.beside_share {
            let what = "hot, beside its share of eager's bytes and time";
            aims.push(Aim::at_most(what, times, SHARE_AIM));
        }
        aims
    }
}

fn faster(restore_ms: &BTreeMap<Way, f64>) -> BTreeMap<Way, f64> {
    let Some(eager) = restore_ms.get(&Way::Eager) else { return BTreeMap::new() };
    let ratio = |(&way, &ms): (&Way, &f64)| (ms > 0.0).then(|| (way, eager / ms));
    restore_ms.iter().filter_map(ratio).collect()
}

#[cfg(test)]
pub mod tests {
    use super::super::plan::Step;
    use super::*;

    pub fn report() -> Report {
        let taken = |restore_ms: f64, pages: Option<u64>| Measured {
            restore_ms,
            whole_ms: 9000.0,
            answer_ms: restore_ms + 10.0,
            pages_before_start: pages,
            pages: 100_000,
            pause_ms: 2.5,
            snapshot_ms: 4000.0,
        };
        let sample = |way, outcome| Sample { step: Step { round: 1, way }, outcome };
        Report::of(
            512,
            &[
                sample(Way::Eager, Ok(taken(8000.0, Some(100_000)))),
                sample(Way::Hot, Ok(taken(900.0, Some(9_000)))),
                sample(Way::Hot, Ok(taken(1100.0, Some(11_000)))),
                sample(Way::Incoming, Ok(taken(3000.0, None))),
                sample(Way::Lazy, Err("its host has ended".into())),
            ],
        )
    }

    #[test]
    fn figures_are_medians_and_aims_are_judged() {
        let report = report();
        assert_eq!(report.restore_ms[&Way::Hot], 1000.0);
        assert_eq!(report.faster_than_eager[&Way::Hot], 8.0);
        assert_eq!(report.loaded_share[&Way::Hot], 0.1);
        assert_eq!(report.pause_ms, Some(2.5));
        let reached: Vec<bool> = report.aims().iter().map(|aim| aim.reached).collect();
        // A tenth of the pages in an eighth of the time.
        assert_eq!(report.beside_share, Some(1.25));
        assert_eq!(reached, [true, true, false, true], "{:?}", report.aims());
        assert_eq!(report.mode_failures, ["round 1, lazy: its host has ended"]);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["restore_ms"]["eager"], 8000.0);
    }
}
