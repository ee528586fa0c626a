//! PostgreSQL in the guest, pgbench outside: the transactions of TPC-B, for a fixed time. Each is
//! seven statements, one after the other, over its client's own connection, and is on the disk
//! before its client has the last answer.

use super::{Bed, Better, Figure, Sample, Scale, after, aside, outside};
use crate::bench::report::quantile;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::time::Duration;

const SECONDS: (u64, u64) = (15, 5);
/// Time beyond its own, to begin and to end.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time for the tables to be made, on a busy machine.
const CREATION_LIMIT: Duration = Duration::from_secs(600);
/// Path in the guest (`guests/bench-rootfs`).
const SERVER: &str = "/etc/postgresql";
const USER: &str = "postgres";
/// The name, in the laboratory's directory, of the folder of pgbench's logs.
const LOGS: &str = "pgbench";

/// Makes the server's tables, once in a guest.
pub fn create(bed: &Bed<'_>) -> Result<()> {
    let line = format!("{SERVER} create");
    bed.shell()?.run(&line, CREATION_LIMIT)?.expect_success(&line).map(drop)
}

/// Every run finds the same: a server that has just started, and nothing in the guest's page
/// cache. pgbench itself empties the table that grows.
pub fn run(bed: &Bed<'_>, scale: Scale, clients: u32) -> Result<Sample> {
    let mut shell = bed.shell()?;
    aside(&mut shell, &format!("sync && echo 3 > /proc/sys/vm/drop_caches && {SERVER} start"))?;
    let (rate, mut latencies) = ask(bed, scale.of(SECONDS.0, SECONDS.1), clients)?;
    let books = aside(&mut shell, &format!("{SERVER} books"))?.text;
    ensure!(
        books.trim() == format!("{}|t", latencies.len()),
        "the bank's books do not balance after {} transactions: {books}",
        latencies.len()
    );
    aside(&mut shell, &format!("{SERVER} stop && sync"))?;
    latencies.sort_by(f64::total_cmp);
    let latency = |name, share| {
        let value = quantile(&latencies, share);
        Figure { name, unit: "ms", better: Better::Lower, value }
    };
    Ok(Sample { value: rate, more: vec![latency("p50", 0.5), latency("p99", 0.99)] })
}

/// Transactions a second, and how long each took in milliseconds.
fn ask(bed: &Bed<'_>, seconds: u64, clients: u32) -> Result<(f64, Vec<f64>)> {
    let logs = bed.lab.directory().join(LOGS);
    fs::create_dir(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    let prefix = logs.join("log").to_string_lossy().into_owned();
    let (time, clients, host) = (seconds.to_string(), clients.to_string(), bed.address.to_string());
    let arguments = ["-h", &host, "-U", USER, "-T", &time, "-c", &clients, "-l"];
    let arguments = [&arguments[..], &["--log-prefix", &prefix, USER]].concat();
    let limit = Duration::from_secs(seconds) + PATIENCE;
    let text = outside::run_ours(bed, limit, "pgbench", &arguments)?.text();
    let report = Report::parse(&text);
    let report = report.with_context(|| format!("pgbench printed no report: {text}"))?;
    ensure!(report.failed == 0, "{} transactions failed: {text}", report.failed);
    let latencies = read_logs(&logs)?;
    ensure!(latencies.len() == report.transactions, "{} are logged: {text}", latencies.len());
    fs::remove_dir_all(&logs).with_context(|| format!("cannot remove {}", logs.display()))?;
    Ok((report.rate, latencies))
}

/// Findings of pgbench.
#[derive(Debug, PartialEq)]
struct Report {
    transactions: usize,
    failed: u64,
    rate: f64,
}

impl Report {
    fn parse(text: &str) -> Option<Report> {
        Some(Report {
            transactions: after(text, "transactions actually processed:")?.parse().ok()?,
            failed: after(text, "number of failed transactions:")?.parse().ok()?,
            rate: after(text, "tps =")?.parse().ok()?,
        })
    }
}

fn read_logs(folder: &Path) -> Result<Vec<f64>> {
    let mut latencies = Vec::new();
    for entry in fs::read_dir(folder)? {
        let text = fs::read_to_string(entry?.path())?;
        for line in text.lines() {
            latencies.push(milliseconds(line).with_context(|| format!("pgbench logged: {line}"))?);
        }
    }
    Ok(latencies)
}

/// Time that the transaction of a line of the log took: client, number, microseconds, ….
fn milliseconds(line: &str) -> Option<f64> {
    line.split(' ').nth(2)?.parse::<f64>().ok().map(|microseconds| microseconds / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let text = "\
number of threads: 1
duration: 10 s
number of transactions actually processed: 1043
number of failed transactions: 0 (0.000%)
latency average = 38.116 ms
initial connection time = 83.600 ms
tps = 104.943049 (without initial connection time)
";
        let expected = Report { transactions: 1043, failed: 0, rate: 104.943049 };
        assert_eq!(Report::parse(text), Some(expected));
        assert_eq!(Report::parse("pgbench: error: connection to server failed"), None);
    }

    #[test]
    fn the_logs_of_all_threads_are_read() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("log.1"), "0 1 38116 0 1763998069 121212\n").unwrap();
        fs::write(folder.path().join("log.1.1"), "3 1 2500 0 1763998070 1\n").unwrap();
        let mut latencies = read_logs(folder.path()).unwrap();
        latencies.sort_by(f64::total_cmp);
        assert_eq!(latencies, [2.5, 38.116]);
        fs::write(folder.path().join("log.1.2"), "0 1 failed 0 1763998069 1\n").unwrap();
        assert!(read_logs(folder.path()).unwrap_err().to_string().contains("failed"));
    }
}
