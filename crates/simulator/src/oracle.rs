//! The truth about what happened, which no host knows: the guest's histories, what each
//! epoch's boundary looked like, and what the outside was shown.

use crate::guest::{Blocks, Claim, LineageId, Pages, State};
use crate::host::{HostId, Image, SessionId};
use std::collections::BTreeMap;
use understudy_protocol::Epoch;

/// The guest as it stood when an epoch was closed.
#[derive(Clone, Copy, Debug)]
pub struct Boundary {
    /// CPU and devices.
    pub state: State,
    /// Memory.
    pub pages: Pages,
    /// The disk.
    pub blocks: Blocks,
}

/// The truth about a schedule.
#[derive(Debug)]
pub struct Oracle {
    /// The state that each lineage began from.
    origins: Vec<Option<State>>,
    last_state: u64,
    boundaries: BTreeMap<(SessionId, Epoch), Boundary>,
    /// The newest state that the outside saw.
    shown: Option<State>,
    /// The claim of what clients were told is safe on disk.
    claim: Option<Claim>,
    /// The host whose image the guest ran on last, or may run on next.
    ran_last: HostId,
}

impl Oracle {
    /// The truth before anything happened.
    pub fn new() -> Oracle {
        Oracle {
            origins: Vec::new(),
            last_state: 0,
            boundaries: BTreeMap::new(),
            shown: None,
            claim: None,
            ran_last: HostId(0),
        }
    }

    /// A guest begins to run where `origin` ended.
    pub fn new_lineage(&mut self, origin: Option<State>) -> State {
        self.origins.push(origin);
        State { lineage: LineageId(self.origins.len() as u32 - 1), number: self.last_state }
    }

    /// A guest of `lineage` takes a step.
    pub fn next_state(&mut self, lineage: LineageId) -> State {
        self.last_state += 1;
        State { lineage, number: self.last_state }
    }

    /// The last state that there can be of a lineage.
    pub fn tip(&self, lineage: LineageId) -> State {
        State { lineage, number: self.last_state }
    }

    /// Whether `younger` came out of `older`.
    pub fn descends(&self, younger: State, older: State) -> bool {
        let mut at = younger;
        loop {
            if at.lineage == older.lineage {
                return older.number <= at.number;
            }
            match self.origins[at.lineage.0 as usize] {
                Some(origin) => at = origin,
                None => return false,
            }
        }
    }

    /// Remembers an epoch's boundary; those that nobody can ask for are forgotten.
    pub fn record(&mut self, session: SessionId, epoch: Epoch, boundary: Boundary) {
        self.boundaries.insert((session, epoch), boundary);
        self.boundaries.remove(&(session, Epoch(epoch.0.saturating_sub(64))));
    }

    /// The guest at the end of that epoch.
    pub fn boundary(&self, session: SessionId, epoch: Epoch) -> Option<&Boundary> {
        self.boundaries.get(&(session, epoch))
    }

    /// The outside sees a frame of `state`: its history must be the one it knows.
    pub fn show(&mut self, state: State, claim: Claim) -> Result<(), String> {
        match self.shown {
            Some(shown) if self.descends(shown, state) => return Ok(()),
            Some(shown) if !self.descends(state, shown) => {
                return Err(format!("the outside saw {shown:?}, now {state:?} of another history"));
            }
            _ => {}
        }
        self.shown = Some(state);
        self.claim = Some(claim);
        Ok(())
    }

    /// The newest state that the outside saw.
    pub fn shown(&self) -> Option<State> {
        self.shown
    }

    /// The VM boots from a disk again: its connections are gone, the records
    /// that it acknowledged must not be.
    pub fn forget_shown(&mut self) {
        self.shown = None;
    }

    /// The operator insists on an image that may be older than what clients were told.
    pub fn forget_all_shown(&mut self) {
        (self.shown, self.claim) = (None, None);
    }

    /// Notes that from here on the guest's newest disk is on `host`.
    pub fn activate(&mut self, host: HostId) {
        self.ran_last = host;
    }

    /// The host that has the guest's newest disk.
    pub fn ran_last(&self) -> HostId {
        self.ran_last
    }

    /// The thing that an image would lack, of what clients were told is safe, if the
    /// power failed now.
    pub fn lacks(&self, image: &Image) -> Option<String> {
        let claim = self.claim?;
        if !self.descends(self.tip(image.lineage), claim.state) {
            return Some(format!("it is of another history than {:?}", claim.state));
        }
        let lost = (0..claim.blocks.len()).find(|b| image.synced[*b] < claim.blocks[*b])?;
        let (is, told) = (image.synced[lost], claim.blocks[lost]);
        Some(format!("its block {lost} is of state {is}, clients were told of state {told}"))
    }
}
