//! Two guests protected as one group: one asks the other over a TCP connection
//! inside the group, while a client outside asks the first. Whatever fails, both
//! move together, both connections live on, and neither guest knows of anything
//! that the other has forgotten.

use crate::cluster_deaths::Moment;
use crate::refusals::log_of;
use crate::stage::{
    Calm, LIMIT, PACE, alone, await_forgotten, await_service, close, daemon_passing, fail_at,
    fail_over, hand_over, options, play, protection, prove_disk, refusal, repairing_daemon, vms,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Instant;
use understudy_client::Client;
use understudy_lab::check::check_disk;
use understudy_lab::companion::{COMPANION, COMPANION_ADDRESS, Companion};
use understudy_lab::scene::{RECORDS_PORT, VM};
use understudy_lab::{GuestShell, RecordClient, Scene, SceneOptions, wait_for};
use understudy_report::AgainRequest;

/// Answers inside the group that prove that the guests talk.
const ANSWERED: u64 = 20;
/// The members of the group.
pub const BOTH: [&str; 2] = [VM, COMPANION];

/// The conversation between the guests.
pub struct Inner {
    asking: GuestShell,
    answering: GuestShell,
    /// The asking program's process.
    pid: u32,
}

impl Inner {
    fn start(scene: &Scene, companion: &Companion) -> Result<Inner> {
        let mut asking = scene.shell()?;
        let server = format!("{COMPANION_ADDRESS}:{RECORDS_PORT}");
        let ask = format!("exec guest-tools ask {server} append /tmp/inner 2>/tmp/inner-error");
        let pid = asking.start(&ask)?;
        let mut inner = Inner { asking, answering: companion.shell(scene)?, pid };
        inner.prove_alive()?;
        Ok(inner)
    }

    /// Requests sent and answers received, as the asking guest knows.
    fn asked(&mut self) -> Result<(u64, u64)> {
        let text = self.asking.run("cat /tmp/inner /tmp/inner-error")?.text;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.next(), numbers.next()) {
            (Some(Ok(sent)), Some(Ok(answered)), None) => Ok((sent, answered)),
            _ => anyhow::bail!("the guests' conversation broke: {text}"),
        }
    }

    /// The last record that the answering guest has.
    fn last(&mut self) -> Result<u64> {
        let text = self.answering.run("tail -n 1 /data/records")?.text;
        let number = text.split(' ').next().and_then(|number| number.parse().ok());
        number.with_context(|| format!("no record in the companion: {text:?}"))
    }

    /// Ends the conversation; returns how many records were answered.
    pub fn stop(mut self) -> Result<u64> {
        self.asking.run(&format!("kill {}", self.pid))?;
        Ok(self.asked()?.1)
    }

    /// The guests go on talking on the connection that they always had, and
    /// agree on what was said.
    pub fn prove_alive(&mut self) -> Result<()> {
        let begin = wait_for("the guests to have begun", LIMIT, || Ok(self.asked().ok()))?.1;
        wait_for("the guests to talk", LIMIT, || {
            let (_, answered) = self.asked()?;
            Ok((answered >= begin + ANSWERED).then_some(()))
        })?;
        let (_, answered) = self.asked()?;
        let last = self.last()?;
        let (sent, _) = self.asked()?;
        ensure!(answered <= last, "record {answered} was answered, and {last} is the last");
        ensure!(last <= sent, "record {last} is there, and {sent} is the last sent");
        Ok(())
    }
}

fn play_group(story: impl FnOnce(&mut Scene, RecordClient, Inner) -> Result<()>) {
    play_group_with(SceneOptions { memory_mib: 256, ..options().calm() }, story);
}

