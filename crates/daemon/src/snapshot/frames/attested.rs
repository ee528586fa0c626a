//! The arbiter's word on a host that says that it runs a member which is known to run elsewhere. Any known host can say
//! so; believed, it would have what is sent to that member, and the member would be cut off.

use understudy_arbiter::Arbiter;
use understudy_protocol::{Generation, HostName, Ownership, VmName};

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
    /// Asks an arbiter for it, which takes as long as that has.
    pub fn of(arbiter: Option<&Arbiter>) -> impl Fn(&VmName, &HostName, Generation) -> Word + '_ {
        move |vm, host, generation| {
            let Some(arbiter) = arbiter else { return Word::Nobody };
            let is_its = |found: &Ownership| {
                found.host.as_ref() == Some(host) && generation <= found.generation
            };
            match arbiter.current(vm) {
                Ok(found) if found.as_ref().is_some_and(is_its) => Word::Yes,
                Ok(_) => Word::No,
                Err(_) => Word::Silent,
            }
        }
    }
}
