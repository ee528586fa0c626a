//! VMs that have a keeper: the daemon may die at any time, and a keeper's end is that of its VM alone.

use crate::autostart::set_autostart;
use crate::refusals::{definition, log_of, quick, write};
use crate::stage::{
    Calm, LIMIT, PACE, await_forgotten, await_service, daemon, hand_over, options, play,
    prove_survival, refusal, restart_daemon,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::time::Duration;
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Part, RecordClient, Scene, SceneOptions, wait_for};
use understudy_qemu::VmDefinition;

/// A copy that takes some ten seconds.
const COPIED_BYTES: u64 = 64 << 20;
const COPY_MBITS: u32 = 50;
/// Longer than the daemon waits for a keeper, and shorter than a failure.
const SILENCE: Duration = Duration::from_secs(3);

/// Time in which wake-ups are counted, and the most that there may be a second of a daemon's threads that look after
/// keepers and leases (22 when each looked by itself), of those of a keeper's API (40 when it looked for events), and of that
/// which looks after the lease that a protected VM does not have (10).
const COUNTED: Duration = Duration::from_secs(5);
const MOST_OF_DAEMON: u64 = 9;
const MOST_OF_KEEPER: u64 = 9;
const MOST_OF_LEASE: u64 = 3;

pub fn with_keepers() -> SceneOptions {
    let mut options = SceneOptions { memory_mib: 256, ..options().calm() };
    for host in ["a", "b"] {
        options.daemons.insert(host.to_owned(), daemon().calm());
    }
    in_keepers(options)
}

/// The same, with a keeper for each VM on every host.
pub fn in_keepers(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        daemon.settings = format!("keepers = true\n{}", daemon.settings);
    }
    options
}

/// A VM as it must be found again.
#[derive(Debug, PartialEq)]
pub struct Kept {
    pub keeper: u64,
    pub qemu: u64,
    generation: u64,
}

pub fn kept(status: &Value) -> Result<Kept> {
    let number = |field: &str| {
        status[field].as_u64().with_context(|| format!("no number `{field}`: {status}"))
    };
    Ok(Kept {
        keeper: number("keeper_pid")?,
        qemu: number("qemu_pid")?,
        generation: number("generation")?,
    })
}

/// The status of a VM of host a once its keeper answers the daemon, which may have to find it again: a busy
/// machine's takes longer for an answer, now and then, than the daemon waits.
pub fn answered(scene: &Scene, vm: &str) -> Result<Value> {
    wait_for(&format!("the keeper of {vm} to answer"), LIMIT, || {
        Ok(scene.host("a")?.known(vm)?.filter(|status| status["live"] == true))
    })
}

/// The status of a VM on a host once its keeper has answered the daemon in time ([`answered`]).
pub fn told(scene: &Scene, host: &str, vm: &str) -> Result<Value> {
    wait_for(&format!("the keeper of {vm} on host {host} to answer"), LIMIT, || {
        let status = scene.host(host)?.status(vm)?;
        Ok((!status["qemu_pid"].is_null()).then_some(status))
    })
}

pub fn checkpoints(status: &Value) -> Result<u64> {
    status["checkpoints"].as_u64().context("no checkpoints")
}

pub fn signal_keeper(status: &Value, signal: Signal) -> Result<()> {
    kill(Pid::from_raw(kept(status)?.keeper as i32), signal)?;
    Ok(())
}

pub fn begin(scene: &Scene) -> Result<RecordClient> {
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    Ok(client)
}

