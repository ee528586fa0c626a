//! Tests of what a guest that broke out of its QEMU would find: nothing.

use crate::block_devices::Device;
use crate::keepers::{kept, told, with_keepers};
use crate::stage::{Calm, options, play, play_protected, prove_survival};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions};

const NOBODY: u32 = 65534;

/// A field of a process's status, without its name.
fn field(pid: u32, name: &str) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    Ok(line.with_context(|| format!("no {name} of process {pid}"))?.trim().to_owned())
}

/// Checks that a process is without root, capabilities and most system calls; returns its user.
fn check_process(pid: u32) -> Result<u32> {
    let uid: u32 = field(pid, "Uid:")?.split_whitespace().next().context("no user")?.parse()?;
    ensure!(uid != 0, "QEMU runs as root");
    for (ids, name) in [(uid, "Uid:"), (uid, "Gid:")] {
        let found = field(pid, name)?;
        ensure!(found.split_whitespace().all(|id| id == ids.to_string()), "{name} {found}");
    }
    ensure!(field(pid, "Groups:")?.is_empty(), "QEMU is in groups");
    for capabilities in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        ensure!(field(pid, capabilities)?.trim_start_matches('0').is_empty(), "{capabilities}");
    }
    ensure!(field(pid, "NoNewPrivs:")? == "1", "QEMU may gain privileges");
    let mut filtered = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task: u32 = task?.file_name().to_string_lossy().parse()?;
        // It may have ended since: QEMU has threads that do one thing.
        let Ok(filter) = field(task, "Seccomp:") else { continue };
        ensure!(filter == "2", "thread {task} has no filter of system calls");
        filtered += 1;
    }
    ensure!(filtered > 1, "{filtered} threads of QEMU were looked at");
    Ok(uid)
}

/// Files in memory are QEMU's and nobody else's.
fn check_memory(pid: u32, uid: u32) -> Result<()> {
    let mut found = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // It may have been closed since.
        let Ok(target) = fs::read_link(&path) else { continue };
        if !target.to_string_lossy().starts_with("/memfd:") {
            continue;
        }
        let Ok(file) = fs::metadata(&path) else { continue };
        found += 1;
        ensure!(file.mode() & 0o077 == 0, "{}: mode {:o}", target.display(), file.mode());
        ensure!(file.uid() == uid, "{} belongs to {}", target.display(), file.uid());
    }
    ensure!(found >= 2, "{found} files in memory: the guest's RAM and device state are missing");
    Ok(())
}

/// The paths that a user can read below a directory.
fn readable(directory: &Path, uid: u32) -> Result<String> {
    let mut find = Command::new("find");
    find.arg(directory).args(["-readable", "-print"]).current_dir("/").uid(uid).gid(uid);
    Ok(String::from_utf8_lossy(&find.output()?.stdout).into_owned())
}

fn check_host(scene: &Scene, host: &str) -> Result<u32> {
    let pid = scene.host(host)?.qemu_pid(VM)?;
    let uid = check_process(pid)?;
    check_memory(pid, uid)?;
    let state = scene.host(host)?.directory().join("state");
    for uid in [uid, NOBODY] {
        let found = readable(&state, uid)?;
        ensure!(found.is_empty(), "user {uid} can read on host {host}:\n{found}");
    }
    Ok(uid)
}

