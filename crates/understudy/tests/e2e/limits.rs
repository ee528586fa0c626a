//! Tests of what one QEMU may use of its host: one that wants more ends alone, and its backup takes
//! over.

use crate::stage::{Calm, await_service, options, play_protected, prove_survival, vms};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};

/// The memory that QEMU may have beside its guest's, here.
const BESIDE_MIB: u64 = 192;
const MEMORY_MIB: u32 = 128;
const THREADS: u64 = 100;
const DESCRIPTORS: u64 = 300;

fn limited() -> SceneOptions {
    let mut options = SceneOptions { memory_mib: MEMORY_MIB, ..options().calm() };
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!(
            "[qemu_process]\nmemory_beside = \"{BESIDE_MIB}M\"\nthreads = {THREADS}\ndescriptors = {DESCRIPTORS}\n"
        );
    }
    options
}

/// The control group that limits a process's memory, if this machine has such groups.
fn memory_group(pid: u32) -> Result<Option<PathBuf>> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let group = |controllers: &str| {
        let lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let path = lines.into_iter().find(|(named, _)| *named == controllers)?.1;
        let mount = PathBuf::from("/sys/fs/cgroup").join(controllers);
        Some(mount.join(path.trim_start_matches('/')))
    };
    let found = group("memory").or_else(|| group(""));
    Ok(found.filter(|group| group.join("cgroup.procs").exists()))
}

fn limits(scene: &Scene, host: &str) -> Result<Value> {
    Ok(scene.status(host)?["limits"].clone())
}

/// Checks the limits as `status` says them, and as the kernel has them.
fn check_limits(scene: &Scene, host: &str) -> Result<()> {
    let (limits, pid) = (limits(scene, host)?, scene.host(host)?.qemu_pid(VM)?);
    let open_files = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = open_files.lines().find(|line| line.starts_with("Max open files"));
    let line = line.context("no limit of open files")?;
    let [soft, hard] = [3, 4].map(|word| line.split_whitespace().nth(word).unwrap_or_default());
    let most = DESCRIPTORS.to_string();
    ensure!(soft == most && hard == most, "host {host}: {line}");
    ensure!(limits["descriptors"] == DESCRIPTORS, "host {host}: {limits}");
    let missing = limits["missing"].as_array().context("no list")?;
    for (field, words, most) in [
        ("memory_bytes", "memory:", (u64::from(MEMORY_MIB) + 1 + BESIDE_MIB) << 20),
        ("threads", "threads:", THREADS + 1),
    ] {
        if limits[field] == most {
            continue;
        }
        let said = missing.iter().filter_map(Value::as_str).any(|line| line.starts_with(words));
        ensure!(limits[field].is_null() && said, "host {host}: {limits}");
        eprintln!("SKIPPED: this machine does not limit {words} {limits}");
    }
    Ok(())
}

/// Takes memory in QEMU's group, a little in each of many processes: the kernel finds that QEMU has the
/// most. They hold it for a moment.
fn take_memory(group: &Path, mib: u64) -> Result<()> {
    let script = "echo 0 > \"$0/cgroup.procs\" || exit; i=0; while [ $i -lt \"$1\" ]; do \
                  i=$((i + 1)); { head -c 16M /dev/zero; sleep 5; } | tail & done; wait";
    let mut taker = Command::new("sh");
    taker.args(["-c", script]).arg(group).arg((mib / 16).to_string()).stdout(Stdio::null());
    taker.status()?;
    Ok(())
}

#[test]
fn a_qemu_that_takes_too_much_memory_ends_alone() {
    play_protected(limited(), |scene, client| {
        check_limits(scene, "a")?;
        check_limits(scene, "b")?;
        let other = second(scene)?;
        let pid = scene.host("a")?.qemu_pid(VM)?;
        let Some(group) = memory_group(pid)? else {
            eprintln!("SKIPPED: this machine has no control group with the memory controller");
            return prove_survival(scene, client, "a");
        };
        take_memory(&group, BESIDE_MIB + u64::from(MEMORY_MIB))?;

        wait_for("host b to run it", crate::stage::LIMIT, || {
            let status = scene.status("b")?;
            Ok((status["role"] == "primary" && status["live"] == true).then_some(()))
        })?;
        wait_for("host a to say why", crate::stage::LIMIT, || {
            let told = crate::refusals::log_of(scene, "a")?;
            Ok(told.contains("went beyond its limit").then_some(()))
        })?;
        await_service(&client)?;
        let there = vms(scene.host("a")?)?;
        let lives = there.iter().any(|vm| vm["name"] == *other && vm["live"] == true);
        ensure!(lives, "the other VM has ended, too: {there:?}");
        prove_survival(scene, client, "b")
    });
}

/// Another VM on host a, which knows nothing of it.
fn second(scene: &Scene) -> Result<String> {
    let image = scene.lab().directory().join("other.img");
    fs::copy(scene.guest_files().join("boot-sector.img"), &image)?;
    let text = format!(
        "name = \"other\"\nmemory = \"64M\"\nvcpus = 1\naccel = \"tcg\"\n[[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
        image.display()
    );
    let file = scene.lab().directory().join("other.toml");
    fs::write(&file, text)?;
    scene.host("a")?.call(["vm", "start", &file.to_string_lossy()])?;
    Ok("other".to_owned())
}

#[test]
fn without_control_groups_what_is_not_limited_is_named() {
    let mut options = limited();
    for daemon in options.daemons.values_mut() {
        *daemon = HostOptions { without_control_groups: true, ..std::mem::take(daemon) };
    }
    options.kind = understudy_lab::scene::GuestKind::BootSector;
    crate::stage::play(options, |scene| {
        scene.start_guest("a")?;
        let limits = limits(scene, "a")?;
        let missing = limits["missing"].as_array().context("no list")?;
        ensure!(missing.len() == 2 && limits["memory_bytes"].is_null(), "{limits}");
        let page = scene.host("a")?.call(["status", VM])?;
        for words in
            ["NOT LIMITED: memory: no control group with the memory", "NOT LIMITED: threads:"]
        {
            ensure!(page.contains(words), "{page}");
        }
        check_limits(scene, "a")
    });
}
