//! Effects of checkpoints on a guest on KVM, counted by KVM itself. Unlike times these are the same
//! on an emulated host.

use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use understudy_report::CheckpointTiming;

/// Path where KVM has a directory for each of its machines.
const MACHINES: &str = "/sys/kernel/debug/kvm";

/// Counts of one machine at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reading {
    faults: u64,
    exits: u64,
    flushes: u64,
    mapped: u64,
}

/// Looks at one machine's counts.
#[derive(Debug)]
pub struct KvmMachine {
    directory: PathBuf,
    /// Pages that were mapped before there were any checkpoints.
    mapped_before: u64,
}

/// Counts of what happened between two checkpoints, on average.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KvmCounts {
    /// Checkpoints counted.
    pub checkpoints: u64,
    /// Pages found written.
    pub pages_written: f64,
    /// Page faults that KVM took.
    pub faults: f64,
    /// Page faults for each page written.
    pub faults_per_page: f64,
    /// Exits from the guest, for whatever reason.
    pub exits: f64,
    /// Times that all processors had to forget mappings.
    pub remote_flushes: f64,
    /// 4 KiB pages that are mapped right after a checkpoint or later, the fewest that were seen,
    /// over those before protection.
    pub mappings_kept: f64,
}

/// Counts while checkpoints are watched.
#[derive(Debug)]
pub struct Watch<'a> {
    machine: &'a KvmMachine,
    first: Reading,
    mapped: Vec<u64>,
}

impl KvmMachine {
    /// The machine of QEMU's process `pid`, before it is protected; none where it is not KVM's or
    /// debugfs is not mounted.
    pub fn find(pid: u32) -> Option<KvmMachine> {
        let prefix = format!("{pid}-");
        let named = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
        };
        let machines = fs::read_dir(MACHINES).ok()?.flatten().map(|entry| entry.path());
        KvmMachine::at({ machines }.find(named)?)
    }

    fn at(directory: PathBuf) -> Option<KvmMachine> {
        let mapped_before = read(&directory)?.mapped;
        Some(KvmMachine { directory, mapped_before })
    }

    /// Begins to count.
    pub fn watch(&self) -> Option<Watch<'_>> {
        Some(Watch { machine: self, first: read(&self.directory)?, mapped: Vec::new() })
    }
}

impl Watch<'_> {
    /// Looks how much is mapped now.
    pub fn glance(&mut self) {
        self.mapped.extend(read(&self.machine.directory).map(|reading| reading.mapped));
    }

    /// The counts, with the checkpoints that were taken meanwhile.
    pub fn end(mut self, timings: &[CheckpointTiming]) -> Option<KvmCounts> {
        self.glance();
        let last = read(&self.machine.directory)?;
        let checkpoints = timings.len() as u64;
        let each = |sum: u64| sum as f64 / checkpoints.max(1) as f64;
        let written = timings.iter().map(|timing| timing.pages + timing.precopied_pages).sum();
        let faults = last.faults - self.first.faults;
        let fewest = self.mapped.iter().min().copied().unwrap_or(last.mapped);
        Some(KvmCounts {
            checkpoints,
            pages_written: each(written),
            faults: each(faults),
            faults_per_page: faults as f64 / written.max(1) as f64,
            exits: each(last.exits - self.first.exits),
            remote_flushes: each(last.flushes - self.first.flushes),
            mappings_kept: fewest as f64 / self.machine.mapped_before.max(1) as f64,
        })
    }
}

fn read(directory: &Path) -> Option<Reading> {
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(directory.join(name)).ok()?.trim().parse().ok()
    };
    Some(Reading {
        faults: number("pf_taken")?,
        exits: number("exits")?,
        flushes: number("remote_tlb_flush")?,
        mapped: number("pages_4k")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, values: [u64; 4]) {
        for (name, value) in
            ["pf_taken", "exits", "remote_tlb_flush", "pages_4k"].iter().zip(values)
        {
            fs::write(directory.join(name), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn counts_are_those_between_two_looks() {
        let directory = tempfile::tempdir().unwrap();
        assert!(KvmMachine::at(directory.path().to_owned()).is_none(), "no machine of KVM's");
        write(directory.path(), [1_000, 5_000, 10, 20_000]);
        let machine = KvmMachine::at(directory.path().to_owned()).unwrap();
        let mut watch = machine.watch().unwrap();
        write(directory.path(), [1_100, 5_200, 12, 19_000]);
        watch.glance();
        write(directory.path(), [1_240, 5_400, 14, 19_900]);
        let timing = CheckpointTiming { pages: 40, precopied_pages: 60, ..Default::default() };
        let counts = watch.end(&[timing, timing]).unwrap();
        assert_eq!((counts.checkpoints, counts.pages_written), (2, 100.0));
        assert_eq!((counts.faults, counts.exits, counts.remote_flushes), (120.0, 200.0, 2.0));
        assert!((counts.faults_per_page - 1.2).abs() < 1e-9);
        assert!((counts.mappings_kept - 0.95).abs() < 1e-9);
    }
}