/// Both guests on host a, protected to b as one group, talking.
pub fn play_group_with(
    options: SceneOptions,
    story: impl FnOnce(&mut Scene, RecordClient, Inner) -> Result<()>,
) {
    play(options, |scene| {
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        scene.await_guest()?;
        companion.await_boot(scene)?;
        protect(scene, "a", "b")?;
        let client = scene.record_client(PACE)?;
        let inner = Inner::start(scene, &companion)?;
        await_service(&client)?;
        story(scene, client, inner)
    });
}

/// Hands both guests, which talk, to the other host, and protects them back.
pub fn hand_both_over(
    scene: &Scene,
    client: &RecordClient,
    inner: &mut Inner,
    (from, to): (&str, &str),
) -> Result<()> {
    hand_over(scene.host(from)?, COMPANION)?;
    await_both(scene, to)?;
    await_forgotten(scene, from)?;
    await_service(client)?;
    inner.prove_alive()?;
    protect(scene, to, from)
}

/// Two hosts that protect again what has lost its protection.
pub fn repairing() -> SceneOptions {
    let mut options = SceneOptions { memory_mib: 256, ..options().calm() };
    for daemon in options.daemons.values_mut() {
        *daemon = repairing_daemon().calm();
    }
    options
}

/// Waits until `host` has protected both guests as one, without being told to.
pub fn await_protected_again(scene: &Scene, host: &str) -> Result<()> {
    wait_for(&format!("host {host} to protect both guests again, as one"), LIMIT, || {
        let again = |vm: &&str| -> Result<bool> {
            let status = scene.host(host)?.status(vm).unwrap_or_default();
            Ok(status["protection"]["state"] == "protected" && status["group"] == "pair")
        };
        let all: Vec<bool> = BOTH.iter().map(again).collect::<Result<_>>()?;
        Ok((all == [true, true]).then_some(()))
    })
}

pub fn protect(scene: &Scene, from: &str, to: &str) -> Result<()> {
    let host = scene.host(from)?;
    host.call(["protect", VM, COMPANION, "--group", "pair", "--to", to, "--no-wait"])?;
    for vm in BOTH {
        let status = host.await_protected(vm, |_| ())?;
        ensure!(status["group"] == "pair", "{vm} is in no group: {status}");
    }
    Ok(())
}

/// Waits until `host` runs both guests.
pub fn await_both(scene: &Scene, host: &str) -> Result<()> {
    let both = format!("host {host} to run both guests");
    wait_for(&both, LIMIT, || {
        let lives = |vm: &Value| vm["role"] == "primary" && vm["live"] == true;
        Ok((vms(scene.host(host)?)?.iter().filter(|vm| lives(vm)).count() == 2).then_some(()))
    })
}

/// Waits until `host` has halted both copies.
pub fn await_both_fenced(scene: &Scene, host: &str) -> Result<()> {
    wait_for(&format!("host {host} to halt both copies"), LIMIT, || {
        let all = vms(scene.host(host)?)?;
        Ok((all.len() == 2 && all.iter().all(|vm| vm["role"] == "fenced")).then_some(()))
    })
}

/// `host` took both over at the same epoch, and they and their clients go on.
pub fn prove_survival(
    scene: &Scene,
    client: RecordClient,
    mut inner: Inner,
    host: &str,
) -> Result<()> {
    await_both(scene, host)?;
    let epochs = take_over_epochs(scene, host)?;
    ensure!(epochs.len() == 2 && epochs[0] == epochs[1], "not one epoch: {epochs:?}");
    await_service(&client)?;
    inner.prove_alive()?;
    let answered = inner.stop()?;
    let image = scene.host(host)?.status(COMPANION)?["disks"][0]["path"].clone();
    let image = image.as_str().context("the companion has no disk")?.to_owned();
    prove_disk(scene, host, close(client)?)?;
    scene.host(host)?.call(["vm", "stop", COMPANION, "--force"])?;
    let check = check_disk(image.as_ref(), answered)?;
    ensure!(check.is_intact(), "{image} after {answered} records: {check:#?}");
    Ok(())
}

