//! The guest's clocks: what they show, and whether they ever go backwards.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::server;

/// Looks between two rests, so that the watchers leave the processors to others now and then.
const BURST: usize = 100;
const REST: Duration = Duration::from_millis(2);
/// At least so many threads watch, on as many processors as there are.
const FEWEST_WATCHERS: usize = 2;

/// A clock that all watchers read, and the latest that any of them has seen.
struct Watched {
    read: fn() -> u64,
    latest: AtomicU64,
    backwards: AtomicU64,
}

impl Watched {
    fn new(read: fn() -> u64) -> Watched {
        Watched { read, latest: AtomicU64::new(0), backwards: AtomicU64::new(0) }
    }

    /// What another thread has seen before this look cannot be later than it.
    fn look(&self) {
        let latest = self.latest.load(Ordering::SeqCst);
        let now = (self.read)();
        if now < latest {
            self.backwards.fetch_add(1, Ordering::Relaxed);
        }
        self.latest.fetch_max(now, Ordering::SeqCst);
    }

    fn backwards(&self) -> u64 {
        self.backwards.load(Ordering::Relaxed)
    }
}

/// Watches the clocks on all processors, and answers each line on `port` with
/// `REALTIME_NS TICKS LOOKS MONOTONIC_BACKWARDS TICKS_BACKWARDS`: what the clocks show now, how
/// often they were looked at, and how often one was behind what another thread had seen before.
pub fn serve(port: u16) -> Result<(), String> {
    let clocks = Arc::new([Watched::new(monotonic), Watched::new(ticks)]);
    let looks = Arc::new(AtomicU64::new(0));
    let watchers = thread::available_parallelism().map_or(FEWEST_WATCHERS, usize::from);
    for _ in 0..watchers.max(FEWEST_WATCHERS) {
        let (clocks, looks) = (Arc::clone(&clocks), Arc::clone(&looks));
        thread::spawn(move || {
            loop {
                for _ in 0..BURST {
                    clocks.iter().for_each(Watched::look);
                }
                looks.fetch_add(BURST as u64, Ordering::Relaxed);
                thread::sleep(REST);
            }
        });
    }
    server::serve(port, move |stream| {
        stream.set_nodelay(true)?;
        server::answer_lines(stream, |_| {
            let realtime = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let (ticks, looks) = (ticks(), looks.load(Ordering::Relaxed));
            let [monotonic_back, ticks_back] = [&clocks[0], &clocks[1]].map(Watched::backwards);
            let nanoseconds = realtime.as_nanos();
            Ok(format!("{nanoseconds} {ticks} {looks} {monotonic_back} {ticks_back}\n")
                .into_bytes())
        })
    })
}

/// CLOCK_MONOTONIC, in nanoseconds since the first call.
fn monotonic() -> u64 {
    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    ORIGIN.elapsed().as_nanos() as u64
}

/// The processor's time stamp counter, read after all that comes before.
#[allow(unsafe_code)] // There is no other way to read it.
fn ticks() -> u64 {
    // SAFETY: every processor that this runs on has both instructions.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}
