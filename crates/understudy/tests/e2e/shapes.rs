//! A guest with two of everything.

use crate::deaths::{await_rounds, unharmed};
use crate::lockstep::console_of;
use crate::pauses::through_qmp;
use crate::refusals::says;
use crate::sick_hosts::Hanging;
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, await_service, close, hand_over, options, play, play_protected,
    prove_disk, prove_survival, refusal, run,
};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use understudy_lab::check::{check_file_system, read_file};
use understudy_lab::scene::{ECHO_PORT, VM};
use understudy_lab::{ChatterClient, GuestShell, Load, SceneOptions, wait_for};

/// QEMU's default for qcow2.
const CLUSTER_BYTES: u64 = 64 << 10;

#[test]
fn two_vcpus_two_disks_and_two_cards_survive() {
    let shape = SceneOptions { vcpus: 2, disks: 2, cards: 2, ..options().calm() };
    play_protected(SceneOptions { second_disk_is_qcow2: true, ..shape }, |scene, client| {
        let lab = scene.lab();
        let echo = |to| ChatterClient::start(lab, to, 4, Load::Bulk(4096), LOAD_PACE);
        let first = echo(scene.guest(ECHO_PORT))?;
        let second = echo(scene.guest_second(ECHO_PORT))?;
        let mut shell = scene.shell()?;
        ensure!(shell.run("nproc")?.text.trim() == "2", "the guest has not two vCPUs");
        for _ in 0..2 {
            shell.start("exec nice guest-tools dirty 500 50")?;
        }
        shell.start(
            "while :; do dd if=/dev/urandom of=/data2/noise bs=64k count=8; sync; sleep 0.1; done",
        )?;
        // Answered, and so committed, in the moment before the host dies.
        let written = shell.run("seq 1 20000 > /data2/marker && sync")?;
        ensure!(written.code == 0, "the guest cannot write to its second disk: {written:?}");
        await_rounds(&first, 2)?;
        await_rounds(&second, 2)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        for chatter in [&first, &second] {
            await_rounds(chatter, 2)?;
        }
        await_service(&client)?;
        ensure!(shell.run("echo $((6 * 7))")?.text.trim() == "42", "the shell is confused");
        unharmed(&first.stop())?;
        unharmed(&second.stop())?;
        let acked = close(client)?;
        let image = scene.disk("b", 1)?;
        prove_disk(scene, "b", acked)?;
        let raw = to_raw(&image)?;
        let complaint = check_file_system(&raw)?;
        ensure!(complaint.is_none(), "the second disk is damaged: {complaint:?}");
        let marker: String = (1..=20000).map(|number| format!("{number}\n")).collect();
        ensure!(read_file(&raw, "/marker")? == marker.as_bytes(), "/marker is damaged");
        Ok(())
    });
}

/// Data that the guest was told are written, and did not flush: qcow2 keeps its tables back in
/// QEMU.
#[test]
fn what_was_written_to_a_qcow2_disk_and_not_flushed_goes_over() {
    let shape = SceneOptions { disks: 2, second_disk_is_qcow2: true, ..options().calm() };
    play_protected(shape, |scene, client| {
        let mut shell = scene.shell()?;
        let aside = shell.run("umount /data2")?;
        ensure!(aside.code == 0, "the guest keeps its second disk: {aside:?}");
        let first = write_unflushed(&mut shell, 400)?;
        await_service(&client)?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        ensure!(sum_of(&mut shell, 400)? == first, "a planned fail-over lost writes");
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        let second = write_unflushed(&mut shell, 600)?;
        await_service(&client)?;
        scene.host_mut("b")?.kill_everything()?;
        scene.await_live("a")?;
        await_service(&client)?;
        ensure!(sum_of(&mut shell, 600)? == second, "the death of its host lost writes");
        ensure!(sum_of(&mut shell, 400)? == first, "the death of its host lost old writes");
        Ok(())
    });
}