/// The epochs at which a host's daemon says that it took VMs over.
fn take_over_epochs(scene: &Scene, host: &str) -> Result<Vec<String>> {
    let log = std::fs::read_to_string(scene.host(host)?.directory().join("daemon.log"))?;
    let lines = log.lines().filter_map(|line| line.split_once("taking over at epoch "));
    Ok(lines.map(|(_, rest)| rest.split(':').next().unwrap_or_default().to_owned()).collect())
}

/// Daemons as they are by default: nobody protects the group again by hand, neither when its
/// backup has died nor when that has taken over.
#[test]
fn a_group_is_protected_again_by_itself() {
    play_group_with(repairing(), |scene, client, mut inner| {
        scene.host_mut("b")?.kill_everything()?;
        await_words(scene, VM, "looking for a backup")?;
        await_words(scene, COMPANION, "group pair is protected again with")?;
        await_service(&client)?;
        inner.prove_alive()?;
        scene.restart("b")?;
        await_protected_again(scene, "a")?;
        await_service(&client)?;
        inner.prove_alive()?;
        scene.host_mut("a")?.kill_everything()?;
        await_both(scene, "b")?;
        scene.restart("a")?;
        await_protected_again(scene, "b")?;
        await_service(&client)?;
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, inner, "a")
    });
}

/// Regression: nobody saw to the other one any more, which said for good that this one does.
#[test]
fn a_group_whose_leader_dies_while_it_is_unprotected_ends() {
    play_group_with(repairing(), |scene, client, inner| {
        inner.stop()?;
        scene.host_mut("b")?.kill_everything()?;
        await_words(scene, VM, "looking for a backup")?;
        await_words(scene, COMPANION, "group pair is protected again with")?;
        drop(client);
        scene.host("a")?.kill_qemu(VM)?;
        await_words(scene, COMPANION, "has died, which ended the group; not protected until")
    });
}

/// What is wanted had been read before: it was protected again.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_group_that_is_unprotected_as_it_is_about_to_be_protected_again_stays_so() {
    let again = Moment::new();
    let mut options = repairing();
    fail_at(&mut options, "a", &again.action("protect-group-again", ""));
    play_group_with(options, |scene, client, inner| {
        inner.stop()?;
        scene.host_mut("b")?.kill_everything()?;
        scene.restart("b")?;
        again.await_reached()?;
        scene.host("a")?.call(["unprotect", VM])?;
        again.end()?;
        wait_for("the repair to end", LIMIT, || {
            let words = "nobody wants it protected any more";
            Ok(log_of(scene, "a")?.contains(words).then_some(()))
        })?;
        for vm in BOTH {
            let status = scene.host("a")?.status(vm)?;
            ensure!(protection(&status).0 == "off", "{vm} is protected again: {status}");
        }
        await_forgotten(scene, "b")?;
        await_service(&client)?;
        prove_disk(scene, "a", close(client)?)
    });
}

/// A group that nobody wants repaired stays as it is, until its operator protects one of its VMs by
/// itself: the other one says that the group has ended.
#[test]
fn a_member_is_protected_by_itself() {
    play_group_with(repairing(), |scene, client, inner| {
        inner.stop()?;
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        let again =
            ["protect", VM, COMPANION, "--group", "pair", "--to", "b", "--no-repair", "--no-wait"];
        scene.host("a")?.call(again)?;
        BOTH.iter().try_for_each(|vm| scene.host("a")?.await_protected(vm, |_| ()).map(drop))?;
        scene.host_mut("b")?.kill_everything()?;
        // Not while the arbiter is asked.
        wait_for("the group to be given up", LIMIT, || {
            let status = scene.host("a")?.status(COMPANION)?;
            Ok(alone(&status).is_some().then_some(()))
        })?;
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        await_words(scene, COMPANION, "protected by itself, which ended the group")?;
        await_service(&client)?;
        prove_disk(scene, "a", close(client)?)
    });
}

