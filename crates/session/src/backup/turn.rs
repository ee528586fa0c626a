//! A turn of the backup from checkpoints to a log, or back, seen from the backup: what its primary orders beforehand,
//! and which epochs may come.

use understudy_protocol::{Epoch, planted};

/// The orders of a primary to prepare another QEMU, `O`, beside the one that there is.
#[derive(Debug)]
pub struct Orders<O> {
    count: u64,
    other: Option<O>,
    /// Whether one is being prepared.
    preparing: bool,
    closed: bool,
    /// Whether the epoch is on its way that is the turn.
    expected: bool,
    /// Turns that are committed and not carried out.
    committed: u32,
}

impl<O> Default for Orders<O> {
    fn default() -> Orders<O> {
        Orders {
            count: 0,
            other: None,
            preparing: false,
            closed: false,
            expected: false,
            committed: 0,
        }
    }
}

impl<O> Orders<O> {
    /// Another order has come: its number, and what was prepared for the one before, which is to be ended. No primary
    /// sends one while the turn before is on its way, which needs that.
    pub fn take(&mut self) -> Result<(u64, Option<O>), &'static str> {
        if self.expected {
            return Err("an order of another turn came before the turn had");
        }
        self.count += 1;
        Ok((self.count, self.other.take()))
    }

    /// Notes that another QEMU is about to be prepared. False while one is: a peer could have this host start as
    /// many as it likes.
    pub fn begin_to_prepare(&mut self) -> bool {
        !std::mem::replace(&mut self.preparing, true)
    }

    /// The preparation has ended, before its answer is sent: then the primary may order anew.
    pub fn end_to_prepare(&mut self) {
        self.preparing = false;
    }

    /// Whether the turn before is carried out, so that the QEMU that there is stays until the next one.
    pub fn may_prepare(&self) -> bool {
        self.committed == 0 || planted!(PrepareTooEarly)
    }

    /// What the order of this number asked for is prepared. Given back if it was called off meanwhile.
    pub fn offer(&mut self, number: u64, other: O) -> Result<(), O> {
        let called_off = self.closed || self.count != number;
        if called_off && !planted!(KeepCalledOff) {
            return Err(other);
        }
        self.other = Some(other);
        Ok(())
    }

    /// An epoch is on its way that is a turn: what it needs, which must be for that one.
    pub fn expect(&mut self, fits: impl Fn(&O) -> bool) -> Result<&O, &'static str> {
        if self.expected {
            return Err("a turn came before the one before had");
        }
        let other = self.other.as_ref().filter(|other| fits(other));
        self.expected = other.is_some();
        other.ok_or("a turn came that was not prepared")
    }

    /// What is prepared.
    pub fn other(&self) -> Option<&O> {
        self.other.as_ref()
    }

    /// A turn is committed: what it needs, if that was prepared.
    pub fn commit(&mut self) -> Option<O> {
        self.expected = false;
        self.committed += 1;
        self.other.take()
    }

    /// A turn that was committed is carried out.
    pub fn carried_out(&mut self) {
        self.committed -= 1;
    }

    /// None is needed any more: gives what is to be ended.
    pub fn close(&mut self) -> Option<O> {
        self.closed = true;
        self.other.take()
    }
}

/// The epochs of a log: those between two checkpoints, or behind one.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogSpan {
    machine: Epoch,
    last: Epoch,
    /// The epoch, on its way, that is a checkpoint again.
    ending: Option<Epoch>,
    ended: bool,
}

impl LogSpan {
    /// A log that begins behind this epoch.
    pub fn new(machine: Epoch) -> LogSpan {
        LogSpan { machine, last: machine, ending: None, ended: false }
    }

    /// The epoch behind which it begins.
    pub fn machine(&self) -> Epoch {
        self.machine
    }

    /// Takes in this batch, which has come; false if it is of no more use.
    pub fn take(&mut self, epoch: Epoch) -> Result<bool, String> {
        if self.ended {
            return Ok(false);
        }
        if epoch != self.last.next() || self.ending.is_some() {
            return Err(format!("batch {epoch} of the log came after {}", self.last));
        }
        self.last = epoch;
        Ok(true)
    }

