//! Redis in the guest, redis-benchmark outside, with a connection for each client: changes, each
//! on the disk before it is answered (`appendfsync always`), then reads.

use super::{Bed, Better, Figure, Sample, Scale, aside, outside};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const CHANGES: (u32, u32) = (8_000, 2_000);
const READS: (u32, u32) = (20_000, 5_000);
const CLIENTS: &str = "8";
/// Number of keys, each with so many bytes.
const KEYS: &str = "10000";
const VALUE_BYTES: &str = "100";
const LIMIT: Duration = Duration::from_secs(240);

const START: &str = "rm -rf /work/redis && mkdir /work/redis && redis-server --daemonize yes \
                     --dir /work/redis --protected-mode no --appendonly yes --appendfsync always \
                     && until redis-cli ping > /dev/null; do sleep 0.1; done";
/// Prints how many keys there were, and what of the file of changes was not written.
const COUNT: &str = "redis-cli dbsize && redis-cli info persistence | grep aof_last_write_status";
const STOP: &str = "redis-cli shutdown nosave; rm -rf /work/redis && sync";

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let mut shell = bed.shell()?;
    aside(&mut shell, START)?;
    let changes = ask(bed, "set", scale.of(CHANGES.0, CHANGES.1))?;
    let reads = ask(bed, "get", scale.of(READS.0, READS.1))?;
    let state = aside(&mut shell, COUNT)?.text;
    ensure!(state.contains("status:ok") && !state.starts_with('0'), "Redis wrote nothing: {state}");
    aside(&mut shell, STOP)?;
    let latency = |name, value| Figure { name, unit: "ms", better: Better::Lower, value };
    let rate =
        Figure { name: "reads", unit: "requests/s", better: Better::Higher, value: reads.rate };
    Ok(Sample {
        value: changes.rate,
        more: vec![
            latency("p50", changes.p50_ms),
            latency("p99", changes.p99_ms),
            rate,
            latency("p50_reads", reads.p50_ms),
            latency("p99_reads", reads.p99_ms),
        ],
    })
}

fn ask(bed: &Bed<'_>, test: &str, requests: u32) -> Result<Report> {
    let (host, requests) = (bed.address.to_string(), requests.to_string());
    let arguments = ["-h", &host, "-t", test, "-n", &requests, "-c", CLIENTS];
    let arguments = [&arguments[..], &["-r", KEYS, "-d", VALUE_BYTES, "--csv"]].concat();
    let text = outside::run_ours(bed, LIMIT, "redis-benchmark", &arguments)?.text();
    Report::parse(&text).with_context(|| format!("redis-benchmark printed no report: {text}"))
}

/// Findings of redis-benchmark.
#[derive(Debug, PartialEq)]
struct Report {
    rate: f64,
    p50_ms: f64,
    p99_ms: f64,
}

impl Report {
    /// Report of a line of names, and one of figures.
    fn parse(text: &str) -> Option<Report> {
        let mut lines = text.lines().skip_while(|line| !line.starts_with("\"test\""));
        let (names, figures) = (lines.next()?, lines.next()?);
        let figure = |name: &str| -> Option<f64> {
            let at = names.split(',').position(|found| found.trim_matches('"') == name)?;
            figures.split(',').nth(at)?.trim_matches('"').parse().ok()
        };
        Some(Report {
            rate: figure("rps")?,
            p50_ms: figure("p50_latency_ms")?,
            p99_ms: figure("p99_latency_ms")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let text = "\
\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"
\"SET\",\"812.35\",\"9.1\",\"4.0\",\"8.703\",\"12.2\",\"18.111\",\"40.3\"
";
        let expected = Report { rate: 812.35, p50_ms: 8.703, p99_ms: 18.111 };
        assert_eq!(Report::parse(text), Some(expected));
        assert_eq!(Report::parse("Could not connect to Redis: Connection refused"), None);
    }
}