/// The page's button protected one of them by itself, which ended the group, and let its console go.
#[test]
fn a_group_that_is_protected_again_is_as_it_was() {
    play_group_with(repairing(), |scene, client, mut inner| {
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        let group = ["--group", "pair", "--to", "b", "--hold-console", "--no-repair", "--no-wait"];
        scene.host("a")?.call([&["protect", VM, COMPANION][..], &group].concat())?;
        await_both_with_consoles(scene)?;
        scene.host_mut("b")?.kill_everything()?;
        wait_for("the group to be given up", LIMIT, || {
            let given_up =
                |vm: &&str| -> Result<bool> { Ok(alone(&scene.host("a")?.status(vm)?).is_some()) };
            let all = BOTH.iter().map(given_up).collect::<Result<Vec<bool>>>()?;
            Ok((all == [true, true]).then_some(()))
        })?;
        scene.restart("b")?;
        let wanted = scene.host("a")?.status(COMPANION)?["wanted"].clone();
        ensure!(wanted["group"] == "pair" && wanted["hold_console"] == true, "{wanted}");
        let again = AgainRequest { to: "b".to_owned() };
        let begun = Client::new(scene.host("a")?.socket())
            .and_then(|client| client.protect_again(COMPANION, &again));
        begun.map_err(|failure| anyhow::anyhow!(failure.message))?;
        await_both_with_consoles(scene)?;
        await_service(&client)?;
        inner.prove_alive()?;
        prove_disk(scene, "a", close(client)?)
    });
}

/// Waits until host a has both protected as one, with their consoles held.
fn await_both_with_consoles(scene: &Scene) -> Result<()> {
    for vm in BOTH {
        let status = scene.host("a")?.await_protected(vm, |_| ())?;
        ensure!(status["group"] == "pair", "{vm} is in no group: {status}");
        ensure!(status["held_console_bytes"].is_u64(), "its console is not held: {status}");
    }
    Ok(())
}

/// Waits until a VM on host a is not protected, and says so in these words.
fn await_words(scene: &Scene, vm: &str, words: &str) -> Result<()> {
    wait_for(&format!("{vm} to say `{words}`"), LIMIT, || {
        let status = scene.host("a")?.status(vm)?;
        let (state, reason) = protection(&status);
        Ok((state == "degraded" && reason.contains(words)).then_some(()))
    })
}

#[test]
fn one_members_qemu_is_killed_and_the_group_moves() {
    play_group(|scene, client, inner| {
        scene.host("a")?.kill_qemu(COMPANION)?;
        prove_survival(scene, client, inner, "b")?;
        await_both_fenced(scene, "a")
    });
}

// Before, the other member was ended, too, which nobody else had.
#[test]
fn a_member_that_dies_in_the_first_copy_takes_the_other_not_along() {
    play(SceneOptions { memory_mib: 256, ..options().calm() }, |scene| {
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        scene.await_guest()?;
        companion.await_boot(scene)?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.lab().limit_speed("b", 8)?;
        let a = scene.host("a")?;
        a.call(["protect", VM, COMPANION, "--group", "pair", "--to", "b", "--no-wait"])?;
        let status = a.status(VM)?;
        ensure!(protection(&status).0 == "syncing", "too fast to die meanwhile: {status}");
        a.kill_qemu(COMPANION)?;
        wait_for("the group to be given up", LIMIT, || {
            Ok(alone(&scene.status("a")?).is_some().then_some(()))
        })?;
        wait_for("the companion to have ended", LIMIT, || {
            Ok((a.status(COMPANION)?["role"] == "fenced").then_some(()))
        })?;
        await_service(&client)?;
        prove_disk(scene, "a", close(client)?)
    });
}

