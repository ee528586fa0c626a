//! The queue's section: its figures, and its text.

use super::Load;
use super::score::{AtHalf, AtSize, ByPolicy, ByShare, Foretold, NAMED, middle};
use crate::bench::restore::aim::Aim;
use crate::bench::suite::statistics::median;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use understudy_snapshot::WorkingSetFactor;

/// Share of the touched pages that first access, first load is to have loaded.
const HIT_RATE_AIM: f64 = 0.944;
/// Hit rates that the paper has at 15 000 pages.
const OF_THE_PAPER: ByPolicy = ByPolicy { fafl: HIT_RATE_AIM, lru: 0.857, clock: 0.868 };
/// Share by which the working set is to be smaller than by sampling.
const REDUCTION_AIM: f64 = 0.51;

/// Findings of the section.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Memory of the guest in MiB.
    pub queue_memory_mib: u32,
    /// Hit rate of first access at 15 000 pages, in snapshots as they are taken by default; the
    /// middle of all loads.
    pub hit_rate_as_taken: Option<f64>,
    /// The same.
    pub accuracy_as_taken: Option<f64>,
    /// Hit rates at 15 000 pages, of policies that saw the same accesses; the middle of all loads.
    pub hit_rate: Option<ByPolicy>,
    /// The same.
    pub accuracy: Option<ByPolicy>,
    /// Hit rate by the paper's measure, at half of what each load touches; the middle of all loads.
    pub hit_rate_at_half_as_taken: Option<f64>,
    /// The same of policies that saw the same accesses.
    pub hit_rate_at_half: Option<ByPolicy>,
    /// Hit rates at the product's own estimate of the working set.
    pub hit_rate_at_working_set: Option<ByPolicy>,
    /// The same.
    pub accuracy_at_working_set: Option<ByPolicy>,
    /// Share by which that estimate is smaller than the one by sampling alone; the middle of all
    /// loads. It has 0.7 of the latter: 0.3 at most.
    pub wss_reduction: Option<f64>,
    /// The same of what first access found by itself: the trace without the sample.
    pub wss_reduction_traced: Option<f64>,
    /// Share by which what a restore at the default waits for is less than the estimate by
    /// sampling.
    pub loaded_reduction: Option<f64>,
    /// Each load, in the middle one of its rounds by the hit rate at 15 000 pages, as it is taken.
    pub workloads: BTreeMap<Load, Figures>,
    /// Each load, round by round.
    #[serde(rename = "queue_rounds")]
    pub rounds: BTreeMap<Load, Vec<Figures>>,
    /// Measurements that failed.
    pub queue_failures: Vec<String>,
}

/// Findings on one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Pages that it touched in the 7 s after the snapshot that was taken by default: its queue of
    /// first accesses.
    pub traced: u64,
    /// Pages that it touched in the 7 s after the restore of that.
    pub touched: u64,
    /// The product's estimate of its working set, in pages.
    pub working_set: u64,
    /// The estimate by sampling in normal running, in pages.
    pub sampled: Option<u64>,
    /// Scores with so many pages loaded.
    pub sizes: Vec<AtSize>,
    /// Scores with half of what it touches loaded.
    pub at_half: AtHalf,
    /// Scores with a half, seven tenths, all of the working set loaded.
    pub of_working_set: Vec<AtSize>,
    /// Faults with such a share of the working set loaded.
    pub faults: ByShare<Faults>,
}

/// Pages that were missing in the 7 s after a restore.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Faults {
    /// Pages that were touched and had not been loaded before the start.
    pub not_loaded: u64,
    /// Number of times that the guest waited for a page: a chunk of 64 pages comes at once, and the
    /// rest is loaded meanwhile.
    pub waits: u64,
}

impl Figures {
    /// Scores with the paper's number of pages.
    fn named(&self) -> Option<AtSize> {
        self.sizes.iter().find(|at| at.pages == NAMED).copied()
    }

    /// Share by which so many pages are less than sampling says.
    fn smaller(&self, pages: f64) -> Option<f64> {
        let sampled = self.sampled.filter(|&pages| pages > 0)?;
        Some(1.0 - pages / sampled as f64)
    }

