//! Answers of everybody who was asked about a VM's images, and what follows from it.

use super::ImagesAnswer;
use crate::lease::{Awaited, Contender};
use understudy_protocol::autostart::Knowledge;
use understudy_protocol::validity::{ArbiterWord, Evidence, Finding, ImageRole, judge};
use understudy_protocol::{Generation, GroupName, HostName, VmName};
use understudy_report::{RecoverReport, ValidImages};
use understudy_snapshot::SnapshotNumber;

/// Answers of everybody.
pub(crate) struct Inquiry {
    pub(super) answers: Vec<ImagesAnswer>,
    /// Hosts that did not answer, and why.
    pub(super) silent: Vec<(HostName, String)>,
    pub(crate) arbiter: ArbiterWord,
    pub(crate) arbiter_words: String,
}

impl Inquiry {
    /// `arbiter` was asked before `answers` came.
    pub(super) fn new(
        (arbiter, arbiter_words): (ArbiterWord, String),
        mut answers: Vec<ImagesAnswer>,
        silent: Vec<(HostName, String)>,
    ) -> Inquiry {
        if let ArbiterWord::Says(now) = &arbiter {
            for answer in &mut answers {
                answer.busy = answer.busy_by(now.as_ref());
            }
        }
        Inquiry { answers, silent, arbiter, arbiter_words }
    }

    /// Those who may run the VM, and do not answer `here`.
    pub(super) fn contenders(&self, here: &HostName) -> Vec<Contender> {
        let silent: Vec<HostName> = self.silent.iter().map(|(host, _)| host.clone()).collect();
        let evidence = self.evidence();
        let owner = match evidence.word() {
            ArbiterWord::Says(None) => return Vec::new(),
            ArbiterWord::Says(Some(owner)) => owner,
            ArbiterWord::Silent if silent.is_empty() => return Vec::new(),
            ArbiterWord::Silent => return vec![Contender::Any(silent)],
        };
        let answers = |host: &HostName| self.answers.iter().any(|answer| answer.host == *host);
        let records = self.answers.iter().filter_map(|answer| answer.record.as_ref());
        let ran = records.filter_map(|record| record.image.ran_at()).max();
        Contender::of(here, (ran.unwrap_or_default(), owner), silent, answers)
    }

    /// One of them that was not waited for: it answered when that began.
    pub(super) fn newly_silent(
        &self,
        here: &HostName,
        awaited: Option<&Awaited>,
    ) -> Option<Contender> {
        let is_covered = |contender: &Contender| awaited.is_some_and(|it| it.covers(contender));
        self.contenders(here).into_iter().find(|contender| !is_covered(contender))
    }

    /// A host that does something with the VM, and what.
    pub(crate) fn busy(&self) -> Option<(&str, &str)> {
        let busy = |answer: &'_ ImagesAnswer| answer.busy.is_some();
        let answer = self.answers.iter().find(|answer| busy(answer))?;
        Some((&answer.host, answer.busy.as_deref()?))
    }

    /// The host that runs the VM, and the bytes of its memory.
    pub(crate) fn runner(&self) -> Option<(HostName, u64)> {
        self.answers.iter().find_map(|answer| Some((answer.host.clone(), answer.runs?)))
    }

    /// Who may run the VM without `here` having heard from it, and why; former owners aside, whose leases are waited for
    /// whatever an operator says. An owner that is no known host was not even asked.
    pub(crate) fn may_run(&self, here: &HostName) -> Option<String> {
        let is_owner = |contender: &Contender| !matches!(contender, Contender::Former(..));
        let contender = self.contenders(here).into_iter().find(is_owner)?;
        let why = |host: &HostName| {
            let silent = self.silent.iter().find(|(silent, _)| silent == host);
            silent.map_or("it is in no [peers] here, and in no etcd", |(_, why)| why)
        };
        Some(match &contender {
            Contender::Owner(owner, _) => format!(
                "{contender}, which owns it by the arbiter's record and does not answer ({})",
                why(owner)
            ),
            _ => format!(
                "{contender}, which does not answer, and who owns it is on no record of an arbiter"
            ),
        })
    }

