//! A VM goes on in another QEMU on its host, so that it can be protected in lockstep.

use crate::stage::{await_service, close, options, play, prove_disk};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions};

fn pid(scene: &Scene) -> Result<u64> {
    scene.status("a")?["qemu_pid"].as_u64().context("no QEMU")
}

/// What the shell in the guest says.
fn guest_says(scene: &Scene, line: &str) -> Result<String> {
    Ok(scene.shell()?.run(line)?.text)
}

/// The guest's clock against this machine's, in seconds, over a second or two.
fn pace_of_time(scene: &Scene) -> Result<f64> {
    let uptime = || -> Result<f64> {
        let said = guest_says(scene, "cut -d' ' -f1 /proc/uptime")?;
        said.trim().parse().with_context(|| said.clone())
    };
    let (before, began) = (uptime()?, std::time::Instant::now());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let after = uptime()?;
    Ok((after - before) / began.elapsed().as_secs_f64())
}

#[test]
fn a_running_guest_is_moved_and_its_connection_lives() {
    let small = SceneOptions { memory_mib: 256, accel: Some("tcg".into()), ..options() };
    play(small, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(crate::stage::PACE)?;
        await_service(&client)?;
        let former = pid(scene)?;
        let asked = ["protect", VM, "--to", "b", "--mode", "lockstep", "--no-wait"];
        let outcome = scene.host("a")?.cli(asked)?;
        println!("{}", String::from_utf8_lossy(&outcome.stderr));
        ensure!(pid(scene)? != former, "it was not moved: {}", scene.status("a")?);
        await_service(&client)?;
        let events = scene.status("a")?["events"].to_string();
        ensure!(events.contains("goes on in another QEMU"), "no event: {events}");
        println!("{events}");
        ensure!(!std::path::Path::new(&format!("/proc/{former}")).exists(), "two QEMUs live");
        let pace = pace_of_time(scene)?;
        println!("pace {pace}");
        // A counter of another rate would show as 0.4, or 2.6.
        ensure!((0.6..1.5).contains(&pace), "the guest's time passes at {pace}");
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}
