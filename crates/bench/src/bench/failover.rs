//! `understudy-lab bench failover`: how long clients wait when a host dies.
//!
//! One guest, and one TCP connection for each kind of client, live through all the
//! failures: the host that failed becomes the backup of the other one for the next.

use super::machine::{Machine, load_average};
use crate::chaos::stage::{Said, Stage, pause};
use crate::cli::BenchFailoverArgs;
use crate::parts::{in_mode, scene_options};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::ops::Range;
use std::time::{Duration, Instant};
use understudy_client::{Exit, Failure, output};
use understudy_lab::SceneOptions;
use understudy_report::{Mode, TakeoverReport};

const MEMORY_MIB: u32 = 192;
/// Bytes that the bulk client sends and gets back in a round.
const BULK_BYTES: usize = 64 << 10;
/// Time for which the guest is protected before a failure, or up to as much longer: failures must
/// not fall into step with the checkpoints.
const BEFORE: Duration = Duration::from_millis(300);
const STEP: Duration = Duration::from_micros(7_300);

/// Failure that is done to the primary's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// SIGKILL to the daemon and QEMU.
    Kill,
    /// The network drops everything; the host lives.
    Cut,
}

/// Kind of client that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ClientKind {
    /// Appends records to the guest's disk, each after the last one's acknowledgement.
    Records,
    /// Sends 64 KiB and gets them back, again and again.
    Bulk,
}

/// One fail-over. All times are in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Outage {
    /// Failure that was done.
    pub failure: FailureKind,
    /// The longest time without an answer, from the last one before it.
    pub outage_ms: f64,
    /// Time from the failure until the backup's suspicion.
    pub detection_ms: f64,
    /// Report on the time from the suspicion until the guest ran.
    pub restart: TakeoverReport,
}

/// The distribution of outages after one kind of failure, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Distribution {
    /// Failure that was done.
    pub failure: FailureKind,
    /// Number of times.
    pub runs: usize,
    /// Median outage.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// Part of the median outage until the suspicion.
    pub detection_p50_ms: f64,
    /// Part of it from there until the guest ran.
    pub restart_p50_ms: f64,
}

/// Everything that `bench failover` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct FailoverBench {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// The guest's memory in MiB.
    pub guest_memory_mib: u32,
    /// Mode in which the guest was protected.
    pub mode: Mode,
    /// Kind of client that waited.
    pub client: ClientKind,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
    /// Protection that was lost before the failure; such runs do not count.
    pub false_alarms: usize,
    /// One entry a kind of failure.
    pub distributions: Vec<Distribution>,
    /// Every fail-over, in order.
    pub outages: Vec<Outage>,
}

/// Measures and prints.
pub fn run(args: &BenchFailoverArgs, json: bool) -> Result<Exit, Failure> {
    let options = in_mode(scene_options(args.guest.as_deref())?, args.mode);
    let bench = measure(options, args.client, args.kills, args.cuts, |done, all, outage| {
        eprintln!("{done} of {all}: {outage}");
    })
    .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &bench, FailoverBench::table)?;
    Ok(Exit::Ok)
}

/// Kills and cuts the primary so many times, under the eyes of one client. `tell` hears of
/// each when it is over: how many are done, how many there will be, what happened.
pub fn measure(
    mut options: SceneOptions,
    client: ClientKind,
    kills: u32,
    cuts: u32,
    mut tell: impl FnMut(usize, usize, &str),
) -> Result<FailoverBench> {
    options.memory_mib = MEMORY_MIB;
    let mode = if options.lockstep { Mode::Lockstep } else { Mode::Checkpoint };
    let mut stage = Stage::at_rest(options, (client == ClientKind::Bulk).then_some(BULK_BYTES))?;
    let failures = interleave(kills, cuts);
    let mut played = Vec::new();
    let mut false_alarms = 0;
    while played.len() < failures.len() {
        let failure = failures[played.len()];
        match fail_over(&mut stage, failure, played.len())? {
            Some(run) => played.push(run),
            None => {
                false_alarms += 1;
                ensure!(false_alarms <= failures.len(), "protection is lost again and again");
            }
        }
        tell(played.len(), failures.len(), played.last().map_or("", |run| run.failure.name()));
    }
    let machine = look(&mut stage)?;
    let said = stage.clear(true)?;
    let outages = played.iter().map(|run| run.outage(client, &said)).collect::<Result<Vec<_>>>()?;
    Ok(FailoverBench {
        machine,
        guest_memory_mib: MEMORY_MIB,
        mode,
        client,
        load_average: load_average(),
        false_alarms,
        distributions: Distribution::of(&outages),
        outages,
    })
}

/// A fail-over, before it is known what the client thought of it.
struct Played {
    failure: FailureKind,
    /// Span from the failure until the guest served from the other host.
    window: Range<Instant>,
    detection: Duration,
    restart: TakeoverReport,
}

