//! Epochs whose image the backup keeps, for a snapshot of the VM.

use super::send::Outgoing;
use super::session::Session;
use crate::messages::{Piece, ToBackup};
use anyhow::bail;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use std::mem;
use std::time::{Duration, Instant};
use tracing::debug;
use understudy_cluster::messages::{KeepOrder, Kept};
use understudy_protocol::{Epoch, GroupName};
use understudy_snapshot::SnapshotNumber;

/// Time for which a checkpoint is waited for: a backup that acknowledges nothing is given up
/// before.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks whether protection has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Work that is done while the guest stands still.
pub type InPause = Box<dyn FnOnce() -> anyhow::Result<()> + Send>;

/// The request to the capture thread, and who waits for the backup.
#[derive(Default)]
pub(super) struct Keeping {
    wanted: Option<Request>,
    waiting: Option<Waiting>,
}

/// A waiter for what the backup says of one snapshot.
struct Waiting {
    group: GroupName,
    number: SnapshotNumber,
    answer: Sender<Kept>,
}

impl Waiting {
    fn is_for(&self, group: &GroupName, number: SnapshotNumber) -> bool {
        (&self.group, self.number) == (group, number)
    }
}

impl Keeping {
    /// An image is wanted. Gives the channels on which it is said that its epoch is closed, and what the
    /// backup has of it.
    fn of(
        order: &KeepOrder,
        in_pause: InPause,
    ) -> (Keeping, Receiver<anyhow::Result<()>>, Receiver<Kept>) {
        let (closed, told) = crossbeam_channel::bounded(1);
        let (answer, answers) = crossbeam_channel::bounded(1);
        let (group, number) = (order.group.clone(), order.number);
        let waiting = Some(Waiting { group, number, answer });
        let wanted = Some(Request { order: order.clone(), in_pause, closed });
        (Keeping { wanted, waiting }, told, answers)
    }

    /// The backup says what became of an image. One of a snapshot that was given up comes too late, and
    /// is none of the next one's: whether it was waited for.
    fn kept(&self, kept: Kept) -> bool {
        let waiting = self.waiting.as_ref();
        let waiting = waiting.filter(|waiting| waiting.is_for(&kept.group, kept.number));
        // One answer is waited for.
        waiting.map(|waiting| waiting.answer.try_send(kept)).is_some()
    }

    /// Notes that nobody waits for this snapshot any more.
    fn let_go(&mut self, group: &GroupName, number: SnapshotNumber) {
        self.waiting.take_if(|waiting| waiting.is_for(group, number));
    }
}

struct Request {
    order: KeepOrder,
    in_pause: InPause,
    closed: Sender<anyhow::Result<()>>,
}

/// An epoch that is to be kept and ends with the checkpoint that is being taken.
pub(super) struct Closing {
    order: KeepOrder,
    closed: Sender<anyhow::Result<()>>,
}

impl Closing {
    /// Queues the order; to be called before the epoch's end is queued.
    pub fn queue(self, session: &Session, epoch: Epoch) {
        session.outbox.put_now(Outgoing::Piece(epoch, Piece::Keep(self.order)));
        let _ = self.closed.try_send(Ok(()));
    }
}

impl Session {
    /// Whether a checkpoint is wanted, however little there is to commit.
    pub(super) fn is_keep_wanted(&self) -> bool {
        self.present.lock().awaited.keeping.wanted.is_some()
    }

    /// The guest stands still at the end of an epoch: is it to be kept?
    pub(super) fn keep_in_pause(&self) -> Option<Closing> {
        let wanted = self.present.lock().awaited.keeping.wanted.take();
        let Request { order, in_pause, closed } = wanted?;
        match in_pause() {
            Ok(()) => Some(Closing { order, closed }),
            Err(error) => {
                // Whoever waits may have given up.
                let _ = closed.try_send(Err(error));
                None
            }
        }
    }

    /// Has the backup keep its image as of the end of an epoch, which is closed for that.
    /// `in_pause` is done while the guest stands still there. Gives the channel on which the
    /// backup answers; nobody does if protection ends.
    ///
    /// # Errors
    /// If no epoch was closed for it, or `in_pause` fails. The guest runs on.
    pub fn keep_epoch(
        &self,
        order: &KeepOrder,
        in_pause: InPause,
    ) -> anyhow::Result<Receiver<Kept>> {
        let (asked, told, answers) = Keeping::of(order, in_pause);
        let former = mem::replace(&mut self.present.lock().awaited.keeping, asked);
        drop(former);
        self.group.ring();
        let deadline = Instant::now() + PATIENCE;
        loop {
            match told.recv_timeout(LOOK) {
                Ok(closed) => return closed.map(|()| answers),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("its checkpoint failed, or another snapshot of it has begun")
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.is_over() || Instant::now() > deadline {
                let wanted = self.present.lock().awaited.keeping.wanted.take();
                drop(wanted);
                let peer = &self.peer;
                bail!("no checkpoint was taken: host {peer} does not acknowledge, or is gone");
            }
        }
    }

    /// The backup says what became of an image.
    pub(super) fn kept(&self, kept: Kept) {
        let number = kept.number;
        let was_awaited = self.present.lock().awaited.keeping.kept(kept);
        if !was_awaited {
            debug!("the backup's image for snapshot {number} comes too late");
        }
    }

    /// The snapshot was given up.
    pub fn let_go(&self, group: &GroupName, number: SnapshotNumber) {
        self.present.lock().awaited.keeping.let_go(group, number);
        // If it cannot be sent, the backup has nothing to keep any more.
        let _ = self.say(&ToBackup::LetGo(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_snapshot::{Compression, TraceTime};

    fn order(group: &'static str, number: u64) -> KeepOrder {
        KeepOrder {
            group: literal(group),
            number: SnapshotNumber(number),
            store: "/srv/snapshots".parse().unwrap(),
            compression: Compression::None,
            trace_ms: TraceTime::NONE,
        }
    }

    fn kept(group: &'static str, number: u64) -> Kept {
        Kept { group: literal(group), number: SnapshotNumber(number), image: Err("why".into()) }
    }

    /// The next snapshot was published with it, of another moment than that of its other members.
    #[test]
    fn an_image_that_comes_too_late_is_not_taken_for_the_next_snapshots() {
        let of = |number| Keeping::of(&order("shop", number), Box::new(|| Ok(())));
        let (mut keeping, _, first) = of(1);
        keeping.let_go(&literal("shop"), SnapshotNumber(1));
        keeping.kept(kept("shop", 1));
        let (mut keeping, _, second) = of(2);
        keeping.kept(kept("shop", 1));
        keeping.kept(kept("db", 2));
        assert!(first.try_recv().is_err() && second.try_recv().is_err());
        keeping.let_go(&literal("shop"), SnapshotNumber(1));
        keeping.kept(kept("shop", 2));
        assert_eq!(second.try_recv(), Ok(kept("shop", 2)));
        keeping.let_go(&literal("shop"), SnapshotNumber(2));
        keeping.kept(kept("shop", 2));
        assert!(second.try_recv().is_err());
    }
}
