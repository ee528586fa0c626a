//! The pieces of an epoch: pages, disk writes, device state, and what changes with it.

use super::{Encoded, Payload, parse};
use crate::medium::Medium;
use std::borrow::Cow;
use std::fmt;
use understudy_cluster::messages::KeepOrder;
use understudy_encoding::{decode_log, encode_log};
use understudy_protocol::wire::{
    DiskRange, DiskWrite, FIRST_WITH_STATE_PARTS, Kind, MAX_PAYLOAD, Message, WireError,
    WireVersion,
};
use understudy_protocol::{CardFrames, Epoch};

/// A piece of an epoch.
#[derive(Clone, Debug)]
pub enum Piece<'a> {
    /// Guest memory.
    Pages(PageBatch<'a>),
    /// Bytes written to a disk.
    DiskWrite(DiskWrite),
    /// A range of a disk that reads as zeroes from now on.
    DiskZero(DiskRange),
    /// QEMU's device state, opaque: all of it, or what comes behind its parts.
    DeviceState(Vec<u8>),
    /// The next part of a device state that is too large for one message.
    DeviceStatePart(Vec<u8>),
    /// Frames that the guest sent, as far as they wait for the epoch's commit.
    Outbound(CardFrames),
    /// The guest's words on its console.
    Console(Vec<u8>),
    /// The medium that a CD-ROM drive has from now on.
    Medium(Medium),
    /// An order to keep what the backup has at the end of the epoch for a snapshot.
    Keep(KeepOrder),
    /// The log begins behind the epoch.
    LogBegins,
    /// The rest of the log, which leads up to the epoch.
    LogEnds(Vec<u8>),
}

/// Encoded pages, for `understudy_encoding::read_pages`. That they are right can be told only with
/// the machine that they are for, by reading them.
#[derive(Clone)]
pub struct PageBatch<'a>(Batch<'a>);

#[derive(Clone)]
enum Batch<'a> {
    /// The pages as they came.
    Received(Vec<u8>),
    /// The pages as they are about to be sent, part after part.
    Encoded(&'a [&'a [u8]]),
}

impl<'a> PageBatch<'a> {
    /// Pages that are about to be sent, in parts.
    pub fn encoded(parts: &'a [&'a [u8]]) -> PageBatch<'a> {
        PageBatch(Batch::Encoded(parts))
    }

    /// The bytes, joined if need be.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.0 {
            Batch::Received(bytes) => Cow::Borrowed(bytes),
            Batch::Encoded(parts) => Cow::Owned(parts.concat()),
        }
    }

    fn len(&self) -> usize {
        match &self.0 {
            Batch::Received(bytes) => bytes.len(),
            Batch::Encoded(parts) => parts.iter().map(|part| part.len()).sum(),
        }
    }

    fn payload(&self) -> Payload<'_> {
        match &self.0 {
            Batch::Received(bytes) => Payload::Borrowed(bytes),
            Batch::Encoded(parts) => Payload::Parts(parts),
        }
    }
}

impl fmt::Debug for PageBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageBatch({} bytes)", self.len())
    }
}

/// The pieces of a device state, in their order, for a backup with which this version is spoken.
///
/// # Errors
/// It is too large for a backup that takes it in one message.
pub fn device_state(
    state: &[u8],
    version: WireVersion,
) -> Result<impl Iterator<Item = Piece<'static>>, WireError> {
    let cut = state.len().saturating_sub(1) / MAX_PAYLOAD * MAX_PAYLOAD;
    if cut > 0 && version < FIRST_WITH_STATE_PARTS {
        return Err(WireError::TooLarge(state.len()));
    }
    let (parts, last) = state.split_at(cut);
    let parts = parts.chunks(MAX_PAYLOAD).map(|part| Piece::DeviceStatePart(part.to_vec()));
    Ok(parts.chain([Piece::DeviceState(last.to_vec())]))
}

impl Piece<'_> {
    /// Bytes that it has: most of what it takes in memory.
    pub fn bytes(&self) -> u64 {
        let bytes = match self {
            Piece::Pages(pages) => pages.len(),
            Piece::DiskWrite(write) => write.payload().len(),
            Piece::DiskZero(_) => DiskRange::BYTES,
            Piece::Outbound(frames) => frames.payload().len(),
            Piece::DeviceState(bytes)
            | Piece::DeviceStatePart(bytes)
            | Piece::Console(bytes)
            | Piece::LogEnds(bytes) => bytes.len(),
            Piece::Medium(_) | Piece::Keep(_) | Piece::LogBegins => 0,
        };
        bytes as u64
    }

    /// Encodes it as a message of this epoch.
    pub(super) fn encode(&self, epoch: Epoch) -> serde_json::Result<Encoded<'_>> {
        let with = |kind, payload| Ok(Encoded::new(kind, epoch.0, payload));
        match self {
            Piece::Pages(pages) => with(Kind::Pages, pages.payload()),
            Piece::DiskWrite(write) => with(Kind::DiskWrite, Payload::Borrowed(write.payload())),
            Piece::DiskZero(range) => with(Kind::DiskZero, Payload::Owned(range.encode().to_vec())),
            Piece::DeviceState(state) => with(Kind::DeviceState, Payload::Borrowed(state)),
            Piece::DeviceStatePart(part) => with(Kind::DeviceStatePart, Payload::Borrowed(part)),
            Piece::Outbound(frames) => with(Kind::Outbound, Payload::Borrowed(frames.payload())),
            Piece::Console(words) => with(Kind::Console, Payload::Borrowed(words)),
            Piece::Medium(medium) => Encoded::json(Kind::Medium, epoch.0, medium),
            Piece::Keep(order) => Encoded::json(Kind::Keep, epoch.0, order),
            Piece::LogBegins => Ok(Encoded::signal(Kind::LogBegins, epoch.0)),
            Piece::LogEnds(rest) => {
                let mut payload = Vec::new();
                encode_log(rest, &mut payload);
                with(Kind::LogEnds, Payload::Owned(payload))
            }
        }
    }

    /// Reads a message that belongs to an epoch, which its header names.
    pub(super) fn decode(message: Message) -> Result<Piece<'static>, WireError> {
        Ok(match message.header.kind {
            Kind::Pages => Piece::Pages(PageBatch(Batch::Received(message.payload))),
            Kind::DiskWrite => Piece::DiskWrite(DiskWrite::decode(message)?),
            Kind::DiskZero => Piece::DiskZero(DiskRange::decode(&message)?),
            Kind::DeviceState => Piece::DeviceState(message.payload),
            Kind::DeviceStatePart => Piece::DeviceStatePart(message.payload),
            Kind::Outbound => Piece::Outbound(CardFrames::decode(message)?),
            Kind::Console => Piece::Console(message.payload),
            Kind::Medium => Piece::Medium(parse::body(&message)?),
            Kind::Keep => Piece::Keep(parse::body(&message)?),
            Kind::LogBegins => {
                parse::number(&message)?;
                Piece::LogBegins
            }
            Kind::LogEnds => {
                let rest = decode_log(&message.payload);
                Piece::LogEnds(rest.map_err(|error| parse::malformed(&message, error))?)
            }
            kind => return Err(WireError::Unexpected { kind, from: "primary" }),
        })
    }
}
