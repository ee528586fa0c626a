//! The backup's side of the logging channel: from the wire to its QEMU.

use crate::{BadEvent, EventScanner, LogPosition};
use std::collections::VecDeque;
use understudy_protocol::Time;

/// The log that was acknowledged and that QEMU has not got yet.
///
/// QEMU gets whole events only: an event whose end never comes would hold it for ever. At
/// the end of the primary the part of an event that was left is dropped (VMware FT, 2.3): the
/// backup then stands exactly behind the last event. Nothing else is: frames may have left that
/// any of it led to.
#[derive(Debug, Default)]
pub struct Feed {
    scanner: EventScanner,
    waiting: VecDeque<u8>,
    /// Position at which `waiting` begins.
    given: LogPosition,
    /// Position up to which QEMU is known to have taken the log.
    taken: LogPosition,
    /// Ends of batches, and when they came.
    arrivals: VecDeque<(LogPosition, Time)>,
    /// The positions at which QEMU is to stop, in order; with what the log tells there, once it has
    /// come so far.
    marks: VecDeque<(LogPosition, Option<Mark>)>,
    ended: bool,
}

/// The last batch of a log, of which nothing has come since it was [looked at](Feed::last).
#[derive(Debug)]
pub struct Rest {
    batch: Vec<u8>,
    /// As it is behind the batch.
    scanner: EventScanner,
}

/// A place of the log at which QEMU stops for a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Position of the mark.
    pub position: LogPosition,
    /// Number of disk requests that have ended before.
    pub disk_ends: u64,
    /// Whether the last event before it is instructions that were executed.
    pub ends_with_instructions: bool,
}

/// No place where QEMU can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMark {
    /// Batch came too late.
    #[error("QEMU is to stop at {0} of its log, of which {1} has come already")]
    Passed(LogPosition, LogPosition),
    /// The mark came after one that lies behind it.
    #[error("QEMU is to stop at {0} of its log, after {1}")]
    Disordered(LogPosition, LogPosition),
}

impl Feed {
    /// A feed at the beginning of a log.
    pub fn new() -> Feed {
        Feed::default()
    }

    /// A batch came, to be acknowledged if this goes well: what is no log of a proven QEMU
    /// cannot be replayed, and must not be acknowledged.
    ///
    /// # Panics
    /// After [`Feed::end`].
    pub fn receive(&mut self, batch: &[u8], now: Time) -> Result<(), BadEvent> {
        assert!(!self.ended, "a batch after the end");
        let (mut scanner, mut marks) = (self.scanner.clone(), self.marks.clone());
        let mut rest = batch;
        for (at, mark) in marks.iter_mut().filter(|(_, mark)| mark.is_none()) {
            let bytes = at.bytes_since(scanner.whole() + scanner.partial()) as usize;
            let Some((before, behind)) = rest.split_at_checked(bytes) else { break };
            scanner.scan(before)?;
            *mark = Some(Mark::of(&scanner));
            rest = behind;
        }
        scanner.scan(rest)?;
        (self.scanner, self.marks) = (scanner, marks);
        self.take_in(batch, now);
        Ok(())
    }

    /// The last batch came, which counts once what came with it does: then it is there to be replayed.
    pub fn last(&self, batch: Vec<u8>) -> Result<Rest, BadEvent> {
        let mut scanner = self.scanner.clone();
        scanner.scan(&batch)?;
        Ok(Rest { batch, scanner })
    }

    /// The last batch counts.
    pub fn receive_last(&mut self, rest: Rest, now: Time) {
        self.scanner = rest.scanner;
        self.take_in(&rest.batch, now);
    }

    fn take_in(&mut self, batch: &[u8], now: Time) {
        self.waiting.extend(batch);
        if !batch.is_empty() {
            self.arrivals.push_back((self.received(), now));
        }
    }

    /// The position at which the log that came ends.
    pub fn received(&self) -> LogPosition {
        self.scanner.whole() + self.scanner.partial()
    }

