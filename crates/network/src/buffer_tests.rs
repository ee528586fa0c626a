//! The output buffer against its rules, and against a naive model of itself.

use super::*;
use proptest::prelude::*;

fn taken(buffer: &mut OutputBuffer) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    while let Some(batch) = buffer.take_released() {
        frames.extend(batch.frames().iter().map(<[u8]>::to_vec));
        buffer.recycle(batch);
    }
    frames
}

fn holding() -> OutputBuffer {
    let mut buffer = OutputBuffer::new(Gate::Open, DEFAULT_LIMIT_BYTES);
    buffer.hold(Epoch(1));
    buffer
}

#[test]
fn frames_wait_for_their_epoch_and_leave_in_order() {
    let mut buffer = holding();
    assert_eq!(buffer.push(b"one"), Pushed::FirstHeld);
    assert_eq!(buffer.push(b"two"), Pushed::Held);
    buffer.barrier(Epoch(2));
    assert_eq!(buffer.push(b"three"), Pushed::FirstHeld);
    assert_eq!(buffer.held_frames(), 3);

    buffer.release_through(Epoch(0));
    assert!(!buffer.has_released());
    buffer.release_through(Epoch(1));
    assert_eq!(taken(&mut buffer), [b"one".to_vec(), b"two".to_vec()]);
    buffer.release_through(Epoch(1));
    assert!(!buffer.has_released());
    assert_eq!(buffer.held_frames(), 1);
    buffer.barrier(Epoch(8));
    buffer.release_through(Epoch(7));
    assert_eq!(taken(&mut buffer), [b"three".to_vec()]);
}

#[test]
fn what_is_taken_back_waits_anew_and_keeps_its_place() {
    let mut buffer = holding();
    buffer.push(b"sent");
    buffer.push(b"late");
    buffer.barrier(Epoch(2));
    buffer.push(b"later");
    buffer.barrier(Epoch(3));
    buffer.push(b"last");
    buffer.release_through(Epoch(2));
    let batch = buffer.take_released().unwrap();
    buffer.take_back(batch, 1);
    assert_eq!((buffer.held_frames(), buffer.has_released()), (3, false));
    buffer.release_through(Epoch(2));
    assert!(!buffer.has_released());
    buffer.barrier(Epoch(4));
    buffer.release_through(Epoch(3));
    let rest: Vec<&[u8]> = vec![b"late", b"later", b"last"];
    assert_eq!(taken(&mut buffer), rest);
    assert_eq!((buffer.used_bytes, buffer.dropped_frames()), (0, 0));
}

#[test]
fn what_is_taken_back_follows_the_gate() {
    for (gate, left) in [(Gate::Open, 1), (Gate::Shut, 0)] {
        let mut buffer = holding();
        buffer.push(b"sent");
        buffer.push(b"late");
        buffer.barrier(Epoch(2));
        buffer.release_through(Epoch(1));
        let batch = buffer.take_released().unwrap();
        match gate {
            Gate::Open => buffer.open(),
            _ => buffer.shut(),
        }
        buffer.take_back(batch, 1);
        assert_eq!(taken(&mut buffer).len(), left);
        assert_eq!((buffer.used_bytes, buffer.dropped_frames()), (0, 1 - left as u64));
    }
}

#[test]
#[should_panic(expected = "epoch 1 cannot be committed: 1 still runs")]
fn running_epoch_is_never_released() {
    let mut buffer = holding();
    buffer.push(b"produced by a state that no backup can have");
    buffer.release_through(Epoch(1));
}

#[test]
fn open_gate_lets_all_pass_and_holding_begins_again_from_there() {
    let mut buffer = holding();
    buffer.push(b"held");
    buffer.open();
    assert_eq!(buffer.push(b"passes"), Pushed::Released);
    buffer.hold(Epoch(1));
    assert_eq!(buffer.push(b"waits"), Pushed::FirstHeld);
    assert_eq!(taken(&mut buffer), [b"held".to_vec(), b"passes".to_vec()]);
    assert_eq!(buffer.held_frames(), 1);
}