/// The command once said that nothing ran here.
#[test]
fn a_host_is_evacuated_of_what_keepers_run() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        let output = scene.host("a")?.cli(["upgrade", "--evacuate"])?;
        let words = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(1), "{words}");
        ensure!(words.contains(&format!("NOT YET: {VM} run here")), "{words}");
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let words = scene.host("a")?.call(["upgrade", "--evacuate"])?;
        ensure!(words.contains(&format!("{VM} is handed over")), "{words}");
        ensure!(words.contains("nothing runs here"), "{words}");
        scene.await_live("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// Times that a process's threads of names which begin so have slept.
fn sleeps(pid: u64, names: &[&str]) -> Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm")).unwrap_or_default();
        if names.iter().any(|beginning| name.starts_with(beginning)) {
            let status = fs::read_to_string(task.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
            sum += line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(sum)
}

/// Each checkpoint waited for what had nothing to do with it: daemons looked for the ends of keepers, and keepers for
/// what to tell their daemons.
#[test]
fn daemons_and_keepers_do_not_look_for_each_other_all_the_time() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let counts = || -> Result<Vec<(String, u64, u64)>> {
            let mut counts = Vec::new();
            for name in ["a", "b"] {
                let (host, keeper) = (scene.host(name)?, kept(&told(scene, name, VM)?)?.keeper);
                let daemon = sleeps(host.pid().into(), &["keeper", "lease\n"])?;
                counts.push((format!("host {name}'s daemon"), daemon, MOST_OF_DAEMON));
                let api = sleeps(keeper, &["tokio-rt-worker"])?;
                counts.push((format!("host {name}'s keeper"), api, MOST_OF_KEEPER));
                let lease = sleeps(keeper, &["lease\n"])?;
                counts.push((format!("the lease in host {name}'s keeper"), lease, MOST_OF_LEASE));
            }
            Ok(counts)
        };
        let before = counts()?;
        std::thread::sleep(COUNTED);
        for ((who, now, most), (_, before, _)) in counts()?.into_iter().zip(before) {
            let times = now.saturating_sub(before);
            eprintln!("{who}: its threads have slept {times} times in {COUNTED:?}");
            ensure!(
                times <= most * COUNTED.as_secs(),
                "{who}: its threads have slept {times} times"
            );
        }
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// QEMU says more than there is room for while there is no daemon.
fn await_bounded_log(scene: &Scene) -> Result<()> {
    let log = scene.host("a")?.directory().join("state").join(VM).join("qemu.log");
    let mut qemu = fs::File::options().append(true).open(&log)?;
    qemu.write_all(&vec![b'x'; 3 << 20])?;
    wait_for("QEMU's log to be cut", LIMIT, || {
        Ok((fs::metadata(&log)?.len() < 1 << 20).then_some(()))
    })?;
    let former = fs::metadata(log.with_extension("log.1"))?.len();
    ensure!(former == 1 << 20, "{former} bytes of it are kept");
    Ok(())
}

#[test]
fn an_unprotected_guest_outlives_its_daemon_too_and_is_stopped_by_the_next() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let before = kept(&answered(scene, VM)?)?;
        scene.host_mut("a")?.kill_daemon()?;
        await_service(&client)?;
        await_bounded_log(scene)?;
        scene.revive("a")?;
        ensure!(kept(&answered(scene, VM)?)? == before, "another one");
        await_service(&client)?;
        // In order it ends without its VMs, too.
        scene.host_mut("a")?.terminate()?;
        await_service(&client)?;
        scene.revive("a")?;
        ensure!(kept(&answered(scene, VM)?)? == before, "another one");
        let plan = scene.host("a")?.call(["upgrade", "--plan"])?;
        ensure!(plan.contains("goes on in its keeper"), "{plan}");
        client.stop();
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        // Its name is free at once; the lock and the socket of the last one are no hindrance.
        scene.start_guest("a")?;
        scene.await_guest()?;
        ensure!(kept(&answered(scene, VM)?)?.keeper != before.keeper, "the same keeper");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

#[test]
fn a_protected_guest_is_handed_over_by_its_keeper_which_ends() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        hand_over(scene.host("a")?, VM)?;
        await_forgotten(scene, "a")?;
        await_service(&client)?;
        // Its place is free: it is backed up there now.
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_keepers_death_is_that_of_its_vm_alone() {
    play(with_keepers(), |scene| {
        let companion = Companion::new(scene)?;
        companion.start(scene.host("a")?)?;
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        companion.await_boot(scene)?;
        let others = companion.record_client(scene, PACE)?;
        await_service(&others)?;
        let before = kept(&answered(scene, COMPANION)?)?;
        let daemon = scene.host("a")?.pid();
        signal_keeper(&answered(scene, VM)?, Signal::SIGKILL)?;
        scene.await_live("b")?;
        await_service(&client)?;
        await_service(&others)?;
        ensure!(kept(&answered(scene, COMPANION)?)? == before, "another one");
        let host = scene.host_mut("a")?;
        ensure!(host.is_running() && host.pid() == daemon, "the daemon ended");
        let fenced = scene.await_fenced("a")?;
        ensure!(fenced.to_string().contains("was killed"), "{fenced}");
        others.stop();
        scene.host("a")?.call(["vm", "stop", COMPANION, "--force"])?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn daemon_and_keeper_die_one_after_the_other_and_the_backup_takes_over() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let status = answered(scene, VM)?;
        scene.host_mut("a")?.kill_daemon()?;
        await_service(&client)?;
        signal_keeper(&status, Signal::SIGKILL)?;
        scene.await_live("b")?;
        await_service(&client)?;
        // The next daemon takes the dead keeper for what it is, and backs the VM up.
        scene.revive("a")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_keeper_that_hangs_is_not_taken_for_well_and_hides_no_other_vm() {
    play(with_keepers(), |scene| {
        let companion = Companion::new(scene)?;
        companion.start(scene.host("a")?)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let status = answered(scene, VM)?;
        scene.host("a")?.stall(Part::Process(kept(&status)?.keeper.try_into()?))?;
        let hangs = scene.status("a")?;
        ensure!(hangs["live"] == false, "{hangs}");
        ensure!(hangs["protection"].to_string().contains("does not answer"), "{hangs}");
        answered(scene, COMPANION).context("the other VM is hidden")?;
        signal_keeper(&status, Signal::SIGCONT)?;
        answered(scene, VM)?;
        for vm in [VM, COMPANION] {
            scene.host("a")?.call(["vm", "stop", vm, "--force"])?;
        }
        await_forgotten(scene, "a")
    });
}

/// `protect` ended with 3 after two seconds, and the copy went on.
#[test]
fn a_keeper_that_is_silent_for_a_moment_ends_no_wait_for_its_copy() {
    let mut options = quick();
    for host in ["a", "b"] {
        // The silence is no failure for the other host.
        let settings = "keepers = true\n[repair]\nenabled = false\n[detection]\ntimeout_ms = \
                        10000\nqemu_timeout_ms = 10000\n";
        let daemon = HostOptions { settings: settings.to_owned(), ..HostOptions::default() };
        options.daemons.insert(host.to_owned(), daemon);
    }
    play(options, |scene| {
        let image =
            VmDefinition::from_toml(&fs::read_to_string(scene.definition())?, scene.definition())?
                .disks[0]
                .path
                .clone();
        let mut image = fs::File::options().append(true).open(image)?;
        io::copy(&mut fs::File::open("/dev/urandom")?.take(COPIED_BYTES), &mut image)?;
        scene.lab().limit_speed("b", COPY_MBITS)?;
        scene.start_guest("a")?;
        let status = answered(scene, VM)?;
        let protect = scene.host("a")?.begin(["protect", VM, "--to", "b"])?;
        wait_for("the copy to be under way", LIMIT, || {
            let done = &scene.status("a")?["protection"]["done_bytes"];
            Ok(done.as_u64().filter(|done| *done > 0))
        })?;
        signal_keeper(&status, Signal::SIGSTOP)?;
        std::thread::sleep(SILENCE);
        let unheard = scene.status("a")?["unheard"].clone();
        signal_keeper(&status, Signal::SIGCONT)?;
        ensure!(unheard.is_string(), "it was heard: {unheard}");
        let output = protect.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
        scene.await_protected("a", |_| ())?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

#[test]
fn a_keeper_that_is_told_to_end_hands_its_vm_over_first() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        signal_keeper(&scene.await_protected("a", |_| ())?, Signal::SIGTERM)?;
        let status = scene.await_live("b")?;
        ensure!(status["takeover"]["planned"] == true, "{status}");
        await_forgotten(scene, "a")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_vm_that_comes_up_with_its_host_is_not_started_beside_its_keeper() {
    play(with_keepers(), |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let before = kept(&answered(scene, VM)?)?;
        restart_daemon(scene, "a")?;
        let host = scene.host("a")?;
        wait_for("the next daemon to await it no more", LIMIT, || {
            let status: Value = serde_json::from_str(&host.call(["status", "--json"])?)?;
            Ok((status["awaited"] == serde_json::json!([])).then_some(()))
        })?;
        ensure!(kept(&answered(scene, VM)?)? == before, "another one");
        await_service(&client)?;
        client.stop();
        host.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

#[test]
fn a_vm_that_cannot_start_leaves_no_keeper() {
    play(with_keepers(), |scene| {
        let host = scene.host("a")?;
        let good = fs::read_to_string(scene.definition())?;
        let file = scene.lab().directory().join("wrong.toml");
        fs::write(&file, good.replace("bridge = \"br0\"", "bridge = \"br9\""))?;
        let (code, said) = refusal(host, &["vm", "start", &file.to_string_lossy()])?;
        ensure!(code == 1 && said.contains("bridge br9 does not exist"), "{code}: {said}");
        await_forgotten(scene, "a")?;
        // What was wrong is no hindrance either.
        scene.start_guest("a")?;
        scene.await_guest()?;
        host.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// With a field that this release does not know no keeper was told; the second time their guests were cut; and the host took
/// backups, of which it was the next to die.
#[test]
fn who_ends_all_keepers_twice_cuts_nothing_and_the_host_takes_no_backup() {
    let mut options = quick();
    let daemon = options.daemons.get_mut("a").unwrap();
    let settings = std::mem::take(&mut daemon.settings);
    daemon.settings = format!("keepers = true\n{settings}[shutdown]\npower_off_seconds = 3600\n");
    play(options, |scene| {
        // Which hears nobody who asks it to power off.
        scene.start_guest("a")?;
        let before = kept(&answered(scene, VM)?)?;
        let config = scene.host("a")?.directory().join("host.toml");
        let text = fs::read_to_string(&config)?;
        fs::write(&config, format!("of_the_next_release = 1\n{text}"))?;
        let config = config.to_string_lossy().into_owned();
        let end = |scene: &Scene| scene.host("a")?.begin(["end-keepers", "--config", &config]);
        let first = end(scene)?;
        wait_for("the keeper to ask its guest", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("shutting down guest").then_some(()))
        })?;
        let mut second = end(scene)?;
        let said = BufReader::new(second.stderr.take().context("no stderr")?);
        let ends = said.lines().map_while(Result::ok).any(|line| line.contains("ends already"));
        ensure!(ends, "nothing is said of a keeper that ends already");
        let other = definition(scene, "other")?.replace("73:01", "73:02");
        let other = write(scene, "other.toml", &other)?;
        scene.host("b")?.call(["vm", "start", &other.to_string_lossy()])?;
        let (_, words) = refusal(scene.host("b")?, &["protect", "other", "--to", "a"])?;
        ensure!(words.contains("shutting down"), "{words}");
        ensure!(kept(&answered(scene, VM)?)? == before, "another one");
        ensure!(!log_of(scene, "a")?.contains("waiting for no guest"), "it was told twice");
        signal_keeper(&answered(scene, VM)?, Signal::SIGTERM)?;
        for end in [first, second] {
            let output = end.wait_with_output()?;
            ensure!(output.status.success(), "{output:?}");
        }
        await_forgotten(scene, "a")
    });
}

/// The note of a keeper about itself.
fn note(scene: &Scene) -> Result<PathBuf> {
    let directory = scene.host("a")?.directory().join("state").join(VM);
    Ok(directory.join("keeper.json"))
}

#[test]
fn what_a_daemon_does_not_understand_of_a_keeper_is_refused_and_the_guest_goes_on() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let host = scene.host("a")?;
        let (code, said) = refusal(host, &["vm", "start", &scene.definition().to_string_lossy()])?;
        ensure!(code == 1 && said.contains("already"), "{code}: {said}");
        // Once it said that the VM is to be stopped, where a name is wrong.
        let (code, said) =
            refusal(host, &["protect", VM, COMPANION, "--group", "shop", "--to", "b"])?;
        ensure!(code == 4 && said.contains("there is no VM"), "{code}: {said}");
        ensure!(!said.contains("stop them"), "{said}");
        let good = fs::read_to_string(note(scene)?)?;
        for (text, words) in [
            (good.replace("\"protocol\":1,\"protocol_highest\":1", "\"protocol\":9"), "version 9"),
            (good.replace("\"host\":\"a\"", "\"host\":\"z\""), "host z"),
            ("{".to_owned(), "not understood"),
        ] {
            fs::write(note(scene)?, text)?;
            let (code, said) = refusal(host, &["vm", "stop", VM, "--force"])?;
            ensure!(code == 1 && said.contains(words), "{code}: {said}");
            let status = scene.status("a")?;
            ensure!(status["live"] == false, "not known, and yet: {status}");
            ensure!(status["protection"]["state"] == "degraded", "{status}");
            await_service(&client)?;
        }
        // A daemon of another host does not even start there.
        fs::write(note(scene)?, good.replace("\"host\":\"a\"", "\"host\":\"z\""))?;
        scene.host_mut("a")?.kill_daemon()?;
        ensure!(scene.revive("a").is_err(), "it takes another host's keeper for its own");
        await_service(&client)?;
        fs::write(note(scene)?, &good)?;
        scene.revive("a")?;
        answered(scene, VM)?;
        await_service(&client)?;
        client.stop();
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}
