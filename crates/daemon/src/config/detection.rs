//! `[detection]`: how long is too long.

use super::check_number;
use super::source::Source;
use serde::Deserialize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use toml::Spanned;
use understudy_protocol::EPOCH_BOUND;
use understudy_replication::primary::Detection;
use understudy_report::error::HostError;

const DEFAULT_PEER_MS: u64 = 100;
const PEER_MS: RangeInclusive<u64> = 50..=10_000;
const DEFAULT_QEMU_MS: u64 = 1_000;
const QEMU_MS: RangeInclusive<u64> = 200..=15_000;
const EPOCH_MS: RangeInclusive<u64> = 100..=60_000;
const DEFAULT_LEASE_SECONDS: u64 = 15;
const LONGEST_LEASE_SECONDS: u64 = 600;
const LEASE_SECONDS: RangeInclusive<u64> = 4..=LONGEST_LEASE_SECONDS;
/// The longest lease that a host can have.
pub const LONGEST_LEASE: Duration = Duration::from_secs(LONGEST_LEASE_SECONDS);

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawDetection {
    timeout_ms: Option<Spanned<i64>>,
    qemu_timeout_ms: Option<Spanned<i64>>,
    epoch_timeout_ms: Option<Spanned<i64>>,
    lease_seconds: Option<Spanned<i64>>,
    watchdog: Option<Spanned<PathBuf>>,
}

impl RawDetection {
    /// 0 is none; else long enough for a few renewals that fail.
    pub(super) fn lease(&self, source: &Source<'_>) -> Result<Duration, HostError> {
        let given = self.lease_seconds.clone();
        if given.as_ref().is_some_and(|given| *given.get_ref() == 0) {
            return Ok(Duration::ZERO);
        }
        let field = ("detection.lease_seconds", given);
        check_number(source, field, (DEFAULT_LEASE_SECONDS, LEASE_SECONDS)).map(Duration::from_secs)
    }

    pub(super) fn watchdog(&self, source: &Source<'_>) -> Result<Option<PathBuf>, HostError> {
        let Some(path) = self.watchdog.clone() else { return Ok(None) };
        if self.lease(source)?.is_zero() {
            let message = "it ends a host before its leases do, and lease_seconds is 0: remove one \
                           of them";
            return Err(source.wrong("detection.watchdog", path.span(), message));
        }
        source.absolute("detection.watchdog", path).map(Some)
    }

    pub(super) fn check(self, source: &Source<'_>) -> Result<Detection, HostError> {
        let number = |field, value, default, allowed| {
            check_number(source, (field, value), (default, allowed)).map(Duration::from_millis)
        };
        let peer = number("detection.timeout_ms", self.timeout_ms, DEFAULT_PEER_MS, PEER_MS)?;
        let qemu =
            number("detection.qemu_timeout_ms", self.qemu_timeout_ms, DEFAULT_QEMU_MS, QEMU_MS)?;
        // As long as a primary bears a peer's silence, which comes first: another path may be left.
        let usual = EPOCH_BOUND.max(peer * 3).as_millis() as u64;
        let epoch = number("detection.epoch_timeout_ms", self.epoch_timeout_ms, usual, EPOCH_MS)?;
        Ok(Detection { peer, qemu, epoch })
    }
}