    /// An epoch comes that is a checkpoint again, with which it ends: the next one.
    pub fn expect_end(&mut self, epoch: Epoch) -> Result<(), String> {
        let is_next = self.ending.is_none() && epoch == self.last.next();
        // Where no batch is taken in any more it matters no more.
        if !is_next && !self.ended {
            return Err(format!("the log is to end with epoch {epoch}, after {}", self.last));
        }
        self.ending = Some(epoch);
        Ok(())
    }

    /// Whether messages of this epoch may come, which is a checkpoint: before the log, and when that ends.
    pub fn may_come(&self, epoch: Epoch) -> bool {
        epoch <= self.machine || self.ending.is_some_and(|ending| epoch >= ending)
    }

    /// No more comes, or is wanted. False if it had ended before.
    pub fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.ended, true)
    }

    /// Whether no more is taken in.
    pub fn has_ended(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_qemu_is_prepared_at_a_time() {
        let mut orders = Orders::<()>::default();
        assert!(orders.begin_to_prepare() && !orders.begin_to_prepare());
        // An order that calls it off does not end what has begun.
        assert_eq!(orders.take(), Ok((1, None)));
        assert!(!orders.begin_to_prepare());
        orders.end_to_prepare();
        assert!(orders.begin_to_prepare());
    }

    #[test]
    fn what_was_called_off_is_given_back() {
        let mut orders = Orders::default();
        let (first, _) = orders.take().unwrap();
        assert_eq!(orders.offer(first, 'a'), Ok(()));
        let (second, left) = orders.take().unwrap();
        assert_eq!((left, orders.offer(first, 'b')), (Some('a'), Err('b')));
        assert_eq!(orders.offer(second, 'c'), Ok(()));
        assert_eq!((orders.close(), orders.offer(second, 'd')), (Some('c'), Err('d')));
    }

    #[test]
    fn a_turn_is_carried_out_before_the_next_is_prepared() {
        let mut orders = Orders::default();
        let (number, _) = orders.take().unwrap();
        assert!(orders.may_prepare() && orders.offer(number, 'a').is_ok());
        assert_eq!((orders.commit(), orders.may_prepare()), (Some('a'), false));
        orders.carried_out();
        assert!(orders.may_prepare() && orders.other().is_none());
    }

    // It was acknowledged, and the other QEMU for it had been ended.
    #[test]
    fn what_a_turn_on_its_way_needs_stays() {
        let mut orders = Orders::default();
        let (number, _) = orders.take().unwrap();
        assert!(orders.expect(|_| true).is_err());
        orders.offer(number, 'a').unwrap();
        assert!(orders.expect(|&other| other == 'b').is_err());
        assert_eq!(orders.expect(|&other| other == 'a'), Ok(&'a'));
        assert!(orders.expect(|_| true).is_err() && orders.take().is_err());
        assert_eq!(orders.commit(), Some('a'));
        assert_eq!(orders.take(), Ok((2, None)));
    }

    #[test]
    fn checkpoints_come_before_a_log_and_when_it_ends() {
        let mut log = LogSpan::new(Epoch(7));
        assert!(log.may_come(Epoch(7)) && !log.may_come(Epoch(8)));
        assert_eq!(log.take(Epoch(8)), Ok(true));
        assert!(log.take(Epoch(8)).is_err() && log.take(Epoch(10)).is_err());
        assert!(log.expect_end(Epoch(8)).is_err() && log.expect_end(Epoch(10)).is_err());
        log.expect_end(Epoch(9)).unwrap();
        assert!(log.may_come(Epoch(9)) && log.may_come(Epoch(10)) && !log.may_come(Epoch(8)));
        // Nothing of it comes behind its rest, which is the last that was looked at.
        assert!(log.take(Epoch(9)).is_err() && log.expect_end(Epoch(9)).is_err());
        assert!(log.end() && !log.end());
        assert_eq!(log.take(Epoch(9)), Ok(false));
    }
}
