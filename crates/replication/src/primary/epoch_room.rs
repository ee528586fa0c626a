//! The room for what a guest may write to its disks in one epoch, as its threads share it, beside that of the queue to the
//! backup: `understudy_protocol::EpochRoom` says who waits.

use crate::sync::{BudgetState, ByteBudget};
use understudy_protocol::EpochRoom;

/// The bytes above which a checkpoint is due. `crates/daemon/src/room.rs` counts it.
pub const EPOCH_DISK_BYTES: u64 = 64 << 20;

/// The bytes that a message takes in memory beside its payload.
const MESSAGE_BYTES: u64 = 64;

/// The room in the queue, and in the epoch that runs.
pub type Room = ByteBudget<EpochRoom>;

impl Room {
    /// Takes room in the epoch for a message, as soon as there is some or a checkpoint can make some. Returns
    /// whether it was the last of the room: a checkpoint is due.
    pub fn take_of_epoch(&self, bytes: u64) -> bool {
        let waits = |state: &mut BudgetState<EpochRoom>| state.other.must_wait() && !state.closed;
        let mut state = self.state.wait_while(self.state.lock(), waits);
        state.other.take(bytes + MESSAGE_BYTES)
    }

    /// Whether a checkpoint is due for want of room.
    pub fn is_epoch_full(&self) -> bool {
        self.state.lock().other.is_full()
    }

    /// Notes that the next epoch has begun.
    pub fn begin_epoch(&self) {
        self.state.change(|state| state.other.empty());
    }

    /// Notes whether as many epochs are on their way as there may be.
    pub fn set_blocked(&self, blocked: bool) {
        if self.state.lock().other.set_blocked(blocked) {
            self.state.wake();
        }
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

    /// A guest that writes without end, told write by write.
    fn writer(room: &Arc<Room>) -> crossbeam_channel::Receiver<()> {
        let (wrote, heard) = crossbeam_channel::bounded(0);
        let room = room.clone();
        thread::spawn(move || {
            loop {
                room.take_of_epoch(WRITE);
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
        let room = Arc::new(Room::with(1000, EpochRoom::new(1000)));
        room.set_blocked(true);
        let heard = writer(&room);
        assert_eq!(drained(&heard, 10), 10, "as much as there is room for");
        assert!(room.is_epoch_full());
        room.set_blocked(false);
        for _ in 0..20 {
            heard.recv_timeout(Duration::from_secs(20)).expect("QEMU stops behind its writes");
        }
        room.set_blocked(true);
        room.begin_epoch();
        assert!(drained(&heard, 0) <= 11, "one may have passed before");
        room.close();
        for _ in 0..20 {
            heard.recv_timeout(Duration::from_secs(20)).expect("nothing is sent any more");
        }
    }
}
