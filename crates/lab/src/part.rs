//! A host fails in parts: its daemon or another process alone, killed or stalled.

use crate::command::run;
use crate::host::HostProcess;
use crate::processes;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use std::path::Path;
use std::time::Instant;

/// Part of a host that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Every process on it.
    Everything,
    /// The daemon alone.
    Daemon,
    /// One process alone, by its id: a QEMU ([`HostProcess::qemu_pid`]) or a keeper.
    Process(u32),
}

impl HostProcess {
    /// Process of this host's QEMU of a VM.
    pub fn qemu_pid(&self, vm: &str) -> Result<u32> {
        let pid = self.status(vm)?["qemu_pid"].as_u64();
        let pid = pid.with_context(|| format!("host {} has no QEMU for `{vm}`", self.name()))?;
        u32::try_from(pid).context("`qemu_pid` is no process id")
    }

    /// Puts an empty directory in the place of `directory`, for this host's
    /// daemon alone: shared storage that is not mounted. Gone with the daemon.
    pub fn hide(&self, directory: &Path) -> Result<()> {
        let directory = directory.to_string_lossy();
        self.inside(&["mount", "-t", "tmpfs", "tmpfs", &directory])
    }

    /// Undoes [`hide`](HostProcess::hide), also of a directory that the daemon is looking at.
    pub fn unhide(&self, directory: &Path) -> Result<()> {
        self.inside(&["umount", "--lazy", &directory.to_string_lossy()])
    }

    /// Runs a command among the daemon's mounts.
    fn inside(&self, command: &[&str]) -> Result<()> {
        let target = format!("--target={}", self.pid());
        run("nsenter", &[&[&target, "--mount"], command].concat()).map(drop)
    }

    /// Kills a part of this host; returns the instant just before.
    pub fn kill(&mut self, part: Part) -> Result<Instant> {
        match part {
            Part::Everything => self.kill_everything(),
            Part::Daemon => self.kill_daemon(),
            Part::Process(pid) => self.kill_process(pid),
        }
    }

    /// Kills this host's QEMU of a VM alone.
    pub fn kill_qemu(&self, vm: &str) -> Result<Instant> {
        self.kill_process(self.qemu_pid(vm)?)
    }

    fn kill_process(&self, pid: u32) -> Result<Instant> {
        let instant = self.signal(Part::Process(pid), Signal::SIGKILL)?;
        processes::wait_until_gone(&[pid])?;
        Ok(instant)
    }

    /// Stops a part of this host in its tracks (SIGSTOP) and waits until it stands still; returns
    /// the instant just before.
    pub fn stall(&self, part: Part) -> Result<Instant> {
        let targets = self.targets(part)?;
        let instant = Instant::now();
        processes::stop_all(&targets)?;
        Ok(instant)
    }

    /// Stops the whole host in its tracks.
    pub fn pause(&self) -> Result<Instant> {
        self.stall(Part::Everything)
    }

    /// Stops whole hosts at one instant, so that none of them lives to see another stand still.
    pub fn pause_together<'h>(hosts: impl IntoIterator<Item = &'h HostProcess>) -> Result<()> {
        let targets = hosts.into_iter().map(HostProcess::everything);
        processes::stop_all(&targets.collect::<Result<Vec<_>>>()?.concat())
    }

    /// Lets everything that was stalled go on, as if nothing had happened.
    pub fn resume(&self) -> Result<()> {
        self.signal(Part::Everything, Signal::SIGCONT).map(drop)
    }

    /// Holds a QEMU of this host still until the guard is dropped: its guest
    /// computes nothing, and its daemon finishes the writes under way.
    pub fn freeze_guest(&self, vm: &str) -> Result<Frozen<'_>> {
        self.stall(Part::Process(self.qemu_pid(vm)?))?;
        Ok(Frozen { host: self })
    }

    fn signal(&self, part: Part, signal: Signal) -> Result<Instant> {
        let targets = self.targets(part)?;
        let instant = Instant::now();
        processes::signal_all(&targets, signal)?;
        Ok(instant)
    }

    fn targets(&self, part: Part) -> Result<Vec<u32>> {
        let everything = self.everything()?;
        match part {
            Part::Everything => Ok(everything),
            Part::Daemon => Ok(vec![self.pid()]),
            Part::Process(pid) => {
                // Never signal on the word of a report alone.
                let here = everything.contains(&pid);
                ensure!(here, "process {pid} is not on host {}", self.name());
                Ok(vec![pid])
            }
        }
    }
}

/// A guest that is held still.
pub struct Frozen<'a> {
    host: &'a HostProcess,
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.host.resume() {
            tracing::error!("a guest of host {} stays frozen: {error:#}", self.host.name());
        }
    }
}
