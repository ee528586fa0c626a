//! The messages of both sides of a session over its data connection, once the backup is ready.
//!
//! | | |
//! |---|---|
//! | [`ToBackup`] | what the primary says |
//! | [`Piece`] | the part of it that belongs to an epoch |
//! | [`WholeEpoch`] | what these make up, once all have come |
//! | [`ToPrimary`] | what the backup says |
//!
//! Each has one `encode` and one `decode`: whatever a peer sends becomes a value of one of these,
//! or an error that ends the connection. Nothing is allocated for a message beside its payload,
//! which the wire bounds, and what a log or a stream of reads has unpacked, which
//! `understudy_encoding` bounds.
//!
//! Not here, since each is all that may come on its connection at that time: what is said before
//! (`handshake`), heartbeats, copies of inbound frames. `Received` is a channel's own.

mod parse;
mod piece;
#[cfg(test)]
mod tests;
mod to_backup;
mod to_primary;
mod whole;

pub use piece::{PageBatch, Piece, device_state};
pub use to_backup::ToBackup;
pub use to_primary::ToPrimary;
pub use whole::{LogTurn, WholeEpoch};

use std::io;
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_protocol::Epoch;
use understudy_protocol::wire::{Header, Kind};

/// A message as the wire has it.
struct Encoded<'m> {
    kind: Kind,
    /// Number in the header: what it means depends on the kind.
    number: u64,
    payload: Payload<'m>,
}

/// The bytes of a payload, wherever they are.
enum Payload<'m> {
    Owned(Vec<u8>),
    Borrowed(&'m [u8]),
    Parts(&'m [&'m [u8]]),
}

impl<'m> Encoded<'m> {
    fn new(kind: Kind, number: u64, payload: Payload<'m>) -> Encoded<'m> {
        Encoded { kind, number, payload }
    }

    /// A message without a payload.
    fn signal(kind: Kind, number: u64) -> Encoded<'m> {
        Encoded::new(kind, number, Payload::Borrowed(&[]))
    }

    fn text(kind: Kind, text: &'m str) -> Encoded<'m> {
        Encoded::new(kind, 0, Payload::Borrowed(text.as_bytes()))
    }

    fn json(
        kind: Kind,
        number: u64,
        body: &impl serde::Serialize,
    ) -> serde_json::Result<Encoded<'m>> {
        Ok(Encoded::new(kind, number, Payload::Owned(serde_json::to_vec(body)?)))
    }

    fn send(&self, channel: &Channel, next: Next) -> io::Result<Header> {
        let (kind, number) = (self.kind, Epoch(self.number));
        match &self.payload {
            Payload::Owned(bytes) => channel.send_before(next, kind, number, &[bytes]),
            Payload::Borrowed(bytes) => channel.send_before(next, kind, number, &[bytes]),
            Payload::Parts(parts) => channel.send_before(next, kind, number, parts),
        }
    }
}
