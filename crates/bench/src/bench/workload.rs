//! `understudy-lab bench workload`: one guest, protected or not, and workloads on it.

use super::suite::protection::Watch;
use super::workloads::{Bed, Better, Door, Sample, Scale, Workload};
use super::{on_scene, patient, words};
use crate::cli::BenchWorkloadArgs;
use crate::parts::scene_options;
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use understudy_client::{Client, Exit, Failure, output};
use understudy_lab::scene::GuestKind;
use understudy_lab::{GUEST_ADDRESS, Scene};

/// Figures that one workload measured; `--json` prints a list of these.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The workload.
    pub workload: Workload,
    /// The unit of the samples' values.
    pub unit: &'static str,
    /// Direction in which they are to go.
    pub better: Better,
    /// One for each run.
    pub samples: Vec<Sample>,
}

impl Measured {
    /// The figures of a workload's runs.
    pub(super) fn of(workload: Workload, samples: Vec<Sample>) -> Measured {
        Measured { workload, unit: workload.unit(), better: workload.better(), samples }
    }
}

/// Measures and prints.
pub fn run(args: &BenchWorkloadArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = patient(scene_options(args.guest.as_deref())?);
    options.kind = GuestKind::Bench;
    options.pinned = args.pinned;
    let measured = on_scene(options, |scene| measure(scene, args))
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &measured, |measured| table(measured))?;
    Ok(Exit::Ok)
}

fn measure(scene: &Scene, args: &BenchWorkloadArgs) -> Result<Vec<Measured>> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let console = scene.console("a")?;
    let bed = bed(scene, &console);
    let names = if args.names.is_empty() { &Workload::ALL[..] } else { &args.names };
    names.iter().try_for_each(|workload| workload.prepare(&bed))?;
    if args.protected {
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
    }
    let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
    let run = |workload: Workload, scale| match args.protected {
        true => run_protected(workload, &bed, scale, &primary),
        false => workload.run_accounted(&bed, scale),
    };
    let scale = if args.quick { Scale::Quick } else { Scale::Full };
    let measure = |&workload: &Workload| {
        eprintln!("{}", workload.name());
        let samples = (0..args.runs).map(|_| run(workload, scale)).collect::<Result<Vec<_>>>()?;
        Ok(Measured::of(workload, samples))
    };
    names.iter().map(measure).collect()
}

/// Runs a workload. An error if the guest was not protected all the time.
pub(super) fn run_protected(
    workload: Workload,
    bed: &Bed<'_>,
    scale: Scale,
    primary: &Client,
) -> Result<Sample> {
    let watch = Watch::begin(primary)?;
    let sample = workload.run_accounted(bed, scale)?;
    watch.end(primary)?;
    Ok(sample)
}

/// The guest, of which `console` is the console.
pub(super) fn bed<'a>(scene: &'a Scene, console: &'a Path) -> Bed<'a> {
    Bed {
        lab: scene.lab(),
        address: GUEST_ADDRESS,
        door: Door::Console(console),
        guest_files: scene.guest_files(),
    }
}

fn table(measured: &[Measured]) -> String {
    let mut text = String::new();
    for Measured { workload, unit, samples, .. } in measured {
        for sample in samples {
            let _ = write!(text, "{:10} {:10.2} {unit}", workload.name(), sample.value);
            for figure in &sample.more {
                let _ = write!(text, "   {} {:.2} {}", figure.name, figure.value, figure.unit);
            }
            text.push('\n');
        }
    }
    text
}
