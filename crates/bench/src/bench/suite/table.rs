//! The report for a terminal.

use super::papers;
use super::report::{Cell, Report};
use super::variant::{Subject, Variant};
use crate::bench::machine::Machine;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Columns of the overview beside the unprotected guest's figure.
const COLUMNS: [Variant; 8] = [
    Variant::Adaptive,
    Variant::Hz10,
    Variant::Hz20,
    Variant::Hz30,
    Variant::Hz40,
    Variant::NoBuffer,
    Variant::Plain,
    Variant::Colo,
];

/// All of the report.
pub fn table(report: &Report) -> String {
    let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &report.machine;
    let mut text = format!(
        "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}, \
         build {}, scale {}\n",
        report.build, report.scale
    );
    for condition in &report.conditions {
        text += &format!("- {condition}\n");
    }
    text += &overview(report);
    text += &protection(report);
    text += &errors(report);
    text
}

/// Each workload in each variant beside the unprotected guest.
fn overview(report: &Report) -> String {
    let mut text = format!("\n{:11} {:>27}", "workload", "unprotected");
    for variant in COLUMNS {
        text += &format!(" {variant:>8}");
    }
    text += "  aim            met    paper's best\n";
    for (&subject, cells) in report.workloads.iter().filter(|row| row.0.own_variant().is_none()) {
        let base = cells.get(&Variant::Unprotected).map_or_else(String::new, figure);
        text += &format!("{subject:11} {base:>27}");
        for variant in COLUMNS {
            text += &format!(" {:>8}", cells.get(&variant).map_or_else(String::new, ratio));
        }
        text += &format!("  {}\n", judgement(subject, cells));
    }
    for (&subject, cells) in &report.workloads {
        let Some(cell) = subject.own_variant().and_then(|variant| cells.get(&variant)) else {
            continue;
        };
        text += &format!(
            "{subject:11} {:>27} {:71}  {}\n",
            figure(cell),
            "",
            judgement(subject, cells)
        );
    }
    text
}

/// `12.3 s ± 0.1`
fn figure(cell: &Cell) -> String {
    match (cell.median, cell.spread, &cell.unit) {
        (Some(median), Some(spread), Some(unit)) => {
            format!("{} {unit} ± {}", number(median), number(spread))
        }
        _ => "failed".to_owned(),
    }
}

fn ratio(cell: &Cell) -> String {
    match (cell.ratio, cell.median) {
        (Some(ratio), _) => format!("{ratio:.2}"),
        (None, Some(median)) => number(median),
        (None, None) => "failed".to_owned(),
    }
}

/// The aims of a subject, whether they are met, and what the papers have.
fn judgement(subject: Subject, cells: &BTreeMap<Variant, Cell>) -> String {
    let judged = |(variant, cell): (&Variant, &Cell)| {
        let judgement = cell.aim.as_ref()?;
        let at =
            if *variant == Variant::Adaptive { String::new() } else { format!(" at {variant}") };
        let met = judgement.met.map_or("?", |met| if met { "yes" } else { "NO" });
        Some((format!("{}{at}", judgement.aim), met))
    };
    let (aims, met): (Vec<String>, Vec<&str>) = cells.iter().filter_map(judged).unzip();
    let best =
        papers::best_published(subject).map_or_else(String::new, |best| format!("{best:.2}"));
    format!("{:14} {:6} {best}", aims.join(", "), met.join(", "))
}

/// Table of what protection did meanwhile.
fn protection(report: &Report) -> String {
    let mut text = format!(
        "\n{:11} {:11} {:>16} {:>13} {:>12} {:>12} {:>14} {:>13} {:>8} {:>6}\n",
        "workload",
        "variant",
        "Mbit/s to backup",
        "checkpoints/s",
        "pause p50 ms",
        "pause p99 ms",
        "cpu primary s",
        "cpu backup s",
        "load",
        "runs"
    );
    let cells = report.workloads.iter().flat_map(|(subject, cells)| {
        cells.iter().map(move |(variant, cell)| (subject, variant, cell))
    });
    for (subject, variant, cell) in cells.filter(|row| row.2.checkpoints_per_s.is_some()) {
        let show = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), number);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{subject:11} {variant:11} {:>16} {:>13} {:>12} {:>12} {:>14} {:>13} {:>8} {:>6}",
            show(cell.replication_mbit_s),
            show(cell.checkpoints_per_s),
            show(cell.pause_p50_ms),
            show(cell.pause_p99_ms),
            show(cell.details.get("cpu_primary_s").copied()),
            show(cell.details.get("cpu_backup_s").copied()),
            show(cell.load_average),
            cell.runs,
        );
    }
    text
}

/// Words on what failed, and why.
pub fn errors(report: &Report) -> String {
    let mut by_error: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (subject, cells) in &report.workloads {
        for (variant, cell) in cells {
            if let Some(error) = &cell.error {
                by_error.entry(error).or_default().push(format!("{subject} {variant}"));
            }
        }
    }
    let line = |(error, cells): (&str, Vec<String>)| {
        format!("\nfailed: {}\n  {}\n", cells.join(", "), error.replace('\n', "\n  "))
    };
    by_error.into_iter().map(line).collect()
}

/// Three digits that matter, as far as there are any.
pub fn number(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn the_table_has_each_workload_its_aim_and_the_errors() {
        let text = table(&report());
        for &subject in Subject::all() {
            assert!(text.contains(&format!("\n{subject:11} ")), "{subject}:\n{text}");
        }
        let cpu = text.lines().find(|line| line.starts_with("cpu")).unwrap();
        assert!(cpu.contains("10.0 s ± 0.00") && cpu.contains("0.50"), "{cpu}");
        assert!(cpu.contains("≥ 0.97") && cpu.contains("NO") && cpu.ends_with("0.98"), "{cpu}");
        assert!(text.contains("≥ 0.97, ≥ 0.9 at 40"), "{text}");
        assert!(
            text.contains("failed: cpu plain, memory plain") && text.contains("\n  QEMU <did>")
        );
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([1234.5, 12.34, 1.234, 0.0].map(number), ["1234", "12.3", "1.23", "0.00"]);
    }
}
