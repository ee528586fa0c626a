use super::*;
use proptest::prelude::*;

const HOSTS: [&str; 3] = ["a", "b", "c"];

fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

fn record(host: &str, role: ImageRole, generation: u64) -> ImageRecord {
    ImageRecord { host: name(host), role, generation: Generation(generation), claimed_from: None }
}

fn owned_by(host: Option<&str>, generation: u64) -> ArbiterWord {
    let host = host.map(name);
    ArbiterWord::Says(Some(Ownership { host, generation: Generation(generation) }))
}

fn evidence(records: Vec<ImageRecord>, silent: &[&str], arbiter: ArbiterWord) -> Evidence {
    let silent = silent.iter().map(|host| name(host)).collect();
    Evidence { records, without: Vec::new(), silent, arbiter }
}

fn valid_on(evidence: &Evidence) -> Option<HostName> {
    match judge(evidence) {
        Finding::Valid { host, .. } => Some(host),
        Finding::Undecided(_) => None,
    }
}

#[test]
fn a_mirror_that_was_not_activated_is_never_valid() {
    let both = vec![record("a", ImageRole::Active, 1), record("b", ImageRole::Mirror, 1)];
    assert_eq!(valid_on(&evidence(both.clone(), &[], owned_by(Some("a"), 1))).unwrap(), "a");
    // Even if it has won the VM: the guest never ran there.
    assert_eq!(valid_on(&evidence(both, &[], owned_by(Some("b"), 2))).unwrap(), "a");
    let mirror = vec![record("b", ImageRole::Mirror, 1)];
    assert_eq!(valid_on(&evidence(mirror, &["a"], owned_by(Some("a"), 1))), None);
}

#[test]
fn an_activated_mirror_is_valid_and_the_former_primary_is_not() {
    let both = vec![record("a", ImageRole::Active, 1), record("b", ImageRole::Active, 2)];
    assert_eq!(valid_on(&evidence(both, &[], ArbiterWord::Silent)).unwrap(), "b");
    let b_alone = vec![record("b", ImageRole::Active, 2)];
    assert_eq!(valid_on(&evidence(b_alone, &["a"], owned_by(Some("b"), 2))).unwrap(), "b");
}

#[test]
fn nothing_is_concluded_when_the_winner_is_silent() {
    let a = vec![record("a", ImageRole::Active, 1)];
    assert_eq!(valid_on(&evidence(a.clone(), &["b"], owned_by(Some("b"), 2))), None);
    assert_eq!(valid_on(&evidence(a.clone(), &["b"], ArbiterWord::Silent)), None);
    let mirror = vec![record("a", ImageRole::Active, 1), record("b", ImageRole::Mirror, 1)];
    assert_eq!(valid_on(&evidence(mirror, &[], owned_by(Some("b"), 2))).unwrap(), "a");
}

// Before, a winner whose state directory was not mounted vouched that it had never run the VM: day-old images came up by
// themselves.
#[test]
fn nothing_is_concluded_when_the_winner_has_lost_its_record() {
    for generation in [2, 5] {
        let a = vec![record("a", ImageRole::Active, 1)];
        let owned = evidence(a, &[], owned_by(Some("b"), generation));
        let found = judge(&Evidence { without: vec![name("b"), name("c")], ..owned });
        let Finding::Undecided(why) = found else { panic!("{found:?}") };
        assert!(why.contains("is its state directory mounted?"), "{why}");
        assert!(why.contains("`recover --force`"), "{why}");
    }
    let given_back = evidence(vec![record("a", ImageRole::Cut, 1)], &[], owned_by(None, 2));
    let never_had_it = Evidence { without: vec![name("b")], ..given_back };
    assert_eq!(valid_on(&never_had_it).unwrap(), "a");
}

#[test]
fn a_fresh_start_wants_the_newest_images() {
    let stopped = record("a", ImageRole::Stopped, 1);
    assert!(may_start(&name("a"), None, &ArbiterWord::Says(None)).is_ok());
    assert!(may_start(&name("a"), Some(&stopped), &ArbiterWord::Silent).is_ok(), "it has none");
    assert!(may_start(&name("a"), Some(&stopped), &owned_by(None, 2)).is_ok());
    let words = may_start(&name("a"), Some(&stopped), &owned_by(None, 4)).unwrap_err();
    assert!(words.contains("stale") && words.contains("generation 4"), "{words}");
    let words = may_start(&name("a"), None, &owned_by(Some("b"), 2)).unwrap_err();
    assert!(words.contains("host b"), "{words}");
    for role in [ImageRole::Stale, ImageRole::Mirror, ImageRole::Syncing] {
        assert!(may_start(&name("a"), Some(&record("a", role, 1)), &owned_by(None, 2)).is_err());
    }
}

