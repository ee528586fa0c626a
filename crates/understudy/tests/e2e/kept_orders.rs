//! Tests of what a keeper is told out of order, by whoever speaks on its sockets: it says why it
//! does not do that, and its guest does not notice.

use crate::keepers::{answered, begin, kept, with_keepers};
use crate::stage::{play, prove_survival};
use anyhow::{Context, Result, ensure};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use understudy_lab::Scene;
use understudy_lab::scene::VM;

/// Time for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// The word that goes with a socket for an order.
const ORDERED: u8 = 3;

/// Gives the keeper of host a's guest these descriptors with a word; whether it takes them.
fn pass(scene: &Scene, word: u8, descriptors: &[RawFd]) -> Result<bool> {
    let directory = scene.host("a")?.directory().join("state").join(VM);
    let mut keeper = UnixStream::connect(directory.join("peers.sock"))?;
    keeper.set_read_timeout(Some(PATIENCE))?;
    let beside = [ControlMessage::ScmRights(descriptors)];
    sendmsg::<()>(
        keeper.as_raw_fd(),
        &[IoSlice::new(&[word])],
        &beside,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    let mut answer = Vec::new();
    // It may be hung up with what was not read in it.
    let heard = keeper.read_to_end(&mut answer);
    Ok(heard.is_ok() && !answer.is_empty())
}

/// The answer to an order about a VM; nothing if it is not understood.
fn order(scene: &Scene, vm: &str, order: &Value) -> Result<Option<String>> {
    let (mut daemon, its_end) = UnixStream::pair()?;
    daemon.set_read_timeout(Some(PATIENCE))?;
    writeln!(daemon, "{}", json!({ "vm": vm, "order": order }))?;
    if !pass(scene, ORDERED, &[its_end.as_raw_fd()])? {
        return Ok(None);
    }
    drop(its_end);
    let mut line = String::new();
    BufReader::new(daemon).read_line(&mut line)?;
    let answer: Value = serde_json::from_str(&line)?;
    Ok(Some(answer["Err"]["message"].as_str().with_context(|| line.clone())?.to_owned()))
}

#[test]
fn a_keeper_refuses_orders_that_come_out_of_order_and_its_guest_does_not_notice() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let before = kept(&answered(scene, VM)?)?;
        let later = json!({ "least": 7, "highest": 9, "agents": { "least": 9, "highest": 9 } });
        let other_agent =
            json!({ "least": 1, "highest": 1, "agents": { "least": 70, "highest": 71 } });
        for (what, words) in [
            // It has a VM.
            (json!("adopt"), "it cannot go on with that of another"),
            (json!("restore"), "not its keeper's affair"),
            (json!("come-up"), "host a runs it"),
            (json!({ "may-leave": later }), "would not understand what this one leaves"),
            (json!({ "leave": later }), "would not understand what this one leaves"),
            (json!({ "leave": other_agent }), "would not understand the agent"),
            (json!({ "leave": { "least": 1, "highest": 1 } }), "as far as it says"),
        ] {
            let said = order(scene, VM, &what)?.with_context(|| format!("no answer to {what}"))?;
            ensure!(said.contains(words), "{what}: {said}");
        }
        let said = order(scene, "other", &json!("stop"))?.context("no answer")?;
        ensure!(said.contains("and of nothing else"), "{said}");
        let said = order(scene, VM, &json!("dance"))?;
        ensure!(said.is_none(), "an unknown order: {said:?}");
        let (one, other) = UnixStream::pair()?;
        for (word, descriptors) in [
            (9, &[one.as_raw_fd()][..]),
            (ORDERED, &[one.as_raw_fd(), other.as_raw_fd()]),
            (1, &[]),
        ] {
            ensure!(!pass(scene, word, descriptors)?, "it takes {word} with {descriptors:?}");
        }
        ensure!(kept(&scene.await_protected("a", |_| ())?)? == before, "another one");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
