//! Errors that reach the user.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// The class of an error; decides the exit code and the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// A definition, configuration or argument is wrong.
    Invalid,
    /// No such VM, host or file.
    NotFound,
    /// The name, address or state is taken: nothing was changed.
    Conflict,
    /// The peer refused; the message holds its reason.
    Refused,
    /// The peer or the arbiter cannot be reached.
    Unreachable,
    /// An action failed that should not have.
    Internal,
}

/// An error for people: what is wrong, where, and what to do.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize, JsonSchema)]
#[error("{message}")]
pub struct HostError {
    /// The class of the error.
    pub kind: ErrorKind,
    /// The message: what is wrong, where, and what to do.
    pub message: String,
}

impl HostError {
    /// An error of `kind` that says `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> HostError {
        HostError { kind, message: message.into() }
    }
}

/// The error that something could not be done with a file.
pub fn cannot(what: &str, path: &Path, error: &io::Error) -> HostError {
    HostError::new(ErrorKind::Invalid, format!("cannot {what} {}: {error}", path.display()))
}