    /// Words for the progress.
    pub fn words(&self) -> String {
        let sampled = self.sampled.map_or("not".to_owned(), |pages| pages.to_string());
        let rates = |at: &AtSize| {
            let foretold = percent(at.as_taken.hit_rate);
            format!("{foretold} ({})", triple(at.hit_rate))
        };
        let rates: Vec<String> = self.of_working_set.iter().map(rates).collect();
        format!(
            "{} pages touched, {} foretold, {sampled} sampled; with 0.5, 0.7, 1 of the working \
             set loaded, a snapshot as it is taken (first access/LRU/CLOCK of the same accesses) \
             has {} % of them",
            self.touched,
            self.traced,
            rates.join(", ")
        )
    }
}

impl Report {
    /// Report of nothing yet.
    pub fn new(queue_memory_mib: u32) -> Report {
        Report {
            queue_memory_mib,
            hit_rate_as_taken: None,
            accuracy_as_taken: None,
            hit_rate: None,
            accuracy: None,
            hit_rate_at_half_as_taken: None,
            hit_rate_at_half: None,
            hit_rate_at_working_set: None,
            accuracy_at_working_set: None,
            wss_reduction: None,
            wss_reduction_traced: None,
            loaded_reduction: None,
            workloads: BTreeMap::new(),
            rounds: BTreeMap::new(),
            queue_failures: Vec::new(),
        }
    }

    /// Concludes from all loads that are there.
    pub fn conclude(&mut self) {
        let one = |(load, rounds): (&Load, &Vec<Figures>)| Some((*load, middle_round(rounds)?));
        self.workloads = self.rounds.iter().filter_map(one).collect();
        let at: Vec<AtSize> = self.workloads.values().filter_map(Figures::named).collect();
        self.hit_rate_as_taken = as_taken(&at, |by| by.hit_rate);
        self.accuracy_as_taken = as_taken(&at, |by| by.accuracy);
        self.hit_rate = of(&at, |at| at.hit_rate);
        self.accuracy = of(&at, |at| at.accuracy);
        let half: Vec<AtHalf> = self.workloads.values().map(|one| one.at_half).collect();
        let rates = half.iter().map(|at| at.as_taken).collect::<Vec<f64>>();
        self.hit_rate_at_half_as_taken = median(&rates);
        self.hit_rate_at_half = middle(&half.iter().map(|at| at.by_policy).collect::<Vec<_>>());
        let last = |one: &Figures| one.of_working_set.last().copied();
        let at: Vec<AtSize> = self.workloads.values().filter_map(last).collect();
        self.hit_rate_at_working_set = of(&at, |at| at.hit_rate);
        self.accuracy_at_working_set = of(&at, |at| at.accuracy);
        let loaded = f64::from(WorkingSetFactor::default());
        self.wss_reduction = self.reduction(|one| one.working_set as f64);
        self.wss_reduction_traced = self.reduction(|one| one.traced as f64);
        self.loaded_reduction = self.reduction(|one| one.working_set as f64 * loaded);
    }

    fn reduction(&self, pages: impl Fn(&Figures) -> f64) -> Option<f64> {
        let of = |one: &Figures| one.smaller(pages(one));
        median(&self.workloads.values().filter_map(of).collect::<Vec<f64>>())
    }

    /// Aims of the section.
    pub fn aims(&self) -> Vec<Aim> {
        let rates = [
            ("as snapshots are taken by default", self.hit_rate_as_taken),
            ("where all accesses are traced", self.hit_rate.map(|rate| rate.fafl)),
        ];
        let rates = rates.into_iter().filter_map(|(what, rate)| {
            let what = format!("hit rate of first access, first load at {NAMED} pages, {what}");
            Some(Aim::at_least(what, rate?, HIT_RATE_AIM))
        });
        let half = [
            ("as snapshots are taken by default", self.hit_rate_at_half_as_taken),
            ("where all accesses are traced", self.hit_rate_at_half.map(|rate| rate.fafl)),
        ];
        let half = half.into_iter().filter_map(|(what, rate)| {
            let what = format!("the same at half of what each load touches, {what}");
            Some(Aim::at_least(what, rate?, HIT_RATE_AIM))
        });
        let smaller = [
            ("working set (of which sampling's is 0.7)", self.wss_reduction),
            ("first accesses alone", self.wss_reduction_traced),
        ];
        let smaller = smaller.into_iter().filter_map(|(what, reduction)| {
            let what = format!("{what}, share by which it is smaller than sampling's");
            Some(Aim::at_least(what, reduction?, REDUCTION_AIM))
        });
        rates.chain(half).chain(smaller).collect()
    }
}

