//! File descriptors: as many as the system allows, and some that are kept for the arbiter.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::fs::File;
use std::os::fd::RawFd;
use tracing::warn;
use understudy_threads::Common;

/// Descriptors that one question to an arbiter may need at once, several times over.
const RESERVED: usize = 16;
/// The last descriptors, which connections of other hosts do not get: VMs need some, too.
const KEPT_FROM_CONNECTIONS: u64 = 128;

/// Raises the soft limit of open files to the hard one.
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!("the limit of open files stays as it is: {error}");
    }
}

/// Descriptors that are open for nothing, so that they can be had when no others can.
#[derive(Default)]
struct Reserve {
    kept: Vec<File>,
    /// Questions to the arbiter under way.
    askers: usize,
    /// Whether there is to be a reserve: without [`fill`] there is none.
    wanted: bool,
}

static RESERVE: Common<Reserve> =
    Common::new(Reserve { kept: Vec::new(), askers: 0, wanted: false });

/// Descriptors that may be used until this is dropped.
pub struct Lent(());

/// Opens the reserve: once, at the daemon's start.
pub fn fill() {
    let mut reserve = RESERVE.lock();
    reserve.wanted = true;
    reserve.fill();
}

/// Frees the reserve for a question to the arbiter.
pub fn lend() -> Lent {
    let mut reserve = RESERVE.lock();
    reserve.askers += 1;
    reserve.kept.clear();
    Lent(())
}

/// Whether this descriptor, the lowest that was free, is among the last ones. No connection of
/// another host may have it.
pub fn is_one_of_the_last(descriptor: RawFd) -> bool {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    descriptor as u64 >= limit - limit.min(KEPT_FROM_CONNECTIONS).min(limit / 2)
}

impl Reserve {
    fn fill(&mut self) {
        while self.wanted && self.kept.len() < RESERVED {
            // What cannot be had now is tried again after the next question.
            let Ok(file) = File::open("/dev/null") else { return };
            self.kept.push(file);
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut reserve = RESERVE.lock();
        reserve.askers -= 1;
        if reserve.askers == 0 {
            reserve.fill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arbiter;
    use crate::ArbiterConfig;
    use std::os::fd::AsRawFd;
    use std::process::Command;
    use understudy_protocol::{Generation, Verdict, VmName, literal};

    /// Says that the test is in a process of its own, whose limits are its own.
    const ALONE: &str = "UNDERSTUDY_TEST_ALONE";

    /// Regression: without the reserve the arbiter is `Unreachable`: too many open files.
    #[test]
    fn the_arbiter_is_asked_when_no_descriptor_is_left() {
        if std::env::var_os(ALONE).is_some() {
            return alone();
        }
        let name = "descriptors::tests::the_arbiter_is_asked_when_no_descriptor_is_left";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        let words = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && words.contains("1 passed"), "{words}");
    }

    fn alone() {
        let directory = tempfile::tempdir().unwrap();
        let config = ArbiterConfig::File { path: directory.path().to_owned() };
        let db: VmName = literal("db");
        let arbiter = Arbiter::new(&config, &literal("a")).unwrap();
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 256, hard).unwrap();
        fill();
        let exhaust = || {
            let open = || File::open("/dev/null").ok();
            std::iter::from_fn(open).collect::<Vec<_>>()
        };
        let all = exhaust();
        let highest = all.iter().map(|file| file.as_raw_fd()).max().unwrap();
        assert!(is_one_of_the_last(highest) && !is_one_of_the_last(100), "{highest}");
        assert!(all.len() > 100, "{} descriptors", all.len());
        assert_eq!(arbiter.claim(&db, Generation(0)), Verdict::Granted(Generation(1)));
        assert_eq!(arbiter.acquire(&db, Generation(1)), Verdict::Granted(Generation(2)));
        assert!(arbiter.current(&db).unwrap().is_some());
        assert!(File::open("/dev/null").is_err(), "the reserve was not taken back");
        drop(all);
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_limit();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(soft, hard);
    }
}
