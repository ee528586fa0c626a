//! Every way to encode pages: the guest's memory is right on the other host.

use crate::resync::protect_again;
use crate::sick_disks::Failing;
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_service, daemon_passing, has_backup, options, play,
    prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, RecordClient, Scene, wait_for};

/// Two files in the guest's memory get the same few bytes in the same place, again
/// and again: at any moment they differ by one such write at most.
const TWINS: &str = "i=0; while :; do i=$((i + 1)); o=$((i * 7919 % 4194304)); for f in /a /b; do \
                     printf %08d $i | dd of=$f bs=1 seek=$o conv=notrunc; done; sleep 0.02; done";
const WRITE_BYTES: u64 = 8;

/// Pages that compress badly, pages that change everywhere, pages that change a little.
const LOADS: [&str; 3] = [
    "while :; do dd if=/dev/urandom of=/noise bs=64k count=8; sleep 0.1; done",
    "while :; do seq 1 60000 > /text; rm /text; sleep 0.1; done",
    "guest-tools dirty 300 20",
];

#[test]
fn memory_is_right_with_every_compression() {
    play(options().calm(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        let mut shell = scene.shell()?;
        shell.run("dd if=/dev/urandom of=/a bs=64k count=64")?;
        for load in LOADS {
            shell.start(load)?;
        }
        let modes = ["none", "general", "xor", "hybrid", "auto"];
        let (mut here, mut there) = ("a", "b");
        for mode in modes {
            let call = ["protect", VM, "--to", there, "--no-wait", "--compression", mode];
            scene.host(here)?.call(call)?;
            scene.await_protected(here, |_| ())?;
            await_service(&client)?;
            shell.run("cp /a /b")?;
            let twins = shell.start(TWINS)?;
            await_method(scene, here, mode)?;
            scene.host_mut(here)?.kill_everything()?;
            scene.await_live(there)?;
            await_service(&client)?;
            compare_twins(&mut shell, twins).with_context(|| format!("after {mode}"))?;
            scene.restart(here)?;
            (here, there) = (there, here);
        }
        prove_survival(scene, client, here)
    });
}

/// A file that does not change, and how the guest reads it from its disk.
const MAKE_STILL: &str =
    "dd if=/dev/urandom of=/data/still bs=1M count=12 2> /dev/null && sync && md5sum /data/still";
const READ_STILL: &str = "echo 3 > /proc/sys/vm/drop_caches; cat /data/still > /dev/null";

/// A file that changes between reads from the disk, and what was wrong with it ever.
const CHURN: &str = "while :; do dd if=/dev/urandom of=/tmp/new bs=64k count=32; \
                     cp /tmp/new /data/churn; sync; echo 3 > /proc/sys/vm/drop_caches; \
                     cat /data/still > /dev/null; cmp /tmp/new /data/churn >> /tmp/bad 2>&1; \
                     echo >> /tmp/rounds; done";
/// The number that is enough for the test to be about them.
const REFERENCES: u64 = 500;

/// Remus 5, introspection: what was read from a disk is read on the backup too.
#[test]
fn pages_read_from_the_disk_are_read_from_the_mirror() {
    play(options().calm(), |scene| {
        let (client, mut shell, still) = with_references(scene)?;
        let churn = shell.start(CHURN)?;
        let so_far = references(scene)?;
        await_rounds(&mut shell, 3)?;
        await_references(scene, so_far + REFERENCES, || Ok(()))?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        same_file(&mut shell, &still)?;
        let rounds = rounds(&mut shell)?;
        await_rounds(&mut shell, rounds + 2)?;
        let bad = shell.run(&format!("kill -9 -{churn}; cat /tmp/bad"))?;
        ensure!(bad.text.trim().is_empty(), "the guest read what it had not written: {bad:?}");
        prove_survival(scene, client, "b")
    });
}

/// A guest on host a, whose pages that come from its disk go to host b as references; and the sum of the file that
/// it reads.
fn with_references(scene: &mut Scene) -> Result<(RecordClient, GuestShell, String)> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    // On a link as fast as this one, nothing is looked for unless it is asked for.
    scene.host("a")?.call(["protect", VM, "--to", "b", "--compression", "hybrid"])?;
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    let mut shell = scene.shell()?;
    let still = shell.run(MAKE_STILL)?;
    ensure!(still.code == 0, "`{MAKE_STILL}` failed: {still:?}");
    await_references(scene, REFERENCES, || shell.run(READ_STILL).map(drop))?;
    Ok((client, shell, last_line(&still.text).to_owned()))
}

/// The first time from the page cache, as far as it has the file.
fn same_file(shell: &mut GuestShell, still: &str) -> Result<()> {
    for line in ["md5sum /data/still", &format!("{READ_STILL}; md5sum /data/still")] {
        let now = shell.run(line)?.text;
        ensure!(last_line(&now) == still, "the file was {still:?}, is {now:?}");
    }
    Ok(())
}

/// The backup was one way ahead of its sound primary at the arbiter, and the guest went on with that mirror.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_that_cannot_read_its_mirror_leaves_the_vm_to_its_primary() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::of("read-disk", directory.path().join("fails"));
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), failing.daemon());
    play(options, |scene| {
        let (client, mut shell, still) = with_references(scene)?;
        failing.begin()?;
        let reason = found_out(scene, &mut shell)?;
        ensure!(reason.contains("cannot read block"), "{reason}");
        failing.end()?;
        another_mirror_is_right(scene, client, shell, &still)
    });
}

