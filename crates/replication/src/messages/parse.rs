//! The parsing of what several kinds of messages have in common.

use serde::de::DeserializeOwned;
use std::fmt::Display;
use understudy_lockstep::Written;
use understudy_protocol::wire::{Message, WireError};

/// An error for what the payload's own format says of it.
pub fn malformed(message: &Message, error: impl Display) -> WireError {
    message.malformed(error.to_string())
}

/// The number of a message that has no payload.
pub fn number(message: &Message) -> Result<u64, WireError> {
    match message.payload.is_empty() {
        true => Ok(message.header.epoch.0),
        false => Err(message.malformed("it has a payload")),
    }
}

/// Checks that a message has no number: it belongs to no epoch.
pub fn without_number(message: &Message) -> Result<(), WireError> {
    match message.header.epoch.0 {
        0 => Ok(()),
        _ => Err(message.malformed("it belongs to no epoch")),
    }
}

/// Checks that a message has neither number nor payload.
pub fn bare(message: &Message) -> Result<(), WireError> {
    number(message)?;
    without_number(message)
}

/// The number of a message in which it says yes or no.
pub fn flag(message: &Message) -> Result<bool, WireError> {
    match message.header.epoch.0 {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(message.malformed("its number is neither 0 nor 1")),
    }
}

/// Words for people.
pub fn text(message: Message) -> Result<String, WireError> {
    without_number(&message)?;
    numbered_text(message)
}

/// The same of a message whose number was looked at.
pub fn numbered_text(message: Message) -> Result<String, WireError> {
    let header = message.header;
    String::from_utf8(message.payload).map_err(|_| header.malformed("it is not UTF-8"))
}

/// Parses what the sender's disks have.
pub fn written(message: &Message) -> Result<Written, WireError> {
    without_number(message)?;
    Written::decode(&message.payload).map_err(|error| malformed(message, error))
}

/// The body of a message that belongs to no epoch.
pub fn json<T: DeserializeOwned>(message: &Message) -> Result<T, WireError> {
    without_number(message)?;
    body(message)
}

/// The body of a message that may belong to an epoch.
pub fn body<T: DeserializeOwned>(message: &Message) -> Result<T, WireError> {
    serde_json::from_slice(&message.payload).map_err(|error| malformed(message, error))
}
