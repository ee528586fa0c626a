use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

fn fit(host: &str, free_mib: u64) -> Candidate {
    let fitness = Fitness { free_memory: free_mib * MIB, ..Fitness::default() };
    Candidate { host: host.to_owned().parse().unwrap(), answer: Ok(fitness) }
}

fn unfit(host: &str) -> Candidate {
    Candidate { host: host.to_owned().parse().unwrap(), answer: Err("does not answer".to_owned()) }
}

fn step(repair: &mut Repair, ms: u64, event: RepairEvent) -> Vec<RepairAction> {
    let mut actions = Vec::new();
    repair.handle(at(ms), 0, event, &mut actions);
    actions
}

fn lost(reason: &str) -> RepairEvent {
    RepairEvent::Lost(reason.to_owned())
}

fn attempt(host: &str) -> Vec<RepairAction> {
    vec![RepairAction::Attempt(host.to_owned().parse().unwrap())]
}

#[test]
fn a_loss_is_repaired_at_once_with_the_roomiest_host() {
    let mut repair = Repair::default();
    assert_eq!(step(&mut repair, 0, lost("b is silent")), [RepairAction::Survey]);
    let found = vec![unfit("b"), fit("c", 100), fit("d", 200)];
    assert_eq!(step(&mut repair, 5, RepairEvent::Surveyed(found)), attempt("d"));
    assert!(step(&mut repair, 9, RepairEvent::Protected).is_empty());
    assert_eq!((repair.phase(), repair.deadline()), (&RepairPhase::Idle, None));
}

#[test]
fn load_and_a_shared_zone_count_before_memory() {
    let rank = |candidates: [(u32, bool, u64); 2]| {
        let mut repair = Repair::default();
        step(&mut repair, 0, lost("x"));
        let candidate = |(name, (load_percent, same_zone, free_memory)): (&str, _)| Candidate {
            host: name.to_owned().parse().unwrap(),
            answer: Ok(Fitness { free_memory, load_percent, same_zone }),
        };
        let found = ["first", "second"].into_iter().zip(candidates).map(candidate).collect();
        step(&mut repair, 0, RepairEvent::Surveyed(found))
    };
    assert_eq!(rank([(180, false, 9), (20, false, 1)]), attempt("second"));
    assert_eq!(rank([(30, false, 1), (20, false, 9)]), attempt("second"), "about as busy");
    assert_eq!(rank([(0, true, 9), (180, false, 1)]), attempt("second"));
}

#[test]
fn all_are_tried_before_it_waits_longer_and_longer() {
    let mut repair = Repair::default();
    step(&mut repair, 0, lost("x"));
    let both = || RepairEvent::Surveyed(vec![fit("b", 2), fit("c", 1)]);
    assert_eq!(step(&mut repair, 0, both()), attempt("b"));
    assert_eq!(step(&mut repair, 1, lost("refused")), attempt("c"));
    assert_eq!(step(&mut repair, 2, lost("refused too")), []);
    assert_eq!(repair.deadline(), Some(at(502)));
    assert_eq!(repair.reason(), "c: refused too");
    assert_eq!(step(&mut repair, 501, RepairEvent::Tick), []);
    assert_eq!(step(&mut repair, 502, RepairEvent::Tick), [RepairAction::Survey]);
    // The one that failed first is tried first again, whatever its memory.
    assert_eq!(step(&mut repair, 502, both()), attempt("b"));
    step(&mut repair, 502, lost("x"));
    step(&mut repair, 502, lost("x"));
    assert_eq!(repair.deadline(), Some(at(1_502)));
    let mut now = 1_502;
    for _ in 0..20 {
        step(&mut repair, now, RepairEvent::Tick);
        step(&mut repair, now, RepairEvent::Surveyed(vec![unfit("b")]));
        let wait = repair.deadline().unwrap() - at(now);
        assert!(wait <= LONGEST_WAIT, "{wait:?}");
        now += wait.as_millis() as u64;
    }
    assert_eq!(repair.reason(), "b: does not answer");
}

