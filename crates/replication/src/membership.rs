//! Groups: VMs that are protected, taken over and fenced as one (Remus, section 5).
//!
//! All members run on one host and have one backup. Each keeps its own record at
//! the arbiter; the group is owned by whoever owns all of them, won in one order,
//! so that the first record decides between two hosts that contest the group.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use tracing::warn;
use understudy_arbiter::{Arbiter, Unreachable};
use understudy_protocol::{Generation, GroupName, HostName, Ownership, Verdict, VmName};

/// The most VMs of a group.
pub const MOST_MEMBERS: usize = 64;

/// One VM of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The VM's name.
    pub vm: VmName,
    /// The generation at which the primary owned it when protection began.
    pub generation: Generation,
}

/// Members of a group, in the same order on every host. What a peer sends is one only if it has
/// members, not too many, and no VM twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedMembership")]
pub struct Membership {
    /// The group's name; none for a VM that is protected by itself.
    pub name: Option<GroupName>,
    /// The members, at least one.
    pub members: Vec<Member>,
}

/// A group as its operator wants it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMembers {
    /// The group's name.
    pub name: GroupName,
    /// Its VMs; the first is the leader.
    pub vms: Vec<VmName>,
}

/// A [`Membership`], as a peer tells it.
#[derive(Deserialize)]
struct UncheckedMembership {
    name: Option<GroupName>,
    members: Vec<Member>,
}

impl TryFrom<UncheckedMembership> for Membership {
    type Error = String;

    fn try_from(unchecked: UncheckedMembership) -> Result<Membership, String> {
        let UncheckedMembership { name, members } = unchecked;
        if !(1..=MOST_MEMBERS).contains(&members.len()) {
            return Err(format!("{} members; a group has 1 to {MOST_MEMBERS}", members.len()));
        }
        let vms: BTreeSet<&VmName> = members.iter().map(|member| &member.vm).collect();
        if vms.len() != members.len() {
            return Err("a group has no VM twice".to_owned());
        }
        Ok(Membership { name, members })
    }
}

impl Membership {
    /// The group, if it is one.
    pub fn group(&self) -> Option<GroupMembers> {
        let vms = self.members.iter().map(|member| member.vm.clone()).collect();
        self.name.clone().map(|name| GroupMembers { name, vms })
    }

    /// A VM by itself.
    pub fn of_one(vm: &VmName, generation: Generation) -> Membership {
        let member = Member { vm: vm.to_owned(), generation };
        Membership { name: None, members: vec![member] }
    }

    /// The member whose generation is that of the group's state machine.
    pub fn leader(&self) -> &Member {
        &self.members[0]
    }

    /// A member's generation, when the leader's is `leaders`: all change together.
    pub fn generation_of(&self, member: &Member, leaders: Generation) -> Generation {
        Generation((member.generation.0 + leaders.0).saturating_sub(self.leader().generation.0))
    }

    /// The command that protects the VM, and its group, again.
    pub fn remedy(&self) -> String {
        let vms: Vec<&str> = self.members.iter().map(|member| member.vm.as_str()).collect();
        match &self.name {
            Some(name) => format!("understudy protect {} --group {name}", vms.join(" ")),
            None => format!("understudy protect {}", vms.join(" ")),
        }
    }

    /// Proves that this host could make itself the owner of all members, which `owner` has.
    pub fn prove(&self, arbiter: &Arbiter, owner: &HostName) -> Result<(), Unreachable> {
        let one = |member: &Member| arbiter.prove(&member.vm, owner, member.generation);
        self.members.iter().try_for_each(one)
    }

    /// Makes this host the owner of all members, or of none. `from` is the
    /// leader's generation. Asking again is harmless.
    pub fn acquire(&self, arbiter: &Arbiter, from: Generation) -> Verdict {
        let mut won: Vec<(&Member, Generation)> = Vec::new();
        let mut returned = None;
        for member in &self.members {
            match arbiter.acquire(&member.vm, self.generation_of(member, from)) {
                Verdict::Granted(generation) => won.push((member, generation)),
                Verdict::Returned(generation) => {
                    returned.get_or_insert(self.leaders_of(member, generation));
                }
                Verdict::Taken(owner) => {
                    give_back(arbiter, &won);
                    let generation = self.leaders_of(member, owner.generation);
                    return Verdict::Taken(Ownership { generation, ..owner });
                }
                unreachable @ Verdict::Unreachable(_) => return unreachable,
            }
        }
        match (won.first(), returned) {
            (Some((_, generation)), None) => Verdict::Granted(*generation),
            (None, Some(generation)) => Verdict::Returned(generation),
            _ => Verdict::Unreachable(
                "some of the group's VMs were handed back to this host and some not; the arbiter is \
                 asked again until all are: if that lasts, `understudy recover` says whose each is"
                    .to_owned(),
            ),
        }
    }

