//! The room for what a guest may write to its disks in one epoch.
//!
//! What it writes goes to the backup at once, which keeps it in memory until the epoch is whole.
//! So over a bound a checkpoint is due. While none can be taken, since epochs before it are on
//! their way, writes wait: that ends when the backup acknowledges them, without the guest's help.
//! Once one can be taken they pass, for QEMU waits for its writes when it stops.

use understudy_threads::Waitable;

/// The bytes above which a checkpoint is due. `room.rs` counts it.
pub const EPOCH_DISK_BYTES: u64 = 64 << 20;

/// The bytes that a message takes in memory beside its payload.
const MESSAGE_BYTES: u64 = 64;

/// The room of the epoch that runs.
#[derive(Debug)]
pub struct EpochRoom {
    limit: u64,
    state: Waitable<State>,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    /// No checkpoint can be taken before an earlier epoch is acknowledged.
    blocked: bool,
    closed: bool,
}

impl EpochRoom {
    /// Room for so many bytes.
    pub fn new(limit: u64) -> EpochRoom {
        EpochRoom { limit, state: Waitable::default() }
    }

    /// Takes room for a message, as soon as there is some or a checkpoint can make some. Returns
    /// whether it was the last of the room: a checkpoint is due.
    pub fn take(&self, bytes: u64) -> bool {
        let waits = |state: &mut State| state.used >= self.limit && state.blocked && !state.closed;
        let mut state = self.state.wait_while(self.state.lock(), waits);
        let was_full = state.used >= self.limit;
        state.used += bytes + MESSAGE_BYTES;
        !was_full && state.used >= self.limit
    }

    /// Whether a checkpoint is due for want of room.
    pub fn is_full(&self) -> bool {
        self.state.lock().used >= self.limit
    }

    #[cfg(test)]
    fn used(&self) -> u64 {
        self.state.lock().used
    }

    /// The next epoch has begun.
    pub fn empty(&self) {
        self.state.change(|state| state.used = 0);
    }

    /// Whether as many epochs are on their way as there may be.
    pub fn set_blocked(&self, blocked: bool) {
        if std::mem::replace(&mut self.state.lock().blocked, blocked) && !blocked {
            self.state.wake();
        }
    }

    /// Lets everybody pass from now on: nothing is sent any more.
    pub fn close(&self) {
        self.state.change(|state| state.closed = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::RecvTimeoutError;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    const WRITE: u64 = 100 - MESSAGE_BYTES;

    #[test]
    fn a_full_epoch_says_so_once_and_the_next_one_is_empty() {
        let room = EpochRoom::new(300);
        assert_eq!([(); 4].map(|()| room.take(WRITE)), [false, false, true, false]);
        assert!(room.is_full());
        room.empty();
        assert!(!room.is_full());
        assert_eq!([(); 3].map(|()| room.take(WRITE)), [false, false, true]);
    }

    /// A guest that writes without end, told write by write.
    fn writer(room: &Arc<EpochRoom>) -> crossbeam_channel::Receiver<()> {
        let (wrote, heard) = crossbeam_channel::bounded(0);
        let room = room.clone();
        thread::spawn(move || {
            loop {
                room.take(WRITE);
                if wrote.send(()).is_err() {
                    return;
                }
            }
        });
        heard
    }

    /// The number of times that the guest says that it wrote, `least` times or more.
    fn drained(heard: &crossbeam_channel::Receiver<()>, least: usize) -> usize {
        let mut count = 0;
        for _ in 0..least {
            heard.recv_timeout(Duration::from_secs(20)).expect("there is room");
            count += 1;
        }
        // Whoever waits says nothing: there is nothing else to wait for.
        while heard.recv_timeout(Duration::from_millis(200)) != Err(RecvTimeoutError::Timeout) {
            count += 1;
        }
        count
    }

    #[test]
    fn writes_wait_only_while_no_checkpoint_can_be_taken() {
        let room = Arc::new(EpochRoom::new(1000));
        room.set_blocked(true);
        let heard = writer(&room);
        assert_eq!(drained(&heard, 10), 10, "as much as there is room for");
        assert_eq!(room.used(), 1000);
        room.set_blocked(false);
        for _ in 0..20 {
            heard.recv_timeout(Duration::from_secs(20)).expect("QEMU stops behind its writes");
        }
        room.set_blocked(true);
        room.empty();
        assert!(drained(&heard, 0) <= 11, "one may have passed before");
        room.close();
        for _ in 0..20 {
            heard.recv_timeout(Duration::from_secs(20)).expect("nothing is sent any more");
        }
    }
}