/// One failure. None if there was no backup to fail over to.
fn fail_over(stage: &mut Stage, failure: FailureKind, number: usize) -> Result<Option<Played>> {
    let (primary, _) = stage.protect(true)?;
    pause(BEFORE + STEP * u32::try_from(number % 41)?, || false);
    if !stage.is_protected(primary)? {
        return Ok(None);
    }
    let failed_at = match failure {
        FailureKind::Kill => stage.scene.host_mut(primary)?.kill_everything()?,
        FailureKind::Cut => {
            let now = Instant::now();
            stage.scene.lab().cut(primary)?;
            now
        }
    };
    let owner = stage.await_service()?;
    let window = failed_at..Instant::now();
    if failure == FailureKind::Cut {
        stage.scene.lab().heal(primary)?;
        stage.scene.await_fenced(primary)?;
    }
    ensure!(owner != primary, "the backup did not take over");
    let status = stage.status(owner)?.context("its owner does not know the guest")?;
    let restart = status.takeover.context("its owner did not take it over")?;
    let announced = stage.first_frame(owner, failed_at)?;
    let ran = Duration::from_secs_f64(restart.total_ms / 1e3);
    let detection = (announced - failed_at).saturating_sub(ran);
    Ok(Some(Played { failure, window, detection, restart }))
}

impl Played {
    fn outage(&self, client: ClientKind, said: &Said) -> Result<Outage> {
        let Range { start, end } = self.window;
        let outage = match client {
            ClientKind::Records => said.records.outage_until(start, end),
            ClientKind::Bulk => said.chatter.iter().find_map(|bulk| bulk.outage_until(start, end)),
        };
        Ok(Outage {
            failure: self.failure,
            outage_ms: outage.context("the client got no answer after a failure")?.as_secs_f64()
                * 1e3,
            detection_ms: self.detection.as_secs_f64() * 1e3,
            restart: self.restart,
        })
    }
}

/// Both kinds, spread evenly.
fn interleave(kills: u32, cuts: u32) -> Vec<FailureKind> {
    let all = kills + cuts;
    let is_cut = |at: u32| (at + 1) * cuts / all > at * cuts / all;
    let kind = |at| if is_cut(at) { FailureKind::Cut } else { FailureKind::Kill };
    (0..all).map(kind).collect()
}

fn look(stage: &mut Stage) -> Result<Machine> {
    let owner = stage.await_service()?;
    let host = stage.host_status(owner)?;
    let vm = stage.status(owner)?.context("its owner does not know the guest")?;
    let pid = vm.qemu_pid.context("the guest has no QEMU")?;
    Ok(Machine::look(host.version, host.qemu_version, pid))
}

impl FailureKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            FailureKind::Kill => "kill",
            FailureKind::Cut => "cut",
        }
    }
}

impl Distribution {
    /// Distributions of all kinds of failure that there are.
    fn of(outages: &[Outage]) -> Vec<Distribution> {
        let kinds = [FailureKind::Kill, FailureKind::Cut].into_iter();
        kinds.filter_map(|kind| Distribution::of_kind(kind, outages)).collect()
    }

    fn of_kind(failure: FailureKind, outages: &[Outage]) -> Option<Distribution> {
        let sorted = |value: fn(&Outage) -> f64| {
            let mut values: Vec<f64> =
                outages.iter().filter(|outage| outage.failure == failure).map(value).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let all = sorted(|outage| outage.outage_ms);
        let max_ms = *all.last()?;
        // The smallest one that so many percent do not exceed.
        let percentile =
            |values: &[f64], percent: usize| values[(values.len() * percent).div_ceil(100) - 1];
        Some(Distribution {
            failure,
            runs: all.len(),
            p50_ms: percentile(&all, 50),
            p90_ms: percentile(&all, 90),
            max_ms,
            detection_p50_ms: percentile(&sorted(|outage| outage.detection_ms), 50),
            restart_p50_ms: percentile(&sorted(|outage| outage.restart.total_ms), 50),
        })
    }
}

impl FailoverBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let client = match self.client {
            ClientKind::Records => "appends records".to_owned(),
            ClientKind::Bulk => format!("sends {} KiB and gets them back", BULK_BYTES >> 10),
        };
        let mode = if self.mode.is_checkpoint() { "" } else { " in lockstep" };
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             a guest of {} MiB{}; the client {client}; false alarms: {}\n\n\
             failure  runs  outage p50 ms  p90 ms  max ms  detection p50 ms  restart p50 ms\n",
            self.guest_memory_mib, mode, self.false_alarms,
        );
        for row in &self.distributions {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{:7} {:5} {:14.1} {:7.1} {:7.1} {:17.1} {:15.1}",
                row.failure.name(),
                row.runs,
                row.p50_ms,
                row.p90_ms,
                row.max_ms,
                row.detection_p50_ms,
                row.restart_p50_ms,
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_spread_and_none_is_lost() {
        let failures = interleave(30, 10);
        assert_eq!(failures.iter().filter(|kind| **kind == FailureKind::Cut).count(), 10);
        assert!(failures.windows(8).all(|some| some.contains(&FailureKind::Cut)));
        assert_eq!(interleave(2, 0), [FailureKind::Kill; 2]);
        assert_eq!(interleave(0, 1), [FailureKind::Cut]);
    }

    #[test]
    fn percentiles_are_outages_that_happened() {
        let outage = |ms: f64| Outage {
            failure: FailureKind::Kill,
            outage_ms: ms,
            detection_ms: ms / 2.0,
            restart: TakeoverReport::default(),
        };
        let outages: Vec<Outage> = (1..=30).rev().map(f64::from).map(outage).collect();
        let [kill] = &Distribution::of(&outages)[..] else { panic!("one kind") };
        assert_eq!((kill.p50_ms, kill.p90_ms, kill.max_ms), (15.0, 27.0, 30.0));
        assert_eq!(kill.detection_p50_ms, 7.5);
    }
}
