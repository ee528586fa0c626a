//! The owner of a VM: the (host, generation) record that the arbiter keeps.

use crate::{Generation, HostName};
use serde::{Deserialize, Serialize};

/// The arbiter's record of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ownership {
    /// The owner; none after a clean stop, when any host may start the VM.
    pub host: Option<HostName>,
    /// Grows by one with every change of owner.
    pub generation: Generation,
}

/// The arbiter's answer to a compare-and-swap from generation *g* to *g + 1*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The asker owns the VM now, at this generation.
    Granted(Generation),
    /// Another host was first.
    Taken(Ownership),
    /// Another host was first, and has handed the key back to the asker since: it owns it at this
    /// generation.
    Returned(Generation),
    /// No answer: nothing may be concluded.
    Unreachable(String),
}