    /// Returns the hosts that did not answer, as the end of a sentence.
    pub(crate) fn silence(&self) -> String {
        let hosts: Vec<&str> = self.silent.iter().map(|(host, _)| host.as_str()).collect();
        match hosts.is_empty() {
            true => String::new(),
            false => format!("; not answering: {}", hosts.join(", ")),
        }
    }

    /// Facts that decide about a VM that is to come up with this host.
    pub(crate) fn knowledge(&self) -> Knowledge {
        let runs = |answer: &&ImagesAnswer| answer.runs.is_some();
        let busy = |answer: &ImagesAnswer| Some((answer.host.clone(), answer.busy.clone()?));
        Knowledge {
            finding: judge(&self.evidence()),
            runner: self.answers.iter().find(runs).map(|answer| answer.host.clone()),
            busy: self.answers.iter().find_map(busy),
        }
    }

    /// The last number of a group's snapshots that anybody has heard of.
    pub(crate) fn last_snapshot(&self, group: &GroupName) -> SnapshotNumber {
        let heard = self.answers.iter().filter_map(|answer| answer.snapshots.get(group));
        heard.max().copied().unwrap_or_default()
    }

    /// The newest generation that anybody knows.
    pub(crate) fn newest(&self) -> Generation {
        let records = self.answers.iter().filter_map(|answer| answer.record.as_ref());
        let known = records.map(|record| record.image.newest_until()).max().unwrap_or_default();
        known.max(self.arbiter.generation())
    }

    /// Evidence that decides which images are valid.
    pub(super) fn evidence(&self) -> Evidence {
        let records = self.answers.iter().filter_map(|answer| answer.record.as_ref());
        let without = self.answers.iter().filter(|answer| answer.record.is_none());
        Evidence {
            records: records.map(|record| record.image.clone()).collect(),
            without: without.map(|answer| answer.host.clone()).collect(),
            silent: self.silent.iter().map(|(host, _)| host.clone()).collect(),
            arbiter: self.arbiter.clone(),
        }
    }

    /// Returns what was found, for people.
    pub(super) fn report(&self, name: &VmName, finding: &Finding) -> RecoverReport {
        let (valid, reason) = match finding {
            Finding::Valid { host, generation, why } => {
                let of = self.answers.iter().filter(|answer| answer.host == *host);
                let images = of.filter_map(|answer| Some(answer.record.as_ref()?.images()));
                let images = images.flatten().collect();
                let valid = ValidImages { host: host.clone(), generation: *generation, images };
                (Some(valid), why.clone())
            }
            Finding::Undecided(why) => (None, why.clone()),
        };
        let mut evidence: Vec<String> = self.answers.iter().map(describe).collect();
        evidence.extend(self.silent.iter().map(|(host, why)| format!("host {host}: {why}")));
        evidence.push(format!("arbiter: {}", self.arbiter_words));
        RecoverReport { vm: name.to_owned(), valid, reason, evidence, status: None }
    }
}