    /// Makes `to` the owner of all members, of which this host has won the leader at `from`, its
    /// generation, and perhaps the others. Asking again is harmless.
    pub fn hand_back(&self, arbiter: &Arbiter, from: Generation, to: &HostName) -> Verdict {
        // The leader is the last: until then `to` is told that the group is not its own, and touches no
        // other member.
        for member in self.members.iter().rev() {
            match self.hand_member_back(arbiter, member, from, to) {
                Verdict::Granted(_) => {}
                other => return other,
            }
        }
        Verdict::Granted(from.next())
    }

    /// A member that was not won is won now: the generations of all change together, or the group could not
    /// be had any more.
    fn hand_member_back(
        &self,
        arbiter: &Arbiter,
        member: &Member,
        from: Generation,
        to: &HostName,
    ) -> Verdict {
        let won = self.generation_of(member, from);
        let hand_back = || arbiter.hand_back(&member.vm, won, to);
        let before = match hand_back() {
            Verdict::Taken(owner)
                if owner.host.as_ref() == Some(to) && owner.generation.next() == won =>
            {
                owner.generation
            }
            verdict => return verdict,
        };
        match arbiter.owns(&self.leader().vm, from) {
            Ok(true) => {}
            Ok(false) => return hand_back(),
            Err(Unreachable(reason)) => return Verdict::Unreachable(reason),
        }
        match arbiter.acquire(&member.vm, before) {
            Verdict::Granted(_) => hand_back(),
            verdict => verdict,
        }
    }

    /// The leader's generation, when a member's is this.
    pub fn leaders_of(&self, member: &Member, generation: Generation) -> Generation {
        Generation((generation.0 + self.leader().generation.0).saturating_sub(member.generation.0))
    }
}

