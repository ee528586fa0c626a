//! The section for a terminal.

use super::plan::Way;
use super::report::Report;
use crate::bench::suite::table::number;
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::fmt::Write;

/// All of it.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "One VM with {} MiB; medians in ms\n\n\
         {:<12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>5}\n",
        report.guest_memory_mib, "", "runs in", "answers", "whole", "loaded", "x eager", "runs",
    );
    for way in Way::value_variants() {
        let runs = report.runs.get(way).copied().unwrap_or_default();
        if runs == 0 {
            continue;
        }
        let figure =
            |figures: &BTreeMap<Way, f64>| figures.get(way).map_or("-".into(), |&v| number(v));
        let share = report.loaded_share.get(way);
        let share = share.map_or("-".into(), |share| format!("{:.0} %", share * 100.0));
        let _ = writeln!(
            text,
            "{way:<12} {:>9} {:>9} {:>9} {share:>9} {:>9} {runs:>5}",
            figure(&report.restore_ms),
            figure(&report.answer_ms),
            figure(&report.whole_ms),
            figure(&report.faster_than_eager),
        );
    }
    let line = |what: &str, value: Option<f64>| {
        value.map_or(String::new(), |value| format!("{what}: {} ms\n", number(value)))
    };
    text += "\n";
    text += &line("a snapshot stops the guest for", report.pause_ms);
    text += &line("a snapshot takes", report.snapshot_ms);
    text += &line("migrate file: stops the guest for", report.saved_ms);
    if let Some(times) = report.beside_share {
        let _ = writeln!(text, "hot, beside its share of eager's bytes: {}", number(times));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn every_way_that_was_measured_has_a_line() {
        let text = table(&report());
        for words in ["hot ", "8.00", "10 %", "beside its share of eager's bytes: 1.25"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        assert!(!text.contains("working-set"), "{text}");
    }
}
