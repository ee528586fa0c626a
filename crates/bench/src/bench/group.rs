//! `understudy-lab bench group`: round trips between two guests on one host, protected
//! as one group, one by one, and not at all (Remus, section 5).
//!
//! One guest asks the record server of the other over one TCP connection, each
//! request after the last answer. Rates are by this machine's clock, percentiles
//! by the guest's, which stands still while the guest does.

use super::machine::{Machine, load_average};
use super::{on_scene, patient, words};
use crate::cli::BenchGroupArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Exit, Failure, output};
use understudy_encoding::EncodingPlan;
use understudy_lab::companion::{COMPANION, COMPANION_ADDRESS};
use understudy_lab::scene::{RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, Companion, GuestShell, Load, Scene, SceneOptions, wait_for};
use understudy_protocol::Policy;
use understudy_protocol::literal;
use understudy_report::{GroupRequest, ProtectRequest, Protection};

const MEMORY_MIB: u32 = 256;
/// Time for both guests to be protected, or for the backup to have forgotten them.
const LIMIT: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_millis(200);
const BOTH: [&str; 2] = [VM, COMPANION];

/// Way in which the two guests are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cover {
    /// No protection.
    None,
    /// One by one: what they say to each other waits.
    Each,
    /// One group of both.
    Group,
}

/// Round trips; medians of the repeats.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Trips {
    /// Round trips a second, by the machine's clock.
    pub per_second: f64,
    /// Their median in milliseconds, by the guest's clock.
    pub p50_ms: f64,
    /// Their 99th percentile.
    pub p99_ms: f64,
    /// Round trips a second of a client outside, at the same time; 0 without one.
    pub outside_per_second: f64,
}

/// One way of protection.
#[derive(Clone, Debug, Serialize)]
pub struct Mode {
    /// Way in which the guests are protected.
    pub cover: Cover,
    /// Policy by which checkpoints are taken.
    pub policy: Option<Policy>,
    /// Trips between the guests, nothing else going on.
    pub alone: Trips,
    /// Trips between the guests, while a client outside asks one of them.
    pub with_outside: Trips,
}

/// Everything that `bench group` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct GroupBench {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// Memory of each guest in MiB.
    pub guest_memory_mib: u32,
    /// Seconds of each measurement.
    pub seconds: u64,
    /// Number of times that everything was measured, in turn.
    pub repeats: u32,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
    /// The ways of protection.
    pub modes: Vec<Mode>,
}

/// Measures and prints.
pub fn run(args: &BenchGroupArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = patient(scene_options(args.guest.as_deref())?);
    options.memory_mib = MEMORY_MIB;
    let bench = measure(options, args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &bench, GroupBench::table)?;
    Ok(Exit::Ok)
}

fn measure(options: SceneOptions, args: &BenchGroupArgs) -> Result<GroupBench> {
    eprintln!("two hosts; two guests boot on one of them");
    on_scene(options, |scene| Bench::begin(scene, args).and_then(Bench::all))
}

struct Bench<'a> {
    scene: &'a Scene,
    args: &'a BenchGroupArgs,
    primary: Client,
    shell: GuestShell,
}

