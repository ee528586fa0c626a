//! The messages of the primary.

use super::{Encoded, Payload, Piece, parse};
use crate::medium::Medium;
use crate::turn::Order;
use std::borrow::Cow;
use std::io;
use understudy_encoding::{decode_log, encode_log};
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_lockstep::{Comparison, Written};
use understudy_protocol::wire::{Header, Kind, Message, WireError};
use understudy_protocol::{Epoch, EpochEnd};
use understudy_snapshot::SnapshotNumber;

/// A message of the primary.
#[derive(Clone, Debug)]
pub enum ToBackup<'a> {
    /// A piece of this epoch. Epoch 0 is the first synchronisation.
    Piece(Epoch, Piece<'a>),
    /// An epoch is whole.
    EpochEnd(EpochEnd),
    /// The backup is to take over.
    TakeOver {
        /// Whether the operator wants it; else the primary's QEMU died.
        planned: bool,
    },
    /// Protection ends.
    StandDown,
    /// The primary gives up, for this reason.
    Refuse(String),
    /// A batch of QEMU's log, which is a whole epoch. Lockstep mode, like what follows.
    Log {
        /// The epoch.
        epoch: Epoch,
        /// Its log.
        log: Cow<'a, [u8]>,
    },
    /// The results of disk reads of which the log of this epoch, or of a later one, tells the ends.
    DiskReads {
        /// The epoch.
        epoch: Epoch,
        /// A piece of the stream.
        stream: Cow<'a, [u8]>,
    },
    /// The writes that the primary's disks have.
    Written(Written),
    /// A place of the log to compare at, and what the primary has there.
    Compare {
        /// The epoch that is about to be sent.
        epoch: Epoch,
        /// Place and checksums.
        comparison: Comparison,
    },
    /// The backup has diverged, as comparisons show.
    Condemn(String),
    /// The primary is about to turn to the other way of keeping up, or is not after all.
    Turn(Order),
    /// Has the backup this medium?
    MediumAsked(Medium),
    /// The snapshot was given up: nothing is to be kept for it.
    LetGo(SnapshotNumber),
}

impl ToBackup<'_> {
    /// Sends it; `next` is what is known to follow. Gives the header.
    pub fn send(&self, channel: &Channel, next: Next) -> io::Result<Header> {
        self.encode()?.send(channel, next)
    }

    /// Encodes it as a message.
    pub(super) fn encode(&self) -> serde_json::Result<Encoded<'_>> {
        Ok(match self {
            ToBackup::Piece(epoch, piece) => piece.encode(*epoch)?,
            ToBackup::EpochEnd(end) => {
                Encoded::new(Kind::EpochEnd, end.epoch.0, Payload::Owned(end.encode()))
            }
            ToBackup::TakeOver { planned } => Encoded::signal(Kind::TakeOver, (*planned).into()),
            ToBackup::StandDown => Encoded::signal(Kind::StandDown, 0),
            ToBackup::Refuse(reason) => Encoded::text(Kind::Refuse, reason),
            ToBackup::Log { epoch, log } => packed(Kind::Log, *epoch, log),
            ToBackup::DiskReads { epoch, stream } => packed(Kind::DiskReads, *epoch, stream),
            ToBackup::Written(written) => {
                Encoded::new(Kind::Written, 0, Payload::Owned(written.encode()))
            }
            ToBackup::Compare { epoch, comparison } => {
                Encoded::new(Kind::Compare, epoch.0, Payload::Owned(comparison.encode()))
            }
            ToBackup::Condemn(reason) => Encoded::text(Kind::Condemn, reason),
            ToBackup::Turn(order) => Encoded::json(Kind::Turn, 0, order)?,
            ToBackup::MediumAsked(medium) => Encoded::json(Kind::MediumAsked, 0, medium)?,
            ToBackup::LetGo(number) => Encoded::signal(Kind::LetGo, number.0),
        })
    }

    /// Reads a message that came from the primary.
    pub fn decode(message: Message) -> Result<ToBackup<'static>, WireError> {
        let epoch = message.header.epoch;
        Ok(match message.header.kind {
            Kind::EpochEnd => ToBackup::EpochEnd(EpochEnd::decode(&message)?),
            Kind::TakeOver => ToBackup::TakeOver { planned: planned(&message)? },
            Kind::StandDown => {
                parse::bare(&message)?;
                ToBackup::StandDown
            }
            Kind::Refuse => ToBackup::Refuse(parse::text(message)?),
            Kind::Log => ToBackup::Log { epoch, log: unpacked(&message)? },
            Kind::DiskReads => ToBackup::DiskReads { epoch, stream: unpacked(&message)? },
            Kind::Written => ToBackup::Written(parse::written(&message)?),
            Kind::Compare => {
                let comparison = Comparison::decode(&message.payload);
                let comparison = comparison.map_err(|error| parse::malformed(&message, error))?;
                ToBackup::Compare { epoch, comparison }
            }
            Kind::Condemn => ToBackup::Condemn(parse::text(message)?),
            Kind::Turn => ToBackup::Turn(parse::json(&message)?),
            Kind::MediumAsked => ToBackup::MediumAsked(parse::json(&message)?),
            Kind::LetGo => ToBackup::LetGo(SnapshotNumber(parse::number(&message)?)),
            _ => ToBackup::Piece(epoch, Piece::decode(message)?),
        })
    }
}

fn planned(message: &Message) -> Result<bool, WireError> {
    match parse::number(message)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(message.malformed("neither planned nor not")),
    }
}

fn packed(kind: Kind, epoch: Epoch, bytes: &[u8]) -> Encoded<'static> {
    let mut payload = Vec::new();
    encode_log(bytes, &mut payload);
    Encoded::new(kind, epoch.0, Payload::Owned(payload))
}

fn unpacked(message: &Message) -> Result<Cow<'static, [u8]>, WireError> {
    let bytes = decode_log(&message.payload).map_err(|error| parse::malformed(message, error))?;
    Ok(Cow::Owned(bytes))
}
