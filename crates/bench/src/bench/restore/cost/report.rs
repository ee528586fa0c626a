//! The section's figures, and its text.

use crate::bench::restore::pair::Plain;
use crate::bench::suite::statistics::median;
use crate::bench::suite::table::number;
use serde::Serialize;
use std::fmt::Write;

/// Findings of the section. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Memory of each guest in MiB.
    pub memory_mib: u32,
    /// The middle of all snapshots; the first one saves all, each later one what changed.
    pub snapshot: Option<Cost>,
    /// The middle of `migrate file:` and `-incoming`.
    pub migrate_file: Option<Plain>,
    /// savevm and loadvm.
    pub inside: Option<Plain>,
    /// Each snapshot.
    pub snapshots: Vec<Cost>,
    /// Each `migrate file:`.
    pub migrations: Vec<Plain>,
}

/// Costs of a snapshot for the guest that runs meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Time for which it stood still.
    pub pause_ms: f64,
    /// Time from the command until the snapshot was stored, first accesses traced.
    pub snapshot_ms: f64,
    /// Share of its work that it did not do meanwhile.
    pub slow_down: f64,
    /// The longest that a client waited for an answer before.
    pub silence_before_ms: f64,
    /// Longest silence while the snapshot is taken, in milliseconds.
    pub silence_ms: f64,
}

impl Cost {
    /// Words for the progress.
    pub fn words(&self) -> String {
        format!(
            "stood still for {:.1} ms, {:.0} % slower for {:.1} s, longest answer {:.0} ms",
            self.pause_ms,
            self.slow_down * 100.0,
            self.snapshot_ms / 1e3,
            self.silence_ms
        )
    }
}

impl Report {
    /// Report of nothing yet.
    pub fn new(memory_mib: u32) -> Report {
        Report {
            memory_mib,
            snapshot: None,
            migrate_file: None,
            inside: None,
            snapshots: Vec::new(),
            migrations: Vec::new(),
        }
    }

    /// Concludes from all rounds.
    pub fn conclude(&mut self) {
        let cost = |figure: fn(&Cost) -> f64| {
            median(&self.snapshots.iter().map(figure).collect::<Vec<f64>>())
        };
        let snapshot = || {
            Some(Cost {
                pause_ms: cost(|one| one.pause_ms)?,
                snapshot_ms: cost(|one| one.snapshot_ms)?,
                slow_down: cost(|one| one.slow_down)?,
                silence_before_ms: cost(|one| one.silence_before_ms)?,
                silence_ms: cost(|one| one.silence_ms)?,
            })
        };
        let plain = |figure: fn(&Plain) -> f64| {
            median(&self.migrations.iter().map(figure).collect::<Vec<f64>>())
        };
        let migrated = || {
            Some(Plain {
                saved_ms: plain(|one| one.saved_ms)?,
                loaded_ms: plain(|one| one.loaded_ms)?,
                answer_ms: plain(|one| one.answer_ms)?,
                bytes: self.migrations.last()?.bytes,
            })
        };
        (self.snapshot, self.migrate_file) = (snapshot(), migrated());
    }
}

/// The section for a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!("What a snapshot of {} MiB costs; medians in ms\n\n", report.memory_mib);
    if let Some(cost) = &report.snapshot {
        let _ = writeln!(
            text,
            "the guest stands still for {}, works {:.0} % slower for {}; an answer takes at most \
             {} ({} before)",
            number(cost.pause_ms),
            cost.slow_down * 100.0,
            number(cost.snapshot_ms),
            number(cost.silence_ms),
            number(cost.silence_before_ms)
        );
    }
    for (name, plain) in [("migrate file:", &report.migrate_file), ("savevm", &report.inside)] {
        let Some(plain) = plain else { continue };
        let _ = writeln!(
            text,
            "{name}: the guest stands still for {}, is loaded in {}",
            number(plain.saved_ms),
            number(plain.loaded_ms)
        );
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn report() -> Report {
        let mut report = Report::new(512);
        for (pause_ms, slow_down) in [(2.0, 0.5), (4.0, 0.25), (3.0, 0.75)] {
            let (snapshot_ms, silence_before_ms, silence_ms) = (8000.0, 5.0, 60.0);
            let cost = Cost { pause_ms, snapshot_ms, slow_down, silence_before_ms, silence_ms };
            report.snapshots.push(cost);
        }
        let (saved_ms, loaded_ms, answer_ms) = (700.0, 600.0, 900.0);
        report.migrations.push(Plain { saved_ms, loaded_ms, answer_ms, bytes: 1 });
        report.conclude();
        report
    }

    #[test]
    fn the_middle_of_each_figure() {
        let report = report();
        let cost = report.snapshot.unwrap();
        assert_eq!((cost.pause_ms, cost.slow_down), (3.0, 0.5));
        let text = table(&report);
        assert!(text.contains("50 % slower") && text.contains("migrate file:"), "{text}");
        assert!(!text.contains("savevm"), "{text}");
    }
}
