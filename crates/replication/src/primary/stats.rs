//! The measurements of a session: the last checkpoints, the bytes sent, and what of that follows for the guest's speed.

use super::link_speed::LinkSpeed;
use super::pace::Limit;
use crate::clock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use understudy_encoding::{Counters, Methods};
use understudy_protocol::{Epoch, Policy, Throttle, Time};
use understudy_report::meters::VmMeters;
use understudy_report::{CheckpointTiming, OutputReport, PauseReport, ThrottleReport};
use understudy_threads::{Mutex, lock};

/// Checkpoints whose timings are kept.
const KEPT_TIMINGS: usize = 4096;

/// The bandwidth is an average over this span.
const BANDWIDTH_SPAN: Duration = Duration::from_secs(2);

/// Measurements of one protection session.
#[derive(Debug)]
pub struct Stats {
    /// The meters that the VM's sessions add to.
    meters: VmMeters,
    bytes_sent: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    link: LinkSpeed,
    throttle: Throttle,
    /// The guest's speed, as it is.
    limit: Limit,
    encoding: (Counters, Methods),
    timings: VecDeque<CheckpointTiming>,
    resumed: VecDeque<(Epoch, Time)>,
    committed: u64,
    longest_pause_ms: f64,
    written_pages: u64,
    /// The end of the pause of the last committed checkpoint.
    committed_from: Option<Time>,
    /// Time at which that was acknowledged.
    committed_at: Option<Time>,
    samples: VecDeque<Sample>,
}

/// A sample of what had been sent and written at a moment.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Time,
    bytes: u64,
    pages: u64,
}

impl Stats {
    /// Measurements of a session under `policy`, which add to these meters.
    pub fn new(meters: VmMeters, policy: &Policy) -> Stats {
        let inner = Inner {
            link: LinkSpeed::default(),
            throttle: Throttle::new(policy.transfer_target()),
            limit: Limit::NONE,
            encoding: Default::default(),
            timings: VecDeque::new(),
            resumed: VecDeque::new(),
            committed: 0,
            longest_pause_ms: 0.0,
            written_pages: 0,
            committed_from: None,
            committed_at: None,
            samples: VecDeque::new(),
        };
        Stats { meters, bytes_sent: AtomicU64::default(), inner: Mutex::new(inner) }
    }

    /// Bytes left for the backup.
    pub fn sent(&self, bytes: u64) {
        self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
        self.meters.sent_bytes.inc_by(bytes);
    }

    /// Bytes that left for the backup since protection began.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }

    /// Works with what was learned about the link.
    pub fn link<T>(&self, work: impl FnOnce(&mut LinkSpeed) -> T) -> T {
        work(&mut lock(&self.inner).link)
    }

    /// Notes what the encoder did so far, and with what it goes on.
    pub fn encoded(&self, counters: Counters, methods: Methods) {
        lock(&self.inner).encoding = (counters, methods);
    }

    /// The values that [`Stats::encoded`] was told last.
    pub fn encoding(&self) -> (Counters, Methods) {
        lock(&self.inner).encoding
    }

    /// A checkpoint's pause ended at `resumed`; the first of its pages were queued at `began`.
    pub fn captured(&self, timing: CheckpointTiming, began: Time, resumed: Time) {
        self.meters.captured(&timing);
        let pages = timing.pages + timing.precopied_pages;
        let mut inner = lock(&self.inner);
        inner.throttle.captured(timing.epoch, pages, began);
        inner.written_pages += pages;
        inner.longest_pause_ms = inner.longest_pause_ms.max(timing.total_ms);
        inner.resumed.push_back((timing.epoch, resumed));
        if inner.timings.len() == KEPT_TIMINGS {
            inner.timings.pop_front();
        }
        inner.timings.push_back(timing);
    }

