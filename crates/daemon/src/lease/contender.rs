//! Contenders, which may run a VM and do not answer, and those of them that were waited for.

use super::FormerLease;
use std::mem::discriminant;
use understudy_protocol::{Generation, HostName};

/// Host that may run a VM, and does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    /// Its owner, by the arbiter's word.
    Owner(HostName, Generation),
    /// One of these, if it owned it at this generation: this host has won the VM since, and may
    /// not have waited for them.
    Former(Vec<HostName>, Generation),
    /// Any of these: there is no word of the arbiter.
    Any(Vec<HostName>),
}

/// One who was waited for.
pub(crate) struct Awaited {
    /// Contender that was waited for.
    pub contender: Contender,
    /// Its lease when it was over; none if it kept none.
    pub lease: Option<FormerLease>,
}

impl Contender {
    /// The generation of its lease.
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Contender::Owner(_, at) | Contender::Former(_, at) => Some(*at),
            Contender::Any(_) => None,
        }
    }

    /// Whether it owns the VM at this moment.
    pub fn is_owner(&self) -> bool {
        matches!(self, Contender::Owner(..))
    }

    /// Whether a lease of that host is its.
    pub fn may_be(&self, host: &HostName) -> bool {
        self.hosts().contains(host)
    }

    /// Whether who has waited for this one has waited for `other`, too.
    pub fn includes(&self, other: &Contender) -> bool {
        discriminant(self) == discriminant(other)
            && self.generation() == other.generation()
            && other.hosts().iter().all(|host| self.may_be(host))
    }

    fn hosts(&self) -> &[HostName] {
        match self {
            Contender::Owner(host, _) => std::slice::from_ref(host),
            Contender::Former(hosts, _) | Contender::Any(hosts) => hosts,
        }
    }
}

impl std::fmt::Display for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {}", self.hosts().join(" or "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    #[test]
    fn who_has_waited_for_one_has_not_waited_for_another() {
        let (a, c): (HostName, HostName) = (literal("a"), literal("c"));
        let owner = |generation| Contender::Owner(a.clone(), Generation(generation));
        assert!(owner(3).includes(&owner(3)));
        assert!(!owner(3).includes(&owner(4)), "it has got the VM again since");
        assert!(!owner(3).includes(&Contender::Owner(c.clone(), Generation(3))));
        let former = |hosts: &[&HostName]| {
            Contender::Former(hosts.iter().copied().cloned().collect(), Generation(3))
        };
        assert!(!owner(3).includes(&former(&[&a])));
        assert!(former(&[&a, &c]).includes(&former(&[&c])), "fewer are silent by now");
        assert!(!former(&[&a]).includes(&former(&[&a, &c])), "one more is");
        assert_eq!(former(&[&a, &c]).to_string(), "host a or c");
    }
}