    /// Bytes that wait here: the backup reads no more from the wire while they are many.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The part of the log that QEMU may get now, without its last partial event; in one piece at
    /// most.
    pub fn ready(&mut self) -> &[u8] {
        let mark = self.marks.front().map(|&(at, _)| at);
        let end = self.scanner.whole().min(mark.unwrap_or(LogPosition(u64::MAX)));
        let whole = end.bytes_since(self.given) as usize;
        let (first, _) = self.waiting.as_slices();
        &first[..whole.min(first.len())]
    }

    /// QEMU got the first `bytes` of [`Feed::ready`].
    pub fn gave(&mut self, bytes: usize) {
        self.waiting.drain(..bytes);
        self.given = self.given + bytes;
    }

    /// QEMU gets no log behind this place until [`Feed::pass_mark`]. To be called before log from
    /// behind it comes.
    pub fn mark(&mut self, at: LogPosition) -> Result<(), BadMark> {
        let received = self.received();
        if at < received {
            return Err(BadMark::Passed(at, received));
        }
        if let Some(&(last, _)) = self.marks.back().filter(|&&(last, _)| last > at) {
            return Err(BadMark::Disordered(at, last));
        }
        let here = (at == received).then(|| Mark::of(&self.scanner));
        self.marks.push_back((at, here));
        Ok(())
    }

    /// The mark up to which QEMU has got the log.
    pub fn at_mark(&self) -> Option<Mark> {
        let &(at, mark) = self.marks.front()?;
        mark.filter(|_| at == self.given)
    }

    /// QEMU may go on.
    pub fn pass_mark(&mut self) {
        self.marks.pop_front();
    }

    /// Drops the partial event, as nothing more will come. Returns how many bytes were dropped.
    /// Once QEMU has come to the end, all that was acknowledged happened.
    pub fn end(&mut self) -> usize {
        if self.ended {
            return 0;
        }
        self.ended = true;
        self.marks.clear();
        let partial = self.scanner.partial();
        self.waiting.truncate(self.waiting.len() - partial);
        partial
    }

    /// Whether QEMU got everything: it is to be told that this was all.
    pub fn is_over(&self) -> bool {
        self.ended && self.waiting.is_empty()
    }

    /// QEMU has executed the log up to here, so far as it says.
    pub fn taken(&mut self, position: LogPosition) {
        self.taken = self.taken.max(position);
        while self.arrivals.front().is_some_and(|&(end, _)| end <= self.taken) {
            self.arrivals.pop_front();
        }
    }

    /// Whole events that QEMU has not executed, in bytes of log.
    pub fn pending(&self) -> u64 {
        self.scanner.whole().bytes_since(self.taken)
    }

    /// Time at which the oldest batch came that QEMU has not executed whole.
    pub fn behind_since(&self) -> Option<Time> {
        self.arrivals.front().filter(|_| self.pending() > 0).map(|&(_, came)| came)
    }
}

