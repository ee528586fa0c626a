//! Processors of this machine, shared out among the sides of a laboratory.

use anyhow::{Context, Result, bail};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Processor of the first host, and that of all else: the other hosts, the client and
/// the arbiter. As two machines would, they then take nothing from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    pub(crate) first_host: usize,
    pub(crate) others: usize,
}

impl Shares {
    /// The first two processors that this program may use.
    pub(crate) fn find() -> Result<Shares> {
        let allowed = sched_getaffinity(Pid::from_raw(0)).context("cannot ask for processors")?;
        let mut allowed = (0..CpuSet::count()).filter(|&cpu| allowed.is_set(cpu) == Ok(true));
        let (Some(first_host), Some(others)) = (allowed.next(), allowed.next()) else {
            bail!("pinned hosts need two processors, and this program may use only one")
        };
        Ok(Shares { first_host, others })
    }
}

/// Keeps this thread, and all that it starts from now on, on one processor.
pub(crate) fn pin(processor: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor).with_context(|| format!("there is no processor {processor}"))?;
    sched_setaffinity(Pid::from_raw(0), &set)
        .with_context(|| format!("cannot run on processor {processor} only"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_processor_is_not_enough() {
        // A thread of its own: its processor is its own affair.
        let narrow = || {
            let shares = Shares::find();
            let Ok(Shares { first_host, others }) = shares else { return };
            assert_ne!(first_host, others);
            pin(others).unwrap();
            let error = Shares::find().unwrap_err().to_string();
            assert!(error.contains("two processors"), "{error}");
        };
        std::thread::spawn(narrow).join().unwrap();
    }
}
