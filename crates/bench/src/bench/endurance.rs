//! `understudy-lab bench endurance`: whether a guest that has moved back and forth between two hosts is as fast as before.

use super::suite::statistics::{Summary, ratio};
use super::workload::{Measured, bed, run_protected};
use super::workloads::{Bed, Scale, Workload};
use super::{on_scene, patient, words};
use crate::chaos::stage::other;
use crate::cli::BenchEnduranceArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::thread;
use std::time::Duration;
use understudy_client::{Client, Exit, Failure, output};
use understudy_lab::Scene;
use understudy_lab::scene::GuestKind;

/// Host where the guest is whenever it is measured.
const HOME: &str = "a";
/// Time between the end of a synchronisation and the next failure.
const PROTECTED_FOR: Duration = Duration::from_millis(500);

/// Figures of a workload after so many fail-overs; `--json` prints a list of these.
#[derive(Clone, Debug, Serialize)]
pub struct Lasting {
    /// Fail-overs until then.
    pub failovers: u32,
    /// Figures that were measured.
    #[serde(flatten)]
    pub measured: Measured,
}

/// Measures and prints.
pub fn run(args: &BenchEnduranceArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = patient(scene_options(args.guest.as_deref())?);
    options.kind = GuestKind::Bench;
    options.pinned = args.pinned;
    let measured = on_scene(options, |scene| measure(scene, args))
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &measured, |measured| table(measured))?;
    Ok(Exit::Ok)
}

fn measure(scene: &mut Scene, args: &BenchEnduranceArgs) -> Result<Vec<Lasting>> {
    scene.start_guest(HOME)?;
    scene.await_guest()?;
    let names = if args.names.is_empty() { &[Workload::Web][..] } else { &args.names };
    let console = scene.console(HOME)?;
    let primary = Client::new(scene.host(HOME)?.socket()).map_err(words)?;
    names.iter().try_for_each(|workload| workload.prepare(&bed(scene, &console)))?;
    scene.protect(HOME, other(HOME))?;
    scene.await_protected(HOME, |_| ())?;
    let mut all = Vec::new();
    for round in 0..=args.rounds {
        if round > 0 {
            fail_over(scene, args.failovers)?;
        }
        let failovers = round * args.failovers;
        eprintln!("after {failovers} fail-overs");
        for &workload in names {
            let measured = runs(workload, &bed(scene, &console), &primary, args.runs)?;
            all.push(Lasting { failovers, measured });
        }
    }
    Ok(all)
}

/// The first run of each is not counted: after a take-over QEMU has translated nothing of the guest's code yet.
fn runs(workload: Workload, bed: &Bed<'_>, primary: &Client, count: u32) -> Result<Measured> {
    let run = |_| run_protected(workload, bed, Scale::Full, primary);
    let mut samples = (0..=count).map(run).collect::<Result<Vec<_>>>()?;
    samples.remove(0);
    Ok(Measured::of(workload, samples))
}

/// Kills everything on the host that runs the guest, so many times, each time with a backup. The guest is at home again.
fn fail_over(scene: &mut Scene, times: u32) -> Result<()> {
    let mut owner = HOME;
    for _ in 0..times {
        thread::sleep(PROTECTED_FOR);
        scene.host_mut(owner)?.kill_everything()?;
        let winner = other(owner);
        scene.await_live(winner)?;
        scene.restart(owner)?;
        scene.protect(winner, owner)?;
        scene.await_protected(winner, |_| ())?;
        owner = winner;
    }
    ensure!(owner == HOME, "an odd number of fail-overs leaves the guest on the other host");
    Ok(())
}

fn table(all: &[Lasting]) -> String {
    let mut text = String::new();
    for lasting in all {
        // Of no runs there is nothing to write.
        let _ = line(&mut text, all, lasting);
    }
    text
}

fn line(
    text: &mut String,
    all: &[Lasting],
    Lasting { failovers, measured }: &Lasting,
) -> Result<()> {
    let Measured { workload, unit, better, .. } = measured;
    let now = summary(measured).context("no runs")?;
    let first = all.iter().find(|it| it.measured.workload == *workload);
    let first = first.and_then(|first| summary(&first.measured));
    write!(text, "{:10} after {failovers:3} fail-overs ", workload.name())?;
    write!(text, "{:10.2} {unit} ({:.2}-{:.2})", now.median, now.min, now.max)?;
    match first.and_then(|first| ratio(now.median, first.median, *better)) {
        Some(beside) => writeln!(text, ", {beside:.2} of the first")?,
        None => writeln!(text)?,
    }
    Ok(())
}

fn summary(measured: &Measured) -> Option<Summary> {
    Summary::of(&measured.samples.iter().map(|it| it.value).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::workloads::Sample;

    #[test]
    fn speeds_stand_beside_those_before_the_first_fail_over() {
        let lasting = |failovers, workload: Workload, values: &[f64]| {
            let sample = |&value| Sample { value, more: Vec::new() };
            let samples = values.iter().map(sample).collect();
            Lasting { failovers, measured: Measured::of(workload, samples) }
        };
        let text = table(&[
            lasting(0, Workload::Web, &[100.0, 90.0, 110.0]),
            lasting(0, Workload::Cpu, &[5.0]),
            lasting(20, Workload::Web, &[95.0, 80.0, 97.0]),
            lasting(20, Workload::Cpu, &[4.0]),
            lasting(40, Workload::Web, &[0.0]),
            lasting(40, Workload::Cpu, &[5.0]),
        ]);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].ends_with("(90.00-110.00), 1.00 of the first"), "{text}");
        assert!(lines[2].contains("after  20 fail-overs"), "{text}");
        assert!(lines[2].ends_with("0.95 of the first"), "{text}");
        assert!(lines[3].ends_with("1.25 of the first"), "{text}");
        assert!(lines[4].ends_with("(0.00-0.00)"), "nothing can be said of that: {text}");
        assert!(lines[5].ends_with("1.00 of the first"), "{text}");
    }
}