#[test]
fn shut_gate_drops_everything_for_good() {
    let mut buffer = holding();
    buffer.push(b"released, not taken");
    buffer.barrier(Epoch(2));
    buffer.release_through(Epoch(1));
    buffer.push(b"held");
    buffer.shut();
    buffer.open();
    buffer.hold(Epoch(5));
    assert_eq!(buffer.gate(), Gate::Shut);
    assert_eq!(buffer.push(b"later"), Pushed::Dropped);
    buffer.release_through(Epoch(u64::MAX));
    assert!(taken(&mut buffer).is_empty());
    assert_eq!((buffer.held_frames(), buffer.dropped_frames()), (0, 3));
}

#[test]
fn full_buffer_drops_and_counts_but_releases_nothing_early() {
    let mut buffer = OutputBuffer::new(Gate::Hold, 250);
    assert_eq!(buffer.push(&[1; 100]), Pushed::FirstHeld);
    assert_eq!(buffer.push(&[2; 100]), Pushed::Held);
    assert_eq!(buffer.push(&[3; 100]), Pushed::Dropped);
    assert_eq!(buffer.push(&[4; 38]), Pushed::Held);
    assert!(!buffer.has_released());
    buffer.barrier(Epoch(1));
    buffer.release_through(Epoch(0));
    assert_eq!(taken(&mut buffer), [vec![1; 100], vec![2; 100], vec![4; 38]]);
    assert_eq!(buffer.push(&[5; 246]), Pushed::FirstHeld, "room is free again");
    assert_eq!(buffer.dropped_frames(), 1);
}

#[test]
#[should_panic(expected = "epochs grow: 1 does not follow 1")]
fn barrier_into_the_same_epoch_is_refused() {
    holding().barrier(Epoch(1));
}

#[test]
#[should_panic(expected = "epochs grow: 1 is before 2")]
fn holding_in_an_earlier_epoch_than_what_is_held_is_refused() {
    let mut buffer = holding();
    buffer.barrier(Epoch(2));
    buffer.push(b"held");
    buffer.hold(Epoch(1));
}

#[test]
fn batches_are_bounded_and_used_again() {
    let mut buffer = holding();
    for _ in 0..1000 {
        buffer.push(&[0; 1500]);
    }
    buffer.barrier(Epoch(2));
    buffer.release_through(Epoch(1));
    let batch = buffer.take_released().unwrap();
    assert!(batch.frames().used() <= BATCH_BYTES);
    let memory = batch.frames().get(0).as_ptr();
    buffer.recycle(batch);
    assert_eq!(taken(&mut buffer).len(), 1000 - BATCH_BYTES / 1500);
    let last = buffer.spare.pop().unwrap();
    assert!(last.frames().is_empty());
    buffer.spare.truncate(1);
    buffer.push(b"again");
    assert_eq!(buffer.held[0].frames().get(0).as_ptr(), memory);
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Barrier(u64),
    Release(u64),
    Take,
    Open,
    Hold(u64),
    Unhold(u64),
    Shut,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0usize..3000).prop_map(Step::Push),
        4 => (1u64..3).prop_map(Step::Barrier),
        4 => (1u64..4).prop_map(Step::Release),
        4 => Just(Step::Take),
        1 => Just(Step::Open),
        1 => (0u64..3).prop_map(Step::Hold),
        1 => (0u64..3).prop_map(Step::Unhold),
        1 => Just(Step::Shut),
    ]
}

/// The same rules in the plainest form: a list of frames with their epochs.
struct Model {
    gate: Gate,
    current: u64,
    held: Vec<(u64, Vec<u8>)>,
    out: Vec<Vec<u8>>,
}

impl Model {
    fn release(&mut self, epoch: u64) {
        while self.held.first().is_some_and(|(of, _)| *of <= epoch) {
            self.out.push(self.held.remove(0).1);
        }
    }

