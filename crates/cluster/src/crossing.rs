//! Frames in flight of a snapshot that matter to a restore.

use std::collections::BTreeMap;
use understudy_network::ethernet;
use understudy_snapshot::{Crossing, InFlightFrame, Member, Segment};

/// Frames in flight to a member, by sender.
pub fn crossings(to: Member, log: &[InFlightFrame]) -> Vec<Crossing> {
    let mut all: BTreeMap<Member, Crossing> = BTreeMap::new();
    for frame in log {
        let none = Crossing { from: frame.from, to, data: 0, acknowledgements: 0, others: 0 };
        let crossing = all.entry(frame.from).or_insert(none);
        match Segment::of(ethernet(&frame.bytes)) {
            Segment::Data => crossing.data += 1,
            Segment::Acknowledgement => crossing.acknowledgements += 1,
            Segment::Other => crossing.others += 1,
        }
    }
    all.into_values().collect()
}