fn describe(answer: &ImagesAnswer) -> String {
    let host = &answer.host;
    let images = match &answer.record {
        None => "no images".to_owned(),
        Some(record) => {
            let generation = record.image.generation;
            match record.image.role {
                ImageRole::Active => format!("ran it at generation {generation}"),
                ImageRole::Stopped => format!("stopped it at generation {generation}"),
                ImageRole::Cut => format!("cut its power at generation {generation}"),
                ImageRole::Stale => format!("lost it after generation {generation}"),
                ImageRole::Mirror => format!("a mirror of generation {generation}, not activated"),
                ImageRole::Syncing => "a mirror that is not whole".to_owned(),
            }
        }
    };
    match &answer.busy {
        Some(busy) => format!("host {host}: {images}; {busy} now"),
        None => format!("host {host}: {images}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{FormerLease, Tenures};
    use std::collections::BTreeMap;
    use understudy_protocol::{Ownership, literal};
    use understudy_qemu::VmDefinition;
    use understudy_replication::records::Records;

    fn answers(host: &'static str, busy: Option<&str>) -> ImagesAnswer {
        let busy = busy.map(str::to_owned);
        let host = literal(host);
        let snapshots = BTreeMap::new();
        ImagesAnswer { host, record: None, busy, keeps: false, runs: None, snapshots }
    }

    /// Host a owns the VM at generation 3.
    fn inquiry(answers: Vec<ImagesAnswer>, silent: &[&'static str]) -> Inquiry {
        let owner = Ownership { host: Some(literal("a")), generation: Generation(3) };
        let silent = silent.iter().map(|host| (literal(host), "no answer".to_owned()));
        Inquiry::new((ArbiterWord::Says(Some(owner)), String::new()), answers, silent.collect())
    }

    // Before, a forced start claimed the VM from its own images' generation: once the arbiter had lost its records, the
    // others' older images counted as newer ones.
    #[test]
    fn the_newest_generation_is_that_of_any_host() {
        let has = |host: &'static str, role, generation, claimed_from| {
            let text = "name = 'db'\nmemory = '64M'\nvcpus = 1";
            let definition: VmDefinition = toml::from_str(text).unwrap();
            let records = Records::new("/s".as_ref(), &literal(host));
            let mut record = records.of(role, Generation(generation), &definition);
            record.image.claimed_from = claimed_from;
            ImagesAnswer { record: Some(record), ..answers(host, None) }
        };
        let here = has("b", ImageRole::Stale, 4, None);
        let of = |other| {
            let answers = vec![here.clone(), other, answers("d", None)];
            Inquiry::new((ArbiterWord::Says(None), String::new()), answers, vec![]).newest()
        };
        assert_eq!(of(has("c", ImageRole::Cut, 9, None)), Generation(9));
        assert_eq!(of(has("c", ImageRole::Cut, 3, Some(Generation(11)))), Generation(11));
        assert_eq!(of(has("c", ImageRole::Stale, 2, None)), Generation(4));
    }

    // Before, a forced start waited for nobody once the arbiter had lost its records: whoever ran it might still let frames out.
    #[test]
    fn whoever_is_silent_is_waited_for_if_the_arbiter_has_lost_its_records() {
        let text = "name = 'db'\nmemory = '64M'\nvcpus = 1";
        let definition: VmDefinition = toml::from_str(text).unwrap();
        let records = Records::new("/s".as_ref(), &literal("a"));
        let record = records.of(ImageRole::Active, Generation(3), &definition);
        let here = ImagesAnswer { record: Some(record), ..answers("a", None) };
        let contender = |generation: Option<u64>, silent: &[&'static str]| {
            let owner = generation.map(|generation| Ownership {
                host: Some(literal("a")),
                generation: Generation(generation),
            });
            let silent = silent.iter().map(|host| (literal(host), "no answer".to_owned()));
            let word = (ArbiterWord::Says(owner), String::new());
            Inquiry::new(word, vec![here.clone()], silent.collect()).contenders(&literal("a"))
        };
        for lost in [None, Some(2)] {
            assert_eq!(contender(lost, &["b"]), [Contender::Any(vec![literal("b")])]);
            assert_eq!(contender(lost, &[]), []);
        }
        assert_eq!(contender(Some(3), &["b"]), [], "it is the owner's itself");
    }

    // Before, a VM was restored beside its running copy, without force: its owner was no known host, so nobody had asked it.
    #[test]
    fn an_owner_that_nobody_has_asked_may_run_it() {
        let here = literal("b");
        let of = |owner: Option<&'static str>, silent: &[&'static str]| {
            let owner = owner
                .map(|owner| Ownership { host: Some(literal(owner)), generation: Generation(3) });
            let silent = silent.iter().map(|host| (literal(host), "no route".to_owned()));
            let word = (ArbiterWord::Says(owner), String::new());
            Inquiry::new(word, vec![answers("b", None), answers("c", None)], silent.collect())
        };
        let unknown = of(Some("a"), &[]).may_run(&here).unwrap();
        assert!(unknown.starts_with("host a, which owns it"), "{unknown}");
        assert!(unknown.contains("it is in no [peers] here"), "{unknown}");
        let silent = of(Some("a"), &["a"]).may_run(&here).unwrap();
        assert!(silent.contains("does not answer (no route)"), "{silent}");
        for nobody in [of(Some("c"), &["a"]), of(Some("b"), &[]), of(None, &["a"])] {
            assert_eq!(nobody.may_run(&here), None);
        }
        let without = |silent: &[&'static str]| {
            let silent = silent.iter().map(|host| (literal(host), "no route".to_owned()));
            let word = (ArbiterWord::Silent, String::new());
            Inquiry::new(word, vec![answers("b", None)], silent.collect()).may_run(&here)
        };
        assert!(without(&["a"]).unwrap().contains("no record of an arbiter"));
        assert_eq!(without(&[]), None);
    }

    // Before, host c waited for nobody: host b, which had won the VM and not started it, answers, and host a, which ran it
    // before, need not have read that.
    #[test]
    fn silent_owners_of_before_are_waited_for_whoever_owns_it_now() {
        let (a, here) = (literal::<HostName>("a"), literal("c"));
        let owner = Ownership { host: Some(literal("b")), generation: Generation(4) };
        let tenures = Tenures::between(Generation(0), &owner);
        let of = |answering: Vec<ImagesAnswer>, silent: &[&'static str]| {
            let silent = silent.iter().map(|host| (literal(host), "no answer".to_owned()));
            let word = (ArbiterWord::Says(Some(owner.clone())), String::new());
            Inquiry::new(word, answering, silent.collect())
        };
        let before = of(vec![answers("c", None), answers("b", None)], &["a"]);
        let former = Contender::Former(vec![a], tenures);
        assert_eq!(before.contenders(&here), std::slice::from_ref(&former));
        let both = of(vec![answers("c", None)], &["a", "b"]);
        let of_b = Contender::Owner(literal("b"), Generation(4));
        assert_eq!(both.contenders(&here), [of_b.clone(), former.clone()]);
        let awaited = |contenders| Awaited { contenders, lease: FormerLease::default() };
        assert_eq!(both.newly_silent(&here, Some(&awaited(vec![of_b, former.clone()]))), None);
        let owner_too = both.newly_silent(&here, Some(&awaited(vec![former])));
        assert!(matches!(owner_too, Some(Contender::Owner(..))), "{owner_too:?}");
        // Who ran it at the newest generation has waited for all before.
        let text = "name = 'db'\nmemory = '64M'\nvcpus = 1";
        let definition: VmDefinition = toml::from_str(text).unwrap();
        let record = Records::new("/s".as_ref(), &literal("b")).of(
            ImageRole::Active,
            Generation(4),
            &definition,
        );
        let ran = ImagesAnswer { record: Some(record), ..answers("b", None) };
        assert_eq!(of(vec![answers("c", None), ran], &["a"]).contenders(&here), []);
    }

    // Before, `recover` on the winner, which had just handed the VM back, started a copy beside the guest that host a went
    // on with.
    #[test]
    fn a_host_that_keeps_its_guest_and_has_the_vm_back_is_busy() {
        let keeps = |host| ImagesAnswer { keeps: true, ..answers(host, None) };
        let returned = inquiry(vec![answers("b", None), keeps("a")], &[]);
        let (host, what) = returned.busy().unwrap();
        assert!(host == "a" && what.contains("given the VM back"), "{host} {what}");
        let still_won = inquiry(vec![answers("a", None), keeps("b")], &[]);
        assert_eq!(
            still_won.busy(),
            None,
            "a claim from that generation fails once it is returned"
        );
    }

    // Before, it was started beside the owner, for whose lease nobody had waited.
    #[test]
    fn an_owner_that_falls_silent_between_two_inquiries_was_not_waited_for() {
        let here = literal("b");
        let first = inquiry(vec![answers("b", None), answers("a", Some("runs it"))], &[]);
        assert_eq!(first.contenders(&here), [], "there is nobody to wait for");
        let second = inquiry(vec![answers("b", None)], &["a"]);
        let owner = Contender::Owner(literal("a"), Generation(3));
        assert_eq!(second.newly_silent(&here, None), Some(owner.clone()));
        let awaited = |contender| {
            Some(Awaited { contenders: vec![contender], lease: FormerLease::default() })
        };
        assert_eq!(second.newly_silent(&here, awaited(owner.clone()).as_ref()), None);
        let earlier = Contender::Owner(literal("a"), Generation(2));
        assert_eq!(second.newly_silent(&here, awaited(earlier).as_ref()), Some(owner));
        let both = inquiry(vec![answers("b", None), answers("a", None)], &[]);
        assert_eq!(both.newly_silent(&here, None), None, "it answers");
    }
}
