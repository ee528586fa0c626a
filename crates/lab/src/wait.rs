//! Waits for a condition, with a deadline.

use crate::lab::Lab;
use crate::namespace::in_namespace;
use anyhow::{Context, Result, bail};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Pause between two probes: a part of what was waited already, within these bounds. Most probes
/// start a process.
const POLL_PART: u32 = 10;
const POLL_INTERVAL: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(100)];
/// Time for a guest to boot, under emulation and on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// Time for one try to connect to a guest that boots.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);

/// Says how many times slower than most this machine is.
const PATIENCE: &str = "UNDERSTUDY_PATIENCE";

/// Factor by which everything may take longer here than usual: 1, unless the environment says
/// more, as it does where the hosts themselves are emulated (`make test-kvm`).
pub fn patience() -> u32 {
    static FACTOR: LazyLock<u32> = LazyLock::new(|| match std::env::var(PATIENCE) {
        Err(_) => 1,
        Ok(text) => match text.parse() {
            Ok(factor @ 1..) => factor,
            _ => panic!("{PATIENCE} is `{text}`, not a number of 1 or more"),
        },
    });
    *FACTOR
}

/// Calls `probe` until it yields a value, at most for `limit` (times the machine's [`patience`]).
///
/// `what` names the awaited thing in the error: "host b to be protected". An
/// error of the probe ends the wait at once; a probe that wants to go on
/// trying answers `Ok(None)`.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let limit = limit.saturating_mul(patience());
    let begun = Instant::now();
    loop {
        if let Some(value) = probe().with_context(|| format!("while waiting for {what}"))? {
            return Ok(value);
        }
        let elapsed = begun.elapsed();
        if elapsed >= limit {
            bail!("waited {limit:?} in vain for {what}");
        }
        let [shortest, longest] = POLL_INTERVAL;
        std::thread::sleep((elapsed / POLL_PART).clamp(shortest, longest));
    }
}

/// Connects from this thread's namespace to a server that is there. A guest that a busy machine keeps from
/// answering for three seconds seems to be none: then it is tried again.
pub fn connect_patiently(to: SocketAddr, limit: Duration) -> Result<TcpStream> {
    wait_for(&format!("{to} to be reached"), limit, || {
        match TcpStream::connect_timeout(&to, limit.saturating_mul(patience())) {
            Err(error) if error.kind() == ErrorKind::HostUnreachable => Ok(None),
            connected => Ok(Some(connected?)),
        }
    })
}

/// Waits until a booting guest's `servers` all answer the laboratory's client.
pub(crate) fn await_servers(lab: &Lab, guest: &str, servers: &[SocketAddr]) -> Result<()> {
    wait_for(&format!("{guest} to boot"), BOOT_LIMIT, || {
        Ok(servers_answer(lab, servers)?.then_some(()))
    })
}

/// Whether all of a guest's `servers` take a connection of the laboratory's client.
pub(crate) fn servers_answer(lab: &Lab, servers: &[SocketAddr]) -> Result<bool> {
    let answers = |to: &SocketAddr| TcpStream::connect_timeout(to, CONNECT_LIMIT).is_ok();
    in_namespace(&lab.client(), || servers.iter().all(answers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_the_value_of_the_first_probe_that_has_one() {
        let mut calls = 0;
        let value = wait_for("the third call", Duration::from_secs(10), || {
            calls += 1;
            Ok((calls == 3).then_some(calls))
        });
        assert_eq!(value.unwrap(), 3);
    }

    #[test]
    fn the_error_says_what_was_awaited() {
        let error = wait_for::<()>("the moon", Duration::ZERO, || Ok(None)).unwrap_err();
        assert!(error.to_string().contains("the moon"), "{error}");
        let error = wait_for::<()>("the moon", Duration::ZERO, || bail!("no sky")).unwrap_err();
        assert!(format!("{error:#}").contains("the moon: no sky"), "{error:#}");
    }
}
