//! The messages of the backup.

use super::{Encoded, Payload, parse};
use crate::medium::MediumAnswer;
use crate::turn::Answer;
use std::io;
use understudy_cluster::messages::Kept;
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_lockstep::{Findings, Written};
use understudy_protocol::wire::{
    FIRST_WITH_FAILED_MIRRORS, Header, Kind, LogProgress, Message, WireError, WireVersion,
};
use understudy_protocol::{Epoch, Generation};

/// A message of the backup.
#[derive(Clone, Debug)]
pub enum ToPrimary {
    /// The backup holds the whole epoch.
    Acknowledge(Epoch),
    /// The disk writes up to this epoch are on stable storage.
    Settled(Epoch),
    /// The backup reads nothing just now, and works: it has applied so many bytes.
    Works(u64),
    /// The reason why the backup could not take over now; none if it could.
    MayTakeOver(Option<String>),
    /// The backup forgot the VM.
    StoodDown,
    /// The VM runs on the backup, in this generation.
    Live(Generation),
    /// The backup gives up, for this reason.
    Refuse {
        /// The reason.
        reason: String,
        /// A mirror of its does not hold what the primary's image does: it is no base for another session.
        mirrors_failed: bool,
    },
    /// Its QEMU does not follow the log any more, for this reason. Lockstep mode, like what
    /// follows.
    Diverged(String),
    /// The progress of its execution of the log.
    Progress(LogProgress),
    /// The writes that its disks have on stable storage.
    Written(Written),
    /// The spots that differed at a place.
    Compared(Findings),
    /// Whether it is ready for a turn.
    TurnAnswer(Answer),
    /// Whether it has a medium.
    MediumAnswer(MediumAnswer),
    /// The fate of an image for a snapshot.
    Kept(Kept),
}

impl ToPrimary {
    /// The backup gives up, for this reason, and says so to a primary with which this version is spoken.
    pub fn refusal(reason: String, mirrors_failed: bool, version: WireVersion) -> ToPrimary {
        let mirrors_failed = mirrors_failed && version >= FIRST_WITH_FAILED_MIRRORS;
        ToPrimary::Refuse { reason, mirrors_failed }
    }

    /// Sends it.
    pub fn send(&self, channel: &Channel) -> io::Result<Header> {
        self.encode()?.send(channel, Next::Unknown)
    }

    /// Encodes it as a message.
    pub(super) fn encode(&self) -> serde_json::Result<Encoded<'_>> {
        let owned = |kind, bytes| Encoded::new(kind, 0, Payload::Owned(bytes));
        Ok(match self {
            ToPrimary::Acknowledge(epoch) => Encoded::signal(Kind::Acknowledge, epoch.0),
            ToPrimary::Settled(epoch) => Encoded::signal(Kind::Settled, epoch.0),
            ToPrimary::Works(bytes) => Encoded::signal(Kind::Works, *bytes),
            ToPrimary::MayTakeOver(obstacle) => {
                Encoded::text(Kind::MayTakeOver, obstacle.as_deref().unwrap_or_default())
            }
            ToPrimary::StoodDown => Encoded::signal(Kind::StoodDown, 0),
            ToPrimary::Live(generation) => Encoded::signal(Kind::Live, generation.0),
            ToPrimary::Refuse { reason, mirrors_failed } => Encoded {
                number: u64::from(*mirrors_failed),
                ..Encoded::text(Kind::Refuse, reason)
            },
            ToPrimary::Diverged(reason) => Encoded::text(Kind::Diverged, reason),
            ToPrimary::Progress(progress) => owned(Kind::Progress, progress.encode().to_vec()),
            ToPrimary::Written(written) => owned(Kind::Written, written.encode()),
            ToPrimary::Compared(findings) => owned(Kind::Compared, findings.encode()),
            ToPrimary::TurnAnswer(answer) => Encoded::json(Kind::TurnAnswer, 0, answer)?,
            ToPrimary::MediumAnswer(answer) => Encoded::json(Kind::MediumAnswer, 0, answer)?,
            ToPrimary::Kept(kept) => Encoded::json(Kind::Kept, 0, kept)?,
        })
    }

    /// Reads a message that came from the backup.
    pub fn decode(message: Message) -> Result<ToPrimary, WireError> {
        Ok(match message.header.kind {
            Kind::Acknowledge => ToPrimary::Acknowledge(Epoch(parse::number(&message)?)),
            Kind::Settled => ToPrimary::Settled(Epoch(parse::number(&message)?)),
            Kind::Works => ToPrimary::Works(parse::number(&message)?),
            Kind::MayTakeOver => {
                ToPrimary::MayTakeOver(Some(parse::text(message)?).filter(|it| !it.is_empty()))
            }
            Kind::StoodDown => {
                parse::bare(&message)?;
                ToPrimary::StoodDown
            }
            Kind::Live => ToPrimary::Live(Generation(parse::number(&message)?)),
            Kind::Refuse => {
                let mirrors_failed = parse::flag(&message)?;
                ToPrimary::Refuse { reason: parse::numbered_text(message)?, mirrors_failed }
            }
            Kind::Diverged => ToPrimary::Diverged(parse::text(message)?),
            Kind::Progress => {
                parse::without_number(&message)?;
                ToPrimary::Progress(LogProgress::decode(&message)?)
            }
            Kind::Written => ToPrimary::Written(parse::written(&message)?),
            Kind::Compared => {
                parse::without_number(&message)?;
                let findings = Findings::decode(&message.payload);
                ToPrimary::Compared(findings.map_err(|error| parse::malformed(&message, error))?)
            }
            Kind::TurnAnswer => ToPrimary::TurnAnswer(parse::json(&message)?),
            Kind::MediumAnswer => ToPrimary::MediumAnswer(parse::json(&message)?),
            Kind::Kept => ToPrimary::Kept(parse::json(&message)?),
            kind => return Err(WireError::Unexpected { kind, from: "backup" }),
        })
    }
}
