//! sysbench in the guest: `cpu`, `memory` and `fileio`, each a fixed number of events.

use super::{Bed, Sample, Scale, Shell, after, aside};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);

const PRIMES: u32 = 10_000;
const PRIME_SEARCHES: (u64, u64) = (6_000, 1_500);

const BLOCK: &str = "1K";
const BLOCKS: (u64, u64) = (16 << 20, 4 << 20);

/// Half of the guest's memory, and read from the disk at first.
const FILES: &str = "--file-num=16 --file-total-size=256M";
const REQUESTS: (u64, u64) = (40_000, 10_000);

/// Primes up to 10 000.
pub fn cpu(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let events = scale.of(PRIME_SEARCHES.0, PRIME_SEARCHES.1);
    measure(&mut bed.shell()?, &format!("cpu --cpu-max-prime={PRIMES}"), events)
}

/// Writes of 1 KB each.
pub fn memory(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let events = scale.of(BLOCKS.0, BLOCKS.1);
    let total = format!("--memory-total-size={events}K");
    let test = format!("memory --memory-block-size={BLOCK} --memory-oper=write {total}");
    measure(&mut bed.shell()?, &test, events)
}

/// Random reads and writes of 16 KB, with an fsync after every hundred, as it comes. The
/// files are there before the clock starts, and nothing of them in the page cache.
pub fn fileio(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let events = scale.of(REQUESTS.0, REQUESTS.1);
    let mut shell = bed.shell()?;
    aside(
        &mut shell,
        &format!(
            "mkdir -p /work/fileio && cd /work/fileio && sysbench fileio {FILES} prepare && \
             sync && echo 3 > /proc/sys/vm/drop_caches"
        ),
    )?;
    let test = format!("fileio {FILES} --file-test-mode=rndrw");
    let sample = measure_in(&mut shell, "/work/fileio", &test, events)?;
    aside(&mut shell, "rm -rf /work/fileio && sync")?;
    Ok(sample)
}

fn measure(shell: &mut Shell, test: &str, events: u64) -> Result<Sample> {
    measure_in(shell, "/", test, events)
}

fn measure_in(shell: &mut Shell, directory: &str, test: &str, events: u64) -> Result<Sample> {
    let line =
        format!("cd {directory} && sysbench {test} --threads=1 --time=0 --events={events} run");
    let output = shell.run(&line, LIMIT)?.expect_success(&line)?;
    let done = parse_events(&output.text)
        .with_context(|| format!("sysbench printed no number of events: {}", output.text))?;
    ensure!(done == events, "sysbench did {done} events of {events}: {}", output.text);
    Ok(Sample::seconds(output.took))
}

fn parse_events(text: &str) -> Option<u64> {
    after(text, "total number of events:")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_events_is_read() {
        let text = "\
General statistics:
    total time:                          4.8686s
    total number of events:              2000

Latency (ms):
         min:                                    1.57
";
        assert_eq!(parse_events(text), Some(2000));
        assert_eq!(parse_events("FATAL: Cannot open file 'test_file.0'"), None);
    }
}
