//! The reports of comparisons.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The result of a comparison of two machines in lockstep (`lockstep verify --json`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ComparisonReport {
    /// The VM's name.
    pub vm: String,
    /// The host that follows.
    pub peer: String,
    /// Pages of memory that were compared.
    pub pages: u64,
    /// Extents of disks that were compared.
    pub extents: u64,
    /// Places of the log at which was compared.
    pub places: u64,
    /// Bytes of log that lead to the last of these places.
    pub position: u64,
    /// Spots that differed at one place and were the same at the next.
    pub passed: u64,
    /// Time that it took, in seconds.
    pub seconds: f64,
    /// Parts that differ. The backup has diverged, and is given up.
    pub differences: Vec<Difference>,
    /// Parts that differed whenever they were looked at, but never while no disk request was under
    /// way: whether the machines differ is not known.
    pub undecided: Vec<Difference>,
}

/// A place where two machines differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Difference {
    /// The part of a machine that it is in.
    #[serde(flatten)]
    pub of: Part,
    /// Offset at which it begins there, in bytes.
    pub offset: u64,
    /// Number of bytes that were compared as one: at least one of them differs.
    pub bytes: u64,
}

/// A part of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// A RAM block, by QEMU's name.
    Memory(String),
    /// A disk, by its number.
    Disk(u16),
}

/// The counts of comparisons of a VM with its backup (`status`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ComparisonCounts {
    /// Comparisons that came to a result since protection began, samples and whole ones.
    pub comparisons: u64,
    /// Pages of memory that were the same.
    pub pages: u64,
    /// Extents of disks that were the same.
    pub extents: u64,
    /// Spots that differed at one place and were the same at the next.
    pub passed: u64,
    /// Time since the last one ended, in seconds.
    pub seconds_ago: f64,
}

impl ComparisonReport {
    /// The result in a few words.
    pub fn words(&self) -> String {
        let ComparisonReport { vm, peer, pages, extents, passed, position, .. } = self;
        let compared = format!("{pages} pages of memory and {extents} extents of disks");
        if !self.differences.is_empty() {
            let differences = words(&self.differences);
            return format!(
                "the backup of {vm} on {peer} DIFFERS at {position} of its log in {differences}"
            );
        }
        if !self.undecided.is_empty() {
            let undecided = words(&self.undecided);
            return format!(
                "{compared} of {vm} and of its backup on {peer} were compared; it is not known whether \
                 these are the same, because the disks never rested: {undecided}"
            );
        }
        let passing = match passed {
            0 => String::new(),
            _ => format!(" ({passed} differed for a moment, by a disk read that was under way)"),
        };
        format!("{compared} are the same on {vm} and on its backup on {peer}{passing}")
    }

    /// Whether the machines are known to be the same.
    pub fn is_same(&self) -> bool {
        self.differences.is_empty() && self.undecided.is_empty()
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { of, offset, bytes } = self;
        match of {
            Part::Memory(block) => write!(f, "{bytes} bytes at {offset:#x} of memory {block}"),
            Part::Disk(disk) => write!(f, "{bytes} bytes at {offset} of disk {disk}"),
        }
    }
}

/// The first differences, in words.
pub fn words(differences: &[Difference]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<String> = differences.iter().take(SHOWN).map(Difference::to_string).collect();
    let more = match differences.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named_and_many_are_cut_short() {
        let page = Difference { of: Part::Memory("pc.ram".to_owned()), offset: 8192, bytes: 4096 };
        let disk = Difference { of: Part::Disk(1), offset: 65536, bytes: 65536 };
        assert_eq!(
            words(&[page.clone(), disk]),
            "4096 bytes at 0x2000 of memory pc.ram, 65536 bytes at 65536 of disk 1"
        );
        assert!(words(&vec![page.clone(); 9]).ends_with(", and 5 more"));
        let json = serde_json::to_value(&page).unwrap();
        assert_eq!(json, serde_json::json!({"memory": "pc.ram", "offset": 8192, "bytes": 4096}));
    }
}
