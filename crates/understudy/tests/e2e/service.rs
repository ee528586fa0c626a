//! Tests of what a service manager is told: when a daemon is ready, that it lives, and that it
//! ends.

use crate::keepers::in_keepers;
use crate::refusals::{definition, log_of, quick, write};
use crate::sick_hosts::await_unfit;
use crate::stage::{LIMIT, play, run};
use anyhow::{Context, Result, ensure};
use std::cell::RefCell;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, SceneOptions, wait_for};

/// The longest silence that it takes for life.
const WATCHDOG: Duration = Duration::from_secs(2);

/// A stand-in for a service manager, for the daemon of host a.
struct Manager {
    socket: UnixDatagram,
    /// All lines so far.
    heard: RefCell<Vec<String>>,
    _directory: tempfile::TempDir,
}

impl Manager {
    /// Makes one, and the options of a scene whose host a belongs to it.
    fn of(mut options: SceneOptions) -> Result<(Manager, SceneOptions)> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("notify");
        let socket = UnixDatagram::bind(&path)?;
        socket.set_nonblocking(true)?;
        let daemon: &mut HostOptions = options.daemons.get_mut("a").context("no host a")?;
        let mut set = |name: &str, value: String| daemon.environment.push((name.to_owned(), value));
        set("NOTIFY_SOCKET", path.display().to_string());
        set("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
        let heard = RefCell::default();
        Ok((Manager { socket, heard, _directory: directory }, options))
    }

    fn listen(&self) {
        let mut bytes = [0; 4096];
        while let Ok(length) = self.socket.recv(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
            self.heard.borrow_mut().extend(text.lines().map(str::to_owned));
        }
    }

    fn count(&self, line: &str) -> usize {
        self.listen();
        self.heard.borrow().iter().filter(|heard| *heard == line).count()
    }

    fn await_line(&self, line: &str, times: usize) -> Result<()> {
        let ready = || Ok((self.count(line) >= times).then_some(()));
        wait_for(&format!("{line}, {times} times"), LIMIT, ready)
            .with_context(|| format!("{:?}", self.heard.borrow()))
    }
}

#[test]
fn a_service_manager_hears_of_start_life_and_end() {
    let (manager, options) = Manager::of(quick()).unwrap();
    play(options, |scene| {
        manager.await_line("READY=1", 1)?;
        manager.await_line("STATUS=VMs in the daemon: 0 run, 0 are backed up; in keepers: 0", 1)?;
        scene.start_guest("a")?;
        manager.await_line("STATUS=VMs in the daemon: 1 run, 0 are backed up; in keepers: 0", 1)?;
        manager.await_line("WATCHDOG=1", 3)?;
        scene.host_mut("a")?.terminate()?;
        manager.await_line("STOPPING=1", 1)?;
        // What the hand-overs may take, and nothing for guests: the laboratory does not wait.
        manager.await_line("EXTEND_TIMEOUT_USEC=120000000", 1)?;
        ensure!(manager.count("READY=1") == 1, "{:?}", manager.heard.borrow());
        Ok(())
    });
}

/// It was told of none, and the log that all of them end with the daemon.
#[test]
fn a_service_manager_hears_of_vms_in_keepers_from_the_next_daemon_too() {
    let (manager, options) = Manager::of(in_keepers(quick())).unwrap();
    play(options, |scene| {
        scene.start_guest("a")?;
        let told = "STATUS=VMs in the daemon: 0 run, 0 are backed up; in keepers: 1";
        manager.await_line(told, 1)?;
        scene.host_mut("a")?.terminate()?;
        let words = format!("go on: {VM} (`understudy end-keepers --config ");
        ensure!(log_of(scene, "a")?.contains(&words), "not {words:?}");
        let before = manager.count(told);
        scene.revive("a")?;
        manager.await_line(told, before + 1)?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// It asked for time once, for however many VMs; and the power button was pressed behind the hand-overs, of which each may take
/// long.
#[test]
fn a_daemon_asks_for_more_time_with_each_vm_that_it_has_dealt_with() {
    let mut options = quick();
    for host in options.daemons.values_mut() {
        host.settings += "[shutdown]\npower_off_seconds = 5\n";
    }
    let (manager, options) = Manager::of(options).unwrap();
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let other = write(scene, "other.toml", &definition(scene, "other")?)?;
        scene.host("a")?.call(["vm", "start", &other.to_string_lossy()])?;
        // Its backup could not take over, for as long as the other guest has to power off.
        scene.host("b")?.hide(&scene.lab().arbiter_directory())?;
        await_unfit(scene, "is its storage mounted?")?;
        let pid = scene.host("a")?.pid().to_string();
        run("kill", &["-TERM", &pid])?;
        wait_for("the guest without a backup to be shut down", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("shutting down other").then_some(()))
        })?;
        ensure!(scene.status("b")?["role"] == "backup", "the other one was handed over before");
        manager.await_line("EXTEND_TIMEOUT_USEC=130000000", 2)?;
        scene.host("b")?.unhide(&scene.lab().arbiter_directory())?;
        scene.await_live("b").map(drop)
    });
}

/// The daemon proved that it lives by the path of its socket: who removed that had it killed a minute later.
#[test]
fn a_daemon_whose_socket_is_removed_makes_it_anew() {
    let (manager, options) = Manager::of(quick()).unwrap();
    play(options, |scene| {
        manager.await_line("WATCHDOG=1", 1)?;
        for _ in 0..2 {
            let before = manager.count("WATCHDOG=1");
            fs::remove_file(scene.host("a")?.socket())?;
            manager.await_line("WATCHDOG=1", before + 3)?;
            scene.host("a")?.call(["status"])?;
        }
        ensure!(log_of(scene, "a")?.contains("it is made anew"), "nothing is said of it");
        scene.host_mut("a")?.terminate()?;
        ensure!(!scene.host("a")?.socket().exists(), "it is left behind");
        Ok(())
    });
}

/// A timer alone would have gone on.
#[test]
fn a_daemon_that_hangs_does_not_say_that_it_lives() {
    let (manager, mut options) = Manager::of(quick()).unwrap();
    let hang = ("FAILPOINTS".to_owned(), "pulse=3*off->sleep(3600000)".to_owned());
    options.daemons.get_mut("a").unwrap().environment.push(hang);
    play(options, |scene| {
        manager.await_line("WATCHDOG=1", 3)?;
        wait_for("the log to tell of it", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("no sign of life of this daemon").then_some(()))
        })?;
        ensure!(manager.count("WATCHDOG=1") == 3, "{:?}", manager.heard.borrow());
        Ok(())
    });
}
