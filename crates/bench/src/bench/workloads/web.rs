//! Apache in the guest; `ab` outside, with 100 connections, for a fixed time.

use super::{ASIDE_LIMIT, Bed, Better, Figure, Sample, Scale, after, aside, outside};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const SECONDS: (u64, u64) = (15, 5);
/// Apache starts as many threads as it finds it needs: not measured.
const WARM_UP_SECONDS: u64 = 2;
/// Time that `ab` waits for one answer, and we for `ab` beyond its time.
const PATIENCE_SECONDS: u64 = 120;
const CONNECTIONS: &str = "100";
const PAGE_BYTES: u64 = 72_950;

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    fetch(bed, WARM_UP_SECONDS)?;
    let report = fetch(bed, scale.of(SECONDS.0, SECONDS.1))?;
    aside(&mut bed.shell()?, ": > /var/log/apache-access.log")?;
    let latency = |name, value| Figure { name, unit: "ms", better: Better::Lower, value };
    Ok(Sample {
        value: report.requests_per_second,
        more: vec![latency("p50", report.p50_ms), latency("p99", report.p99_ms)],
    })
}

fn fetch(bed: &Bed<'_>, seconds: u64) -> Result<Report> {
    let limit = Duration::from_secs(seconds + PATIENCE_SECONDS).min(ASIDE_LIMIT);
    let (time, patience) = (seconds.to_string(), PATIENCE_SECONDS.to_string());
    let address = format!("http://{}/", bed.address);
    // A time implies at most 50 000 requests, unless told otherwise after it.
    let arguments =
        ["-q", "-c", CONNECTIONS, "-t", &time, "-n", "100000000", "-s", &patience, &address];
    let text = outside::run(bed, limit, "ab", &arguments, None)?.text();
    let report = Report::parse(&text).with_context(|| format!("`ab` printed no report: {text}"))?;
    ensure!(report.bytes == PAGE_BYTES, "the page has {} bytes: {text}", report.bytes);
    ensure!(report.failed == 0, "{} requests failed: {text}", report.failed);
    Ok(report)
}

/// Findings of `ab`.
#[derive(Debug, PartialEq)]
struct Report {
    bytes: u64,
    failed: u64,
    requests_per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
}

impl Report {
    fn parse(text: &str) -> Option<Report> {
        Some(Report {
            bytes: after(text, "Document Length:")?.parse().ok()?,
            failed: after(text, "Failed requests:")?.parse().ok()?,
            requests_per_second: after(text, "Requests per second:")?.parse().ok()?,
            p50_ms: after(text, " 50%")?.parse().ok()?,
            p99_ms: after(text, " 99%")?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let text = "\
Document Path:          /
Document Length:        72950 bytes

Concurrency Level:      100
Time taken for tests:   5.002 seconds
Complete requests:      1210
Failed requests:        0
Total transferred:      89164950 bytes
Requests per second:    241.90 [#/sec] (mean)
Time per request:       413.392 [ms] (mean)

Percentage of the requests served within a certain time (ms)
  50%    381
  66%    402
  99%   1280
 100%   1893 (longest request)
";
        let report = Report::parse(text).unwrap();
        let (p50_ms, p99_ms) = (381.0, 1280.0);
        let expected =
            Report { bytes: 72950, failed: 0, requests_per_second: 241.9, p50_ms, p99_ms };
        assert_eq!(report, expected);
        assert_eq!(Report::parse("apr_socket_recv: Connection refused (111)"), None);
    }
}
