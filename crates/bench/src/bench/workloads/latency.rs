//! Request and response, one after the other: of an idle guest, then of one that computes.

use super::{Bed, Better, Figure, Sample, Scale, aside};
use crate::bench::report::quantile;
use anyhow::{Context, Result};
use std::time::Duration;
use understudy_lab::round_trips;
use understudy_lab::scene::ECHO_PORT;

const ROUNDS: (u64, u64) = (300, 100);
/// The client thinks, on average so long.
const PAUSE: Duration = Duration::from_millis(20);
/// Keeps one virtual CPU busy; prints its pid.
const LOAD: &str = "sh -c 'while :; do :; done' > /dev/null 2>&1 & echo $!";

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let rounds = scale.of(ROUNDS.0, ROUNDS.1);
    let mut shell = bed.shell()?;
    let idle = measure(bed, rounds)?;
    let load = aside(&mut shell, LOAD)?;
    let pid: u32 = load.text.trim().parse().with_context(|| format!("no pid: {load:?}"))?;
    let busy = measure(bed, rounds);
    aside(&mut shell, &format!("kill {pid}"))?;
    let busy = busy?;
    let figure = |name, value| Figure { name, unit: "ms", better: Better::Lower, value };
    Ok(Sample {
        value: quantile(&idle, 0.5),
        more: vec![
            figure("p99_idle", quantile(&idle, 0.99)),
            figure("p50_load", quantile(&busy, 0.5)),
            figure("p99_load", quantile(&busy, 0.99)),
        ],
    })
}

/// Milliseconds, sorted.
fn measure(bed: &Bed<'_>, rounds: u64) -> Result<Vec<f64>> {
    let times = round_trips(bed.lab, bed.server(ECHO_PORT), rounds, PAUSE)?;
    let mut times: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    Ok(times)
}