/// A test as above, where the next session once believed all of that mirror but what had changed
/// since. With fail points host b notes nothing of it, as if its disk took no write: it is on record on host a.
#[test]
fn a_backup_whose_mirror_is_wrong_leaves_the_vm_to_its_primary() {
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), daemon_passing("distrust=return"));
    play(options, |scene| {
        let (client, mut shell, still) = with_references(scene)?;
        spoil_mirror(scene, &mut shell)?;
        let reason = found_out(scene, &mut shell)?;
        ensure!(reason.contains("is not what the primary has"), "{reason}");
        another_mirror_is_right(scene, client, shell, &still)
    });
}

/// Changes a byte of the file's, on host b's mirror alone.
fn spoil_mirror(scene: &Scene, shell: &mut GuestShell) -> Result<()> {
    let show = "dd if=/data/still bs=4096 skip=1000 count=1 2> /dev/null | head -c 32 | \
                busybox hexdump -v -e '1/1 \"%02x\"'";
    let hex = shell.run(show)?.text;
    let digits = hex.trim().as_bytes().chunks(2);
    let sought = digits.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?));
    let sought = sought.collect::<Result<Vec<u8>>>()?;
    ensure!(sought.len() == 32, "the guest says {hex:?}");
    let mirror = scene.host("b")?.directory().join("state").join(VM).join("disk0.img");
    let content = std::fs::read(&mirror)?;
    let mut places =
        (0..content.len()).step_by(4096).filter(|&at| content[at..].starts_with(&sought));
    let at = places.next_back().context("the mirror does not have the file")? as u64;
    let file = File::options().write(true).open(&mirror)?;
    Ok(file.write_all_at(&[!sought[0]], at)?)
}

/// Has the guest read its file until a reference meets what is wrong; why host a has no backup any more.
fn found_out(scene: &Scene, shell: &mut GuestShell) -> Result<String> {
    wait_for("the backup to find out about its mirror", LIMIT, || {
        shell.run(READ_STILL)?;
        Ok((!has_backup(&scene.status("a")?)).then_some(()))
    })?;
    await_degraded(scene, "a")
}

/// The next session copies all, and the guest finds its file on host b.
fn another_mirror_is_right(
    scene: &mut Scene,
    client: RecordClient,
    mut shell: GuestShell,
    still: &str,
) -> Result<()> {
    await_service(&client)?;
    let (_, full_because) = protect_again(scene, "a", "b")?;
    ensure!(full_because.is_some(), "the mirror was believed");
    scene.host_mut("a")?.kill_everything()?;
    scene.await_live("b")?;
    await_service(&client)?;
    same_file(&mut shell, still)?;
    prove_survival(scene, client, "b")
}

fn references(scene: &Scene) -> Result<u64> {
    let counters = scene.status("a")?["compression"]["counters"].take();
    counters["reference"].as_u64().with_context(|| format!("no references in {counters}"))
}

/// Waits until so many references were sent; does `work` meanwhile.
fn await_references(scene: &Scene, goal: u64, mut work: impl FnMut() -> Result<()>) -> Result<()> {
    wait_for("pages to be sent as references", LIMIT, || {
        work()?;
        Ok((references(scene)? >= goal).then_some(()))
    })
}

fn rounds(shell: &mut GuestShell) -> Result<u64> {
    let output = shell.run("cat /tmp/rounds 2> /dev/null | wc -l")?;
    last_line(&output.text).parse().with_context(|| format!("`wc` said {output:?}"))
}

fn await_rounds(shell: &mut GuestShell, goal: u64) -> Result<()> {
    wait_for("the guest to write and read its file", LIMIT, || {
        Ok((rounds(shell)? >= goal).then_some(()))
    })
}

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap_or_default().trim()
}

/// Waits until what the mode is about has happened a few hundred times.
fn await_method(scene: &Scene, host: &str, mode: &str) -> Result<()> {
    wait_for(&format!("the pages that {mode} is about"), LIMIT, || {
        let report = scene.status(host)?["compression"].take();
        ensure!(report["asked"]["compression"] == mode, "{mode} was asked for: {report}");
        let count = |field: &str| report["counters"][field].as_u64().unwrap_or_default();
        let unused = match mode {
            "none" => count("general") + count("delta") + count("lookups"),
            "general" => count("delta") + count("lookups"),
            "xor" => count("general"),
            _ => 0,
        };
        ensure!(unused == 0, "{mode} uses other methods: {report}");
        let enough = |field| count(field) > 500;
        Ok(match mode {
            "none" => enough("raw"),
            "general" => enough("general"),
            "hybrid" => enough("general") && enough("delta"),
            _ => enough("delta"),
        }
        .then_some(()))
    })
}

fn compare_twins(shell: &mut GuestShell, writer: u32) -> Result<()> {
    let output = shell.run(&format!("kill -9 -{writer}; cmp -l /a /b | wc -l"))?;
    let text = output.text.trim();
    let differ: u64 = text.parse().with_context(|| format!("`cmp` said {text:?}"))?;
    ensure!(differ <= WRITE_BYTES, "{differ} bytes of the guest's memory are wrong");
    Ok(())
}
