use super::*;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(20);

/// Number of the flush, and whether it succeeded.
type Answer = (u32, bool);

/// A flusher whose fsyncs are carried out by the test, one by one.
struct Bench {
    flusher: Flusher,
    /// Receiver that is told when an fsync begins.
    begun: Receiver<()>,
    /// Lets the fsync end.
    finish: Sender<io::Result<()>>,
    answer: Sender<Answer>,
    answered: Receiver<Answer>,
}

impl Bench {
    fn new() -> Bench {
        let (begin, begun) = unbounded();
        let (finish, finished) = unbounded();
        let sync: SyncImage = Box::new(move || {
            begin.send(()).ok();
            // The test has let go of its end: nothing is to be waited for any more.
            finished.recv().unwrap_or(Ok(()))
        });
        let flusher = Flusher::new("test", sync);
        flusher.set_backup(true);
        let (answer, answered) = unbounded();
        Bench { flusher, begun, finish, answer, answered }
    }

    fn flush(&self, id: u32) {
        let answer = self.answer.clone();
        self.flusher.flush(Box::new(move |result| {
            answer.send((id, result.is_ok())).ok();
        }));
    }

    fn next_fsync(&self) {
        self.begun.recv_timeout(DEADLINE).expect("an fsync begins");
    }

    fn answer(&self) -> (u32, bool) {
        self.answered.recv_timeout(DEADLINE).expect("a flush is answered")
    }

    /// The fsync that is under way succeeds, which answers nobody before.
    fn succeed(&self) {
        self.no_answer();
        self.finish.send(Ok(())).unwrap();
    }

    fn no_answer(&self) {
        assert!(self.answered.try_recv().is_err(), "answered too early");
    }
}

#[test]
fn a_flush_is_answered_after_an_fsync_that_began_after_it() {
    let bench = Bench::new();
    bench.flush(1);
    bench.next_fsync();
    bench.flush(2);
    bench.flush(3);
    bench.succeed();
    assert_eq!(bench.answer(), (1, true));

    bench.next_fsync();
    bench.succeed();
    assert_eq!([bench.answer(), bench.answer()], [(2, true), (3, true)]);
    assert!(bench.begun.try_recv().is_err(), "flushes that waited together share one fsync");
}

#[test]
fn a_failed_fsync_fails_the_flush() {
    let bench = Bench::new();
    bench.flush(1);
    bench.finish.send(Err(Errno::EIO.into())).unwrap();
    assert_eq!(bench.answer(), (1, false));
}

#[test]
fn a_flush_inside_a_checkpoint_is_answered_at_once_and_made_up_for_once() {
    let bench = Bench::new();
    bench.flusher.begin_checkpoint();
    bench.flush(1);
    bench.flush(2);
    assert_eq!([bench.answer(), bench.answer()], [(1, true), (2, true)]);
    assert!(bench.begun.try_recv().is_err(), "no fsync inside the checkpoint");

    bench.flusher.end_checkpoint();
    bench.next_fsync();
    bench.finish.send(Ok(())).unwrap();
    // The next fsync belongs to the next flush: only one was owed.
    bench.flush(3);
    bench.next_fsync();
    bench.finish.send(Ok(())).unwrap();
    assert_eq!(bench.answer(), (3, true));
    assert!(bench.begun.try_recv().is_err());
}

#[test]
fn a_checkpoint_without_a_flush_owes_nothing() {
    let bench = Bench::new();
    bench.flusher.begin_checkpoint();
    bench.flusher.end_checkpoint();
    bench.flush(1);
    bench.next_fsync();
    bench.finish.send(Ok(())).unwrap();
    assert_eq!(bench.answer(), (1, true));
    assert!(bench.begun.try_recv().is_err());
}

/// Nobody holds what the guest says before the first checkpoint, nor once its backup is lost: what it was told
/// to be on the disk a power failure could take back, although others knew of it.
#[test]
fn without_a_backup_no_flush_is_answered_before_its_fsync() {
    let bench = Bench::new();
    bench.flusher.set_backup(false);
    bench.flush(1);
    bench.next_fsync();
    bench.flusher.begin_checkpoint();
    bench.flush(2);
    bench.succeed();
    assert_eq!(bench.answer(), (1, true));
    bench.next_fsync();
    bench.succeed();
    assert_eq!(bench.answer(), (2, true));

    // The guest stands still: from here on its output is held.
    bench.flusher.set_backup(true);
    bench.flush(3);
    assert_eq!(bench.answer(), (3, true));

    // The backup is lost within the checkpoint: the next flush makes up for what is owed.
    bench.flusher.set_backup(false);
    bench.flush(4);
    bench.next_fsync();
    bench.succeed();
    assert_eq!(bench.answer(), (4, true));
    bench.flusher.end_checkpoint();
    bench.flush(5);
    bench.next_fsync();
    bench.finish.send(Ok(())).unwrap();
    assert_eq!(bench.answer(), (5, true));
    assert!(bench.begun.try_recv().is_err(), "nothing was owed any more");
}

#[test]
fn the_beginning_of_a_checkpoint_answers_the_flush_under_way() {
    let bench = Bench::new();
    bench.flush(1);
    bench.next_fsync();
    bench.flush(2);
    bench.flusher.begin_checkpoint();
    assert_eq!([bench.answer(), bench.answer()], [(2, true), (1, true)]);
    bench.finish.send(Ok(())).unwrap();
    bench.flusher.end_checkpoint();
    bench.next_fsync();
    bench.finish.send(Ok(())).unwrap();
}

#[test]
fn a_failure_that_nobody_waited_for_fails_every_flush_from_then_on() {
    let bench = Bench::new();
    bench.flusher.begin_checkpoint();
    bench.flush(1);
    assert_eq!(bench.answer(), (1, true));
    bench.flusher.end_checkpoint();
    bench.next_fsync();
    bench.finish.send(Err(Errno::ENOSPC.into())).unwrap();

    // Whatever the next syncs say: what the first one lost is lost.
    for id in [2, 3] {
        bench.flush(id);
        bench.next_fsync();
        bench.finish.send(Ok(())).unwrap();
        assert_eq!(bench.answer(), (id, false));
    }
    bench.flusher.begin_checkpoint();
    bench.flush(4);
    assert_eq!(bench.answer(), (4, false), "in a checkpoint, too");
    drop(bench.finish);
}

#[test]
fn dropping_carries_out_what_is_owed() {
    let Bench { flusher, begun, finish, .. } = Bench::new();
    flusher.begin_checkpoint();
    flusher.flush(Box::new(|_| ()));
    drop(finish);
    drop(flusher);
    assert_eq!(begun.try_iter().count(), 1);
}
