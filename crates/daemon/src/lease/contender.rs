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

/// Those who were waited for.
pub(crate) struct Awaited {
    /// Contenders that were waited for.
    pub contenders: Vec<Contender>,
    /// Their leases when they were over.
    pub lease: FormerLease,
}

impl Awaited {
    /// Whether this one was waited for.
    pub fn covers(&self, contender: &Contender) -> bool {
        self.contenders.iter().any(|awaited| awaited.includes(contender))
    }
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
    /// All of a VM that is `now`'s, by the arbiter's word, and that a host which answers ran last at the generation `ran`. An
    /// owner that answers, and did not come to run it, may not have waited for those before: nor may one that is silent.
    pub fn of(
        here: &HostName,
        (ran, now): (Generation, &Ownership),
        silent: Vec<HostName>,
        answers: impl Fn(&HostName) -> bool,
    ) -> Vec<Contender> {
        let owner = now.host.clone().filter(|host| host != here && !answers(host));
        let tenures = Tenures::between(ran, now);
        let is_former = |host: &HostName| owner.as_ref() != Some(host);
        let former: Vec<HostName> = silent.into_iter().filter(is_former).collect();
        let former = (!tenures.is_empty() && !former.is_empty())
            .then_some(Contender::Former(former, tenures));
        let owner = owner.map(|host| Contender::Owner(host, now.generation));
        owner.into_iter().chain(former).collect()
    }

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