// Before, the member that started was live, and the other, which its former host still had, was ended there.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_group_of_which_one_member_cannot_be_started_stays_whole_where_it_was() {
    let mut options = SceneOptions { memory_mib: 256, ..options().calm() };
    options.daemons.insert("b".to_owned(), daemon_passing("before-start=1*return".to_owned()));
    play_group_with(options, |scene, client, mut inner| {
        let output = fail_over(scene.host("a")?, VM)?;
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "it was handed over");
        ensure!(words.contains("goes on here without having lost anything"), "{words}");
        await_both(scene, "a")?;
        await_service(&client)?;
        inner.prove_alive()?;
        await_forgotten(scene, "b")?;
        prove_disk(scene, "a", close(client)?)
    });
}

#[test]
fn the_host_of_a_group_is_cut_off() {
    play_group(|scene, client, inner| {
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        let cut_at = Instant::now();
        scene.lab().cut("a")?;
        await_both(scene, "b")?;
        await_service(&client)?;
        await_both_fenced(scene, "a")?;
        scene.lab().heal("a")?;
        await_service(&client)?;
        let first = b.first_frame_after(cut_at)?.context("b answered no client")?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        prove_survival(scene, client, inner, "b")
    });
}

/// Regression: the winner answered by the first of them alone, and that host kept both until its operator ended them.
#[test]
fn a_host_that_was_cut_off_ends_its_copies_also_if_the_first_has_died_since() {
    play_group(|scene, client, inner| {
        inner.stop()?;
        scene.lab().cut("a")?;
        await_both(scene, "b")?;
        await_service(&client)?;
        drop(client);
        scene.host("b")?.kill_qemu(VM)?;
        wait_for("the first of them to have ended", LIMIT, || {
            Ok((scene.host("b")?.status(VM)?["role"] == "fenced").then_some(()))
        })?;
        scene.lab().heal("a")?;
        let a = scene.host("a")?;
        wait_for("host a to keep none of them", LIMIT, || {
            Ok((a.namespace().processes()? == [a.pid()]).then_some(()))
        })?;
        await_both_fenced(scene, "a")?;
        ensure!(scene.host("b")?.status(COMPANION)?["live"] == true, "the other one has ended");
        Ok(())
    });
}

#[test]
fn a_group_fails_over_and_back_and_ends_as_one() {
    play_group(|scene, client, mut inner| {
        for (from, to) in [("a", "b"), ("b", "a")] {
            hand_both_over(scene, &client, &mut inner, (from, to))?;
        }
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        for vm in BOTH {
            let status = scene.host("a")?.status(vm)?;
            ensure!(protection(&status).0 == "off", "{vm} is still protected: {status}");
        }
        await_service(&client)?;
        inner.prove_alive()?;
        prove_disk(scene, "a", close(client)?)
    });
}

/// The group ends with a member that powers off; who is left says so.
#[test]
fn a_member_powers_off() {
    play_group(|scene, client, mut inner| {
        refuse(scene)?;
        inner.answering.start("poweroff")?;
        await_words(scene, VM, COMPANION)?;
        await_forgotten(scene, "b")?;
        await_service(&client)?;
        prove_disk(scene, "a", close(client)?)
    });
}

/// Checks that what cannot be a group is refused, with words, and nothing is changed.
fn refuse(scene: &Scene) -> Result<()> {
    let host = scene.host("a")?;
    let cases = [
        (&["protect", VM, COMPANION, "--to", "b"][..], "--group"),
        (&["protect", VM, "--group", "one", "--to", "b"], "at least two"),
        (&["protect", VM, VM, "--group", "twin", "--to", "b"], "named twice"),
        (&["protect", VM, "nobody", "--group", "odd", "--to", "b"], "must run on the host"),
        (&["protect", VM, COMPANION, "--group", "a/b", "--to", "b"], "name of a group"),
        (&["protect", VM, COMPANION, "--group", "again", "--to", "b"], "already"),
    ];
    for (arguments, word) in cases {
        let (_, words) = refusal(host, arguments)?;
        ensure!(words.contains(word), "{arguments:?}: no {word:?} in: {words}");
    }
    Ok(())
}
