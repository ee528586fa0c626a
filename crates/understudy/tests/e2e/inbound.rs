//! Tests that what clients have just said is not lost with the primary, nor what the guest has just
//! answered: the backup has a copy, as much of it as it needs and no more.

use crate::deaths::await_empty;
use crate::stage::{Calm, LIMIT, PACE, close, daemon_passing, options, play, prove_disk};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Duration;
use understudy_lab::scene::ECHO_PORT;
use understudy_lab::{CLIENT_ADDRESS, ChatterClient, Lab, Load, Scene};
use understudy_lab::{SceneOptions, in_namespace, wait_for};
use understudy_protocol::{FORWARDED_BYTES, Policy};

/// A client that says no more in a test than its first word.
const SILENCE: Duration = Duration::from_secs(3600);
/// The number of uploads at a time, more than is copied of an epoch.
const UPLOADS: usize = 16;
const UPLOAD_BYTES: usize = 64 << 10;
/// The discard service, which no guest offers.
const UNUSED_PORT: u16 = 9;
/// Releases of a host before it dies in the next one.
const RELEASES: u32 = 6;

/// Epochs of this length: what happens in one can be seen from outside.
fn epochs(hz: u32) -> SceneOptions {
    SceneOptions { policy: Some(Policy::Interval { hz }), ..options().calm() }
}

/// Whether `holds` of host b's status, too, once host a stands still, as it does from then on if so.
fn still(scene: &Scene, holds: impl FnOnce(&Value) -> Result<bool>) -> Result<bool> {
    scene.host("a")?.pause()?;
    let still = holds(&scene.status("b")?)?;
    if !still {
        scene.host("a")?.resume()?;
    }
    Ok(still)
}

#[test]
fn a_request_of_an_uncommitted_epoch_is_answered_without_being_repeated() {
    play(epochs(1), |scene| {
        forbid_retransmissions(scene.lab())?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        wait_for("the first answer", LIMIT, || Ok((client.acked() > 0).then_some(())))?;
        let epoch = scene.status("a")?["epoch"].as_u64();
        // Soon after a commit, so that there is time until the next one.
        wait_for("a request in an uncommitted epoch", LIMIT, || {
            ensure!(!client.failed(), "the client's connection broke");
            let (a, b) = (scene.status("a")?, scene.status("b")?);
            let is_copied = count(&a, "frames")? == count(&b, "frames")?;
            let is_kept = count(&b, "kept_frames")? > 0;
            let is_answered = a["held_frames"].as_u64() > Some(0);
            let is_next = a["epoch"].as_u64() > epoch;
            let is_there = is_next && is_copied && is_kept && is_answered;
            // It is not committed before host a dies: until then that stands still.
            Ok((is_there && still(scene, |b| Ok(count(b, "kept_frames")? > 0))?).then_some(()))
        })?;
        let (acked, repeated) = (client.acked(), retransmissions(scene.lab())?);
        scene.host_mut("a")?.kill_everything()?;
        let status = scene.await_live("b")?;
        let injected = status["takeover"]["injected_frames"].as_u64();
        ensure!(injected > Some(0), "nothing was injected: {status}");
        // One more may have been on its way to the client when a died.
        wait_for("the answer from b", LIMIT, || {
            ensure!(!client.failed(), "the client's connection broke");
            Ok((client.acked() > acked + 1).then_some(()))
        })?;
        ensure!(retransmissions(scene.lab())? == repeated, "the client had to repeat itself");
        let acked = close(client)?;
        prove_disk(scene, "b", acked)
    });
}

#[test]
fn what_a_committed_epoch_has_received_is_not_injected() {
    play(epochs(10), |scene| {
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(SILENCE)?;
        wait_for("the answer", LIMIT, || Ok((client.acked() == 1).then_some(())))?;
        wait_for("a copy of what the guest receives", LIMIT, || {
            // What was committed before it could be sent is not copied.
            ask(scene)?;
            Ok((count(&scene.status("b")?, "frames")? > 0).then_some(()))
        })?;
        let answered = scene.status("a")?["epoch"].as_u64();
        wait_for("every copy to be forgotten", LIMIT, || {
            let b = scene.status("b")?;
            // The client has confirmed the answer long since.
            let is_later = b["epoch"].as_u64() > answered.map(|epoch| epoch + 5);
            // Nothing comes, to be copied, before host a dies: until then that stands still.
            let none = |b: &Value| Ok(count(b, "kept_frames")? == 0);
            Ok((is_later && none(&b)? && still(scene, none)?).then_some(()))
        })?;
        scene.host_mut("a")?.kill_everything()?;
        let status = scene.await_live("b")?;
        ensure!(status["takeover"]["injected_frames"] == 0, "{}", status["takeover"]);
        let acked = close(client)?;
        ensure!(acked == 1, "{acked} records");
        prove_disk(scene, "b", acked)
    });
}

