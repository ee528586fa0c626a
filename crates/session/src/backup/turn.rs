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
    /// Turns that are committed and not carried out.
    committed: u32,
}

impl<O> Default for Orders<O> {
    fn default() -> Orders<O> {
        Orders { count: 0, other: None, preparing: false, closed: false, committed: 0 }
    }
}

impl<O> Orders<O> {
    /// Another order has come: its number, and what was prepared for the one before, which is to be ended.
    pub fn take(&mut self) -> (u64, Option<O>) {
        self.count += 1;
        (self.count, self.other.take())
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

    /// What is prepared.
    pub fn other(&self) -> Option<&O> {
        self.other.as_ref()
    }

    /// A turn is committed: what it needs, if that was prepared.
    pub fn commit(&mut self) -> Option<O> {
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
    /// An epoch is on its way that is a checkpoint again.
    ending: bool,
    ended: bool,
}

impl LogSpan {
    /// A log that begins behind this epoch.
    pub fn new(machine: Epoch) -> LogSpan {
        LogSpan { machine, last: machine, ending: false, ended: false }
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
        if epoch != self.last.next() {
            return Err(format!("batch {epoch} of the log came after {}", self.last));
        }
        self.last = epoch;
        Ok(true)
    }

    /// An epoch comes that is a checkpoint again, with which it ends.
    pub fn expect_end(&mut self) {
        self.ending = true;
    }

    /// Whether messages of this epoch may come, which is a checkpoint: before the log, and when that ends.
    pub fn may_come(&self, epoch: Epoch) -> bool {
        epoch <= self.machine || self.ending
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
        assert_eq!(orders.take(), (1, None));
        assert!(!orders.begin_to_prepare());
        orders.end_to_prepare();
        assert!(orders.begin_to_prepare());
    }

    #[test]
    fn what_was_called_off_is_given_back() {
        let mut orders = Orders::default();
        let (first, _) = orders.take();
        assert_eq!(orders.offer(first, 'a'), Ok(()));
        let (second, left) = orders.take();
        assert_eq!((left, orders.offer(first, 'b')), (Some('a'), Err('b')));
        assert_eq!(orders.offer(second, 'c'), Ok(()));
        assert_eq!((orders.close(), orders.offer(second, 'd')), (Some('c'), Err('d')));
    }

    #[test]
    fn a_turn_is_carried_out_before_the_next_is_prepared() {
        let mut orders = Orders::default();
        let (number, _) = orders.take();
        assert!(orders.may_prepare() && orders.offer(number, 'a').is_ok());
        assert_eq!((orders.commit(), orders.may_prepare()), (Some('a'), false));
        orders.carried_out();
        assert!(orders.may_prepare() && orders.other().is_none());
    }

    #[test]
    fn checkpoints_come_before_a_log_and_when_it_ends() {
        let mut log = LogSpan::new(Epoch(7));
        assert!(log.may_come(Epoch(7)) && !log.may_come(Epoch(8)));
        assert_eq!(log.take(Epoch(8)), Ok(true));
        assert!(log.take(Epoch(8)).is_err() && log.take(Epoch(10)).is_err());
        log.expect_end();
        assert!(log.may_come(Epoch(9)));
        assert!(log.end() && !log.end());
        assert_eq!(log.take(Epoch(9)), Ok(false));
    }
}
