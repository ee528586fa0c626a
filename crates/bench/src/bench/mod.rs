//! `understudy-lab bench`: measures this machine, on real parts.
//!
//! | module    | is |
//! |-----------|----|
//! | [`suite`] | every workload of the papers in every variant, and the report |
//! | [`pause`] | how long a checkpoint stops the guest, against the pages it wrote |
//! | [`checkpoint`] | what a checkpoint costs the processors, thread by thread |
//! | `migration` | live migrations of the same guest, for the pause to be compared with |
//! | `papers`  | figures that were measured elsewhere |
//! | [`group`] | round trips between two guests, protected as a group, one by one, not at all |
//! | [`lockstep`] | what lockstep costs, and its log |
//! | [`restore`] | snapshots, and how fast each way has a VM back |
//! | [`throttle`] | what becomes of a guest that writes faster than the link carries |
//! | [`compression`] | what each way to encode pages gains and costs while the guest compiles |
//! | [`workload`] | one workload of the suite by itself |
//! | `workloads` | what each workload runs |
//! | [`distance`]| records a second, and what they wait, with the backup far away |
//! | [`failover`] | how long clients wait when a host dies |
//! | [`endurance`] | whether a guest is as fast after many fail-overs |
//! | `report`, `compression_report` | the results: medians, JSON, the tables |
//! | `memory`  | how much memory the daemons hold |
//! | `kvm_counts` | what checkpoints do to a guest on KVM, counted by KVM |
//! | `machine` | what it was measured on |
//! | `clock`   | whether its clock was set meanwhile |

pub mod checkpoint;
mod clock;
pub mod compression;
mod compression_report;
pub mod distance;
pub mod endurance;
pub mod failover;
pub mod group;
mod kvm_counts;
pub mod lockstep;
mod machine;
mod memory;
mod migration;
mod papers;
pub mod pause;
mod report;
pub mod restore;
pub mod suite;
pub mod throttle;
pub mod workload;
pub mod workloads;

use crate::cli::{BenchArgs, BenchCommand};
use understudy_client::{Exit, Failure};
use understudy_lab::{HostOptions, Scene, SceneOptions};

/// One measurement, or the suite.
pub fn run(args: &BenchArgs, json: bool) -> Result<Exit, Failure> {
    match &args.command {
        None => suite::run(&args.suite, json),
        Some(BenchCommand::Checkpoint(args)) => checkpoint::run(args, json),
        Some(BenchCommand::Compression(args)) => compression::run(args, json),
        Some(BenchCommand::Distance(args)) => distance::run(args, json),
        Some(BenchCommand::Endurance(args)) => endurance::run(args, json),
        Some(BenchCommand::Failover(args)) => failover::run(args, json),
        Some(BenchCommand::Group(args)) => group::run(args, json),
        Some(BenchCommand::Lockstep(args)) => lockstep::run(args, json),
        Some(BenchCommand::Pause(args)) => pause::run(args, json),
        Some(BenchCommand::Readme(args)) => suite::readme::run(args),
        Some(BenchCommand::Restore(args)) => restore::run(args, json),
        Some(BenchCommand::Throttle(args)) => throttle::run(args, json),
        Some(BenchCommand::Workload(args)) => workload::run(args, json),
    }
}

/// Both hosts and the guest's load share this machine's processors, so silence means nothing.
const DETECTION: &str = "[detection]\ntimeout_ms = 10000\n";

/// Options with hosts that suspect each other only after a long silence.
fn patient(mut options: SceneOptions) -> SceneOptions {
    for host in &options.hosts {
        let settings = DETECTION.to_owned();
        options.daemons.insert(host.clone(), HostOptions { settings, ..Default::default() });
    }
    options
}

fn words(failure: Failure) -> anyhow::Error {
    anyhow::anyhow!(failure.message)
}

/// Measures on a scene of its own, which is gone when this returns, whatever happened.
/// An error shows the ends of its logs first.
fn on_scene<T>(
    options: SceneOptions,
    measure: impl FnOnce(&mut Scene) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut scene = Scene::start(options)?;
    let measured = measure(&mut scene).inspect_err(|_| eprintln!("{}", scene.diagnostics()))?;
    scene.finish()?;
    Ok(measured)
}
