//! `understudy-lab bench endurance`: whether a guest that has moved back and forth between two hosts is as fast as before.

use super::patient;
use super::suite::statistics::{Summary, ratio};
use super::workloads::{Bed, Better, Door, Sample, Scale, Workload};
use crate::chaos::stage::other;
use crate::cli::BenchEnduranceArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;
use understudy_client::{Exit, Failure, output};
use understudy_lab::scene::GuestKind;
use understudy_lab::{GUEST_ADDRESS, Scene};

/// Where the guest is whenever it is measured.
const HOME: &str = "a";
/// Between the end of a synchronisation and the next failure.
const PROTECTED_FOR: Duration = Duration::from_millis(500);

/// What a workload did after so many fail-overs; `--json` prints a list of these.
#[derive(Clone, Debug, Serialize)]
pub struct Lasting {
    /// Fail-overs until then.
    pub failovers: u32,
    /// The workload.
    pub workload: Workload,
    /// The unit of the samples' values.
    pub unit: &'static str,
    /// Which way they are to go.
    pub better: Better,
    /// One for each run.
    pub samples: Vec<Sample>,
}

/// Measures and prints.
pub fn run(args: &BenchEnduranceArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = patient(scene_options(args.guest.as_deref())?);
    options.kind = GuestKind::Bench;
    options.pinned = args.pinned;
    let scene = Scene::start(options).map_err(failed)?;
    let measured = measure(scene, args).map_err(failed)?;
    output::show(json, &measured, |measured| table(measured))?;
    Ok(Exit::Ok)
}

fn failed(error: anyhow::Error) -> Failure {
    Failure::internal(format!("the benchmark failed: {error:#}"))
}

fn measure(mut scene: Scene, args: &BenchEnduranceArgs) -> Result<Vec<Lasting>> {
    scene.start_guest(HOME)?;
    scene.await_guest()?;
    let names = if args.names.is_empty() { &[Workload::Web][..] } else { &args.names };
    let console = scene.console(HOME)?;
    names.iter().try_for_each(|workload| workload.prepare(&bed(&scene, &console)))?;
    scene.protect(HOME, other(HOME))?;
    scene.await_protected(HOME, |_| ())?;
    let mut measured = Vec::new();
    for round in 0..=args.rounds {
        if round > 0 {
            fail_over(&mut scene, args.failovers)?;
        }
        let failovers = round * args.failovers;
        eprintln!("after {failovers} fail-overs");
        for &workload in names {
            measured.push(lasting(&bed(&scene, &console), workload, failovers, args.runs)?);
        }
    }
    scene.finish()?;
    Ok(measured)
}

fn bed<'a>(scene: &'a Scene, console: &'a Path) -> Bed<'a> {
    let (lab, guest_files) = (scene.lab(), scene.guest_files());
    Bed { lab, address: GUEST_ADDRESS, door: Door::Console(console), guest_files }
}

/// The first run of each is not counted: after a take-over QEMU has translated nothing of the guest's code yet.
fn lasting(bed: &Bed<'_>, workload: Workload, failovers: u32, runs: u32) -> Result<Lasting> {
    workload.run(bed, Scale::Full)?;
    let samples = (0..runs).map(|_| workload.run(bed, Scale::Full)).collect::<Result<_>>()?;
    let (unit, better) = (workload.unit(), workload.better());
    Ok(Lasting { failovers, workload, unit, better, samples })
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

fn table(measured: &[Lasting]) -> String {
    let mut text = String::new();
    for lasting in measured {
        // Of no runs there is nothing to write.
        let _ = line(&mut text, measured, lasting);
    }
    text
}

fn line(text: &mut String, measured: &[Lasting], lasting: &Lasting) -> Result<()> {
    let summary =
        |of: &Lasting| Summary::of(&of.samples.iter().map(|it| it.value).collect::<Vec<_>>());
    let now = summary(lasting).context("no runs")?;
    let first = measured.iter().find(|it| it.workload == lasting.workload).and_then(summary);
    let beside = first.and_then(|first| ratio(now.median, first.median, lasting.better));
    write!(text, "{:10} after {:3} fail-overs ", lasting.workload.name(), lasting.failovers)?;
    write!(text, "{:10.2} {} ({:.2}-{:.2})", now.median, lasting.unit, now.min, now.max)?;
    writeln!(text, ", {:.2} of the first", beside.context("no ratio")?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_stand_beside_those_before_the_first_fail_over() {
        let lasting = |failovers, workload: Workload, values: &[f64]| {
            let sample = |&value| Sample { value, more: Vec::new() };
            let samples = values.iter().map(sample).collect();
            let (unit, better) = (workload.unit(), workload.better());
            Lasting { failovers, workload, unit, better, samples }
        };
        let text = table(&[
            lasting(0, Workload::Web, &[100.0, 90.0, 110.0]),
            lasting(0, Workload::Cpu, &[5.0]),
            lasting(20, Workload::Web, &[95.0, 80.0, 97.0]),
            lasting(20, Workload::Cpu, &[4.0]),
        ]);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].ends_with("(90.00-110.00), 1.00 of the first"), "{text}");
        assert!(lines[2].contains("after  20 fail-overs"), "{text}");
        assert!(lines[2].ends_with("0.95 of the first"), "{text}");
        assert!(lines[3].ends_with("1.25 of the first"), "{text}");
    }
}
