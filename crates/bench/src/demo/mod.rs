//! `understudy-lab demo`: a host dies, and its guest's connection lives on.
//!
//! Everything is real: two daemons of the product, a Linux guest, a
//! client with one TCP connection. Only the hosts are network namespaces.

mod narrator;
mod outcome;

use crate::cli::{Cut, DemoArgs};
use crate::parts::{in_mode, scene_options};
use anyhow::{Context, Result, bail, ensure};
use narrator::Narrator;
use outcome::{LogOutcome, Outcome};
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::progress::syncing;
use understudy_client::{Client, Exit, Failure, ModeKind, output};
use understudy_lab::check::{DiskCheck, check_disk};
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, SceneOptions, Watcher, wait_for};
use understudy_report::{PauseReport, Protection, Role, VmStatus};

/// Time between two looks of the story at what it tells about.
const GLANCE: Duration = Duration::from_millis(100);
/// Time for the client to be answered by the backup.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(30);
/// Acknowledgements from the backup that make a survival.
const ACKS_AFTER: u64 = 20;
/// Time for which the story goes on after the fail-over.
const AFTERMATH: Duration = Duration::from_secs(1);

/// Plays the demo; exits with 0 only if nothing was lost.
pub fn run(args: &DemoArgs, json: bool) -> Result<Exit, Failure> {
    let options = in_mode(scene_options(args.guest.as_deref())?, args.mode);
    let outcome = play(options, args)?;
    output::show(json, &outcome, |outcome| format!("\n{}", outcome.summary()))?;
    Ok(if outcome.is_good() { Exit::Ok } else { Exit::Error })
}

/// The scene is gone when this returns, whatever happened.
fn play(options: SceneOptions, args: &DemoArgs) -> Result<Outcome, Failure> {
    let say = Narrator::new();
    let failed = |error: anyhow::Error| Failure::internal(format!("the demo failed: {error:#}"));
    say.say("two hosts, a and b, and a client, joined by a switch; a daemon on each host");
    let mut scene = Scene::start(options).map_err(failed)?;
    let story = Story { say: &say, scene: &mut scene, args };
    match story.tell() {
        Ok(outcome) if outcome.is_good() => {
            scene.finish().map_err(failed)?;
            Ok(outcome)
        }
        result => {
            say.settle();
            eprintln!("\n{}", scene.diagnostics());
            let outcome = result.map_err(failed)?;
            for problem in &outcome.problems {
                eprintln!("understudy-lab: {problem}");
            }
            Ok(outcome)
        }
    }
}

struct Story<'a> {
    say: &'a Narrator,
    scene: &'a mut Scene,
    args: &'a DemoArgs,
}

/// The failure, and what was there before it.
struct Failed {
    at: Instant,
    /// The primary's last report.
    before: VmStatus,
    /// Records acknowledged when the failure had happened.
    acked: u64,
    watchers: Option<Watchers>,
}

/// Watchers of what the two hosts send in the guest's name.
struct Watchers {
    a: Watcher,
    b: Watcher,
}

