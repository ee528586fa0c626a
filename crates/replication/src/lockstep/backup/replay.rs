//! The machine on its log: loaded, at the log's end, live.

use super::Following;
use super::reads::{self, ReadFailure};
use super::watch::{signs, silent_disk, watchdog};
use crate::clock;
use crate::lockstep::reads::forget;
use crate::lockstep::writes::Writes;
use anyhow::Context;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_lockstep::{END, Stuck, left_of_ended_log};
use understudy_machine::Machine;
use understudy_qemu::lockstep::{LogChannel, Request};

/// Time between two looks of a take-over whether QEMU has come to the log's end.
const END_INTERVAL: Duration = Duration::from_micros(250);

/// Loads the machine and lets it execute its log, as soon as there is any.
pub fn begin(
    machine: &Machine,
    following: &Arc<Following>,
    device_state: &[u8],
) -> anyhow::Result<()> {
    let log = machine.log().context("this QEMU does not replay")?;
    machine.load(device_state).context("cannot load the machine's state")?;
    if following.await_log() {
        following.begin_writes(&machine.disks());
        reads::follow(machine, following);
        log.ask(Request::Follow)?;
        machine.monitor().cont()?;
        following.begin();
    }
    Ok(())
}

/// The reason why QEMU does not come to the end of its log.
#[derive(Debug)]
pub enum NoEnd {
    /// It has not done what the primary's did, nor written to its disks what that wrote.
    Diverged(String),
    /// Another reason.
    Other(String),
}

impl NoEnd {
    fn of(failure: &ReadFailure) -> NoEnd {
        match failure {
            ReadFailure::Diverged(reason) => NoEnd::Diverged(reason.clone()),
            ReadFailure::Unusable(reason) => NoEnd::Other(reason.clone()),
        }
    }
}

/// Waits until QEMU has executed all of the log, which has ended.
pub fn await_end(machine: &Machine, following: &Following) -> Result<(), NoEnd> {
    fail::fail_point!("rest-diverges", |_| Err(NoEnd::Diverged("a test says so".to_owned())));
    let other = |reason: &str| NoEnd::Other(reason.to_owned());
    let log = machine.log().ok_or_else(|| other("this QEMU does not replay"))?;
    if !following.await_log() {
        return Ok(());
    }
    let began = Instant::now();
    let mut dog = watchdog();
    loop {
        let status = log.status();
        let (progress, pending) = following.note(status);
        // QEMU runs no more then, and never comes to the end of its log.
        if machine.is_powered_off() {
            return Err(other("the guest has powered off, as its log says"));
        }
        if following.is_over() && pending == 0 && status.event == u64::from(END) {
            break;
        }
        let left = left_of_ended_log(pending, status.event);
        match dog.look(signs(machine, &progress), left, clock::now()) {
            Some(Stuck::Diverged(_)) => {
                return Err(NoEnd::Diverged(format!(
                    "this copy has diverged: {pending} bytes of its log are not taken, or the last \
                     event is not executed; {:?}",
                    log.status()
                )));
            }
            Some(Stuck::Disk(time)) => return Err(NoEnd::Other(silent_disk(time))),
            None => {}
        }
        if !machine.is_alive() {
            // As a log that makes no sense to it may have it do.
            return Err(NoEnd::Diverged(format!("QEMU ended: {}", machine.last_words())));
        }
        if let Some(failure) = following.read_failure() {
            return Err(NoEnd::of(&failure));
        }
        thread::sleep(END_INTERVAL);
    }
    info!(
        vm = %machine.definition().name,
        "executed the rest of the log in {:.1} ms",
        began.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

/// A QEMU at the end of its log becomes an ordinary one; its guest runs on.
pub fn start(machine: &Machine) -> anyhow::Result<()> {
    stop(machine)?;
    Ok(machine.monitor().cont()?)
}

/// A QEMU at the end of its log becomes an ordinary one, whose guest stands still: its disks
/// have all that it wrote.
pub fn stop(machine: &Machine) -> anyhow::Result<()> {
    let log: &LogChannel = machine.log().context("this QEMU does not replay")?;
    machine.monitor().stop()?;
    log.ask(Request::GoLive)?;
    forget(machine);
    Ok(())
}
