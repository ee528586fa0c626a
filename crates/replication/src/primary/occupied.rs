//! The time for which a thread was occupied: it worked, or was ready to and had no processor. The rest of
//! its time it waited for others.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Three numbers of at most 20 digits.
const SCHEDSTAT_BYTES: usize = 64;

/// The calling thread's time. No other thread may ask.
#[derive(Debug)]
pub struct OwnTime {
    /// The kernel's word; none where it does not tell: then nobody seems to wait for processors.
    schedstat: Option<File>,
}

impl OwnTime {
    /// That of the calling thread.
    pub fn new() -> OwnTime {
        OwnTime { schedstat: File::open("/proc/thread-self/schedstat").ok() }
    }

    /// The time that it has been occupied in its life.
    pub fn occupied(&self) -> Duration {
        worked() + self.waited()
    }

    /// The time of it for which it was ready to work, and had no processor.
    pub fn waited(&self) -> Duration {
        let mut text = [0; SCHEDSTAT_BYTES];
        let read = self.schedstat.as_ref().and_then(|file| file.read_at(&mut text, 0).ok());
        read.and_then(|read| waited(&text[..read])).unwrap_or_default()
    }
}

/// The processor time that the calling thread has used.
pub fn worked() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    // Every Linux has this clock; without it nothing would seem to cost anything.
    nix::time::clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}

/// The second number of a thread's `schedstat`: nanoseconds that it waited on a run queue.
fn waited(text: &[u8]) -> Option<Duration> {
    let number = std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?;
    number.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn the_wait_for_a_processor_is_the_second_number() {
        assert_eq!(waited(b"5234 800 12\n"), Some(Duration::from_nanos(800)));
        assert_eq!(waited(b"5234\n"), None);
        assert_eq!(waited(b""), None);
    }

    #[test]
    fn a_thread_that_works_is_occupied_and_one_that_sleeps_is_not() {
        let own = OwnTime::new();
        assert!(own.schedstat.is_some(), "this kernel tells");
        let occupied = |work: &dyn Fn()| {
            let (before, began) = (own.occupied(), Instant::now());
            work();
            (own.occupied().saturating_sub(before), began.elapsed())
        };
        let span = Duration::from_millis(30);
        let (worked, took) = occupied(&|| {
            let began = Instant::now();
            while began.elapsed() < span {}
        });
        assert!(worked > took / 2, "{worked:?} of {took:?}");
        let (slept, took) = occupied(&|| thread::sleep(span));
        assert!(slept < took - span + Duration::from_millis(1), "{slept:?} of {took:?}");
    }
}