/// The lower one of two.
fn middle_round(rounds: &[Figures]) -> Option<Figures> {
    let mut rounds: Vec<&Figures> = rounds.iter().collect();
    let rate = |one: &Figures| one.named().map_or(0.0, |at| at.as_taken.hit_rate);
    rounds.sort_by(|one, other| rate(one).total_cmp(&rate(other)));
    rounds.get(rounds.len().saturating_sub(1) / 2).map(|&middle| middle.clone())
}

fn as_taken(at: &[AtSize], figure: fn(&Foretold) -> f64) -> Option<f64> {
    median(&at.iter().map(|at| figure(&at.as_taken)).collect::<Vec<f64>>())
}

fn of(at: &[AtSize], figure: fn(&AtSize) -> ByPolicy) -> Option<ByPolicy> {
    middle(&at.iter().map(figure).collect::<Vec<_>>())
}

/// The section for a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "Queues, {} MiB: share of the pages touched in 7 s that were loaded (of the loaded ones \
         touched), %, in snapshots as they are taken by default; and by policies that saw the same \
         accesses\n\n{:<10} {:>8} {:>8}  {:>13} {:>8}  {:>13} {:>13} {:>13}\n",
        report.queue_memory_mib,
        "",
        "loaded",
        "possible",
        "as taken",
        "possible",
        "first access",
        "LRU",
        "CLOCK"
    );
    for (load, figures) in &report.workloads {
        let name = format!("{load:?}").to_lowercase();
        for at in figures.sizes.iter().chain(&figures.of_working_set) {
            let both = |hits: f64, right: f64| format!("{} ({})", percent(hits), percent(right));
            let _ = writeln!(
                text,
                "{name:<10} {:>8} {:>8}  {:>13} {:>8}  {:>13} {:>13} {:>13}",
                at.pages,
                percent(at.as_taken.bound),
                both(at.as_taken.hit_rate, at.as_taken.accuracy),
                percent(at.bound),
                both(at.hit_rate.fafl, at.accuracy.fafl),
                both(at.hit_rate.lru, at.accuracy.lru),
                both(at.hit_rate.clock, at.accuracy.clock),
            );
        }
    }
    text += &format!(
        "\nWith half of what each touches loaded: share of the first so many pages touched that \
         were loaded, %; as taken, first access/LRU/CLOCK; the paper at {NAMED} pages: {}\n\n",
        triple(OF_THE_PAPER)
    );
    for (load, figures) in &report.workloads {
        let name = format!("{load:?}").to_lowercase();
        let AtHalf { pages, as_taken, by_policy } = figures.at_half;
        let both = format!("{:>8}  {}", percent(as_taken), triple(by_policy));
        let _ = writeln!(text, "{name:<10} {pages:>8} {both}");
    }
    text += "\nWorking sets in pages: estimate, sampling alone, first accesses; how much smaller \
             than sampling's estimate and first accesses are, %\n\n";
    for (load, figures) in &report.workloads {
        let name = format!("{load:?}").to_lowercase();
        let sampled = figures.sampled.map_or("-".to_owned(), |pages| pages.to_string());
        let smaller = |pages| figures.smaller(pages).map_or("-".to_owned(), percent);
        let _ = writeln!(
            text,
            "{name:<10} {:>8} {sampled:>8} {:>8}  {:>8} {:>8}",
            figures.working_set,
            figures.traced,
            smaller(figures.working_set as f64),
            smaller(figures.traced as f64)
        );
    }
    text += "\nTouched in 7 s and not loaded before the start (and how often it waited), by the \
             share of the working set\n\n";
    let shares = report.workloads.values().flat_map(|figures| figures.faults.keys());
    let mut shares: Vec<&String> = shares.collect();
    shares.sort();
    shares.dedup();
    let _ = writeln!(text, "{:<10} {}", "", columns(&shares, |share| format!("{share} WSS")));
    for (load, figures) in &report.workloads {
        let cell = |share: &&String| {
            let faults = figures.faults.get(*share);
            faults.map_or("-".to_owned(), |one| format!("{} ({})", one.not_loaded, one.waits))
        };
        let name = format!("{load:?}").to_lowercase();
        let _ = writeln!(text, "{name:<10} {}", columns(&shares, cell));
    }
    text
}

