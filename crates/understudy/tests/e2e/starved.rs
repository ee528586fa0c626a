//! A backup whose host has hardly any processor for it.

use crate::sick_hosts::look_whether_served;
use crate::stage::{
    Calm, await_service, options, play_protected, protect_when_taken, protection, prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// A process that gets a hundredth of a processor, but for its threads that go before all others; until this is dropped.
struct Starved {
    group: PathBuf,
    pid: u32,
    /// Whether threads are moved one by one.
    by_thread: bool,
}

/// A period of the scheduler's accounts, and what is had of it, in microseconds.
const PERIOD: &str = "100000";
const SHARE: &str = "1000";

impl Starved {
    fn of(pid: u32) -> Result<Starved> {
        let (all, one) = (Path::new("/sys/fs/cgroup"), Path::new("/sys/fs/cgroup/cpu"));
        let by_thread = one.join("tasks").exists();
        let group = if by_thread { one } else { all }.join(format!("story-{pid}"));
        if !by_thread {
            fs::write(all.join("cgroup.subtree_control"), "+cpu").context("no cpu controller")?;
        }
        fs::create_dir(&group)?;
        let starved = Starved { group, pid, by_thread };
        if by_thread {
            starved.write("cpu.cfs_period_us", PERIOD)?;
            starved.write("cpu.cfs_quota_us", SHARE)?;
        } else {
            starved.write("cpu.max", &format!("{SHARE} {PERIOD}"))?;
        }
        let moved = starved.put_into(&starved.group)?;
        ensure!(moved > 0, "no thread of {pid} can be limited");
        Ok(starved)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.group.join(file);
        fs::write(&path, value).with_context(|| path.display().to_string())
    }

    /// Puts it into a group; returns how many of its parts were.
    fn put_into(&self, group: &Path) -> Result<usize> {
        if !self.by_thread {
            fs::write(group.join("cgroup.procs"), self.pid.to_string())?;
            return Ok(1);
        }
        let mut moved = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid))? {
            // The kernel refuses those that go before all others.
            let name = thread?.file_name();
            let put = fs::write(group.join("tasks"), name.to_string_lossy().as_bytes());
            moved += usize::from(put.is_ok());
        }
        Ok(moved)
    }
}

impl Drop for Starved {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.put_into(self.group.parent().expect("it is below a mount"));
        if let Err(error) = fs::remove_dir(&self.group) {
            eprintln!("{}: {error}", self.group.display());
        }
    }
}

/// Time for which a backup gets so little; longer than a guest may be called protected that is not served.
const STARVED_FOR: Duration = Duration::from_secs(35);

/// The guest is served more slowly, or said not to be protected; nothing is lost either way.
#[test]
fn a_backup_that_hardly_gets_a_processor_holds_nobody_up_in_silence() {
    play_protected(options().calm(), |scene, client| {
        let starved = Starved::of(scene.host("b")?.pid())?;
        let (before, until) = (client.acked(), Instant::now() + STARVED_FOR);
        let mut served = (before, Instant::now());
        while Instant::now() < until {
            look_whether_served(scene, &client, &mut served)?;
            thread::sleep(Duration::from_millis(50));
        }
        println!("{} records in {STARVED_FOR:?}", client.acked() - before);
        drop(starved);
        await_service(&client)?;
        if protection(&scene.status("a")?).0 != "protected" {
            protect_when_taken(scene, "a", "b")?;
        }
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
