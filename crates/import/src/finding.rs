//! Outcome for each part of a VM.

use serde::Serialize;
use std::fmt;

/// Outcome for one part of the VM, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Outcome for the part.
    pub outcome: Outcome,
    /// Its line in the text, from 1.
    pub line: usize,
    /// The part, in the words of the text.
    pub what: String,
    /// Reason: what the part is from now on, or why it is not there; empty if there is nothing to
    /// say.
    pub why: String,
}

/// Outcome for a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest finds it as it was.
    Taken,
    /// The guest, or its administrator, finds something else in its place.
    Changed,
    /// Nothing is in its place; the guest does without.
    LeftOut,
    /// The VM cannot be protected with it.
    Refused,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Taken => "taken",
            Outcome::Changed => "changed",
            Outcome::LeftOut => "left out",
            Outcome::Refused => "REFUSED",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<9} line {}: {}", self.outcome, self.line, self.what)?;
        if self.why.is_empty() { Ok(()) } else { write!(f, ": {}", self.why) }
    }
}