/// Gives back what was won of a group of which a member was started anew: it is not to be had any
/// more.
fn give_back(arbiter: &Arbiter, won: &[(&Member, Generation)]) {
    for (member, generation) in won {
        if let Err(error) = arbiter.release(&member.vm, *generation) {
            warn!(vm = %member.vm, "{}", error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use understudy_arbiter::ArbiterConfig;
    use understudy_protocol::literal;

    fn group() -> Membership {
        let member = |(vm, generation): (&str, u64)| Member {
            vm: vm.parse().unwrap(),
            generation: Generation(generation),
        };
        let members = [("db", 1), ("web", 4)].map(member).to_vec();
        Membership { name: Some(literal("shop")), members }
    }

    fn arbiters(directory: &Path) -> (Arbiter, Arbiter) {
        let config = ArbiterConfig::File { path: directory.to_owned() };
        let arbiter = |host| Arbiter::new(&config, &literal(host)).unwrap();
        // Host a has started both.
        arbiter("a").claim(&literal::<VmName>("db"), Generation(0));
        arbiter("a").claim(&literal::<VmName>("web"), Generation(3));
        (arbiter("a"), arbiter("b"))
    }

    /// An empty one ended the daemon of whoever looked for its leader.
    #[test]
    fn a_membership_of_a_peer_has_members_and_none_twice() {
        let parse = |members: serde_json::Value| {
            serde_json::from_value::<Membership>(
                serde_json::json!({"name": "shop", "members": members}),
            )
        };
        let member =
            |vm: &str, generation: u64| serde_json::json!({"vm": vm, "generation": generation});
        assert_eq!(parse(serde_json::json!([member("db", 1), member("web", 4)])).unwrap(), group());
        assert!(parse(serde_json::json!([])).is_err());
        assert!(parse(serde_json::json!([member("db", 1), member("db", 1)])).is_err());
        assert!(parse(serde_json::json!([member("db", u64::MAX)])).is_err());
        let many: Vec<_> = (0..=MOST_MEMBERS).map(|n| member(&format!("vm{n}"), 1)).collect();
        assert!(parse(many.into()).is_err());
    }

    /// A host that asks for its VMs may name any generation, and one before the leader's made an immense one.
    #[test]
    fn a_generation_before_the_leaders_makes_no_other_one() {
        let web = &group().members[1];
        assert_eq!(group().generation_of(web, Generation(3)), Generation(6));
        assert_eq!(group().generation_of(web, Generation(0)), Generation(3));
        let alone = Membership::of_one(&literal("db"), Generation(7));
        assert_eq!(alone.generation_of(alone.leader(), Generation(0)), Generation(0));
        let late = Membership { members: vec![web.clone(), group().members[0].clone()], ..group() };
        assert_eq!(late.generation_of(&late.members[1], Generation(1)), Generation(0));
    }

    #[test]
    fn a_group_is_won_as_a_whole_and_once() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = arbiters(directory.path());
        assert_eq!(group().acquire(&b, Generation(1)), Verdict::Granted(Generation(2)));
        assert_eq!(group().acquire(&b, Generation(1)), Verdict::Granted(Generation(2)));
        assert!(matches!(group().acquire(&a, Generation(1)), Verdict::Taken(_)));
        let owner = Ownership { host: Some(literal("b")), generation: Generation(5) };
        assert_eq!(b.current(&literal::<VmName>("web")).unwrap(), Some(owner));
        assert_eq!(group().remedy(), "understudy protect db web --group shop");
    }

    #[test]
    fn a_winner_hands_a_group_back_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = arbiters(directory.path());
        assert_eq!(group().acquire(&b, Generation(1)), Verdict::Granted(Generation(2)));
        let owner = Ownership { host: Some(literal("b")), generation: Generation(2) };
        assert_eq!(group().acquire(&a, Generation(1)), Verdict::Taken(owner));
        // Half of it is done when the arbiter fails.
        let db = literal::<VmName>("db");
        assert_eq!(b.hand_back(&db, Generation(2), &literal("a")), Verdict::Granted(Generation(3)));
        assert!(matches!(group().acquire(&a, Generation(1)), Verdict::Taken(_)));
        for _ in 0..2 {
            let back = group().hand_back(&b, Generation(2), &literal("a"));
            assert_eq!(back, Verdict::Granted(Generation(3)));
        }
        assert_eq!(group().acquire(&a, Generation(1)), Verdict::Returned(Generation(3)));
        // What is another's is nobody's to give.
        assert!(matches!(group().hand_back(&b, Generation(3), &literal("b")), Verdict::Taken(_)));
    }

    // Before, the leader was handed back, the other was not to be, and the group was nobody's for good.
    #[test]
    fn a_group_of_which_only_some_members_were_won_is_handed_back_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = arbiters(directory.path());
        let db = literal::<VmName>("db");
        let unasked = group().hand_back(&b, Generation(2), &literal("a"));
        assert!(matches!(unasked, Verdict::Taken(_)), "what was not won is nobody's to give");
        assert_eq!(b.acquire(&db, Generation(1)), Verdict::Granted(Generation(2)));
        let owner = Ownership { host: Some(literal("b")), generation: Generation(2) };
        assert_eq!(group().acquire(&a, Generation(1)), Verdict::Taken(owner));
        for _ in 0..2 {
            let back = group().hand_back(&b, Generation(2), &literal("a"));
            assert_eq!(back, Verdict::Granted(Generation(3)));
        }
        assert_eq!(group().acquire(&a, Generation(1)), Verdict::Returned(Generation(3)));
        let owner = Ownership { host: Some(literal("a")), generation: Generation(6) };
        assert_eq!(a.current(&literal::<VmName>("web")).unwrap(), Some(owner));
    }

    #[test]
    fn a_proof_is_of_every_members_record_and_the_same_arbiter() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = arbiters(directory.path());
        assert_eq!(group().prove(&b, &literal("a")), Ok(()));
        let words = group().prove(&b, &literal("c")).unwrap_err().0;
        assert!(words.contains("its record says a, generation 1"), "{words}");
        // What is in its place is not the arbiter, however empty it is.
        let aside = directory.path().with_extension("aside");
        std::fs::rename(directory.path(), &aside).unwrap();
        std::fs::create_dir(directory.path()).unwrap();
        let words = group().prove(&b, &literal("a")).unwrap_err().0;
        assert!(words.contains("is its storage mounted?"), "{words}");
        for from in [0, 1] {
            assert!(matches!(
                b.claim(&literal::<VmName>("db"), Generation(from)),
                Verdict::Unreachable(_)
            ));
        }
        assert!(
            b.current(&literal::<VmName>("db")).is_err()
                && b.release(&literal::<VmName>("db"), Generation(1)).is_err()
        );
        std::fs::remove_dir(directory.path()).unwrap();
        std::fs::rename(&aside, directory.path()).unwrap();
        assert_eq!(group().prove(&b, &literal("a")), Ok(()), "by itself, once it is back");
        assert_eq!(
            a.acquire(&literal::<VmName>("web"), Generation(4)),
            Verdict::Granted(Generation(5))
        );
        let words = group().prove(&b, &literal("a")).unwrap_err().0;
        assert!(words.contains("a, generation 5"), "{words}");
    }

    #[test]
    fn a_member_that_was_started_anew_keeps_the_group_from_moving() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = arbiters(directory.path());
        assert_eq!(
            a.acquire(&literal::<VmName>("web"), Generation(4)),
            Verdict::Granted(Generation(5))
        );
        assert!(matches!(group().acquire(&b, Generation(1)), Verdict::Taken(_)));
        assert_eq!(b.current(&literal::<VmName>("db")).unwrap().unwrap().host, None, "given back");
    }
}