/// The second disk's own host loses it between a write and the pause behind it. QEMU could not write the tables,
/// said nothing of it, and the backup's guest read zeros where it had been told that it had written.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_pause_through_qmp_that_leaves_a_disks_tables_unwritten_is_no_checkpoint() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let (due, failing) = (Hanging::new(), directory.path().join("fails"));
    let shape = SceneOptions { disks: 2, second_disk_is_qcow2: true, ..through_qmp() };
    let mut daemons = shape.daemons.clone();
    let fails = format!("write-one-disk=return({})", failing.display());
    let points = [due.action("checkpoint-due"), fails].join(";");
    daemons.entry("a".to_owned()).or_default().environment.push(("FAILPOINTS".to_owned(), points));
    play_protected(SceneOptions { daemons, ..shape }, |scene, client| {
        let mut shell = scene.shell()?;
        let ready = shell.run(
            "umount /data2 && dd if=/dev/urandom of=/tmp/noise bs=64k count=64 && \
             dd if=/tmp/noise of=/dev/vdb bs=64k oflag=direct",
        )?;
        ensure!(ready.code == 0, "the guest's second disk is not its own: {ready:?}");
        shell.start(WRITE_LATER)?;
        due.begin()?;
        let said = |word| -> Result<bool> {
            Ok(String::from_utf8_lossy(&console_of(scene, "a")?).contains(word))
        };
        ensure!(!said("WRITTEN")?, "the guest wrote before its checkpoint was held back");
        wait_for("the guest to write", LIMIT, || Ok(said("WRITTEN")?.then_some(())))?;
        fs::write(&failing, "1")?;
        due.end()?;
        scene.await_live("b")?;
        fs::remove_file(&failing)?;
        await_service(&client)?;
        wait_for("the guest to have written", LIMIT, || {
            Ok((shell.run("test -e /tmp/all-written")?.code == 0).then_some(()))
        })?;
        let noise = sum(&mut shell, "md5sum < /tmp/noise")?;
        ensure!(sum_of(&mut shell, 400)? == noise, "what was answered as written is not there");
        prove_survival(scene, client, "b")
    });
}

/// Writes to clusters that have none yet, and later, in an epoch of its own, to one that has.
const WRITE_LATER: &str = "sleep 20; dd if=/tmp/noise of=/dev/vdb bs=64k seek=400 oflag=direct && \
                           echo WRITTEN > /dev/console; sleep 3; \
                           dd if=/tmp/noise of=/dev/vdb bs=64k count=1 oflag=direct; \
                           touch /tmp/all-written";

/// Writes 4 MiB that lie in clusters which have none yet; gives their sum.
fn write_unflushed(shell: &mut GuestShell, cluster: u32) -> Result<String> {
    let write = format!(
        "dd if=/dev/urandom of=/tmp/noise bs=64k count=64 && \
         dd if=/tmp/noise of=/dev/vdb bs=64k seek={cluster} oflag=direct && md5sum < /tmp/noise"
    );
    sum(shell, &write)
}

fn sum_of(shell: &mut GuestShell, cluster: u32) -> Result<String> {
    sum(shell, &format!("dd if=/dev/vdb bs=64k skip={cluster} count=64 iflag=direct | md5sum"))
}

fn sum(shell: &mut GuestShell, line: &str) -> Result<String> {
    let output = shell.run(line)?;
    let sum = output.text.split_whitespace().find(|word| word.len() == 32);
    let sum = sum.with_context(|| format!("no sum: {output:?}"))?;
    Ok(sum.to_owned())
}

/// The tables say of their own beginning that it is nobody's, as if power had failed at a wrong moment.
fn damage(image: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(image)?;
    let number = |at: u64| -> Result<u64> {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_be_bytes(bytes))
    };
    let (first_level, counts) = (number(40)? / CLUSTER_BYTES, number(number(48)?)?);
    Ok(file.write_all_at(&[0; 2], counts + 2 * first_level)?)
}

/// The guest was started, and did not find its disk.
#[test]
fn a_qcow2_disk_with_damaged_tables_is_not_started_on() {
    let shape = SceneOptions { disks: 2, second_disk_is_qcow2: true, ..options() };
    play(shape, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let image = scene.disk("a", 1)?;
        let a = scene.host("a")?;
        a.call(["vm", "stop", VM, "--force"])?;
        damage(&image)?;
        let (_, words) = refusal(a, &["recover", VM])?;
        says(&words, &["damaged", "qemu-img check -r all", &image.to_string_lossy()])?;
        let definition = scene.definition().to_string_lossy().into_owned();
        let (_, words) = refusal(a, &["vm", "start", &definition])?;
        says(&words, &["damaged"])?;
        run("qemu-img", &["check", "-q", "-f", "qcow2", "-r", "all", &image.to_string_lossy()])?;
        a.call(["recover", VM])?;
        scene.await_guest()?;
        a.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// The content of a qcow2 image, which must be sound itself.
fn to_raw(image: &Path) -> Result<PathBuf> {
    let check =
        Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(image).output()?;
    // Exit code 3 is leaked clusters: a crash may leave those, they hold nothing.
    ensure!(matches!(check.status.code(), Some(0 | 3)), "the qcow2 image is damaged: {check:?}");
    let raw = image.with_extension("raw");
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    let converted = Command::new("qemu-img").args(convert).args([image, &raw]).output()?;
    ensure!(converted.status.success(), "qemu-img convert failed: {converted:?}");
    Ok(raw)
}