impl Story<'_> {
    fn tell(mut self) -> Result<Outcome> {
        self.boot()?;
        let client = self.scene.record_client(Duration::ZERO)?;
        self.say.say("the client opens its one connection and appends records to the guest's disk");
        self.protect()?;
        let before = self.run_protected(&client)?;
        let failed = self.fail(&client, before)?;
        let mut problems = self.survive(&client, &failed)?;
        let both_answered = failed
            .watchers
            .as_ref()
            .map(|watchers| watchers.both_answered(failed.at))
            .transpose()?;
        if both_answered == Some(true) {
            problems.push("a's copy still answered after b's copy had begun to".to_owned());
        }
        let report = client.stop();
        if let Some(error) = report.error() {
            problems.push(format!("the client's connection did not survive: {error}"));
        }
        let disk = self.examine(report.acked())?;
        problems.extend(complaints(&disk));
        let (outage, pause) = (report.outage(failed.at), failed.before.pause_ms);
        Ok(Outcome {
            outage_ms: outage.map(|outage| microseconds(outage.as_secs_f64() * 1e3)),
            checkpoints: failed.before.checkpoints,
            pause_ms: PauseReport {
                p50: microseconds(pause.p50),
                p99: microseconds(pause.p99),
                max: microseconds(pause.max),
            },
            bytes_sent: failed.before.bytes_sent,
            lockstep: failed.before.lockstep.map(LogOutcome::from),
            acked: report.acked(),
            lost: disk.records.lost.len() as u64,
            connection_survived: report.connection_survived() && outage.is_some(),
            cut: self.args.cut,
            both_answered,
            problems,
        })
    }

    fn boot(&self) -> Result<()> {
        self.command("a", "vm start vm.toml");
        self.scene.start_guest("a")?;
        self.say.update("Linux boots: 512 MiB, 1 vCPU, a disk, a network card");
        self.scene.await_guest()
    }

    fn command(&self, host: &str, command: &str) {
        self.say.say(format!("{host}# understudy {command}"));
    }

    fn protect(&self) -> Result<()> {
        let mode = match self.args.mode {
            ModeKind::Checkpoint => "",
            ModeKind::Lockstep => " --mode lockstep",
        };
        self.command("a", &format!("protect {VM} --to b{mode}"));
        self.scene.protect("a", "b")?;
        let a = self.api("a")?;
        loop {
            let status = ask(&a)?;
            match &status.protection {
                Protection::Protected { .. } => break,
                Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds } => {
                    self.say.update(&syncing(peer, *done_bytes, *total_bytes, *remaining_seconds))
                }
                // The backup follows, and is late: it is one again by itself.
                _ if status.lapse.is_some() => {}
                other => bail!("the guest is not protected: {other:?}"),
            }
            thread::sleep(GLANCE);
        }
        self.say.say("protected: from now on nothing leaves host a before host b holds its cause");
        Ok(())
    }

    /// Lets the client work; returns the primary's last report.
    fn run_protected(&self, client: &RecordClient) -> Result<VmStatus> {
        let a = self.api("a")?;
        let (begun, acked) = (Instant::now(), client.acked());
        let rate = || (client.acked() - acked) as f64 / begun.elapsed().as_secs_f64();
        let mut status = ask(&a)?;
        while begun.elapsed() < Duration::from_secs(self.args.seconds) {
            thread::sleep(GLANCE);
            status = ask(&a)?;
            ensure!(!client.failed(), "the client's connection broke before anything was done");
            let is_followed = matches!(status.protection, Protection::Protected { .. });
            ensure!(
                is_followed || status.lapse.is_some(),
                "protection was lost before anything was done: {:?}",
                status.protection
            );
            self.say.update(&format!(
                "host a serves: {} records acknowledged, {:.0} a second, {}",
                client.acked(),
                rate(),
                followed(&status)
            ));
        }
        self.say.say(format!(
            "{} records acknowledged, {:.0} a second; {}",
            client.acked(),
            rate(),
            followed(&status)
        ));
        Ok(status)
    }

    fn fail(&mut self, client: &RecordClient, before: VmStatus) -> Result<Failed> {
        let (at, watchers) = match self.args.cut {
            None => {
                self.say.say("SIGKILL to everything on host a: the daemon and QEMU");
                (self.scene.host_mut("a")?.kill_everything()?, None)
            }
            Some(Cut::Network) => {
                let watch = |host| self.scene.watch_uplink(host, 0);
                let watchers = Watchers { a: watch("a")?, b: watch("b")? };
                self.say.say("host a is cut off: it runs on, and nothing goes in or out");
                // Both reach the arbiter's directory: a busy machine's host a might be first there.
                self.scene.host("a")?.hide(&self.scene.lab().arbiter_directory())?;
                let at = Instant::now();
                self.scene.lab().cut("a")?;
                (at, Some(watchers))
            }
        };
        Ok(Failed { at, before, acked: client.acked(), watchers })
    }

    /// Waits until the client is served by b; returns what is wrong with that.
    fn survive(&self, client: &RecordClient, failed: &Failed) -> Result<Vec<String>> {
        let goal = failed.acked + ACKS_AFTER;
        wait_for("acknowledgements from host b", TAKE_OVER_LIMIT, || {
            Ok((client.acked() >= goal || client.failed()).then_some(()))
        })?;
        self.say.say("the same connection goes on: host b answers");
        let until = Instant::now() + AFTERMATH;
        while Instant::now() < until && !client.failed() {
            self.say.update(&format!("host b serves: {} records acknowledged", client.acked()));
            thread::sleep(GLANCE);
        }
        let mut problems = Vec::new();
        let after = ask(&self.api("b")?)?;
        if after.role != Role::Primary || !after.live {
            problems.push(format!("host b does not run the guest: it is {:?}", after.role));
        }
        if after.generation <= failed.before.generation {
            problems.push(format!(
                "host b has not won the ownership: generation {} before, {} after",
                failed.before.generation, after.generation
            ));
        }
        if failed.watchers.is_some() {
            self.await_fencing(&failed.before)?;
        }
        Ok(problems)
    }

    /// The host that was cut off must let its own copy stand still, and halt it once it hears that
    /// the other one runs.
    fn await_fencing(&self, before: &VmStatus) -> Result<()> {
        self.scene.host("a")?.unhide(&self.scene.lab().arbiter_directory())?;
        self.scene.await_kept("a")?;
        self.say.say("host a's copy stands still: the arbiter gave the guest to host b");
        self.scene.lab().heal("a")?;
        self.scene.await_fenced("a")?;
        let qemu = before.qemu_pid.context("host a told no process id of its QEMU")?;
        let processes = || self.scene.host("a")?.namespace().processes();
        wait_for("host a's QEMU to be gone", TAKE_OVER_LIMIT, || {
            Ok((!processes()?.contains(&qemu)).then_some(()))
        })?;
        self.say.say("host a, on the network again, has halted its copy: host b runs the guest");
        Ok(())
    }

    /// Stops the guest and looks at its disk.
    fn examine(&self, acked: u64) -> Result<DiskCheck> {
        let disk = self.scene.disk("b", 0)?;
        self.command("b", &format!("vm stop {VM}"));
        self.scene.power_off("b")?;
        let check = check_disk(&disk, acked)?;
        self.say.say("host b's disk is compared with every acknowledgement that the client got");
        Ok(check)
    }

    fn api(&self, host: &str) -> Result<Client> {
        Client::new(self.scene.host(host)?.socket())
            .map_err(|failure| anyhow::anyhow!(failure.message))
    }
}

