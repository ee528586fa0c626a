//! Every way to encode pages: the guest's memory is right on the other host.

use crate::stage::{LIMIT, PACE, await_service, options, play, prove_survival};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, wait_for};

/// Two files in the guest's memory get the same few bytes in the same place, again
/// and again: at any moment they differ by one such write at most.
const TWINS: &str = "i=0; while :; do i=$((i + 1)); o=$((i * 7919 % 4194304)); for f in /a /b; do \
                     printf %08d $i | dd of=$f bs=1 seek=$o conv=notrunc; done; done";
const WRITE_BYTES: u64 = 8;

/// Pages that compress badly, pages that change everywhere, pages that change a little.
const LOADS: [&str; 3] = [
    "while :; do dd if=/dev/urandom of=/noise bs=64k count=8; done",
    "while :; do seq 1 60000 > /text; rm /text; done",
    "guest-tools dirty 300 20",
];

#[test]
fn memory_is_right_with_every_compression() {
    play(options(), |scene| {
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
