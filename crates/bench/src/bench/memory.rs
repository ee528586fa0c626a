//! Memory that a daemon holds.

use super::machine::{field, kib};
use anyhow::{Context, Result};
use serde::Serialize;

const KIB_PER_MIB: f64 = 1024.0;

/// A daemon's memory in MiB. Guest memory is shared with QEMU and is counted
/// apart; the program itself (its file's pages) is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DaemonMemory {
    /// Its own memory now.
    pub private_mib: f64,
    /// The most of it that was seen during the measurement.
    pub private_peak_mib: f64,
    /// Guest memory that it has mapped and touched.
    pub shared_mib: f64,
}

impl DaemonMemory {
    /// Looks again; the peak is kept.
    pub fn update(&mut self, pid: u32) -> Result<()> {
        let status = format!("/proc/{pid}/status");
        let mib = |name: &str| {
            let value = field(&status, name).and_then(|text| kib(&text));
            let kib = value.with_context(|| format!("cannot read {name} in {status}"))?;
            anyhow::Ok(kib as f64 / KIB_PER_MIB)
        };
        self.private_mib = mib("RssAnon")?;
        self.private_peak_mib = self.private_peak_mib.max(self.private_mib);
        self.shared_mib = mib("RssShmem")?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays() {
        let mut memory = DaemonMemory::default();
        memory.update(std::process::id()).unwrap();
        assert!(memory.private_mib > 0.0);
        assert_eq!(memory.private_peak_mib, memory.private_mib);
        memory.private_peak_mib = 1e9;
        memory.update(std::process::id()).unwrap();
        assert_eq!(memory.private_peak_mib, 1e9);
        let error = memory.update(0).unwrap_err().to_string();
        assert!(error.contains("/proc/0/status"), "{error}");
    }
}
