//! A stream of messages that outlives its connections.
//!
//! Two hosts with several paths between them carry a session over one
//! connection at a time. When it breaks, the next one goes on where the
//! receiver was: messages are numbered by counting, the sender keeps what the
//! receiver has not confirmed, and a new connection begins with each side's
//! count. Nothing is lost, doubled or reordered, wherever the old one broke.

use std::collections::VecDeque;

/// Unconfirmed bytes that a sender keeps; over it, it waits.
pub const WINDOW_BYTES: u64 = 64 << 20;

/// A receiver confirms after this many bytes at the latest, …
const CONFIRM_BYTES: u64 = 1 << 20;
/// … or this many messages.
const CONFIRM_MESSAGES: u64 = 256;

/// The number of messages of one direction that came before some point.
pub type Count = u64;

/// The peer's count cannot be: it never got what it counts, or what it lacks
/// was confirmed. The session cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer counts {count} messages where {confirmed} to {sent} are possible")]
pub struct WrongCount {
    count: Count,
    confirmed: Count,
    sent: Count,
}

/// The sender's half of one direction.
#[derive(Clone, Debug)]
pub struct SendWindow<M> {
    /// Messages that were confirmed: everything before the first one kept.
    confirmed: Count,
    kept: VecDeque<(M, u64)>,
    bytes: u64,
}

impl<M> Default for SendWindow<M> {
    fn default() -> Self {
        SendWindow { confirmed: 0, kept: VecDeque::new(), bytes: 0 }
    }
}

impl<M> SendWindow<M> {
    /// Keeps a message of `bytes` that is about to be sent.
    pub fn push(&mut self, message: M, bytes: u64) {
        self.kept.push_back((message, bytes));
        self.bytes += bytes;
    }

    /// Whether another message may be sent now.
    pub fn has_room(&self) -> bool {
        self.bytes < WINDOW_BYTES
    }

    /// The receiver has the first `count` messages.
    pub fn confirm(&mut self, count: Count) -> Result<(), WrongCount> {
        let sent = self.confirmed + self.kept.len() as u64;
        if count < self.confirmed || count > sent {
            return Err(WrongCount { count, confirmed: self.confirmed, sent });
        }
        for (_, bytes) in self.kept.drain(..(count - self.confirmed) as usize) {
            self.bytes -= bytes;
        }
        self.confirmed = count;
        Ok(())
    }

    /// The messages that are not confirmed, in order: to be sent again on a new connection.
    pub fn unconfirmed(&self) -> impl Iterator<Item = &M> {
        self.kept.iter().map(|(message, _)| message)
    }
}

/// The receiver's half of one direction.
#[derive(Clone, Debug, Default)]
pub struct ReceiveWindow {
    received: Count,
    confirmed: Count,
    unconfirmed_bytes: u64,
}

impl ReceiveWindow {
    /// A message of `bytes` arrived whole.
    pub fn receive(&mut self, bytes: u64) {
        self.received += 1;
        self.unconfirmed_bytes += bytes;
    }

    /// The number of messages that arrived: where a new connection goes on.
    pub fn received(&self) -> Count {
        self.received
    }

    /// Whether the sender should hear of it by now.
    pub fn confirmation_is_due(&self) -> bool {
        self.unconfirmed_bytes >= CONFIRM_BYTES
            || self.received - self.confirmed >= CONFIRM_MESSAGES
    }

    /// The count to confirm; the caller sends it.
    pub fn confirm(&mut self) -> Count {
        self.confirmed = self.received;
        self.unconfirmed_bytes = 0;
        self.received
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_full_window_has_room_again_once_confirmed() {
        let mut window = SendWindow::default();
        window.push('a', WINDOW_BYTES - 1);
        assert!(window.has_room());
        window.push('b', 1);
        assert!(!window.has_room());
        window.confirm(1).unwrap();
        assert!(window.has_room());
        assert_eq!(window.unconfirmed().collect::<String>(), "b");
    }

    #[test]
    fn counts_that_cannot_be_are_refused() {
        let mut window = SendWindow::default();
        window.push((), 1);
        window.push((), 1);
        assert!(window.confirm(3).is_err());
        window.confirm(2).unwrap();
        assert!(window.confirm(1).is_err(), "confirmed messages are gone");
        window.confirm(2).unwrap();
    }

    #[test]
    fn confirmations_are_due_by_bytes_and_by_messages() {
        let mut window = ReceiveWindow::default();
        window.receive(CONFIRM_BYTES - 1);
        assert!(!window.confirmation_is_due());
        window.receive(1);
        assert!(window.confirmation_is_due());
        assert_eq!(window.confirm(), 2);
        assert!(!window.confirmation_is_due());
        (0..CONFIRM_MESSAGES).for_each(|_| window.receive(0));
        assert!(window.confirmation_is_due());
    }

    /// One direction between two hosts, over connections that break.
    #[derive(Default)]
    struct Direction {
        sender: SendWindow<u32>,
        receiver: ReceiveWindow,
        next: u32,
        arrived: Vec<u32>,
        /// Messages on the connection, not there yet.
        messages: VecDeque<u32>,
        confirmations: VecDeque<Count>,
    }

    impl Direction {
        fn send(&mut self) {
            self.sender.push(self.next, 1);
            self.messages.push_back(self.next);
            self.next += 1;
        }

        fn deliver(&mut self) {
            let Some(message) = self.messages.pop_front() else { return };
            self.arrived.push(message);
            self.receiver.receive(1);
        }

        fn confirm(&mut self) {
            self.confirmations.push_back(self.receiver.confirm());
        }

        fn hear(&mut self) {
            if let Some(count) = self.confirmations.pop_front() {
                self.sender.confirm(count).unwrap();
            }
        }

        /// Loses everything under way; the next connection resumes.
        fn cut(&mut self) {
            self.confirmations.clear();
            self.sender.confirm(self.receiver.received()).unwrap();
            self.messages = self.sender.unconfirmed().copied().collect();
        }
    }

    proptest! {
        #[test]
        fn cuts_lose_double_and_reorder_nothing(steps in proptest::collection::vec(0..12, 0..400)) {
            let mut direction = Direction::default();
            for step in steps {
                match step {
                    0..4 => direction.send(),
                    4..7 => direction.deliver(),
                    7..9 => direction.confirm(),
                    9..11 => direction.hear(),
                    _ => direction.cut(),
                }
                prop_assert!(direction.arrived.iter().copied().eq(0..direction.arrived.len() as u32));
            }
            direction.cut();
            while !direction.messages.is_empty() {
                direction.deliver();
            }
            prop_assert!(direction.arrived.iter().copied().eq(0..direction.next));
        }
    }
}