impl Mark {
    /// The mark at the end of what was scanned.
    fn of(scanner: &EventScanner) -> Mark {
        Mark {
            position: scanner.whole() + scanner.partial(),
            disk_ends: scanner.disk_ends(),
            ends_with_instructions: scanner.ends_with_instructions(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const AT: Time = Time(Duration::ZERO);

    /// Instructions, a frame of three bytes, an interrupt.
    const LOG: &[u8] = &[0, 0, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 3, 7, 7, 7, 1];
    const ENDS: [usize; 3] = [5, 18, 19];

    fn drain(feed: &mut Feed, most: usize) -> Vec<u8> {
        let mut got = Vec::new();
        loop {
            let ready = feed.ready();
            let piece = ready[..ready.len().min(most)].to_vec();
            if piece.is_empty() {
                return got;
            }
            feed.gave(piece.len());
            got.extend(piece);
        }
    }

    proptest! {
        #[test]
        fn qemu_gets_all_whole_events_wherever_the_log_stops(
            stop in 0..=LOG.len(), cut in 1..8usize, most in 1..8usize, early in any::<bool>(),
        ) {
            let mut feed = Feed::new();
            let mut got = Vec::new();
            for batch in LOG[..stop].chunks(cut) {
                feed.receive(batch, AT).unwrap();
                if early {
                    got.extend(drain(&mut feed, most));
                    prop_assert!(got.is_empty() || ENDS.contains(&got.len()));
                }
            }
            let whole = ENDS.into_iter().rev().find(|&end| end <= stop).unwrap_or(0);
            prop_assert_eq!(feed.end(), stop - whole);
            got.extend(drain(&mut feed, most));
            prop_assert_eq!(&got, &LOG[..whole]);
            prop_assert!(feed.is_over());
        }
    }

    #[test]
    fn qemu_stops_at_marks_and_nowhere_else() {
        let mut feed = Feed::new();
        let at = LogPosition;
        feed.receive(&LOG[..5], AT).unwrap();
        assert_eq!(feed.mark(at(4)), Err(BadMark::Passed(at(4), at(5))));
        feed.mark(at(5)).unwrap();
        feed.mark(at(18)).unwrap();
        assert_eq!(feed.mark(at(17)), Err(BadMark::Disordered(at(17), at(18))));
        assert_eq!(feed.at_mark(), None, "QEMU has not got the log");
        feed.receive(&LOG[5..], AT).unwrap();
        assert_eq!(drain(&mut feed, 100), &LOG[..5]);
        let first = Mark { position: at(5), disk_ends: 0, ends_with_instructions: true };
        assert_eq!(feed.at_mark(), Some(first));
        feed.pass_mark();
        assert_eq!(drain(&mut feed, 3), &LOG[5..18]);
        let second = Mark { position: at(18), ends_with_instructions: false, ..first };
        assert_eq!(feed.at_mark(), Some(second));
        feed.pass_mark();
        assert_eq!(drain(&mut feed, 100), &LOG[18..]);
        assert_eq!(feed.at_mark(), None);
    }

    #[test]
    fn the_end_of_a_log_passes_all_marks() {
        let mut feed = Feed::new();
        feed.mark(LogPosition(5)).unwrap();
        feed.receive(LOG, AT).unwrap();
        feed.end();
        assert!(!feed.is_over());
        assert_eq!(drain(&mut feed, 100), LOG);
        assert_eq!(feed.at_mark(), None);
    }

    // It was acknowledged with its epoch before it was looked at.
    #[test]
    fn the_last_batch_is_looked_at_before_it_counts() {
        let mut feed = Feed::new();
        feed.receive(&LOG[..7], AT).unwrap();
        assert!(feed.last(vec![0xff; 20]).is_err());
        let rest = feed.last(LOG[7..18].to_vec()).unwrap();
        assert_eq!((drain(&mut feed, 100), feed.received()), (LOG[..5].to_vec(), LogPosition(7)));
        feed.receive_last(rest, AT);
        assert_eq!((feed.end(), drain(&mut feed, 100)), (0, LOG[5..18].to_vec()));
    }

    #[test]
    fn a_bad_batch_changes_nothing() {
        let mut feed = Feed::new();
        feed.receive(&LOG[..7], AT).unwrap();
        assert!(feed.receive(&[0; 8].map(|_| 0xff), AT).is_err());
        assert_eq!((feed.received(), feed.ready().len()), (LogPosition(7), 5));
        feed.receive(&LOG[7..], AT).unwrap();
        assert_eq!(feed.ready().len(), LOG.len());
    }

    #[test]
    fn the_lag_is_that_of_the_oldest_batch_that_is_not_executed() {
        let at = |ms| Time(Duration::from_millis(ms));
        let mut feed = Feed::new();
        feed.receive(&LOG[..5], at(1)).unwrap();
        feed.receive(&LOG[5..], at(4)).unwrap();
        assert_eq!((feed.behind_since(), feed.pending()), (Some(at(1)), 19));
        feed.taken(LogPosition(6));
        assert_eq!(feed.behind_since(), Some(at(4)));
        feed.taken(LogPosition(19));
        assert_eq!((feed.behind_since(), feed.pending()), (None, 0));
    }
}