impl<'a> Bench<'a> {
    fn begin(scene: &'a Scene, args: &'a BenchGroupArgs) -> Result<Bench<'a>> {
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        scene.await_guest()?;
        companion.await_boot(scene)?;
        let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
        Ok(Bench { scene, args, primary, shell: scene.shell()? })
    }

    fn all(mut self) -> Result<GroupBench> {
        let (adaptive, interval) = (Policy::default(), Policy::Interval { hz: 40 });
        let ways = [
            (Cover::None, None),
            (Cover::Each, Some(adaptive)),
            (Cover::Group, Some(adaptive)),
            (Cover::Each, Some(interval)),
            (Cover::Group, Some(interval)),
        ];
        let mut runs: Vec<Vec<(Trips, Trips)>> = vec![Vec::new(); ways.len()];
        // In turn, so that whatever else the machine does meets all alike.
        for _ in 0..self.args.repeats {
            for ((cover, policy), runs) in ways.iter().zip(&mut runs) {
                runs.push(self.mode(*cover, *policy)?);
            }
        }
        let mode = |((cover, policy), runs): (_, Vec<(Trips, Trips)>)| {
            let (alone, outside): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
            Mode { cover, policy, alone: medians(&alone), with_outside: medians(&outside) }
        };
        let modes = ways.into_iter().zip(runs).map(mode).collect();
        let status = self.primary.status().map_err(words)?;
        let vm = self.primary.vm_status(VM).map_err(words)?;
        let qemu_pid = vm.qemu_pid.context("the guest has no QEMU")?;
        Ok(GroupBench {
            machine: Machine::look(status.version, status.qemu_version, qemu_pid),
            guest_memory_mib: MEMORY_MIB,
            seconds: self.args.seconds,
            repeats: self.args.repeats,
            load_average: load_average(),
            modes,
        })
    }

    fn mode(&mut self, cover: Cover, policy: Option<Policy>) -> Result<(Trips, Trips)> {
        self.protect(cover, policy)?;
        let alone = self.trips()?;
        let server = self.scene.guest(RECORDS_PORT);
        let client =
            ChatterClient::start(self.scene.lab(), server, 1, Load::Pings, Duration::ZERO)?;
        let (begun, before) = (Instant::now(), client.least_rounds());
        let mut with_outside = self.trips()?;
        let outside = client.least_rounds() - before;
        with_outside.outside_per_second = outside as f64 / begun.elapsed().as_secs_f64();
        let report = client.stop();
        ensure!(report.errors().is_empty(), "the client outside: {:?}", report.errors());
        self.unprotect(cover)?;
        eprintln!("{cover:?} {policy:?}: {:.0} a second", alone.per_second);
        Ok((alone, with_outside))
    }

    /// One measurement inside.
    fn trips(&mut self) -> Result<Trips> {
        let seconds = self.args.seconds;
        let ask = format!("guest-tools ask {COMPANION_ADDRESS}:{RECORDS_PORT} ping {seconds} 2>&1");
        let begun = Instant::now();
        let output = self.shell.run(&ask)?;
        let elapsed = begun.elapsed().as_secs_f64();
        ensure!(output.code == 0, "the guests' conversation failed: {}", output.text);
        parse(&output.text, elapsed).with_context(|| format!("unexpected: {}", output.text))
    }

    fn protect(&self, cover: Cover, policy: Option<Policy>) -> Result<()> {
        let to = "b".to_owned();
        let begin = || match cover {
            Cover::None => Ok(()),
            Cover::Each => BOTH.iter().try_for_each(|vm| match self.primary.vm_status(vm)? {
                status if status.protection == Protection::Off => {
                    let request = ProtectRequest {
                        to: to.clone(),
                        policy,
                        repair: false,
                        ..ProtectRequest::default()
                    };
                    self.primary.protect(vm, &request).map(drop)
                }
                _ => Ok(()),
            }),
            Cover::Group => {
                let vms = BOTH.map(literal).to_vec();
                let request = GroupRequest {
                    vms,
                    to: to.clone(),
                    policy,
                    encoding: EncodingPlan::default(),
                    repair: false,
                    hold_console: false,
                };
                self.primary.protect_group("pair", &request).map(drop)
            }
        };
        // Host b refuses for as long as it still stands down from the last time.
        let begun = Instant::now();
        while let Err(failure) = begin() {
            ensure!(begun.elapsed() < LIMIT, "{}", failure.message);
            thread::sleep(GLANCE);
        }
        wait_for("both guests to be as protected as asked for", LIMIT, || {
            for vm in BOTH {
                let status = self.primary.vm_status(vm).map_err(words)?;
                let protected = matches!(status.protection, Protection::Protected { .. });
                if protected != (cover != Cover::None) {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
    }

    fn unprotect(&self, cover: Cover) -> Result<()> {
        match cover {
            Cover::None => {}
            Cover::Each => {
                for vm in BOTH {
                    self.primary.unprotect(vm).map_err(words)?;
                }
            }
            Cover::Group => drop(self.primary.unprotect(VM).map_err(words)?),
        }
        Ok(())
    }
}

/// `rounds N p50_us A p99_us B`
fn parse(text: &str, seconds: f64) -> Option<Trips> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["rounds", rounds, "p50_us", p50, "p99_us", p99] = words[..] else { return None };
    Some(Trips {
        per_second: rounds.parse::<f64>().ok()? / seconds,
        p50_ms: p50.parse::<f64>().ok()? / 1000.0,
        p99_ms: p99.parse::<f64>().ok()? / 1000.0,
        outside_per_second: 0.0,
    })
}

fn medians(runs: &[Trips]) -> Trips {
    let median = |value: fn(&Trips) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values[(values.len() - 1) / 2]
    };
    Trips {
        per_second: median(|trips| trips.per_second),
        p50_ms: median(|trips| trips.p50_ms),
        p99_ms: median(|trips| trips.p99_ms),
        outside_per_second: median(|trips| trips.outside_per_second),
    }
}

impl GroupBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             two guests of {} MiB; medians of {} runs of {} s, in turn; round trips between the \
             guests, alone and beside a client outside\n\n\
             guests     policy     alone/s  p50 ms  p99 ms  beside/s  p50 ms  p99 ms  outside/s\n",
            self.guest_memory_mib, self.repeats, self.seconds
        );
        for mode in &self.modes {
            let cover = match mode.cover {
                Cover::None => "bare",
                Cover::Each => "one by one",
                Cover::Group => "one group",
            };
            let policy = match mode.policy {
                None => "-".to_owned(),
                Some(Policy::Adaptive { .. }) => "adaptive".to_owned(),
                Some(Policy::Interval { hz }) => format!("{hz} Hz"),
            };
            let (a, o) = (mode.alone, mode.with_outside);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{cover:10} {policy:9} {:8.0} {:7.2} {:7.2} {:9.0} {:7.2} {:7.2} {:10.0}",
                a.per_second,
                a.p50_ms,
                a.p99_ms,
                o.per_second,
                o.p50_ms,
                o.p99_ms,
                o.outside_per_second,
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_words_are_understood() {
        let trips = parse("rounds 300 p50_us 1500 p99_us 20000\n", 3.0).unwrap();
        assert_eq!((trips.per_second, trips.p50_ms, trips.p99_ms), (100.0, 1.5, 20.0));
        assert!(parse("guest-tools: cannot connect", 3.0).is_none());
    }

    #[test]
    fn medians_are_of_the_runs() {
        let run = |rate| Trips { per_second: rate, ..Default::default() };
        assert_eq!(medians(&[run(3.0), run(1.0), run(2.0)]).per_second, 2.0);
    }
}
