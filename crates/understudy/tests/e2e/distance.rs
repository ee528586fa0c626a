//! A backup far away: 50 ms each way, over 100 Mbit/s.

use crate::stage::{
    Calm, PACE, await_service, daemon_with_peers, hand_over, options, play, prove_survival,
};
use anyhow::Result;
use std::time::Duration;
use understudy_lab::scene::VM;
use understudy_lab::{LongLine, RecordClient, Scene};

/// [`play`] with a guest on host a that is protected to the far host b, and its client.
fn play_far_away(story: impl FnOnce(&mut Scene, RecordClient) -> Result<()>) {
    let mut options = options().calm();
    let peers = format!("b = \"{}\"", LongLine::address());
    options.daemons.insert("a".to_owned(), daemon_with_peers(&peers).calm());
    play(options, |scene| {
        let line = LongLine::lay(scene.lab(), "b", 100_000_000)?;
        line.set_delay(Duration::from_millis(50));
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        story(scene, client)
    });
}

#[test]
fn a_backup_far_away_takes_over_and_loses_nothing() {
    play_far_away(|scene, client| {
        // A busy machine's disk may stand still for seconds, in which the backup is none.
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_planned_fail_over_to_a_backup_far_away() {
    play_far_away(|scene, client| {
        hand_over(scene.host("a")?, VM)?;
        prove_survival(scene, client, "b")
    });
}
