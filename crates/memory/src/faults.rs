//! The page faults of QEMU: a bound of what it has written that costs less than to find the pages.

use crate::MemoryError;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A line of `stat` up to the faults, and more: a name of at most 64 bytes, and eleven numbers.
const STAT_BYTES: usize = 320;

/// The places of minor and major faults behind the name (proc_pid_stat(5)): one that had to be tried again is a major one.
const FAULTS: [usize; 2] = [7, 9];

/// The faults of a process, of all its threads, also those that have ended.
#[derive(Debug)]
pub struct Faults(File);

impl Faults {
    /// Those of process `pid`.
    pub fn open(pid: u32) -> Result<Faults, MemoryError> {
        File::open(format!("/proc/{pid}/stat")).map(Faults).map_err(|source| MemoryError::Process {
            action: "count the faults of",
            pid: pid as i32,
            address: 0,
            bytes: 0,
            source,
        })
    }

    /// Their number: it grows by no less than the pages that a [`DirtyTracker`](crate::DirtyTracker) counts, but for
    /// [hot ones](crate::DirtyTracker::hot_pages), since the first write to each is one. None of a process that is gone.
    pub fn count(&self) -> Option<u64> {
        let mut text = [0; STAT_BYTES];
        let read = self.0.read_at(&mut text, 0).ok()?;
        parse(&text[..read])
    }
}

/// The faults in a line of `stat`, of which the beginning is enough.
fn parse(stat: &[u8]) -> Option<u64> {
    // The name, in brackets, may contain anything.
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let numbers = str::from_utf8(stat.get(end_of_name + 2..)?).ok()?;
    // The last one may be cut off.
    let fields: Vec<&str> = numbers.rsplit_once(' ')?.0.split(' ').collect();
    FAULTS.into_iter().map(|place| fields.get(place)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_behind_any_name() {
        let told = |text: &str| parse(text.as_bytes());
        assert_eq!(told("812 (qemu) S (1) S 1 812 812 0 -1 4194304 7100 3 25 1 900"), Some(7125));
        assert_eq!(told("812 (qemu) S 1 812 812 0 -1 4194304 7100 3 2"), None, "it is cut off");
        assert_eq!(told("812 (qemu) S 1 812"), None);
        assert_eq!(told(""), None);
    }
}
