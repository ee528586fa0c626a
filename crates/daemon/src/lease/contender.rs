//! Contenders, which may run a VM and do not answer, and those of them that were waited for.

use super::FormerLease;
use understudy_protocol::{Generation, HostName, Ownership};

/// Host that may run a VM, and does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    /// Its owner, by the arbiter's word.
    Owner(HostName, Generation),
    /// One of these, if it owned it at one of these generations: this host has won the VM since, or gave it up, and may not
    /// have waited for them.
    Former(Vec<HostName>, Tenures),
    /// Any of these: there is no word of the arbiter.
    Any(Vec<HostName>),
}

/// One who was waited for.
pub(crate) struct Awaited {
    /// Contender that was waited for.
    pub contender: Contender,
    /// Its lease when it was over.
    pub lease: FormerLease,
}

/// Generations of which an owner may not have read yet that it has lost the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tenures {
    after: Generation,
    before: Generation,
}

impl Tenures {
    /// Those since somebody who answers has run the VM, and who did so has waited for all before, up to `now`'s. A VM that
    /// is nobody's was given up by its last owner, which runs nothing.
    pub fn between(ran: Generation, now: &Ownership) -> Tenures {
        let given_up = u64::from(now.host.is_none());
        Tenures { after: ran, before: Generation(now.generation.0.saturating_sub(given_up)) }
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.after.next() >= self.before
    }

    fn include(self, other: Tenures) -> bool {
        self.after <= other.after && other.before <= self.before
    }

    /// Whether this is one of them.
    pub fn have(self, generation: Generation) -> bool {
        self.after < generation && generation < self.before
    }
}

impl Contender {
    /// Whether a lease of that host is its.
    pub fn may_be(&self, host: &HostName) -> bool {
        self.hosts().contains(host)
    }

    /// Whether who has waited for this one has waited for `other`, too.
    pub fn includes(&self, other: &Contender) -> bool {
        let same = match (self, other) {
            (Contender::Owner(_, own), Contender::Owner(_, other)) => own == other,
            (Contender::Former(_, own), Contender::Former(_, other)) => own.include(*other),
            (Contender::Any(_), Contender::Any(_)) => true,
            _ => false,
        };
        same && other.hosts().iter().all(|host| self.may_be(host))
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
            let now = Ownership { host: Some(literal("b")), generation: Generation(4) };
            let hosts = hosts.iter().copied().cloned().collect();
            Contender::Former(hosts, Tenures::between(Generation(0), &now))
        };
        assert!(!owner(3).includes(&former(&[&a])));
        assert!(former(&[&a, &c]).includes(&former(&[&c])), "fewer are silent by now");
        assert!(!former(&[&a]).includes(&former(&[&a, &c])), "one more is");
        assert_eq!(former(&[&a, &c]).to_string(), "host a or c");
    }

    // Before, whoever tried again after a claim of its own had come to nothing looked at the lease of that claim, and waited
    // for nobody.
    #[test]
    fn an_owner_is_waited_for_however_many_claims_came_to_nothing_since() {
        let found = |ran, host: Option<&'static str>, generation| {
            let now = Ownership { host: host.map(literal), generation: Generation(generation) };
            let tenures = Tenures::between(Generation(ran), &now);
            [1, 3].into_iter().filter(|of| tenures.have(Generation(*of))).collect::<Vec<_>>()
        };
        assert_eq!(found(1, Some("b"), 4), [3], "its claim came to nothing");
        assert_eq!(found(1, None, 5), [3], "it gave that up");
        assert_eq!(found(1, Some("b"), 8), [3]);
        assert_eq!(found(0, Some("b"), 4), [1, 3]);
        assert_eq!(found(1, None, 4), [0; 0], "its owner gave it up itself");
        assert_eq!(found(4, None, 7), [0; 0], "who ran it at generation 4 had waited");
        let empty = |ran, now| {
            let now = Ownership { host: None, generation: Generation(now) };
            Tenures::between(Generation(ran), &now).is_empty()
        };
        assert!(empty(3, 4) && empty(3, 5) && empty(0, 0) && !empty(3, 6));
    }
}
