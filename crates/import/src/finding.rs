//! What becomes of a part of a VM.

use serde::Serialize;
use std::fmt;

/// What becomes of one part of the VM, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What becomes of it.
    pub outcome: Outcome,
    /// Its line in the text, from 1.
    pub line: usize,
    /// The part, in the words of the text.
    pub what: String,
    /// What it is from now on, or why not; empty if there is nothing to say.
    pub why: String,
}

/// What becomes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest finds it as it was.
    Taken,
    /// The guest, or its administrator, finds something else in its place.
    Changed,
    /// It is gone; the guest does without.
    LeftOut,
    /// With it the VM cannot be protected.
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