// Before, its images counted as stale, and nothing was certain while one host was silent.
#[test]
fn a_start_that_was_claimed_and_came_to_nothing_makes_no_images_stale() {
    let claimed = |from| ImageRecord {
        claimed_from: Some(Generation(from)),
        ..record("a", ImageRole::Cut, 1)
    };
    let may = |from, host, at| {
        may_start(&name("a"), Some(&claimed(from)), &owned_by(Some(host), at)).is_ok()
    };
    // At the arbiter the last start came to its claim, or did not.
    for (from, at) in [(2, 3), (3, 3), (3, 4)] {
        assert!(may(from, "a", at));
        let found = judge(&evidence(vec![claimed(from)], &["b"], owned_by(Some("a"), at)));
        assert!(matches!(found, Finding::Valid { .. }), "{found:?}");
        assert!(!may(from, "b", at));
        assert!(!may(from, "a", from + 2), "somebody may have had it since");
    }
    let taken = evidence(vec![claimed(2)], &["b"], owned_by(Some("b"), 3));
    assert_eq!(valid_on(&taken), None);
    let later = vec![claimed(4), record("b", ImageRole::Active, 3)];
    assert_eq!(valid_on(&evidence(later, &[], owned_by(Some("a"), 5))).unwrap(), "b");
}

#[test]
fn a_guest_that_was_cut_is_not_said_to_have_stopped_in_order() {
    let said = |role| {
        let found = judge(&evidence(vec![record("a", role, 1)], &[], owned_by(None, 2)));
        match found {
            Finding::Valid { why, .. } => why,
            Finding::Undecided(why) => panic!("{why}"),
        }
    };
    assert!(said(ImageRole::Stopped).contains("stopped in order"));
    for role in [ImageRole::Cut, ImageRole::Active] {
        assert!(!said(role).contains("in order"), "{}", said(role));
    }
    assert!(said(ImageRole::Cut).contains("power was cut"));
    let cut = record("a", ImageRole::Cut, 1);
    assert!(may_start(&name("a"), Some(&cut), &owned_by(None, 2)).is_ok());
}

// Before, an arbiter that was set up anew, or restored, called the first host's images the newest while the one that had won
// since was silent.
#[test]
fn an_arbiter_that_knows_less_than_the_hosts_says_nothing() {
    let a = record("a", ImageRole::Active, 3);
    for word in [ArbiterWord::Says(None), owned_by(Some("a"), 2), owned_by(None, 2)] {
        let alone = evidence(vec![a.clone()], &["b"], word.clone());
        let Finding::Undecided(why) = judge(&alone) else { panic!("host b has had it since") };
        assert!(why.contains("lost its records") && why.contains("host b"), "{why}");
        let both = vec![a.clone(), record("b", ImageRole::Active, 4)];
        assert_eq!(valid_on(&evidence(both, &[], word.clone())).unwrap(), "b");
        assert_eq!(valid_on(&evidence(vec![a.clone()], &[], word.clone())).unwrap(), "a");
        let refused = may_start(&name("a"), Some(&a), &word).unwrap_err();
        assert!(refused.contains("lost its records"), "{refused}");
    }
    // A backup has seen a newer primary than an old copy of the arbiter's records names.
    let mirror = vec![a.clone(), record("c", ImageRole::Mirror, 4)];
    assert_eq!(valid_on(&evidence(mirror, &["b"], owned_by(Some("a"), 3))), None);
}

/// Three hosts and an arbiter, each step of which may be the last before a crash.
#[derive(Default)]
struct History {
    owner: Option<Ownership>,
    records: [Option<ImageRecord>; 3],
    /// The host that runs the guest.
    running: Option<usize>,
    /// The host whose images the guest ran on last.
    newest: Option<usize>,
    /// The backup with a whole mirror of the one that runs.
    backup: Option<usize>,
}

impl History {
    fn swap(&mut self, host: Option<usize>) -> Generation {
        let generation = self.generation().next();
        let host = host.map(|host| name(HOSTS[host]));
        self.owner = Some(Ownership { host, generation });
        generation
    }

    fn generation(&self) -> Generation {
        self.owner.as_ref().map_or(Generation(0), |owner| owner.generation)
    }

    fn word(&self) -> ArbiterWord {
        ArbiterWord::Says(self.owner.clone())
    }

    fn note(&mut self, host: usize, role: ImageRole, generation: Generation) {
        self.records[host] = Some(record(HOSTS[host], role, generation.0));
    }

    fn run(&mut self, host: usize, generation: Generation) {
        self.note(host, ImageRole::Active, generation);
        (self.running, self.newest) = (Some(host), Some(host));
    }