#[test]
fn a_host_that_failed_comes_last_for_a_while() {
    let mut repair = Repair::default();
    step(&mut repair, 0, lost("x"));
    step(&mut repair, 0, RepairEvent::Surveyed(vec![fit("b", 9), fit("c", 1)]));
    assert_eq!(step(&mut repair, 1, lost("x")), attempt("c"));
    step(&mut repair, 2, RepairEvent::Protected);
    let found = || RepairEvent::Surveyed(vec![fit("b", 9), fit("c", 1)]);
    step(&mut repair, 20_000, lost("x"));
    assert_eq!(step(&mut repair, 20_000, found()), attempt("c"));
    step(&mut repair, 20_000, RepairEvent::Protected);
    step(&mut repair, 80_000, lost("x"));
    assert_eq!(step(&mut repair, 80_000, found()), attempt("b"), "forgiven");
}

// Before, it surveyed on and on, said that no host took a VM which was protected, and bore with any sick backup.
#[test]
fn a_loss_of_an_attempt_before_is_history_and_charged_to_no_other() {
    let mut repair = Repair::default();
    step(&mut repair, 0, lost("x"));
    step(&mut repair, 0, RepairEvent::Surveyed(vec![fit("b", 9), fit("c", 1)]));
    assert_eq!(step(&mut repair, 1, lost("its second member was refused")), attempt("c"));
    let (former, present) = ("session with b", "session with c");
    assert!(is_history(&former, Some(&present)));
    assert!(!is_history(&present, Some(&present)) && !is_history(&former, None));
    // However it comes about that it waits, it is protected.
    let mut waits = repair.clone();
    assert_eq!(step(&mut waits, 2, lost("x")), []);
    assert!(matches!(waits.phase(), RepairPhase::Waiting(_)));
    for mut repair in [repair, waits] {
        assert!(repair.awaits_protection());
        assert_eq!(step(&mut repair, 3, RepairEvent::Protected), []);
        assert!(!repair.awaits_protection());
        assert_eq!(step(&mut repair, 4, sick()), [RepairAction::Survey]);
    }
}

fn sick() -> RepairEvent {
    sick_for(1)
}

fn sick_for(times: u32) -> RepairEvent {
    let host = "b".to_owned().parse().unwrap();
    RepairEvent::Sick { host, reason: "its disk hangs".to_owned(), times }
}

// Before, a backup whose disk hung for good kept its place, and the third host was never asked.
#[test]
fn a_backup_that_is_sick_for_long_gives_way_to_another_host_and_comes_last_for_a_while() {
    let mut repair = Repair::default();
    assert_eq!(step(&mut repair, 0, sick()), [RepairAction::Survey]);
    assert_eq!(step(&mut repair, 1, sick()), [], "the hosts are asked already");
    let words = "host b could not take over: its disk hangs; host c would take it".to_owned();
    let found = vec![unfit("b"), fit("c", 1)];
    assert_eq!(step(&mut repair, 2, RepairEvent::Surveyed(found)), [RepairAction::Replace(words)]);
    assert_eq!(step(&mut repair, 3, lost("given up")), [RepairAction::Survey]);
    let found = vec![fit("b", 9), fit("c", 1)];
    assert_eq!(step(&mut repair, 4, RepairEvent::Surveyed(found)), attempt("c"));
    assert_eq!(step(&mut repair, 5, lost("it refuses")), attempt("b"), "rather than nobody");
}

// Before, where every host was as slow, each was given up for the next one for ever.
#[test]
fn a_host_that_was_replaced_is_borne_with_twice_as_long_the_next_time() {
    let mut repair = Repair::default();
    let day = FORBEARANCE.as_millis() as u64;
    let replaced = |repair: &mut Repair, ms, times| {
        assert_eq!(step(repair, ms, sick_for(times)), [RepairAction::Survey], "{times}");
        let told = step(repair, ms, RepairEvent::Surveyed(vec![fit("c", 1)]));
        assert!(matches!(told[..], [RepairAction::Replace(_)]), "{told:?}");
        step(repair, ms, lost("given up"));
        step(repair, ms, RepairEvent::Surveyed(vec![fit("b", 1)]));
        step(repair, ms, RepairEvent::Protected);
    };
    replaced(&mut repair, 0, 1);
    assert_eq!(step(&mut repair, 1, sick_for(1)), []);
    replaced(&mut repair, 2, 2);
    for times in 1..4 {
        assert_eq!(step(&mut repair, 3, sick_for(times)), []);
    }
    let mut forgotten = repair.clone();
    replaced(&mut repair, 4, 4);
    let event = RepairEvent::Sick {
        host: "c".to_owned().parse().unwrap(),
        reason: String::new(),
        times: 1,
    };
    assert_eq!(step(&mut repair, 5, event), [RepairAction::Survey], "another host");
    replaced(&mut forgotten, 2 + day, 1);
}

