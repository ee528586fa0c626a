//! tbench: the network traffic of a file server's clients, for a fixed time.

use super::{Bed, Better, Figure, Sample, Scale, outside};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

/// Seconds, the first fifth of which is its warm-up.
const SECONDS: (u64, u64) = (15, 5);
const CLIENTS: &str = "4";
/// Time beyond its own, to begin and to end.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let seconds = scale.of(SECONDS.0, SECONDS.1);
    let limit = Duration::from_secs(seconds) + PATIENCE;
    let (time, address) = (seconds.to_string(), bed.address.to_string());
    let text = outside::run(bed, limit, "tbench", &["-t", &time, CLIENTS, &address], None)?.text();
    let (rate, max_latency) =
        parse(&text).with_context(|| format!("tbench printed no throughput: {text}"))?;
    ensure!(rate > 0.0, "tbench transferred nothing: {text}");
    let latency =
        Figure { name: "max_latency", unit: "ms", better: Better::Lower, value: max_latency };
    Ok(Sample { value: rate, more: vec![latency] })
}

/// Megabytes a second, and the longest latency of an operation in milliseconds.
fn parse(text: &str) -> Option<(f64, f64)> {
    let line = text.lines().find(|line| line.starts_with("Throughput "))?;
    let rate = line.split_whitespace().nth(1)?.parse().ok()?;
    let (_, latency) = line.split_once("max_latency=")?;
    Some((rate, latency.split_whitespace().next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_and_latency_are_read() {
        let text = "\
 Operation                Count    AvgLat    MaxLat
 --------------------------------------------------
 Flush                      123     0.010     0.090

Throughput 31.4159 MB/sec  4 clients  4 procs  max_latency=27.182 ms
";
        assert_eq!(parse(text), Some((31.4159, 27.182)));
        assert_eq!(parse("read failed on handle 10003 (Connection reset by peer)"), None);
    }
}
