//! The guest: a machine whose whole state says which moment it is from.

use std::collections::VecDeque;
use understudy_protocol::{Epoch, Time};

/// Pages of guest memory.
pub const PAGES: usize = 8;

/// Blocks of the guest's disk.
pub const BLOCKS: usize = 8;

/// The content of each page, or of each disk block: the state that wrote it last.
pub type Pages = [u64; PAGES];
/// See [`Pages`].
pub type Blocks = [u64; BLOCKS];

/// One history of the guest: a fail-over begins a new one where the epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineageId(pub u32);

/// A moment of a guest's execution. Numbers only grow, over all lineages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The history that it belongs to.
    pub lineage: LineageId,
    /// Its number.
    pub number: u64,
}

impl State {
    /// The device state as it travels.
    pub fn encode(self) -> Vec<u8> {
        [u64::from(self.lineage.0).to_le_bytes(), self.number.to_le_bytes()].concat()
    }

    /// Reads what [`State::encode`] made.
    pub fn decode(bytes: &[u8]) -> State {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        State { lineage: LineageId(word(0) as u32), number: word(8) }
    }
}

/// CPU and memory of a running guest; its disk is the host's image.
#[derive(Clone, Debug)]
pub struct Guest {
    /// CPU and device state.
    pub state: State,
    /// Memory.
    pub pages: Pages,
    /// The disk as the guest last flushed it, which it tells its clients about.
    pub flushed: Claim,
}

/// The claim by which a client was told what is safe on disk: the blocks at the time of a flush.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// State at the time of the flush.
    pub state: State,
    /// Content of the blocks.
    pub blocks: Blocks,
}

/// A frame that the guest sent: it shows the outside which state it was in.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The state that produced it.
    pub state: State,
    /// The records that it acknowledges.
    pub claim: Claim,
}

impl Frame {
    /// The frame as it is on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let blocks = self.claim.blocks.iter().flat_map(|block| block.to_le_bytes());
        [self.state.encode(), self.claim.state.encode(), blocks.collect()].concat()
    }

    /// Reads what [`Frame::encode`] made.
    pub fn decode(bytes: &[u8]) -> Frame {
        let (state, claimed) = (State::decode(&bytes[..16]), State::decode(&bytes[16..32]));
        let mut words = bytes[32..].chunks_exact(8);
        let mut word = || {
            u64::from_le_bytes(words.next().expect("all blocks")[..].try_into().expect("8 bytes"))
        };
        let blocks = std::array::from_fn(|_| word());
        Frame { state, claim: Claim { state: claimed, blocks } }
    }
}

/// The gate of a card: what it does with the guest's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Lets them out at once.
    Open,
    /// Holds them, tagged with the epoch that runs.
    Held(Epoch),
    /// Lets nothing out ever again.
    Shut,
}

/// The network card: a pipe from QEMU, and the output buffer behind it.
#[derive(Debug)]
pub struct Port {
    /// Gate of the frames.
    pub gate: Gate,
    pipe: Vec<Frame>,
    /// Frames with the epochs whose commits they await, and the times at which they came.
    held: VecDeque<(Epoch, Time, Frame)>,
}

impl Port {
    /// A card without frames.
    pub fn new(gate: Gate) -> Port {
        Port { gate, pipe: Vec::new(), held: VecDeque::new() }
    }

    /// The time since which the oldest of the frames that wait for their epochs has.
    pub fn waits_since(&self) -> Option<Time> {
        self.held.front().map(|(_, came, _)| *came)
    }

    /// The time since which the oldest frame of the epoch that runs has waited, if any does.
    pub fn waits_in_epoch(&self) -> Option<Time> {
        let Gate::Held(epoch) = self.gate else { return None };
        let first = self.held.iter().find(|(tag, ..)| *tag == epoch);
        first.map(|(_, came, _)| *came)
    }

    /// The frames of an epoch that wait for its commit.
    pub fn held_of(&self, epoch: Epoch) -> impl Iterator<Item = &Frame> {
        self.held.iter().filter(move |(tag, ..)| *tag == epoch).map(|(.., frame)| frame)
    }

    /// The guest sends a frame; it takes a moment to arrive in the buffer.
    pub fn send(&mut self, frame: Frame) {
        self.pipe.push(frame);
    }

    /// Lets what is in the pipe arrive; returns what goes out at once.
    pub fn drain(&mut self, now: Time) -> Vec<Frame> {
        let arrived = std::mem::take(&mut self.pipe);
        match self.gate {
            Gate::Open => return arrived,
            Gate::Held(epoch) => {
                self.held.extend(arrived.into_iter().map(|frame| (epoch, now, frame)));
            }
            Gate::Shut => {}
        }
        Vec::new()
    }

    /// Lets out the frames of epochs up to `epoch`.
    pub fn release_through(&mut self, epoch: Epoch) -> Vec<Frame> {
        let ready = self.held.partition_point(|(tag, ..)| *tag <= epoch);
        self.held.drain(..ready).map(|(.., frame)| frame).collect()
    }

    /// Lets out everything, from now on at once.
    pub fn open(&mut self) -> Vec<Frame> {
        self.gate = Gate::Open;
        let mut out: Vec<Frame> = self.held.drain(..).map(|(.., frame)| frame).collect();
        out.append(&mut self.pipe);
        out
    }

    /// Lets nothing out ever again.
    pub fn shut(&mut self) {
        self.gate = Gate::Shut;
        self.pipe.clear();
        self.held.clear();
    }
}
