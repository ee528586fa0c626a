//! The parts of a snapshot that a host stores.

use crate::group::{Frame, Memory, PAGES};
use std::collections::{BTreeMap, BTreeSet};
use understudy_protocol::{BlockId, CardIndex};
use understudy_snapshot::{
    Area, AreaEntry, AreaMap, Compression, Crossing, FirstAccess, InFlightFrame, Lane, Machine,
    Member, MemberManifest, Packer, Part, Segment, SnapshotNumber, Store, UNIT_BYTES, WorkingSet,
    scattered,
};

/// A snapshot that was taken and is not stored yet.
pub struct Saving {
    pub number: SnapshotNumber,
    pub truth: Memory,
    pub changed: BTreeSet<u64>,
    pub queue: FirstAccess,
    pub map: Option<AreaMap>,
}

/// Stores a member's part of a snapshot, the difference from its base.
pub fn store_member(
    store: &Store,
    at: usize,
    base: &AreaMap,
    saving: &mut Saving,
    log: &[(Member, Frame)],
) -> Part {
    let packing = Compression::Lz4;
    let content = |unit: u64| &saving.truth[unit as usize * UNIT_BYTES..][..UNIT_BYTES];
    let queue: Vec<u64> = saving.queue.pages().iter().map(|page| page.index.0).collect();
    let unpacked: BTreeSet<u64> = scattered(base, &queue).into_iter().collect();
    let (mut packer, mut chunks) = (Packer::new(), Vec::new());
    for &unit in &saving.changed {
        chunks.extend(packer.put(unit, content(unit), Lane::Rest));
    }
    for unit in queue {
        if saving.changed.contains(&unit) || unpacked.contains(&unit) {
            chunks.extend(packer.put(unit, content(unit), Lane::WorkingSet));
        }
    }
    let (last, map, _) = packer.finish(base);
    chunks.extend(last);
    store.put_chunks(&chunks, packing).unwrap();
    let working_set = WorkingSet { queue: saving.queue.pages().to_vec(), size: 12 };
    let frames: Vec<InFlightFrame> = log
        .iter()
        .map(|(from, bytes)| InFlightFrame {
            from: *from,
            card: CardIndex(0),
            bytes: bytes.clone(),
        })
        .collect();
    let blob = |bytes: &[u8]| store.put_blob(bytes, packing).unwrap();
    let member = MemberManifest {
        name: format!("bank-{at}").parse().unwrap(),
        machine: Machine {
            qemu: "10.0.2".into(),
            machine_type: "pc-i440fx-10.0".into(),
            vcpus: 1,
            memory: PAGES * UNIT_BYTES as u64,
        },
        definition: serde_json::Value::Null,
        firmware: None,
        kernel: None,
        initrd: None,
        areas: vec![AreaEntry {
            area: Area::Memory(BlockId(0)),
            name: "pc.ram".into(),
            bytes: PAGES * UNIT_BYTES as u64,
            map: blob(&map.encode()),
        }],
        device_state: blob(b"registers"),
        in_flight: store.put_frames(&frames, packing).unwrap(),
        working_set: blob(&working_set.encode()),
        recent: None,
        clock: None,
        sampled: None,
        pause_us: 0,
        base: None,
    };
    saving.map = Some(map);
    let manifest = store.put_member(&member, packing).unwrap();
    Part { manifest, crossings: crossings(at, log) }
}

fn crossings(at: usize, log: &[(Member, Frame)]) -> Vec<Crossing> {
    let mut crossings: BTreeMap<Member, Crossing> = BTreeMap::new();
    let to = Member(at as u16);
    for (from, frame) in log {
        let new = Crossing { from: *from, to, data: 0, acknowledgements: 0, others: 0 };
        let crossing = crossings.entry(*from).or_insert(new);
        match Segment::of(frame) {
            Segment::Data => crossing.data += 1,
            Segment::Acknowledgement => crossing.acknowledgements += 1,
            Segment::Other => crossing.others += 1,
        }
    }
    crossings.into_values().collect()
}
