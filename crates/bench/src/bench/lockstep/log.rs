//! Figures that the daemon tells of the log while a guest in lockstep is measured.

use crate::bench::suite::statistics::quantile;
use crate::bench::words;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::Client;
use understudy_report::{Protection, VmStatus};

/// Time between two looks at the lag.
const GLANCE: Duration = Duration::from_millis(50);

/// Figures that the daemon counted of the log during a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LogFigures {
    /// Millions of bits a second that went to the backup.
    pub mbit_s: f64,
    /// Lag of the backup, in milliseconds: the median.
    pub lag_ms_p50: f64,
    /// The 99th percentile.
    pub lag_ms_p99: f64,
}

/// Does `work`, and tells what the log of `vm` was meanwhile. An error if it was not in
/// lockstep all the time: the figure would be of something else.
pub fn during<T>(
    primary: &Client,
    vm: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, LogFigures)> {
    let before = in_lockstep(primary, vm)?;
    let begun = Instant::now();
    let (done, lags) = thread::scope(|scope| {
        let (over, ends) = channel();
        let glances = scope.spawn(move || glance(primary, vm, &ends));
        let done = work();
        drop(over);
        let lags = glances.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (done, lags)
    });
    let (done, lags) = (done?, lags?);
    let (after, took) = (in_lockstep(primary, vm)?, begun.elapsed());
    let sent = after.bytes_sent.checked_sub(before.bytes_sent);
    let sent = sent.with_context(|| format!("protection began anew: {:?}", after.events))?;
    let lag = |share| quantile(&lags, share).context("nobody has looked at the lag");
    let figures = LogFigures {
        mbit_s: sent as f64 * 8.0 / 1e6 / took.as_secs_f64(),
        lag_ms_p50: lag(0.5)?,
        lag_ms_p99: lag(0.99)?,
    };
    Ok((done, figures))
}

/// The lag, in milliseconds, again and again until the sender of `over` is gone.
fn glance(primary: &Client, vm: &str, over: &Receiver<()>) -> Result<Vec<f64>> {
    let mut lags = Vec::new();
    loop {
        let status = in_lockstep(primary, vm)?;
        lags.extend(status.lockstep.map(|lockstep| lockstep.lag_ms));
        if over.recv_timeout(GLANCE) == Err(RecvTimeoutError::Disconnected) {
            return Ok(lags);
        }
    }
}

fn in_lockstep(primary: &Client, vm: &str) -> Result<VmStatus> {
    let status = primary.vm_status(vm).map_err(words)?;
    let protected = matches!(status.protection, Protection::Protected { .. });
    ensure!(
        protected && status.lockstep.is_some(),
        "the guest is not in lockstep: {:?}; {:?}",
        status.protection,
        status.events
    );
    Ok(status)
}