#[test]
fn qemu_has_no_rights_and_its_memory_is_private() {
    play_protected(options().calm(), |scene, client| {
        let (a, b) = (check_host(scene, "a")?, check_host(scene, "b")?);
        ensure!(a != b, "both QEMUs run as user {a}");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The capabilities of a process, or those that it could ever have.
fn capabilities(pid: u32, set: &str) -> Result<u64> {
    Ok(u64::from_str_radix(&field(pid, set)?, 16)?)
}

/// The number of filters of system calls that a thread has.
fn filters(thread: u32) -> Result<u32> {
    Ok(field(thread, "Seccomp_filters:")?.parse()?)
}

/// The numbers of what a keeper needs (linux/capability.h), and nothing else.
fn of_a_keeper() -> u64 {
    let (chown, dac_override, fowner, kill, setgid, setuid) = (0, 1, 3, 5, 6, 7);
    let (net_admin, sys_ptrace, sys_nice, sys_resource) = (12, 19, 23, 24);
    let of_files = [chown, dac_override, fowner, kill, setgid, setuid];
    let of_host = [net_admin, sys_ptrace, sys_nice, sys_resource];
    of_files.iter().chain(&of_host).fold(0, |all, number| all | 1 << number)
}

#[test]
fn a_keeper_has_few_of_roots_rights_and_its_qemu_none() {
    play_protected(with_keepers(), |scene, client| {
        for host in ["a", "b"] {
            let keeper = u32::try_from(kept(&told(scene, host, VM)?)?.keeper)?;
            let qemu = check_host(scene, host).map(|_| scene.host(host)?.qemu_pid(VM))??;
            ensure!(field(keeper, "NoNewPrivs:")? == "1", "the keeper may gain privileges");
            // Its own two; QEMU has a third one.
            for (process, least) in [(keeper, 2), (qemu, 3)] {
                ensure!(filters(process)? >= least, "calls of process {process} are not refused");
            }
            for task in fs::read_dir(format!("/proc/{keeper}/task"))? {
                let task: u32 = task?.file_name().to_string_lossy().parse()?;
                ensure!(filters(task).unwrap_or(2) >= 2, "calls of thread {task} are not refused");
                for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapInh:", "CapAmb:"] {
                    // It may have ended since.
                    let Ok(found) = capabilities(task, set) else { continue };
                    ensure!(found & !of_a_keeper() == 0, "thread {task}: {set} {found:x}");
                }
            }
            let could = capabilities(qemu, "CapBnd:")?;
            ensure!(could & !of_a_keeper() == 0, "its QEMU could get {could:x}");
        }
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Something of a VM that a keeper is to try to read.
pub fn has_another_vm(scene: &Scene, host: &str) -> Result<()> {
    let state = scene.host(host)?.directory().join("state/another");
    fs::create_dir(&state)?;
    for file in ["keeper.json", "disk0.img"] {
        fs::write(state.join(file), "")?;
    }
    ensure!(scene.lab().directory().join("pki/ca.key").exists(), "there is no key to be read");
    Ok(())
}

/// Has keepers try what they may not, and tell of it in a file.
pub fn that_try(mut options: SceneOptions, file: &Path) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        let point = format!("rights=return({})", file.display());
        daemon.environment.push(("FAILPOINTS".to_owned(), point));
    }
    options
}

/// The end of what a keeper tells in it that opens these devices, and makes none.
pub fn told_of_devices(opened: &[&Path]) -> String {
    format!(" {opened:?} false")
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_a_keeper_tries_beyond_its_rights_is_refused() {
    let tried = tempfile::NamedTempFile::new().expect("a file");
    play(that_try(with_keepers(), tried.path()), |scene| {
        for host in ["a", "b"] {
            has_another_vm(scene, host)?;
        }
        let image = scene.lab().directory().join("others.img");
        File::create(&image)?.set_len(1 << 20)?;
        let others = Device::on(&image)?;
        File::open(others.path()).context("this test takes root")?;
        scene.protected_guest("a", "b")?;
        let tries = fs::read_to_string(tried.path())?;
        for host in ["a", "b"] {
            let keeper = kept(&told(scene, host, VM)?)?.keeper;
            let files = "[Err(PermissionDenied), Err(PermissionDenied), Err(NotFound)]";
            let devices = told_of_devices(&[]);
            let outcome =
                format!("{keeper} {files} Err(EPERM) Ok(\"HTTP/1.1 403 Forbidden\"){devices}");
            ensure!(tries.lines().any(|line| line == outcome), "no {outcome}:\n{tries}");
        }
        for host in ["a", "b"] {
            scene.host_mut(host)?.kill_everything()?;
        }
        Ok(())
    });
}

#[test]
fn all_qemus_run_as_the_configured_user() {
    let mut options = options().calm();
    for daemon in options.daemons.values_mut() {
        daemon.settings += "[qemu_process]\nuser = \"nobody\"\n";
    }
    play_protected(options, |scene, client| {
        for host in ["a", "b"] {
            let pid = scene.host(host)?.qemu_pid(VM)?;
            ensure!(check_process(pid)? == NOBODY, "host {host}");
        }
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
