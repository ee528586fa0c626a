//! Failures of a command: the words on stderr, the JSON on stdout, the exit code.

use crate::output;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::process::ExitCode;
use understudy_report::{ErrorKind, HostError};

/// Exit codes, as the help documents them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Success.
    Ok = 0,
    /// Failure of the command.
    Error = 1,
    /// The command line is wrong.
    Usage = 2,
    /// Protection was asked for and is lost.
    Degraded = 3,
    /// No such VM or file.
    NotFound = 4,
    /// The daemon does not answer.
    NoDaemon = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Reason why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class of the failure.
    pub kind: FailureKind,
    /// Message: what is wrong, where, and what to do.
    pub message: String,
}

/// The class of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// The command line is wrong.
    Usage,
    /// Protection was asked for and is lost.
    Degraded,
    /// The daemon does not answer.
    DaemonUnreachable,
    /// It has said nothing in time, and may live. Users are told the same.
    #[serde(rename = "daemon-unreachable", skip_deserializing)]
    DaemonSilent,
    /// Error that the daemon, or a file, has told.
    #[serde(untagged)]
    Host(ErrorKind),
}

/// Form of errors as JSON, in the API and on the command line.
#[derive(Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody<E> {
    /// The error.
    pub error: E,
}

impl Failure {
    /// A failure of `kind` that says `message`.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    /// Something failed that should not have.
    pub fn internal(message: impl Into<String>) -> Failure {
        Failure::new(FailureKind::Host(ErrorKind::Internal), message)
    }

    /// The exit code.
    pub fn exit(&self) -> Exit {
        match self.kind {
            FailureKind::Usage => Exit::Usage,
            FailureKind::Degraded => Exit::Degraded,
            FailureKind::DaemonUnreachable | FailureKind::DaemonSilent => Exit::NoDaemon,
            FailureKind::Host(ErrorKind::NotFound) => Exit::NotFound,
            FailureKind::Host(_) => Exit::Error,
        }
    }

    /// Tells the user of `program`; returns the exit code.
    pub fn report(self, program: &str, json: bool) -> ExitCode {
        let exit = self.exit();
        // Nothing can be said if the terminal is gone; that changes nothing about the failure.
        let _ = writeln!(io::stderr(), "{program}: {}", self.message);
        if json {
            // Nothing more can be said if stdout is gone.
            let _ = output::json(&ErrorBody { error: self });
        }
        exit.into()
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Failure {
        Failure::new(FailureKind::Host(error.kind), error.message)
    }
}

/// Reports a command line that cannot be read; also prints help and version.
pub fn usage(error: &clap::Error) -> ExitCode {
    // Nothing more can be said if the terminal is gone.
    let _ = error.print();
    if !error.use_stderr() {
        return Exit::Ok.into();
    }
    if std::env::args_os().any(|argument| argument == "--json") {
        let message = error.to_string();
        let first = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let _ = output::json(&ErrorBody { error: Failure::new(FailureKind::Usage, first) });
    }
    Exit::Usage.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_exit_code_and_its_word() {
        let cases = [
            (FailureKind::Usage, 2, "usage"),
            (FailureKind::Degraded, 3, "degraded"),
            (FailureKind::DaemonUnreachable, 5, "daemon-unreachable"),
            (FailureKind::DaemonSilent, 5, "daemon-unreachable"),
            (FailureKind::Host(ErrorKind::NotFound), 4, "not-found"),
            (FailureKind::Host(ErrorKind::Invalid), 1, "invalid"),
            (FailureKind::Host(ErrorKind::Conflict), 1, "conflict"),
        ];
        for (kind, code, word) in cases {
            let failure = Failure::new(kind, "words");
            assert_eq!(failure.exit() as u8, code);
            let json = serde_json::to_value(ErrorBody { error: failure }).unwrap();
            assert_eq!(json, serde_json::json!({"error": {"kind": word, "message": "words"}}));
        }
    }
}