    /// The backup acknowledged `epoch` at `now`.
    pub fn committed(&self, epoch: Epoch, now: Time) {
        let mut inner = lock(&self.inner);
        inner.link.acknowledged(epoch, now);
        inner.throttle.committed(epoch, now);
        let before = inner.committed;
        while let Some(&(first, resumed)) = inner.resumed.front() {
            if first > epoch {
                break;
            }
            inner.resumed.pop_front();
            inner.committed += 1;
            inner.committed_from = Some(resumed);
            let timing = inner.timings.iter_mut().rev().find(|timing| timing.epoch == first);
            if let Some(timing) = timing {
                timing.replicate_ms = milliseconds(now - resumed);
                self.meters.committed(timing);
            }
        }
        if inner.committed > before {
            if let Some(last) = inner.committed_at.replace(now) {
                self.meters.commit_gaps.observe((now - last).as_secs_f64());
            }
        }
    }

    /// The part of its processors that the guest may have, so that the link carries what it writes.
    pub fn share(&self) -> f64 {
        lock(&self.inner).throttle.share()
    }

    /// The time to wait before somebody looks how much the guest has written, if at all.
    pub fn next_look(&self) -> Option<Duration> {
        lock(&self.inner).throttle.next_look(clock::now())
    }

    /// The guest has written `dirty` pages so far; true if its epoch is to be cut short.
    pub fn looked(&self, dirty: u64) -> bool {
        lock(&self.inner).throttle.looked(dirty, clock::now())
    }

    /// Whether pages may be sent before the pause; see [`Throttle::may_precopy`].
    pub fn may_precopy(&self, found: u64, before: &[u64]) -> bool {
        lock(&self.inner).throttle.may_precopy(found, before)
    }

    /// The guest has this speed.
    pub fn limited(&self, limit: Limit) {
        lock(&self.inner).limit = limit;
    }

    /// How far the guest is slowed down, for `status`.
    pub fn throttle(&self) -> ThrottleReport {
        let inner = lock(&self.inner);
        ThrottleReport {
            vcpu_percent: inner.limit.percent,
            unavailable: inner.limit.unavailable.clone(),
            cut_short: inner.throttle.cut_short(),
            link_pages_per_second: inner.throttle.capacity(),
        }
    }

    /// Checkpoints committed since protection began.
    pub fn checkpoints(&self) -> u64 {
        lock(&self.inner).committed
    }

    /// The committed checkpoints' timings, oldest first.
    pub fn timings(&self) -> Vec<CheckpointTiming> {
        let inner = lock(&self.inner);
        let waiting = inner.resumed.len();
        let committed = inner.timings.len().saturating_sub(waiting);
        inner.timings.iter().take(committed).copied().collect()
    }

    /// Percentiles of the pause.
    pub fn pause(&self) -> PauseReport {
        let (pauses, max): (Vec<f64>, f64) = {
            let inner = lock(&self.inner);
            let pauses = inner.timings.iter().map(|timing| timing.total_ms);
            (pauses.collect(), inner.longest_pause_ms)
        };
        let pauses = Sorted::new(pauses.into_iter());
        PauseReport { p50: pauses.at(0.5), p99: pauses.at(0.99), max }
    }

    /// The time that output has waited in the committed epochs that had any.
    pub fn output_wait(&self) -> Option<OutputReport> {
        let timings = self.timings();
        let waits = |more: fn(&CheckpointTiming) -> f64| {
            let wait = |timing: &CheckpointTiming| Some(timing.output_waited_ms? + more(timing));
            Sorted::new(timings.iter().filter_map(wait))
        };
        let (checkpoint, release) =
            (waits(|_| 0.0), waits(|timing| timing.total_ms + timing.replicate_ms));
        (!checkpoint.0.is_empty()).then(|| OutputReport {
            to_checkpoint_p50: checkpoint.at(0.5),
            to_checkpoint_p99: checkpoint.at(0.99),
            to_release_p50: release.at(0.5),
            to_release_p99: release.at(0.99),
        })
    }