impl Watchers {
    /// Whether a still sent something in the guest's name once b had begun to.
    fn both_answered(&self, failed_at: Instant) -> Result<bool> {
        let first = self.b.first_frame_after(failed_at).context("watching host b")?;
        let first = first.context("host b has sent nothing in the guest's name")?;
        Ok(self.a.frames_after(first).context("watching host a")? > 0)
    }
}

/// Words on how the backup keeps up.
fn followed(status: &VmStatus) -> String {
    match &status.lockstep {
        None => {
            let (checkpoints, pause) = (status.checkpoints, status.pause_ms.p50);
            format!("{checkpoints} checkpoints, each a pause of {pause:.1} ms")
        }
        Some(lockstep) => {
            let (lag, log) = (lockstep.lag_ms, lockstep.log_mbit_s);
            format!("host b executes the same {lag:.1} ms behind, by {log:.1} Mbit/s of log")
        }
    }
}

/// Milliseconds without the digits that mean nothing.
fn microseconds(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

fn ask(client: &Client) -> Result<VmStatus> {
    client.vm_status(VM).map_err(|failure| anyhow::anyhow!(failure.message))
}

/// Complaints about the survivor's disk.
fn complaints(disk: &DiskCheck) -> Vec<String> {
    let records = &disk.records;
    let mut complaints = Vec::new();
    let mut complain = |what: &str, count: usize| {
        if count > 0 {
            complaints.push(format!("{count} records are {what} on host b's disk"));
        }
    };
    complain("missing", records.lost.len());
    complain("repeated", records.repeated.len());
    complain("out of order", records.out_of_order.len());
    complain("damaged", records.damaged.len());
    // One may have been under way.
    complain("there that were never sent", records.unacknowledged.len().saturating_sub(1));
    if let Some(words) = &disk.file_system {
        complaints.push(format!("the file system on host b's disk is damaged: {words}"));
    }
    complaints
}