    fn crash(&mut self) {
        (self.running, self.backup) = (None, None);
    }

    fn may_start(&self, host: usize) -> bool {
        let own = self.records[host].as_ref();
        may_start(&name(HOSTS[host]), own, &self.word()).is_ok() && self.knows(host)
    }

    /// Notes a claim before the arbiter is asked.
    fn note_claim(&mut self, host: usize) {
        let from = self.generation();
        if let Some(own) = &mut self.records[host] {
            own.claimed_from = Some(from);
        }
    }

    /// `crash` stops the step before its last part.
    fn step(&mut self, what: u8, host: usize, crash: bool) {
        match (what % 7, self.running) {
            (0, None) if self.may_start(host) => {
                self.note_claim(host);
                let generation = self.swap(Some(host));
                match crash {
                    true => assert!(self.may_start(host), "a start that came to nothing counts"),
                    false => self.run(host, generation),
                }
            }
            (6, None) if self.may_start(host) => {
                self.note_claim(host);
                assert!(self.may_start(host), "a claim that came to nothing counts");
            }
            (1, Some(primary)) if host != primary => {
                self.note(host, ImageRole::Syncing, self.generation());
                if !crash {
                    self.note(host, ImageRole::Mirror, self.generation());
                    self.backup = Some(host);
                }
            }
            (2, Some(primary)) => self.take_over(primary, crash, host == primary),
            (3, Some(primary)) => {
                let generation = self.swap(Some(primary));
                self.backup = None;
                if crash {
                    self.crash();
                } else {
                    self.note(primary, ImageRole::Active, generation);
                }
            }
            (4, Some(primary)) => {
                let ran = self.generation();
                self.swap(None);
                self.crash();
                if !crash {
                    self.note(primary, ImageRole::Stopped, ran);
                }
            }
            (5, _) => self.crash(),
            _ => {}
        }
    }

    /// A user starts a VM without a record only where it never ran elsewhere.
    fn knows(&self, host: usize) -> bool {
        self.records[host].is_some() || self.newest.is_none()
    }

    fn take_over(&mut self, primary: usize, crash: bool, primary_lives: bool) {
        let Some(backup) = self.backup.take() else { return };
        let ran = self.generation();
        let generation = self.swap(Some(backup));
        if primary_lives {
            self.note(primary, ImageRole::Stale, ran);
        }
        if crash {
            self.crash();
        } else {
            self.run(backup, generation);
        }
    }

    /// The evidence that can be had when these do not answer.
    fn evidence(&self, silent: [bool; 3], arbiter_silent: bool) -> Evidence {
        let names = |wanted: &dyn Fn(usize) -> bool| -> Vec<HostName> {
            (0..3).filter(|&host| wanted(host)).map(|host| name(HOSTS[host])).collect()
        };
        let answered = |host: &usize| !silent[*host];
        Evidence {
            records: (0..3).filter(answered).filter_map(|h| self.records[h].clone()).collect(),
            without: names(&|host| !silent[host] && self.records[host].is_none()),
            silent: names(&|host| silent[host]),
            arbiter: if arbiter_silent { ArbiterWord::Silent } else { self.word() },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// The images that are called valid, whatever happened and whoever is silent, are those that
    /// the guest ran on last; and if everybody answers, they are found.
    #[test]
    fn the_valid_images_are_those_that_the_guest_ran_on_last(
        steps in proptest::collection::vec((any::<u8>(), 0..3usize, any::<bool>()), 1..40),
        silent in any::<[bool; 3]>(),
        arbiter_silent in any::<bool>(),
    ) {
        let mut history = History::default();
        for (what, host, crash) in steps {
            history.step(what, host, crash);
            let found = judge(&history.evidence(silent, arbiter_silent));
            if let Finding::Valid { host, .. } = &found {
                prop_assert_eq!(Some(host.as_str()), history.newest.map(|newest| HOSTS[newest]));
            }
            let all = judge(&history.evidence([false; 3], arbiter_silent));
            let told = matches!(all, Finding::Valid { .. });
            prop_assert_eq!(told, history.newest.is_some());
        }
    }

    /// A fresh start is never allowed on images that are not the newest.
    #[test]
    fn a_fresh_start_never_goes_back_in_time(
        steps in proptest::collection::vec((any::<u8>(), 0..3usize, any::<bool>()), 1..40),
    ) {
        let mut history = History::default();
        for (what, host, crash) in steps {
            history.step(what, host, crash);
            for (host, own) in history.records.iter().enumerate() {
                let own = own.as_ref();
                let may = may_start(&name(HOSTS[host]), own, &history.word());
                if own.is_some() && may.is_ok() {
                    prop_assert_eq!(history.newest, Some(host));
                }
            }
        }
    }
}
