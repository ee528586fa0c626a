//! Tests of what the guest says on its console, held until it is committed; and what is typed
//! there.

use crate::lockstep::{console_of, lockstep};
use crate::stage::{
    Calm, LIMIT, PACE, await_service, close, hand_over, options, play, play_protected, protect,
    prove_survival, refusal,
};
use anyhow::{Context, Result, ensure};
use std::time::Duration;
use understudy_lab::scene::VM;
use understudy_lab::{Console, RecordClient, Scene, SceneOptions, wait_for};

/// The command that keeps the console busy: each line says one more than the one before.
const COUNT: &str = "n=0; while :; do n=$((n + 1)); echo count $n. > /dev/console; done";

/// Time for a line of shell.
const LINE_LIMIT: Duration = Duration::from_secs(180);

/// The guest of `options` on host a, protected to b with its console held.
fn play_held(options: SceneOptions, story: impl FnOnce(&mut Scene, RecordClient) -> Result<()>) {
    let mode = if options.lockstep { "lockstep" } else { "checkpoint" };
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        protect(scene.host("a")?, VM, &["--to", "b", "--hold-console", "--mode", mode])?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        story(scene, client)
    });
}

fn log_of(scene: &Scene, host: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&console_of(scene, host)?).into_owned())
}

/// The count in a console's log, from its beginning on.
fn counted(log: &str) -> &str {
    log.find("count 1.").map_or("", |at| &log[at..])
}

/// Has the guest count, until host a has let something of it out; held bytes are seen.
fn begin_to_count(scene: &Scene) -> Result<()> {
    scene.shell()?.start(COUNT)?;
    wait_for("held words on the console", LIMIT, || {
        let held = &scene.status("a")?["held_console_bytes"];
        let held = held.as_u64().with_context(|| format!("no held bytes: {held}"))?;
        Ok((held > 0).then_some(()))
    })?;
    wait_for("host a to let words out", LIMIT, || {
        Ok((counted(&log_of(scene, "a")?).lines().count() > 50).then_some(()))
    })
}

/// Host b goes on with the count: what host a had let out is a part of it, and no line is
/// missing, or there twice.
fn prove_count(scene: &Scene, let_out: &str) -> Result<()> {
    let let_out = counted(let_out);
    let lines = let_out.lines().count() + 50;
    let said = wait_for("host b to go on with the count", LIMIT, || {
        let log = log_of(scene, "b")?;
        let said = counted(&log);
        Ok((said.lines().count() > lines).then(|| said.to_owned()))
    })?;
    ensure!(
        said.starts_with(let_out),
        "host a let out {:?}, host b has {:?}",
        tail(let_out, let_out.len()),
        tail(&said, let_out.len())
    );
    let mut lines: Vec<&str> = said.lines().collect();
    // It may be half a line.
    lines.pop();
    for (n, line) in lines.iter().enumerate() {
        let expected = format!("count {}.", n + 1);
        ensure!(line.trim_end() == expected, "{line:?} where {expected:?} was due");
    }
    Ok(())
}

/// The text around a place.
fn tail(text: &str, at: usize) -> &str {
    &text[at.saturating_sub(60)..text.len().min(at + 60)]
}

fn a_primary_is_killed(options: SceneOptions) {
    play_held(options, |scene, client| {
        begin_to_count(scene)?;
        scene.host_mut("a")?.kill_everything()?;
        let let_out = log_of(scene, "a")?;
        scene.await_live("b")?;
        prove_count(scene, &let_out)?;
        prove_survival(scene, client, "b")
    });
}

fn a_primary_is_cut_off(options: SceneOptions) {
    play_held(options, |scene, client| {
        begin_to_count(scene)?;
        scene.lab().cut("a")?;
        scene.await_live("b")?;
        scene.await_kept("a")?;
        let let_out = log_of(scene, "a")?;
        prove_count(scene, &let_out)?;
        scene.lab().heal("a")?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn with_checkpoints_a_primary_is_killed_while_its_guest_speaks() {
    a_primary_is_killed(options().calm());
}

#[test]
fn in_lockstep_a_primary_is_killed_while_its_guest_speaks() {
    a_primary_is_killed(lockstep());
}

#[test]
fn with_checkpoints_a_primary_is_cut_off_while_its_guest_speaks() {
    a_primary_is_cut_off(options().calm());
}

#[test]
fn in_lockstep_a_primary_is_cut_off_while_its_guest_speaks() {
    a_primary_is_cut_off(lockstep());
}

#[test]
fn a_planned_fail_over_leaves_no_word_out() {
    play_held(options().calm(), |scene, client| {
        begin_to_count(scene)?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        let let_out = log_of(scene, "a")?;
        prove_count(scene, &let_out)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn what_was_held_is_heard_when_protection_ends() {
    play_held(options().calm(), |scene, client| {
        begin_to_count(scene)?;
        scene.host("a")?.call(["unprotect", VM])?;
        let status = scene.status("a")?;
        ensure!(status["held_console_bytes"].is_null(), "still held: {status}");
        let lines = counted(&log_of(scene, "a")?).lines().count();
        wait_for("the guest to go on", LIMIT, || {
            Ok((counted(&log_of(scene, "a")?).lines().count() > lines + 50).then_some(()))
        })?;
        close(client).map(drop)
    });
}

#[test]
fn a_console_is_not_held_beside_output_that_is_not() {
    play(options().calm(), |scene| {
        scene.start_guest("a")?;
        let both = ["protect", VM, "--to", "b", "--hold-console", "--unheld-output"];
        let (code, words) = refusal(scene.host("a")?, &both)?;
        ensure!(code == 2, "exit code {code}: {words}");
        ensure!(words.contains("--hold-console") && words.contains("--unheld-output"), "{words}");
        Ok(())
    });
}

/// Words of which no two are the same, far more than a serial port takes at once.
fn long_line() -> String {
    (100..400).map(|n| n.to_string()).collect::<Vec<_>>().join("-")
}

/// Types a long line at once; the guest's shell must have got all of it, in order.
fn type_and_check(scene: &Scene, host: &str) -> Result<()> {
    let mut console = Console::connect(&scene.console(host)?)?;
    for _ in 0..5 {
        let line = long_line();
        let output = console.run(&format!("echo {line}"), LINE_LIMIT)?;
        ensure!(output.text.trim() == line, "typed {line:?}, the guest got {:?}", output.text);
    }
    Ok(())
}

#[test]
fn what_is_typed_at_once_comes_to_a_guest_in_lockstep() {
    play_protected(lockstep(), |scene, client| {
        type_and_check(scene, "a")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        type_and_check(scene, "b")?;
        prove_survival(scene, client, "b")
    });
}