#[test]
fn of_an_upload_only_the_beginning_of_each_epoch_is_copied() {
    play(epochs(4), |scene| {
        scene.protected_guest("a", "b")?;
        let (load, server) = (Load::Bulk(UPLOAD_BYTES), scene.guest(ECHO_PORT));
        let upload = ChatterClient::start(scene.lab(), server, UPLOADS, load, Duration::ZERO)?;
        let bound = FORWARDED_BYTES as u64;
        wait_for("an epoch that receives more than is copied", LIMIT, || {
            ensure!(!upload.failed(), "the upload broke");
            let (b, a) = (scene.status("b")?, scene.status("a")?);
            let epoch = a["epoch"].as_u64().context("no epoch")?;
            let bytes = count(&a, "bytes")?;
            // Those that run and are in flight, and the one that begins, beside the committed.
            ensure!(bytes <= (epoch + 4) * bound, "{bytes} bytes by epoch {epoch}");
            let kept = count(&b, "kept_bytes")?;
            ensure!(kept <= 4 * bound, "b keeps {kept} bytes");
            Ok((count(&a, "dropped")? > 0).then_some(()))
        })?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        let rounds = upload.least_rounds();
        wait_for("the upload to go on", LIMIT, || {
            ensure!(!upload.failed(), "the upload broke");
            Ok((upload.least_rounds() > rounds).then_some(()))
        })?;
        let report = upload.stop();
        ensure!(report.errors().is_empty(), "the upload: {:?}", report.errors());
        Ok(())
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn answers_of_a_committed_epoch_that_were_not_released_come_from_the_backup() {
    let mut options = epochs(1);
    let action = format!("before-release={RELEASES}*off->panic");
    options.daemons.insert("a".to_owned(), daemon_passing(action));
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        // One in each epoch, soon after it began; so one in that which a does not release.
        let mut questions = Vec::new();
        let mut epoch = 0;
        wait_for("host a to die", LIMIT, || {
            if !scene.host_mut("a")?.is_running() {
                return Ok(Some(()));
            }
            // A host that is dying does not say.
            let Ok(status) = scene.status("a") else { return Ok(None) };
            let released = status["epoch"].as_u64().context("no epoch")?;
            if released > epoch {
                epoch = released;
                questions.push(ask(scene)?);
            }
            Ok(None)
        })?;
        await_empty(scene, "a")?;
        let status = scene.await_live("b")?;
        let resent = status["takeover"]["resent_frames"].as_u64();
        ensure!(resent > Some(0), "nothing was sent again: {status}");
        // Nobody repeats these: not the client, nor the guest.
        for (n, question) in questions.iter().enumerate() {
            let answer = question.recv(&mut [0]).map_err(|error| error.kind());
            let is_answered = answer == Err(ErrorKind::ConnectionRefused);
            ensure!(is_answered, "question {} of {}: {answer:?}", n + 1, questions.len());
        }
        Ok(())
    });
}

/// Asks the guest for a service that it does not offer: its kernel says so, once.
fn ask(scene: &Scene) -> Result<UdpSocket> {
    let bind = || UdpSocket::bind((CLIENT_ADDRESS, 0));
    let socket = in_namespace(&scene.lab().client(), bind)??;
    socket.connect(scene.guest(UNUSED_PORT))?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.send(&[0])?;
    Ok(socket)
}

/// The count of copied frames in a host's status.
fn count(status: &Value, field: &str) -> Result<u64> {
    let count = status["inbound"][field].as_u64();
    count.with_context(|| format!("status has no inbound.{field}: {status}"))
}

/// The client's TCP waits longer than any test before it repeats something.
fn forbid_retransmissions(lab: &Lab) -> Result<()> {
    let source = CLIENT_ADDRESS.to_string();
    let network = ["route", "replace", "10.77.0.0/24", "dev", "net", "scope", "link"];
    let changed = lab
        .client()
        .command("ip")
        .args(network)
        .args(["src", &source, "rto_min", "600s"])
        .status()
        .context("cannot run ip")?;
    ensure!(changed.success(), "ip route: {changed}");
    Ok(())
}

/// Segments that the client's TCP has sent more than once, on any connection.
fn retransmissions(lab: &Lab) -> Result<u64> {
    // Of this thread's namespace, not of the process's.
    let read = || std::fs::read_to_string("/proc/thread-self/net/snmp");
    let text = in_namespace(&lab.client(), read)??;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    let (_, value) = pairs.find(|(name, _)| *name == "RetransSegs").context("no RetransSegs")?;
    Ok(value.parse()?)
}
