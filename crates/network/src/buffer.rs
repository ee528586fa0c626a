//! The output buffer: holds what the guest sends until it may be seen.
//!
//! Every frame belongs to the epoch that was current when it was pushed. It is
//! handed out only once that epoch has been committed on the backup
//! ([`OutputBuffer::release_through`]) or this host owns the VM alone
//! ([`OutputBuffer::open`]): output commit, Remus section 2.4. Pure: the caller
//! takes what is released and writes it.

use crate::frames::Frames;
use std::collections::VecDeque;
use understudy_protocol::Epoch;

/// Bytes that a card may hold by default.
pub const DEFAULT_LIMIT_BYTES: usize = 64 << 20;

/// Frames lie back to back in batches of about this size, so that holding one
/// costs no allocation and a release hands over whole batches.
const BATCH_BYTES: usize = 256 * 1024;

/// The number of emptied batches that are kept for reuse.
const SPARE_BATCHES: usize = 16;

/// The bytes that are counted against the limit for each frame beside its own.
const FRAME_OVERHEAD_BYTES: usize = size_of::<u32>();

/// The state of a gate: what happens to the guest's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// A protected guest's gate: frames wait until their epoch is committed.
    Hold,
    /// A backup follows, but output is not held: frames pass while the host has a permit,
    /// and else wait like held ones.
    Unheld,
    /// The sole owner's gate: frames pass at once.
    Open,
    /// Fenced: frames are dropped, for good.
    Shut,
}

/// The fate of a pushed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// The frame may go out now.
    Released,
    /// The frame waits, the first of the current epoch: there is a reason to commit.
    FirstHeld,
    /// The frame waits beside others of its epoch.
    Held,
    /// The buffer is full or shut.
    Dropped,
}

/// Frames of one epoch with their headers, in the order in which the guest sent
/// them.
#[derive(Debug, Default)]
pub struct FrameBatch {
    epoch: Epoch,
    frames: Frames,
}

impl FrameBatch {
    /// The frames, oldest first.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    fn cost(&self) -> usize {
        self.frames.used() + self.frames.len() * FRAME_OVERHEAD_BYTES
    }

    fn has_room(&self, epoch: Epoch, frame: &[u8]) -> bool {
        self.epoch == epoch && self.frames.used() + frame.len() <= BATCH_BYTES
    }
}

/// Holds a card's outbound frames by epoch. See the module.
#[derive(Debug)]
pub struct OutputBuffer {
    gate: Gate,
    current: Epoch,
    limit_bytes: usize,
    /// Bytes in `held` and `released`, overhead included.
    used_bytes: usize,
    held_frames: usize,
    held: VecDeque<FrameBatch>,
    released: VecDeque<FrameBatch>,
    spare: Vec<FrameBatch>,
    dropped_frames: u64,
}

impl OutputBuffer {
    /// An empty buffer in epoch 0. A gate may start open (an unprotected VM) or
    /// held (a standby, which owns nothing yet).
    pub fn new(gate: Gate, limit_bytes: usize) -> Self {
        OutputBuffer {
            gate,
            current: Epoch(0),
            limit_bytes,
            used_bytes: 0,
            held_frames: 0,
            held: VecDeque::new(),
            released: VecDeque::new(),
            spare: Vec::new(),
            dropped_frames: 0,
        }
    }

    /// Takes a frame of the current epoch.
    ///
    /// Over the limit the frame is dropped: Ethernet may lose frames, whereas
    /// letting one out early would break output commit.
    pub fn push(&mut self, frame: &[u8]) -> Pushed {
        if self.used_bytes + frame.len() + FRAME_OVERHEAD_BYTES > self.limit_bytes {
            self.dropped_frames += 1;
            return Pushed::Dropped;
        }
        self.push_always(frame)
    }

    /// The same for what must not be lost for want of room: little, and seldom.
    pub fn push_always(&mut self, frame: &[u8]) -> Pushed {
        if self.gate == Gate::Shut {
            self.dropped_frames += 1;
            return Pushed::Dropped;
        }
        self.used_bytes += frame.len() + FRAME_OVERHEAD_BYTES;
        // Not past what was taken back before.
        let passes = self.gate == Gate::Unheld && self.held.is_empty();
        if self.gate == Gate::Open || passes {
            append(&mut self.released, &mut self.spare, self.current, frame);
            return Pushed::Released;
        }
        let first = self.held.back().is_none_or(|last| last.epoch != self.current);
        append(&mut self.held, &mut self.spare, self.current, frame);
        self.held_frames += 1;
        if first { Pushed::FirstHeld } else { Pushed::Held }
    }

    /// Ends the current epoch: later frames belong to `next`.
    ///
    /// # Panics
    /// If `next` does not follow the current epoch.
    pub fn barrier(&mut self, next: Epoch) {
        assert!(next > self.current, "epochs grow: {next} does not follow {}", self.current);
        self.current = next;
    }

    /// The backup has acknowledged `epoch` and all before it: their frames may
    /// go out.
    ///
    /// # Panics
    /// If frames are held and `epoch` has not even ended.
    pub fn release_through(&mut self, epoch: Epoch) {
        assert!(
            self.gate != Gate::Hold || epoch < self.current,
            "epoch {epoch} cannot be committed: {} still runs",
            self.current
        );
        while self.held.front().is_some_and(|batch| batch.epoch <= epoch) {
            self.release_oldest();
        }
    }