    fn apply(&mut self, step: &Step, frame: &[u8]) {
        match (self.gate, step) {
            (_, Step::Barrier(by)) => self.current += by,
            (Gate::Shut, _) | (_, Step::Take) => {}
            (Gate::Open, Step::Push(_)) => self.out.push(frame.to_vec()),
            (Gate::Unheld, Step::Push(_)) if self.held.is_empty() => self.out.push(frame.to_vec()),
            (Gate::Hold | Gate::Unheld, Step::Push(_)) => {
                self.held.push((self.current, frame.to_vec()))
            }
            (_, Step::Release(back)) => {
                if let Some(epoch) = self.current.checked_sub(*back) {
                    self.release(epoch);
                }
            }
            (_, Step::Open) => {
                self.release(u64::MAX);
                self.gate = Gate::Open;
            }
            (_, Step::Hold(by)) => {
                self.gate = Gate::Hold;
                self.current += by;
            }
            (_, Step::Unhold(by)) => {
                self.gate = Gate::Unheld;
                self.current += by;
            }
            (_, Step::Shut) => {
                self.gate = Gate::Shut;
                self.held.clear();
                self.out.clear();
            }
        }
    }
}

fn apply(buffer: &mut OutputBuffer, step: &Step, frame: &[u8]) {
    let current = buffer.current_epoch().0;
    match step {
        Step::Push(_) => drop(buffer.push(frame)),
        Step::Barrier(by) => buffer.barrier(Epoch(current + by)),
        Step::Release(back) => {
            if let Some(epoch) = current.checked_sub(*back) {
                buffer.release_through(Epoch(epoch));
            }
        }
        Step::Take => {}
        Step::Open => buffer.open(),
        Step::Hold(by) => buffer.hold(Epoch(current + by)),
        Step::Unhold(by) => buffer.unhold(Epoch(current + by)),
        Step::Shut => buffer.shut(),
    }
}

proptest! {
    #[test]
    fn behaves_as_the_model(steps in prop::collection::vec(step(), 0..300)) {
        let mut buffer = OutputBuffer::new(Gate::Open, DEFAULT_LIMIT_BYTES);
        let mut model =
            Model { gate: Gate::Open, current: 0, held: Vec::new(), out: Vec::new() };
        for (number, step) in steps.iter().enumerate() {
            let length = if let Step::Push(length) = step { *length } else { 0 };
            let frame = vec![number as u8; length];
            model.apply(step, &frame);
            apply(&mut buffer, step, &frame);
            if matches!(step, Step::Take) {
                prop_assert_eq!(taken(&mut buffer), std::mem::take(&mut model.out));
            }
            prop_assert_eq!(buffer.gate(), model.gate);
            prop_assert_eq!(buffer.held_frames(), model.held.len());
        }
        prop_assert_eq!(taken(&mut buffer), model.out);
    }

    #[test]
    fn never_holds_more_than_its_limit(
        lengths in prop::collection::vec(0usize..400, 0..200),
        limit in 0usize..5000,
    ) {
        let mut buffer = OutputBuffer::new(Gate::Hold, limit);
        for length in &lengths {
            buffer.push(&vec![0; *length]);
            prop_assert!(buffer.used_bytes <= limit);
        }
        prop_assert_eq!(
            buffer.held_frames() as u64 + buffer.dropped_frames(),
            lengths.len() as u64
        );
        buffer.open();
        taken(&mut buffer);
        prop_assert_eq!(buffer.used_bytes, 0);
    }
}

#[test]
fn unheld_frames_pass_and_what_is_taken_back_keeps_its_place() {
    let mut buffer = OutputBuffer::new(Gate::Open, DEFAULT_LIMIT_BYTES);
    buffer.unhold(Epoch(2));
    assert_eq!(buffer.push(b"one"), Pushed::Released);
    let batch = buffer.take_released().unwrap();
    // No permit: nothing of it was written.
    buffer.take_back(batch, 0);
    assert_eq!(buffer.held_frames(), 1);
    assert_ne!(buffer.push(b"two"), Pushed::Released, "not past the first");
    buffer.release_unheld();
    assert_eq!(buffer.push(b"three"), Pushed::Released);
    let mut out = Vec::new();
    while let Some(batch) = buffer.take_released() {
        out.extend(batch.frames().iter().map(<[u8]>::to_vec));
    }
    assert_eq!(out, [&b"one"[..], b"two", b"three"]);
    buffer.shut();
    buffer.unhold(Epoch(3));
    assert_eq!(buffer.push(b"four"), Pushed::Dropped);
}
