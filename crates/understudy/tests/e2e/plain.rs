//! The guest that the product's guests are compared with: QEMU without the product.

use crate::stage::{LIMIT, options, play};
use anyhow::{Context, Result, ensure};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT};
use understudy_lab::{
    GuestShell, Lab, MigrationLimits, PlainGuest, PlainOptions, SceneOptions, in_namespace,
    wait_for,
};

/// A paused guest is watched for so long.
const SILENCE: Duration = Duration::from_millis(700);

fn connect(lab: &Lab, to: SocketAddr) -> Result<TcpStream> {
    let connection = in_namespace(&lab.client(), || TcpStream::connect_timeout(&to, LIMIT))??;
    connection.set_read_timeout(Some(LIMIT))?;
    Ok(connection)
}

fn await_echo(connection: &mut TcpStream, word: &[u8]) -> Result<()> {
    let mut answer = vec![0; word.len()];
    connection.read_exact(&mut answer).context("the guest's echo")?;
    ensure!(answer == word, "the guest answered {answer:?} to {word:?}");
    Ok(())
}

#[test]
fn a_plain_guest_runs_beside_a_managed_one_and_leaves_nothing() {
    let options = options();
    let plain = PlainOptions::test_guest(&options.guest_files);
    play(options, |scene| {
        scene.start_guest("a")?;
        let guest = PlainGuest::start(scene.lab(), "a", &plain)?;
        guest.await_boot(scene.lab(), &[ECHO_PORT])?;
        scene.await_guest()?;

        let mut connection = connect(scene.lab(), guest.server(ECHO_PORT))?;
        connection.write_all(b"before")?;
        await_echo(&mut connection, b"before")?;
        guest.pause()?;
        connection.write_all(b"while paused")?;
        connection.set_read_timeout(Some(SILENCE))?;
        let heard = connection.read(&mut [0; 1]).map_err(|error| error.kind());
        ensure!(heard == Err(ErrorKind::WouldBlock), "a paused guest answers: {heard:?}");
        guest.resume()?;
        connection.set_read_timeout(Some(LIMIT))?;
        await_echo(&mut connection, b"while paused")?;
        let pauses = wait_for("the pause in QEMU's events", LIMIT, || {
            Ok(Some(guest.pauses()).filter(|pauses| !pauses.is_empty()))
        })?;
        ensure!(pauses.len() == 1 && pauses[0] >= SILENCE, "{pauses:?}");

        let (pid, console) = (guest.qemu_pid(), guest.console().to_owned());
        ensure!(console.exists(), "the guest has no console at {}", console.display());
        drop(guest);
        ensure!(!Path::new("/proc").join(pid.to_string()).exists(), "QEMU {pid} still runs");
        ensure!(!console.exists(), "{} is left behind", console.display());
        let interfaces = scene.lab().host("a")?.interfaces()?;
        ensure!(!interfaces.contains(&plain.name), "a tap is left behind: {interfaces:?}");
        Ok(())
    });
}

#[test]
fn a_plain_guest_migrates_with_its_connections_or_stays_where_it_is() {
    let options = SceneOptions { hosts: vec!["a".to_owned()], ..options() };
    let plain = PlainOptions::test_guest(&options.guest_files);
    play(options, |scene| {
        let lab = scene.lab();
        let mut guest = PlainGuest::start(lab, "a", &plain)?;
        guest.await_boot(lab, &[ECHO_PORT, SHELL_PORT])?;
        let mut connection = connect(lab, guest.server(ECHO_PORT))?;
        let mut echo = |word: &[u8]| {
            connection.write_all(word)?;
            await_echo(&mut connection, word)
        };
        let mut shell = GuestShell::connect(lab, guest.server(SHELL_PORT))?;
        shell.start("exec guest-tools dirty 1000 20")?;
        echo(b"on the source")?;

        let pid = guest.qemu_pid();
        let migrated = guest.migrate(lab, &MigrationLimits::default(), LIMIT)?;
        let migration = migrated.context("QEMU found no moment to switch")?;
        ensure!(guest.qemu_pid() != pid, "the guest is in the same QEMU");
        ensure!(!migration.downtime.is_zero() && migration.downtime < migration.total);
        ensure!(migration.rounds >= 2 && migration.bytes > 1 << 20, "{migration:?}");
        echo(b"on the target")?;

        // The guest's memory does not fit through this in so short a time.
        let crawl = MigrationLimits { bandwidth: 1 << 20, ..Default::default() };
        let pid = guest.qemu_pid();
        let migrated = guest.migrate(lab, &crawl, Duration::from_secs(1))?;
        ensure!(migrated.is_none() && guest.qemu_pid() == pid, "{migrated:?}");
        echo(b"still there")?;

        let migrated = guest.migrate(lab, &MigrationLimits::default(), LIMIT)?;
        ensure!(migrated.is_some(), "the second migration came to no end");
        echo(b"on the second target")
    });
}

#[test]
fn a_plain_guest_that_cannot_start_says_why_and_leaves_nothing() {
    let options = options();
    let mut plain = PlainOptions::test_guest(&options.guest_files);
    plain.append.clear();
    plain.disks.clear();
    play(options, |scene| {
        let refusal = |plain: &PlainOptions| {
            let started = PlainGuest::start(scene.lab(), "a", plain);
            started.err().map(|error| format!("{error:#}")).unwrap_or_default()
        };
        let missing = PlainOptions { kernel: "/nowhere/vmlinuz".into(), ..plain.clone() };
        let text = refusal(&missing);
        ensure!(text.contains("/nowhere/vmlinuz"), "{text}");
        // A kernel that QEMU refuses: it has greeted nobody when it ends.
        let wrong = PlainOptions { kernel: "/proc/version".into(), ..plain.clone() };
        let text = refusal(&wrong);
        ensure!(text.contains("QEMU ended with"), "{text}");
        let taken = PlainOptions { name: "uplink".to_owned(), ..plain.clone() };
        let text = refusal(&taken);
        ensure!(text.contains("has an interface `uplink`"), "{text}");
        Ok(())
    });
}
