//! The report for a terminal.

use super::plan::{Subject, Variant};
use super::report::{
    DiskReads, LEAST_RATIO, Link, MOST_ADDED_MS, MOST_IDLE_LOG, MOST_LAG_MS, MOST_LOG, Reads,
    Report, Row,
};
use crate::bench::machine::Machine;
use crate::bench::suite::table::number;
use std::collections::BTreeMap;

/// VMware FT (2010): what its authors measured on two hosts of their own, with hardware's
/// help for virtual machines.
const PAPER: &str = "\
VMware FT: ratio 0.94 to 0.99 with 1.5 to 18 Mbit/s of log, 0.5 to 1.5 of an idle guest;
  transmit 940 -> 855, receive 940 -> 604 Mbit/s with a log link of 1 Gbit/s; lag < 100 ms";

/// All of the report.
pub fn table(report: &Report) -> String {
    let Machine { cpu, cpus, kernel, qemu, understudy, .. } = &report.machine;
    let mut text = format!(
        "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} (tcg), understudy {understudy}, build \
         {}, scale {}\n",
        report.build, report.scale
    );
    for condition in report.conditions {
        text += &format!("- {condition}\n");
    }
    text += &workloads(&report.workloads);
    text += &network(&report.network);
    text += &format!(
        "\nidle log {} Mbit/s (aim: at most {MOST_IDLE_LOG})\n",
        show(report.idle_log_mbit_s)
    );
    text += &report.disk_reads.as_ref().map_or_else(String::new, disk_reads);
    text += &latency(report);
    text += &format!("\n{PAPER}\n");
    for error in &report.errors {
        text += &format!("\nfailed: {}\n", error.replace('\n', "\n  "));
    }
    text
}

fn workloads(rows: &BTreeMap<Subject, Row>) -> String {
    let mut text = format!(
        "\n{:9} {:>15} {:>15} {:>15} {:>15} {:>15} {:>6} {:>7} {:>7} {:>10} {:>8} {:>8}\n",
        "workload",
        "tcg",
        "icount",
        "pair",
        "record",
        "lockstep",
        "ratio",
        "to tcg",
        "to pair",
        "log Mbit/s",
        "lag p50",
        "p99 ms"
    );
    for (subject, row) in rows {
        text += &format!("{subject:9}{}\n", cells(row));
    }
    text + &format!(
        "aim: ratio at least {LEAST_RATIO}, log at most {MOST_LOG} Mbit/s, lag p99 at most \
         {MOST_LAG_MS} ms\n"
    )
}

fn cells(row: &Row) -> String {
    let figure = |variant: Variant| {
        let runs = row.variants.get(&variant);
        runs.map_or_else(
            || "-".to_owned(),
            |runs| format!("{} ± {} {}", number(runs.median), number(runs.spread), short(row.unit)),
        )
    };
    let of = [Variant::Tcg, Variant::Icount, Variant::Pair, Variant::Record, Variant::Lockstep];
    let of = of.map(|variant| format!(" {:>15}", figure(variant))).concat();
    let [ratio, to_tcg, to_pair] = [row.ratio, row.ratio_to_tcg, row.ratio_to_pair].map(show);
    let [log, p50, p99] = [row.log_mbit_s, row.lag_ms_p50, row.lag_ms_p99].map(show);
    format!("{of} {ratio:>6} {to_tcg:>7} {to_pair:>7} {log:>10} {p50:>8} {p99:>8}")
}

fn short(unit: &str) -> &str {
    if unit == "requests/s" { "/s" } else { unit }
}

fn network(links: &BTreeMap<Subject, Link>) -> String {
    let mut text = format!(
        "\n{:9} {:>16} {:>16} {:>16} {:>6} {:>10}\n",
        "Mbit/s", "tcg", "icount", "lockstep", "ratio", "log Mbit/s"
    );
    for (way, Link { base, ft, tcg, row }) in links {
        let [tcg, base, ft, ratio, log] = [*tcg, *base, *ft, row.ratio, row.log_mbit_s].map(show);
        text += &format!("{way:9} {tcg:>16} {base:>16} {ft:>16} {ratio:>6} {log:>10}\n");
    }
    text
}

fn disk_reads(reads: &DiskReads) -> String {
    let mut text = format!(
        "\n{:13} {:>16} {:>6} {:>10} {:>8} {:>8}\n",
        "disk reads", reads.unit, "ratio", "log Mbit/s", "lag p50", "p99 ms"
    );
    for (variant, Reads { runs, log_mbit_s, lag_ms_p50, lag_ms_p99 }) in &reads.variants {
        let ratio = match variant {
            Variant::Lockstep => reads.ratio,
            Variant::LockstepLog => reads.ratio_log,
            _ => None,
        };
        let speed = format!("{} ± {}", number(runs.median), number(runs.spread));
        let [ratio, log, p50, p99] = [ratio, *log_mbit_s, *lag_ms_p50, *lag_ms_p99].map(show);
        text += &format!("{variant:13} {speed:>16} {ratio:>6} {log:>10} {p50:>8} {p99:>8}\n");
    }
    text + "lockstep: both hosts read; lockstep-log: what was read travels with the log\n"
}

fn latency(report: &Report) -> String {
    let Some(latency) = &report.latency else { return String::new() };
    let names = ["p50_idle", "p99_idle", "p50_load", "p99_load"];
    let mut text = format!("\n{:11}", "latency ms");
    text += &names.map(|name| format!(" {name:>9}")).concat();
    text.push('\n');
    for (variant, figures) in &latency.variants {
        let figures = names.map(|name| format!(" {:>9}", show(figures.get(name).copied())));
        text += &format!("{variant:11}{}\n", figures.concat());
    }
    text + &format!(
        "added to an idle guest at the median: {} ms by lockstep (aim: at most {MOST_ADDED_MS}), {} \
         by checkpoints\n",
        show(latency.added_by_lockstep_ms),
        show(latency.added_by_checkpoints_ms)
    )
}

fn show(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), number)
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn the_table_has_each_row_and_the_errors() {
        let text = table(&report());
        let line = |start: &str| {
            text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{text}"))
        };
        assert!(line("cpu").contains("8.00 ± 0.00 s") && line("cpu").contains("0.50"), "{text}");
        assert!(line("web").contains("2.00 ± 0.00 /s"), "{text}");
        assert!(line("transmit").contains("100") && line("transmit").contains("50.0"), "{text}");
        let logged = line("lockstep-log");
        assert!(logged.contains("1.00 ± 0.00") && logged.contains("0.25"), "{text}");
        assert!(line("idle log").contains("3.00"), "{text}");
        assert!(line("checkpoint").contains("4.00"), "{text}");
        assert!(line("failed: round 2, web, tcg").contains("QEMU ended"), "{text}");
    }
}