    /// Opens the gate of a sole owner: everything held may go out, and later frames pass at once. A
    /// shut gate stays shut.
    pub fn open(&mut self) {
        if self.gate == Gate::Shut {
            return;
        }
        self.gate = Gate::Open;
        while !self.held.is_empty() {
            self.release_oldest();
        }
    }

    /// Protection begins in epoch `current`: from now on frames wait. A shut
    /// gate stays shut.
    ///
    /// # Panics
    /// If frames are held already and `current` would be before their epoch.
    pub fn hold(&mut self, current: Epoch) {
        if self.gate == Gate::Shut {
            return;
        }
        // With nothing held a new session may count its epochs afresh.
        assert!(
            self.held.is_empty() || current >= self.current,
            "epochs grow: {current} is before {}",
            self.current
        );
        self.gate = Gate::Hold;
        self.current = current;
    }

    /// A backup follows from epoch `current` on, without output commit: frames pass, and
    /// what [`take_back`](Self::take_back) returns waits. A shut gate stays shut.
    ///
    /// # Panics
    /// As [`hold`](Self::hold) does.
    pub fn unhold(&mut self, current: Epoch) {
        self.hold(current);
        if self.gate == Gate::Hold {
            self.gate = Gate::Unheld;
        }
    }

    /// Lets everything that was taken back go out, unless output is held.
    pub fn release_unheld(&mut self) {
        while self.gate == Gate::Unheld && !self.held.is_empty() {
            self.release_oldest();
        }
    }

    /// Another host owns the VM: everything is dropped, now and for good, also
    /// what was released but not yet taken.
    pub fn shut(&mut self) {
        self.gate = Gate::Shut;
        let lost = self.held.iter().chain(&self.released).map(|batch| batch.frames.len());
        self.dropped_frames += lost.sum::<usize>() as u64;
        self.held = VecDeque::new();
        self.released = VecDeque::new();
        self.spare = Vec::new();
        (self.used_bytes, self.held_frames) = (0, 0);
    }

    /// The next batch to write out; batches come in the order of sending.
    pub fn take_released(&mut self) -> Option<FrameBatch> {
        let batch = self.released.pop_front()?;
        self.used_bytes -= batch.cost();
        Some(batch)
    }

    /// Takes back a batch, of which the first `sent` frames were written, and all
    /// that is still released: their release is out of date. They wait for the
    /// commit of the current epoch, before all that is held already. Under an open
    /// gate they stay released; under a shut one they are dropped.
    pub fn take_back(&mut self, mut batch: FrameBatch, sent: usize) {
        batch.frames.skip(sent);
        if self.gate == Gate::Shut {
            self.dropped_frames += batch.frames.len() as u64;
            return;
        }
        self.used_bytes += batch.cost();
        self.released.push_front(batch);
        if self.gate == Gate::Open {
            return;
        }
        while let Some(mut batch) = self.released.pop_back() {
            batch.epoch = self.current;
            self.held_frames += batch.frames.len();
            self.held.push_front(batch);
        }
    }

    /// Gives a written batch back, so that its memory is used again.
    pub fn recycle(&mut self, mut batch: FrameBatch) {
        if self.spare.len() < SPARE_BATCHES {
            batch.frames.clear();
            self.spare.push(batch);
        }
    }

    /// Whether [`take_released`](Self::take_released) has something to give.
    pub fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// The gate's state.
    pub fn gate(&self) -> Gate {
        self.gate
    }

    /// The epoch to which the next frame will belong.
    pub fn current_epoch(&self) -> Epoch {
        self.current
    }

    /// Frames that wait for their epoch's commit.
    pub fn held_frames(&self) -> usize {
        self.held_frames
    }

    /// Bytes of the frames that wait for their epoch's commit.
    pub fn held_bytes(&self) -> usize {
        self.held.iter().map(|batch| batch.frames.used()).sum()
    }

    /// Bytes of the frames that wait to be written, as well.
    pub fn bytes(&self) -> usize {
        self.held_bytes() + self.released.iter().map(|batch| batch.frames.used()).sum::<usize>()
    }

    /// Whether a frame of the current epoch waits.
    pub fn holds_current(&self) -> bool {
        self.held.back().is_some_and(|last| last.epoch == self.current)
    }

    /// The frames of an epoch that wait for its commit, oldest first.
    pub fn held_of(&self, epoch: Epoch) -> impl Iterator<Item = &[u8]> {
        let batches = self.held.iter().filter(move |batch| batch.epoch == epoch);
        batches.flat_map(|batch| batch.frames.iter())
    }

    /// Frames dropped because the buffer was full or shut.
    pub fn dropped_frames(&self) -> u64 {
        self.dropped_frames
    }

    fn release_oldest(&mut self) {
        if let Some(batch) = self.held.pop_front() {
            self.held_frames -= batch.frames.len();
            self.released.push_back(batch);
        }
    }
}

/// Adds a frame to the last batch, or to a new one if that is full or older.
fn append(
    queue: &mut VecDeque<FrameBatch>,
    spare: &mut Vec<FrameBatch>,
    epoch: Epoch,
    frame: &[u8],
) {
    if let Some(last) = queue.back_mut().filter(|last| last.has_room(epoch, frame)) {
        last.frames.push(frame);
        return;
    }
    let mut batch = spare.pop().unwrap_or_default();
    batch.epoch = epoch;
    batch.frames.push(frame);
    queue.push_back(batch);
}

#[cfg(test)]
#[path = "buffer_tests.rs"]
mod tests;
