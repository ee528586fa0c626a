//! The arbiter's word on a host that says that it runs a member which is known to run elsewhere. Any known host can say
//! so; believed, it would have what is sent to that member, and the member would be cut off.

use crate::host::Host;
use std::time::Duration;
use understudy_protocol::validity::ArbiterWord;
use understudy_protocol::{Generation, HostName, Ownership, VmName};

/// Time for the arbiter to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the arbiter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The host owns the VM, at that generation or since.
    Yes,
    /// Another host owns it, or none does.
    No,
    /// It does not answer.
    Silent,
    /// There is no arbiter.
    Nobody,
}

impl Word {
    /// Asks a host's arbiter for it. The frames of all members on a host wait for that: one that hangs is silent, and
    /// is asked again as that one is.
    pub fn of(host: &Host) -> impl Fn(&VmName, &HostName, Generation) -> Word + '_ {
        move |vm, claimant, generation| {
            if host.arbiter.is_none() {
                return Word::Nobody;
            }
            // Known to be silent: one more thread would only hang with the others.
            if host.vms.look(|all| all.findings.arbiter.is_some()) {
                return Word::Silent;
            }
            let is_its = |found: &Ownership| {
                found.host.as_ref() == Some(claimant) && generation <= found.generation
            };
            match host.ask_arbiter_within(PATIENCE, vm) {
                ArbiterWord::Says(found) if found.as_ref().is_some_and(is_its) => Word::Yes,
                ArbiterWord::Says(_) => Word::No,
                ArbiterWord::Silent => Word::Silent,
            }
        }
    }
}
