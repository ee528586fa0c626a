//! The result of `bench compression`.

use super::machine::Machine;
use serde::Serialize;
use std::fmt::Write;
use understudy_encoding::Counters;

/// Everything that `bench compression` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct CompressionBench {
    /// Way that leaves zero pages out, and nothing else.
    pub none: Way,
    /// The general compressor.
    pub general: Way,
    /// Deltas against the cache.
    pub xor: Way,
    /// Way that has both.
    pub hybrid: Way,
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// Checkpoints a second that were asked for.
    pub hz: u32,
    /// Pages in the cache.
    pub cache_pages: u32,
    /// Number of times that each way was measured.
    pub rounds: u32,
    /// Seconds of each time.
    pub seconds: u64,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
}

/// One way to encode: medians over the rounds, and the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Way {
    /// Bytes of written pages for each byte of messages about them.
    pub ratio: f64,
    /// Share of looked-up pages in the cache, 0 to 1; none where there is no cache.
    pub hit_rate: Option<f64>,
    /// CPU time of encoding, in milliseconds for each MB (10⁶ bytes) of pages.
    pub cpu_ms_per_mb: f64,
    /// MB a second to the backup, disk writes and device state included.
    pub mb_per_s: f64,
    /// Pages in an epoch.
    pub pages_per_epoch: f64,
    /// Shares of the pages by what became of them.
    pub shares: Shares,
    /// The rounds.
    pub samples: Vec<Sample>,
}

/// Fate of the pages, as shares of all.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Shares {
    /// Zero pages.
    pub zero: f64,
    /// Pages that were written, but are as they were.
    pub unchanged: f64,
    /// Deltas.
    pub delta: f64,
    /// Pages that went through the general compressor.
    pub general: f64,
    /// Pages that went as they are.
    pub raw: f64,
}

/// One way, measured once.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// See [`Way::ratio`].
    pub ratio: f64,
    /// See [`Way::hit_rate`].
    pub hit_rate: Option<f64>,
    /// See [`Way::cpu_ms_per_mb`].
    pub cpu_ms_per_mb: f64,
    /// See [`Way::mb_per_s`].
    pub mb_per_s: f64,
    /// Epochs measured.
    pub epochs: u64,
    /// Counters of what the encoder did.
    pub counters: Counters,
    /// MB a second to the backup, every half second.
    pub mb_per_s_over_time: Vec<f64>,
}

impl Sample {
    /// A measurement over `epochs` that sent `mb_per_s`.
    pub fn new(counters: Counters, mb_per_s: f64, epochs: u64, over_time: Vec<f64>) -> Sample {
        Sample {
            ratio: counters.ratio().unwrap_or(1.0),
            hit_rate: counters.hit_rate(),
            cpu_ms_per_mb: counters.cpu_ms_per_mb().unwrap_or(0.0),
            mb_per_s,
            epochs,
            counters,
            mb_per_s_over_time: over_time,
        }
    }
}

impl Way {
    /// Medians over `samples`, of which there is at least one.
    pub fn from_samples(samples: Vec<Sample>) -> Way {
        let over = |value: &dyn Fn(&Sample) -> f64| median(samples.iter().map(value).collect());
        let rates: Vec<f64> = samples.iter().filter_map(|sample| sample.hit_rate).collect();
        let share = |count: &dyn Fn(&Counters) -> u64| {
            over(&|sample| count(&sample.counters) as f64 / sample.counters.pages.max(1) as f64)
        };
        Way {
            ratio: over(&|sample| sample.ratio),
            hit_rate: (!rates.is_empty()).then(|| median(rates)),
            cpu_ms_per_mb: over(&|sample| sample.cpu_ms_per_mb),
            mb_per_s: over(&|sample| sample.mb_per_s),
            pages_per_epoch: over(&|sample| {
                sample.counters.pages as f64 / sample.epochs.max(1) as f64
            }),
            shares: Shares {
                zero: share(&|counters| counters.zero),
                unchanged: share(&|counters| counters.unchanged),
                delta: share(&|counters| counters.delta),
                general: share(&|counters| counters.general),
                raw: share(&|counters| counters.raw),
            },
            samples,
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() % 2 {
        0 => (values[half - 1] + values[half]) / 2.0,
        _ => values[half],
    }
}

impl CompressionBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             a guest compiles C; {} checkpoints a second, a cache of {} pages; medians of {} \
             rounds of {} s\n\n         ratio  hits %  CPU ms/MB   MB/s  pages/epoch   zero  \
             unchanged  delta  general    raw\n",
            self.hz, self.cache_pages, self.rounds, self.seconds
        );
        let ways = [&self.none, &self.general, &self.xor, &self.hybrid];
        for (name, way) in ["none", "general", "xor", "hybrid"].iter().zip(ways) {
            let hits = way.hit_rate.map_or("-".to_owned(), |rate| format!("{:.1}", rate * 100.0));
            let Shares { zero, unchanged, delta, general, raw } = way.shares;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{name:8} {:5.1}  {hits:>6}  {:9.2}  {:5.2}  {:11.0}  {:3.0} %  {:7.0} %  {:3.0} %  \
                 {:5.0} %  {:3.0} %",
                way.ratio,
                way.cpu_ms_per_mb,
                way.mb_per_s,
                way.pages_per_epoch,
                zero * 100.0,
                unchanged * 100.0,
                delta * 100.0,
                general * 100.0,
                raw * 100.0,
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(mb_per_s: f64) -> Sample {
        let counters =
            Counters { pages: 100, raw: 50, zero: 50, bytes: 204_800, ..Default::default() };
        Sample::new(counters, mb_per_s, 10, vec![mb_per_s])
    }

    #[test]
    fn medians_over_the_rounds() {
        let way = Way::from_samples(vec![sample(9.0), sample(1.0), sample(2.0)]);
        assert_eq!((way.mb_per_s, way.ratio, way.hit_rate), (2.0, 2.0, None));
        assert_eq!((way.pages_per_epoch, way.shares.raw), (10.0, 0.5));
        assert_eq!(median(vec![1.0, 2.0]), 1.5);
    }

    #[test]
    fn the_json_has_the_documented_fields() {
        let way = serde_json::to_value(Way::from_samples(vec![sample(1.0)])).unwrap();
        for field in ["ratio", "cpu_ms_per_mb", "mb_per_s"] {
            assert!(way[field].is_number(), "{field}: {way}");
        }
        assert!(way["hit_rate"].is_null());
        assert!(way["samples"][0]["mb_per_s_over_time"].is_array());
    }
}