fn columns<T>(cells: &[T], text: impl Fn(&T) -> String) -> String {
    cells.iter().map(|cell| format!("{:>14}", text(cell))).collect()
}

fn triple(by: ByPolicy) -> String {
    format!("{}/{}/{}", percent(by.fafl), percent(by.lru), percent(by.clock))
}

fn percent(share: f64) -> String {
    format!("{:.1}", share * 100.0)
}

#[cfg(test)]
pub mod tests {
    use super::super::score::Noted;
    use super::*;

    fn noted(accesses: u64, touched: u64) -> Noted {
        Noted { accesses: (0..accesses).collect(), touched: (0..touched).collect() }
    }

    pub fn report() -> Report {
        let mut report = Report::new(512);
        for (load, again) in [(Load::Pi, 3), (Load::Gzip, 2)] {
            let compared = noted(12_000, again * 3_000);
            let as_taken = noted(4_000, 5_000);
            let at = |pages| AtSize::of(pages, &as_taken, &compared);
            let figures = Figures {
                traced: 4_000,
                touched: 5_000,
                working_set: 12_000,
                sampled: Some(16_000),
                sizes: vec![at(5_000), at(NAMED)],
                at_half: AtHalf::of(&as_taken, &compared),
                of_working_set: vec![at(6_000), at(12_000)],
                faults: [("0.5".to_owned(), Faults { not_loaded: 3_000, waits: 41 })].into(),
            };
            report.rounds.insert(load, vec![figures]);
        }
        report.conclude();
        report
    }

    #[test]
    fn the_named_size_is_what_is_aimed_at() {
        let report = report();
        assert_eq!(report.hit_rate.unwrap().fafl, 1.0);
        assert_eq!((report.hit_rate_as_taken, report.accuracy_as_taken), (Some(0.8), Some(1.0)));
        let reached: Vec<bool> = report.aims().iter().map(|aim| aim.reached).collect();
        let expected = [false, true, true, true, false, true];
        assert_eq!(reached, expected, "each measure beside its aim");
        // 9 000 and 6 000 of 12 000.
        assert_eq!(report.accuracy_at_working_set.unwrap().lru, 0.625);
        assert_eq!((report.wss_reduction, report.loaded_reduction), (Some(0.25), Some(0.625)));
        assert_eq!(report.wss_reduction_traced, Some(0.75));
        assert_eq!(Report::new(512).aims(), []);
    }

    #[test]
    fn a_load_is_shown_in_its_middle_round() {
        let mut report = report();
        let rounds = report.rounds.get_mut(&Load::Pi).unwrap();
        for (touched, traced) in [(30_000, 1), (24_000, 2)] {
            let sizes = vec![AtSize::of(NAMED, &noted(12_000, touched), &noted(1, 1))];
            rounds.push(Figures { traced, sizes, ..rounds[0].clone() });
        }
        report.conclude();
        assert_eq!(report.workloads[&Load::Pi].traced, 2, "hit rates of 0.8, 0.4 and 0.5");
        assert_eq!(report.rounds[&Load::Pi].len(), 3);
    }

    #[test]
    fn the_text_has_each_load_at_each_size() {
        let text = table(&report());
        for words in
            ["gzip", "55.6 (100.0)", "3000 (41)", "0.5 WSS", "25.0     75.0", "94.4/85.7/86.8"]
        {
            assert!(text.contains(words), "{words} in\n{text}");
        }
    }
}