// The host may be unable to write the arbiter's next record: then nobody is given up.
#[test]
fn a_host_that_stayed_although_another_would_take_the_vm_is_borne_with_as_before() {
    let mut repair = Repair::default();
    for times in 1..4 {
        assert_eq!(step(&mut repair, u64::from(times), sick_for(times)), [RepairAction::Survey]);
        let found = RepairEvent::Surveyed(vec![fit("c", 1)]);
        let told = step(&mut repair, u64::from(times), found);
        assert!(matches!(told[..], [RepairAction::Replace(_)]), "{told:?}");
    }
}

#[test]
fn a_backup_that_is_sick_stays_where_no_other_host_would_do() {
    let mut repair = Repair::default();
    for found in [vec![fit("b", 1), unfit("c")], vec![]] {
        assert_eq!(step(&mut repair, 0, sick()), [RepairAction::Survey]);
        assert_eq!(step(&mut repair, 1, RepairEvent::Surveyed(found)), []);
        assert_eq!(repair.phase(), &RepairPhase::Idle);
    }
    assert_eq!(step(&mut repair, 2, sick()), [RepairAction::Survey]);
    assert_eq!(step(&mut repair, 3, lost("b is silent")), [RepairAction::Survey]);
    let found = vec![fit("b", 2), fit("c", 1)];
    assert_eq!(step(&mut repair, 4, RepairEvent::Surveyed(found)), attempt("b"));
}

#[test]
fn protection_that_does_not_last_is_not_set_up_again_at_once() {
    let mut repair = Repair::default();
    step(&mut repair, 0, lost("x"));
    step(&mut repair, 0, RepairEvent::Surveyed(vec![fit("b", 1)]));
    step(&mut repair, 1, RepairEvent::Protected);
    assert_eq!(step(&mut repair, 2, lost("again")), []);
    assert_eq!(repair.deadline(), Some(at(502)));
    step(&mut repair, 502, RepairEvent::Tick);
    step(&mut repair, 502, RepairEvent::Surveyed(vec![fit("b", 1)]));
    step(&mut repair, 503, RepairEvent::Protected);
    assert_eq!(step(&mut repair, 20_000, lost("much later")), [RepairAction::Survey]);
}

#[test]
fn what_nobody_wants_any_more_is_not_repaired() {
    let mut repair = Repair::default();
    step(&mut repair, 0, lost("x"));
    step(&mut repair, 1, RepairEvent::Ended);
    assert_eq!(step(&mut repair, 2, RepairEvent::Surveyed(vec![fit("b", 1)])), []);
    assert_eq!(step(&mut repair, 60_000, RepairEvent::Tick), []);
    assert_eq!(repair.phase(), &RepairPhase::Idle);
}

proptest! {
    /// A VM that one of the hosts takes, whatever they did for a while, is
    /// protected within one longest wait and one round.
    #[test]
    fn protection_returns_once_a_host_takes_the_vm(
        faults in proptest::collection::vec((0u32..=1_000, 0usize..4), 0..40)
    ) {
        let mut repair = Repair::default();
        let mut actions = Vec::new();
        let mut now = at(0);
        repair.handle(now, 0, lost("x"), &mut actions);
        let mut faults = faults.into_iter();
        let mut healthy_since = None;
        loop {
            let (jitter, fault) = faults.next().unwrap_or_else(|| {
                healthy_since.get_or_insert(now);
                (1_000, 3)
            });
            let event = match actions.pop() {
                Some(RepairAction::Survey) => RepairEvent::Surveyed(match fault {
                    0 => vec![unfit("b"), unfit("c")],
                    1 => vec![],
                    _ => vec![fit("b", 1), fit("c", 2)],
                }),
                Some(RepairAction::Attempt(_)) if fault < 3 => lost("no"),
                Some(RepairAction::Attempt(_)) => break,
                Some(RepairAction::Replace(reason)) => panic!("no backup is sick: {reason}"),
                None => {
                    now = repair.deadline().expect("it never gives up");
                    RepairEvent::Tick
                }
            };
            repair.handle(now, jitter, event, &mut actions);
            prop_assert!(actions.len() <= 1);
        }
        let late = healthy_since.map_or(Duration::ZERO, |since| now - since);
        prop_assert!(late <= LONGEST_WAIT * 3 / 2, "{late:?}");
    }
}
