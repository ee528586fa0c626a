//! The quantities that cross module borders, each with a type of its own.

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes in a guest page; the unit of tracking, sending and applying memory.
pub const PAGE_SIZE: usize = 4096;

/// A number above anything that hosts count: who has read a number below it can count on, and add
/// to it.
pub const MOST_COUNTED: u64 = 1 << 48;

/// Reads a number that others name, with which it can be counted.
pub fn countable<'a, D: Deserializer<'a>>(from: D) -> Result<u64, D::Error> {
    let number = u64::deserialize(from)?;
    match number < MOST_COUNTED {
        true => Ok(number),
        false => Err(D::Error::custom(format!("{number} is more than can be counted"))),
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($(#[$how:meta])* $inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name($(#[$how])* pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// One interval of execution between two checkpoints. Epoch 0 is the first
    /// synchronisation; the first whole checkpoint commits epoch 1.
    Epoch(u64)
}
number! {
    /// The number of times that the ownership of a VM has changed; grows by compare-and-swap only.
    Generation(#[serde(deserialize_with = "countable")] u64)
}
number! {
    /// Index of a page inside its RAM block.
    PageIndex(u64)
}
number! {
    /// A RAM block of the machine: 0 is main memory, the others are QEMU's
    /// auxiliary blocks (ROMs, ACPI tables, VGA memory) in order of their names.
    BlockId(u16)
}
number! {
    /// The state of a VM from which its memory and disks count what they change: a snapshot that the next one may
    /// build on. Of this process: no two have the same.
    BaseId(u64)
}

impl BaseId {
    /// One that there was not before.
    pub fn new_here() -> BaseId {
        static LAST: AtomicU64 = AtomicU64::new(0);
        BaseId(LAST.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

number! {
    /// A disk of the VM, in the order of its definition.
    DiskIndex(u16)
}
number! {
    /// A network card of the VM, in the order of its definition.
    CardIndex(u16)
}

number! {
    /// A path between two hosts, in the order of the primary's configuration.
    PathIndex(u16)
}

impl Epoch {
    /// The epoch that follows this one.
    pub fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

impl Generation {
    /// The generation that a compare-and-swap from this one would make.
    pub fn next(self) -> Generation {
        Generation(self.0 + 1)
    }
}

impl PageIndex {
    /// Offset of the page's first byte in its block.
    pub fn byte_offset(self) -> u64 {
        self.0 * PAGE_SIZE as u64
    }
}

/// A run of neighbouring pages of one RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The block that the pages belong to.
    pub block: BlockId,
    /// The first page.
    pub first: PageIndex,
    /// Number of pages, at least one.
    pub count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The one after it was 0: a peer's word could begin the count anew.
    #[test]
    fn a_generation_with_which_nobody_could_count_on_is_none() {
        let read = |number: u64| serde_json::from_str::<Generation>(&number.to_string());
        assert_eq!(read(MOST_COUNTED - 1).unwrap(), Generation(MOST_COUNTED - 1));
        let error = read(u64::MAX).unwrap_err().to_string();
        assert!(error.contains("more than can be counted"), "{error}");
    }
}
