//! `[qemu_process]`: who QEMU runs as, and the most that each may use.

use super::check_number;
use super::source::Source;
use serde::Deserialize;
use std::ops::RangeInclusive;
use toml::Spanned;
use understudy_machine::cgroup::Limits;
use understudy_qemu::RunAs;
use understudy_qemu::definition::MemorySize;
use understudy_report::error::HostError;

/// Limits of descriptors: with fewer a QEMU with some disks and cards does not start.
const DESCRIPTORS: RangeInclusive<u64> = 256..=1_048_576;
/// QEMU has up to 64 for requests to files alone.
const THREADS: RangeInclusive<u64> = 96..=32_768;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawQemuProcess {
    user: Option<Spanned<String>>,
    memory_beside: Option<MemorySize>,
    descriptors: Option<Spanned<i64>>,
    threads: Option<Spanned<i64>>,
}

impl RawQemuProcess {
    pub(super) fn user(&self, source: &Source<'_>) -> Result<RunAs, HostError> {
        let Some(user) = &self.user else { return Ok(RunAs::default()) };
        RunAs::named(user.get_ref())
            .map_err(|error| source.wrong("qemu_process.user", user.span(), &error.to_string()))
    }

    pub(super) fn limits(self, source: &Source<'_>) -> Result<Limits, HostError> {
        let default = Limits::default();
        Ok(Limits {
            memory_beside: self.memory_beside.map(MemorySize::bytes),
            descriptors: check_number(
                source,
                ("qemu_process.descriptors", self.descriptors),
                (default.descriptors, DESCRIPTORS),
            )?,
            threads: check_number(
                source,
                ("qemu_process.threads", self.threads),
                (default.threads, THREADS),
            )?,
        })
    }
}
