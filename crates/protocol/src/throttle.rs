//! Keeping a guest within what the link carries (Remus, section 3.4).
//!
//! An epoch's pages should reach the backup within a target time. While the guest runs,
//! somebody looks now and then how many pages it has written; when these alone would take
//! the target time, the epoch is cut short. A guest that writes as much again while the
//! epoch before is still on its way outruns the link: its processors are slowed down, step
//! by step, and given back when epochs have become small.

use crate::{Epoch, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Looks at a running epoch are this far apart, and the first one as far from its begin.
const LOOK_INTERVAL: Duration = Duration::from_millis(25);

/// The fewest pages of an epoch that say something about the link: the time of a smaller one is
/// that of the round trip.
const TELLING_PAGES: u64 = 256;

/// Pages a second that few guests exceed all of a sudden: such a link is looked after only
/// when the last epoch took its share of it.
const FAST_LINK: f64 = 100_000.0;

/// The part of its processors that is left to a guest by each look that finds it outrunning the
/// link.
const SLOWER: f64 = 0.8;

/// The factor by which each small epoch gives back.
const FASTER: f64 = 1.25;

/// The share of its processors that a guest always keeps.
const LEAST_SHARE: f64 = 0.02;

/// The most pages of an epoch that are sent before its pause: what a backup has room for beside
/// all of the guest's memory, which the pause may add.
pub const MOST_PRECOPIED_PAGES: u64 = 64 << 10;

/// Measures the link, and decides when an epoch is cut short and how fast the guest may run.
#[derive(Clone, Debug)]
pub struct Throttle {
    target: Duration,
    /// Pages a second, from the guest to the backup's acknowledgement.
    capacity: Option<f64>,
    in_flight: VecDeque<Flight>,
    /// Pages that arrived while the link was busy without a rest.
    arrived: Arrived,
    last_pages: u64,
    last_look: Time,
    share: f64,
    cut_short: u64,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    epoch: Epoch,
    pages: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Arrived {
    since: Time,
    pages: u64,
}

impl Throttle {
    /// An epoch should take `target` to reach the backup, at most.
    pub fn new(target: Duration) -> Throttle {
        Throttle {
            target,
            capacity: None,
            in_flight: VecDeque::new(),
            arrived: Arrived::default(),
            last_pages: 0,
            last_look: Time::default(),
            share: 1.0,
            cut_short: 0,
        }
    }

    /// `epoch` with so many pages was captured; the first of them were queued at `began`.
    pub fn captured(&mut self, epoch: Epoch, pages: u64, began: Time) {
        if self.in_flight.is_empty() {
            self.arrived = Arrived { since: began, pages: 0 };
        }
        self.in_flight.push_back(Flight { epoch, pages });
        self.last_pages = pages;
        // Of the next epoch nothing is written yet.
        self.last_look = self.last_look.max(began);
        match self.transfer_time(pages) {
            Some(time) if time > 2 * self.target => self.slow_down(),
            Some(time) if 2 * time > self.target => {}
            _ => self.speed_up(),
        }
    }

    /// The backup has all epochs up to `epoch`.
    pub fn committed(&mut self, epoch: Epoch, now: Time) {
        while self.in_flight.front().is_some_and(|flight| flight.epoch <= epoch) {
            self.arrived.pages += self.in_flight.pop_front().map_or(0, |flight| flight.pages);
        }
        self.measure(now);
    }

    /// Measures over all the time that the link is busy: acknowledgements may come in bunches.
    fn measure(&mut self, now: Time) {
        let Arrived { since, pages } = self.arrived;
        let span = now - since;
        if pages == 0 || span.is_zero() {
            return;
        }
        self.measured(pages, pages as f64 / span.as_secs_f64());
        if span > 4 * self.target {
            // The past counts half.
            self.arrived = Arrived { since: since + span / 2, pages: pages / 2 };
        }
    }

    /// A small epoch may say that the link is faster than thought, not that it is slower; the
    /// few pages of an idle guest, which are hardly changed, say neither.
    fn measured(&mut self, pages: u64, rate: f64) {
        let telling = pages >= TELLING_PAGES;
        self.capacity = match self.capacity {
            None => telling.then_some(rate),
            Some(known) if telling || rate > known && self.is_near(pages) => {
                Some((known + rate) / 2.0)
            }
            known => known,
        };
    }

    /// Whether so many pages take a good part of the target time.
    fn is_near(&self, pages: u64) -> bool {
        self.transfer_time(pages).is_some_and(|time| time * 4 > self.target)
    }

    /// The time to wait before the next look; none while the guest is far from the limit.
    pub fn next_look(&self, now: Time) -> Option<Duration> {
        let near = self.is_near(self.last_pages);
        let slow = self.capacity? < FAST_LINK;
        (near || slow || self.is_limiting()).then(|| self.last_look + LOOK_INTERVAL - now)
    }

    /// The guest has written `dirty` pages in this epoch so far. True if the epoch is to be
    /// cut short now.
    pub fn looked(&mut self, dirty: u64, now: Time) -> bool {
        self.last_look = now;
        let too_much = self.transfer_time(dirty).is_some_and(|time| time >= self.target);
        if too_much && !self.in_flight.is_empty() {
            self.slow_down();
            return false;
        }
        self.cut_short += u64::from(too_much);
        too_much
    }

    /// Whether the pages that a round has found may be sent while the guest runs, after rounds that
    /// sent so many: each must be sent within the target time and find fewer than the one before.
    /// Else the guest writes as much again meanwhile, and all is sent twice.
    pub fn may_precopy(&self, found: u64, before: &[u64]) -> bool {
        let in_time = self.transfer_time(found).is_some_and(|time| time <= self.target);
        let converges = before.last().is_none_or(|last| found < *last);
        let fits = before.iter().sum::<u64>() + found <= MOST_PRECOPIED_PAGES;
        // Where the link is the limit, what is sent twice costs more than a pause.
        !self.is_limiting() && in_time && converges && fits
    }

    /// The part of its processors that the guest may use, 0.02 to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Whether the guest is slowed down.
    pub fn is_limiting(&self) -> bool {
        self.share < 1.0
    }

    /// Epochs that were cut short.
    pub fn cut_short(&self) -> u64 {
        self.cut_short
    }

    /// Pages a second that the link and the backup take, as far as it is known.
    pub fn capacity(&self) -> Option<u64> {
        self.capacity.map(|rate| rate as u64)
    }

    fn transfer_time(&self, pages: u64) -> Option<Duration> {
        let seconds = pages as f64 / self.capacity?;
        // No wait is as long as that.
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 8))
    }

    fn slow_down(&mut self) {
        self.share = (self.share * SLOWER).max(LEAST_SHARE);
    }

    fn speed_up(&mut self) {
        self.share = (self.share * FASTER).min(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(200);

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    /// Has measured a link that takes 3 000 pages a second: 600 within the target time.
    fn slow_link() -> Throttle {
        let mut throttle = Throttle::new(TARGET);
        throttle.captured(Epoch(1), 600, at(0));
        throttle.committed(Epoch(1), at(200));
        assert_eq!(throttle.capacity(), Some(3000));
        throttle
    }

    #[test]
    fn nothing_is_decided_before_the_link_is_known() {
        let mut throttle = Throttle::new(TARGET);
        assert_eq!(throttle.next_look(at(0)), None);
        throttle.captured(Epoch(1), 1_000_000, at(0));
        assert!(!throttle.looked(1_000_000, at(1)));
        assert!(!throttle.is_limiting());
    }

    #[test]
    fn an_epoch_is_not_looked_at_before_it_has_lasted_for_a_while() {
        let mut throttle = slow_link();
        throttle.looked(1, at(300));
        for (epoch, now) in (2..).zip((310..1000).step_by(10)) {
            throttle.captured(Epoch(epoch), 200, at(now));
            throttle.committed(Epoch(epoch), at(now + 5));
            assert!(throttle.next_look(at(now + 9)) > Some(Duration::ZERO), "at {now}");
        }
    }

    #[test]
    fn a_guest_far_from_the_limit_is_not_looked_at() {
        let mut throttle = Throttle::new(TARGET);
        throttle.captured(Epoch(1), 60_000, at(0));
        throttle.committed(Epoch(1), at(200));
        assert_eq!(throttle.next_look(at(1000)), Some(Duration::ZERO));
        throttle.captured(Epoch(2), 10_000, at(1000));
        assert_eq!(throttle.next_look(at(1000)), None);
    }

    #[test]
    fn acknowledgements_in_bunches_do_not_make_the_link_fast() {
        let mut throttle = slow_link();
        for i in 1..20 {
            let (now, epoch) = (i * 1000, 2 * i);
            throttle.captured(Epoch(epoch), 1500, at(now));
            throttle.captured(Epoch(epoch + 1), 1500, at(now + 500));
            throttle.committed(Epoch(epoch), at(now + 998));
            throttle.committed(Epoch(epoch + 1), at(now + 999));
        }
        assert!(throttle.capacity() < Some(4000), "{:?}", throttle.capacity());
    }

    #[test]
    fn an_idle_guest_does_not_make_the_link_fast() {
        let mut throttle = slow_link();
        for i in 1..20 {
            throttle.captured(Epoch(1 + i), 30, at(i * 1000));
            throttle.committed(Epoch(1 + i), at(i * 1000 + 1));
        }
        assert_eq!(throttle.capacity(), Some(3000));
        assert!(throttle.looked(600, at(30_000)));
    }

    #[test]
    fn a_link_that_becomes_faster_is_noticed_by_small_epochs_too() {
        let mut throttle = slow_link();
        for i in 1..10 {
            throttle.captured(Epoch(1 + i), 200, at(i * 1000));
            throttle.committed(Epoch(1 + i), at(i * 1000 + 10));
        }
        assert!(throttle.capacity() > Some(3500), "{:?}", throttle.capacity());
    }

    #[test]
    fn an_epoch_that_fills_the_target_time_is_cut_short() {
        let mut throttle = slow_link();
        assert!(!throttle.looked(599, at(300)));
        assert_eq!(throttle.next_look(at(310)), Some(Duration::from_millis(15)));
        assert!(throttle.looked(600, at(325)));
        assert_eq!(throttle.cut_short(), 1);
        assert!(!throttle.is_limiting());
    }

    #[test]
    fn a_guest_that_outruns_the_link_is_slowed_down_and_gets_its_processors_back() {
        let mut throttle = slow_link();
        throttle.captured(Epoch(2), 600, at(300));
        assert!(!throttle.looked(700, at(325)), "the epoch before is still on its way");
        assert_eq!(throttle.share(), 0.8);
        for i in 0..100 {
            throttle.looked(700, at(350 + i));
        }
        assert_eq!(throttle.share(), 0.02);
        let mut epochs = 0;
        while throttle.is_limiting() {
            epochs += 1;
            throttle.captured(Epoch(2 + epochs), 100, at(1000 + 100 * epochs));
            throttle.committed(Epoch(2 + epochs), at(1010 + 100 * epochs));
        }
        assert!(epochs < 20, "{epochs}");
    }

    #[test]
    fn nothing_is_sent_before_the_pause_that_is_written_again_meanwhile() {
        assert!(!Throttle::new(TARGET).may_precopy(1, &[]), "the link is not known");
        let mut throttle = slow_link();
        assert!(throttle.may_precopy(600, &[]));
        assert!(!throttle.may_precopy(601, &[]), "it takes longer than an epoch may");
        assert!(throttle.may_precopy(400, &[600, 500]));
        assert!(!throttle.may_precopy(500, &[600, 500]), "no fewer than before");
        throttle.captured(Epoch(2), 2_000, at(1000));
        assert!(throttle.is_limiting() && !throttle.may_precopy(1, &[]));
    }

    /// A guest that writes all of its memory in no time, over whatever link: its epochs were as large as its memory,
    /// once for each round and once for the pause, and the backup refused them.
    #[test]
    fn an_epoch_is_never_much_larger_than_what_the_pause_finds() {
        let mut throttle = Throttle::new(TARGET);
        throttle.captured(Epoch(1), 1 << 30, at(0));
        throttle.committed(Epoch(1), at(1));
        for first in [1, 1 << 10, MOST_PRECOPIED_PAGES, MOST_PRECOPIED_PAGES + 1, 1 << 24] {
            for left in [first, first - first / 8, first / 2] {
                let (mut sent, mut found) = (Vec::new(), first);
                while found > 0 && throttle.may_precopy(found, &sent) {
                    sent.push(found);
                    found = found * left / first;
                }
                assert!(sent.iter().sum::<u64>() <= MOST_PRECOPIED_PAGES, "{sent:?}");
                assert!(left < first || sent.len() <= 1, "{sent:?}");
            }
        }
    }

    /// A guest that writes at a fixed rate per share settles where the link can follow.
    #[test]
    fn it_settles_at_the_speed_of_the_link() {
        const LINK: f64 = 3000.0;
        for guest in [1000.0, 4000.0, 20_000.0, 50_000.0] {
            let mut throttle = slow_link();
            let (mut now, mut dirty, mut epoch, mut began) = (1000, 0.0, 2, 1000);
            let mut arrives: Option<u64> = None;
            let mut largest: f64 = 0.0;
            for _ in 0..20_000 {
                now += 1;
                dirty += guest * throttle.share() / 1000.0;
                if arrives.is_some_and(|time| time <= now) {
                    throttle.committed(Epoch(epoch), at(now));
                    arrives = None;
                }
                let due = throttle.next_look(at(now)) == Some(Duration::ZERO);
                let cut = due && throttle.looked(dirty as u64, at(now));
                if arrives.is_none() && (cut || now >= began + 200) {
                    if now > 10_000 {
                        largest = largest.max(dirty);
                    }
                    (epoch, began) = (epoch + 1, now);
                    throttle.captured(Epoch(epoch), dirty as u64, at(now));
                    arrives = Some(now + (dirty / LINK * 1000.0) as u64 + 2);
                    dirty = 0.0;
                }
            }
            assert!(largest < 900.0, "{guest} pages a second: {largest} pages in an epoch");
            let used = guest * throttle.share();
            assert!(used < 1.5 * LINK, "{guest}: {used} pages a second");
            assert!(used > 0.3 * guest.min(LINK), "{guest}: only {used} pages a second");
        }
    }
}