    /// The age of the state that the backup would go on with: what the guest did since is lost
    /// with this host. None before the first commit.
    pub fn uncommitted_ms(&self) -> Option<f64> {
        let from = lock(&self.inner).committed_from?;
        Some(milliseconds(clock::now() - from))
    }

    /// Notes what was sent and written so far; call it regularly.
    pub fn sample(&self) {
        let (at, bytes) = (clock::now(), self.bytes_sent());
        let mut inner = lock(&self.inner);
        let pages = inner.written_pages;
        inner.samples.push_back(Sample { at, bytes, pages });
        while inner.samples.front().is_some_and(|first| at - first.at > BANDWIDTH_SPAN) {
            inner.samples.pop_front();
        }
    }

    /// Bytes a second to the backup, over the last two seconds.
    pub fn bandwidth(&self) -> u64 {
        self.rate(|sample| sample.bytes)
    }

    /// Pages a second that checkpoints found written, over the last two seconds.
    pub fn dirty_rate(&self) -> u64 {
        self.rate(|sample| sample.pages)
    }

    fn rate(&self, of: fn(&Sample) -> u64) -> u64 {
        let inner = lock(&self.inner);
        let (Some(first), Some(last)) = (inner.samples.front(), inner.samples.back()) else {
            return 0;
        };
        let seconds = (last.at - first.at).as_secs_f64();
        if seconds > 0.0 { ((of(last) - of(first)) as f64 / seconds) as u64 } else { 0 }
    }
}

/// Measured values in ascending order.
struct Sorted(Vec<f64>);

impl Sorted {
    fn new(values: impl Iterator<Item = f64>) -> Sorted {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        Sorted(values)
    }

    /// The value that this share of them does not exceed; 0 if there are none.
    fn at(&self, share: f64) -> f64 {
        let index = (self.0.len() as f64 * share).ceil() as usize;
        self.0.get(index.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}

/// A span in milliseconds, for reports.
pub fn milliseconds(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;
    use understudy_protocol::literal;
    use understudy_report::meters::Meters;

    #[test]
    fn output_waits_until_its_checkpoint_and_until_its_commit() {
        let meters = Meters::default();
        let stats = Stats::new(meters.of(&literal("db")), &Policy::default());
        let at = |ms| Time(Duration::from_millis(ms));
        assert_eq!(stats.output_wait(), None);
        for (epoch, waited) in [(1, None), (2, Some(4.0)), (3, Some(6.0)), (4, Some(50.0))] {
            let epoch = Epoch(epoch);
            let timing = CheckpointTiming {
                epoch,
                total_ms: 1.0,
                output_waited_ms: waited,
                ..Default::default()
            };
            stats.captured(timing, at(9), at(10));
            if epoch < Epoch(4) {
                stats.committed(epoch, at(12));
            }
        }
        let report = stats.output_wait().expect("two committed epochs had output");
        let expected = OutputReport {
            to_checkpoint_p50: 4.0,
            to_checkpoint_p99: 6.0,
            to_release_p50: 7.0,
            to_release_p99: 9.0,
        };
        assert_eq!(report, expected, "what is not committed has not left");
        let (mut registry, mut page) = (Registry::default(), String::new());
        meters.register(&mut registry);
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        for line in [
            r#"vm_checkpoints_total{vm="db"} 3"#,
            r#"vm_pause_seconds_count{vm="db"} 4"#,
            r#"vm_checkpoint_wait_seconds_count{vm="db"} 3"#,
            r#"vm_output_delay_seconds_count{vm="db"} 2"#,
            r#"vm_commit_gap_seconds_count{vm="db"} 2"#,
            r#"vm_output_delay_seconds_bucket{le="0.01",vm="db"} 2"#,
        ] {
            assert!(page.lines().any(|other| other == line), "{line} is not in:\n{page}");
        }
    }
}
