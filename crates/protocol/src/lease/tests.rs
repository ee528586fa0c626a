use super::*;
use crate::literal;

const LENGTH: Duration = Duration::from_secs(15);

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

fn limit(ms: u64) -> LeaseAction {
    LeaseAction::Limit(Some(at(ms)))
}

const RENEW: LeaseAction = LeaseAction::Ask(LeaseErrand::Renew);

/// A lease that began at 0 and was renewed at once.
fn held() -> Lease {
    let mut lease = Lease::new(LENGTH);
    assert_eq!(lease.tick(at(0), Stake::Sole), [limit(15_000), RENEW]);
    assert_eq!(lease.answered(at(10), at(0), LeaseAnswer::Own), [limit(15_000)]);
    lease
}

fn silent() -> LeaseAnswer {
    LeaseAnswer::Unreachable("no route".to_owned())
}

#[test]
fn nothing_at_stake_costs_nothing() {
    let mut lease = Lease::new(LENGTH);
    for stake in [Stake::Nothing, Stake::Undecided, Stake::Guarded] {
        assert_eq!(lease.tick(at(100_000), stake), []);
    }
    let mut none = Lease::new(Duration::ZERO);
    assert_eq!(none.tick(at(100_000), Stake::Sole), []);
    assert!(!none.is_held() && !none.has_run_out());
}

#[test]
fn a_lease_is_renewed_long_before_it_ends_and_counts_from_the_question() {
    let mut lease = held();
    assert_eq!(lease.tick(at(2_999), Stake::Sole), []);
    assert_eq!(lease.tick(at(3_000), Stake::Sole), [RENEW]);
    assert_eq!(lease.tick(at(3_100), Stake::Sole), [], "one question at a time");
    let renewed = lease.answered(at(4_500), at(3_000), LeaseAnswer::Own);
    assert_eq!(renewed, [limit(18_000)]);
}

#[test]
fn without_the_arbiter_the_guest_freezes_and_goes_on_when_it_is_still_its_own() {
    let mut lease = held();
    let mut now = 3_000;
    while now < 15_000 {
        if !lease.tick(at(now), Stake::Sole).is_empty() {
            assert_eq!(lease.answered(at(now + 900), at(now), silent()), []);
        }
        now += 500;
    }
    let actions = lease.tick(at(15_000), Stake::Sole);
    let Some(LeaseAction::Freeze(why)) = actions.first() else { panic!("{actions:?}") };
    assert!(why.contains("15 s") && why.contains("no route"), "{why}");
    assert!(lease.standstill().is_some());
    lease.answered(at(15_100), at(15_000), silent());
    assert_eq!(lease.tick(at(16_600), Stake::Sole), [RENEW], "it asks on");
    let back = lease.answered(at(16_700), at(16_600), LeaseAnswer::Own);
    assert_eq!(back, [limit(31_600), LeaseAction::GoOn]);
    assert_eq!(lease.standstill(), None);
}

#[test]
fn an_answer_that_took_as_long_as_the_lease_is_worth_nothing() {
    let mut lease = held();
    lease.tick(at(3_000), Stake::Sole);
    assert!(matches!(lease.tick(at(18_000), Stake::Sole)[..], [LeaseAction::Freeze(_)]));
    assert_eq!(lease.answered(at(18_001), at(3_000), LeaseAnswer::Own), []);
    assert_eq!(lease.tick(at(18_001), Stake::Sole), [RENEW]);
}

#[test]
fn a_vm_that_another_host_was_given_is_halted() {
    let mut lease = held();
    lease.tick(at(3_000), Stake::Sole);
    let moved = LeaseAnswer::Moved { to: None, why: "host b has it".to_owned() };
    let halted = lease.answered(at(3_010), at(3_000), moved);
    assert_eq!(halted, [limit(0), LeaseAction::Halt("host b has it".to_owned())]);
    assert_eq!(lease.tick(at(9_000), Stake::Sole), [], "for good");
}

#[test]
fn a_backup_takes_the_place_of_the_lease_once_that_is_withdrawn() {
    let mut lease = held();
    assert_eq!(lease.tick(at(3_000), Stake::Undecided), [RENEW], "it goes on meanwhile");
    lease.answered(at(3_010), at(3_000), LeaseAnswer::Own);
    let withdraw = LeaseAction::Ask(LeaseErrand::Withdraw);
    assert_eq!(lease.tick(at(6_000), Stake::Guarded), std::slice::from_ref(&withdraw));
    lease.answered(at(6_100), at(6_000), silent());
    assert!(lease.is_held(), "others may still count on it");
    assert_eq!(lease.tick(at(7_600), Stake::Guarded), [withdraw]);
    let withdrawn = lease.answered(at(7_700), at(7_600), LeaseAnswer::Own);
    assert_eq!(withdrawn, [LeaseAction::Limit(None)]);
    assert_eq!(lease.tick(at(9_000_000), Stake::Guarded), []);
}

#[test]
fn a_host_that_stood_still_lets_nothing_out_before_it_has_asked() {
    let mut lease = held();
    // Asked before, answered after.
    lease.tick(at(3_000), Stake::Sole);
    assert_eq!(lease.stood_still(at(9_000)), [limit(9_000)]);
    assert_eq!(lease.answered(at(9_001), at(3_000), LeaseAnswer::Own), [], "of before");
    assert_eq!(lease.tick(at(9_002), Stake::Sole), [RENEW]);
    assert_eq!(lease.answered(at(9_010), at(9_002), LeaseAnswer::Own), [limit(24_002)]);
    // No answer: it freezes soon, not when the lease would have ended.
    lease.stood_still(at(12_000));
    lease.tick(at(12_000), Stake::Sole);
    assert!(matches!(lease.tick(at(13_500), Stake::Sole)[..], [LeaseAction::Freeze(_)]));
}

fn renewal(mark: u64) -> Option<Renewal> {
    Some(Renewal { host: literal("a"), length_ms: 15_000, mark })
}

/// A look that takes no time.
fn at_once(now: Time) -> (Time, Time) {
    (now, now)
}

/// Before, whoever stood still behind a read took what it had found for the renewal of a minute later.
#[test]
fn a_lease_is_not_over_by_a_look_that_its_host_slept_through() {
    let mut watch = LeaseWatch::default();
    let patience = renewal(7).unwrap().patience();
    assert_eq!(watch.look((at(0), at(2_000)), renewal(7)), LeaseSight::Wait(patience));
    let slept = watch.look((at(3_000), at(63_000)), renewal(7));
    assert_eq!(slept, LeaseSight::Wait(patience - Duration::from_secs(1)));
    let end = Time(patience) + Duration::from_secs(2);
    assert!(matches!(watch.look(at_once(end), renewal(7)), LeaseSight::Over(_)), "seen at 2 s");
}

#[test]
fn a_lease_is_over_when_nothing_has_changed_for_longer_than_it_lasts() {
    let mut watch = LeaseWatch::default();
    let patience = renewal(7).unwrap().patience();
    assert!(patience > LENGTH + Duration::from_secs(1));
    assert_eq!(watch.look(at_once(at(0)), renewal(7)), LeaseSight::Wait(patience));
    let left = patience - Duration::from_secs(15);
    assert_eq!(watch.look(at_once(at(15_000)), renewal(7)), LeaseSight::Wait(left));
    let end = Time(patience);
    assert_eq!(watch.look(at_once(end), renewal(7)), LeaseSight::Over(renewal(7).unwrap()));
    assert_eq!(watch.look(at_once(end), renewal(8)), LeaseSight::Alive);
    assert_eq!(watch.look(at_once(end), None), LeaseSight::Alive, "withdrawn");
    assert_eq!(LeaseWatch::default().look(at_once(end), None), LeaseSight::None);
}

/// Both halves fit, however long a renewal was on its way.
#[test]
fn whoever_looks_is_more_patient_than_any_lease_lasts() {
    for (asked, written) in [(3_000, 3_000), (3_000, 14_000), (14_000, 14_001), (9_000, 20_000)] {
        let mut lease = held();
        lease.tick(at(asked), Stake::Sole);
        let kept = lease.answered(at(written), at(asked), LeaseAnswer::Own);
        let ends = if kept.is_empty() { 15_000 } else { asked + 15_000 };
        let (mut watch, mut taken) = (LeaseWatch::default(), None);
        for now in (0..60_000).step_by(50) {
            match watch.look(at_once(at(now)), renewal(u64::from(now >= written))) {
                LeaseSight::Over(_) => taken = taken.or(Some(now)),
                LeaseSight::Alive => (watch, taken) = (LeaseWatch::default(), None),
                _ => {}
            }
        }
        assert!(taken.unwrap() > ends, "asked {asked}, written {written}");
    }
}

#[test]
fn what_a_contest_of_this_hosts_own_moved_is_not_lost() {
    let why = || "this host has it at a later generation".to_owned();
    let moved = || LeaseAnswer::Moved { to: None, why: why() };
    let mut lease = held();
    assert_eq!(lease.tick(at(3_000), Stake::Guarded), [LeaseAction::Ask(LeaseErrand::Withdraw)]);
    assert_eq!(lease.answered(at(3_010), at(3_000), moved().beside_contest(true)), []);
    assert_eq!(lease.tick(at(5_000), Stake::Sole), [RENEW], "by its new generation");
    assert_eq!(lease.answered(at(5_010), at(5_000), LeaseAnswer::Own), [limit(20_000)]);
    assert_eq!(moved().beside_contest(false), moved());
    assert_eq!(LeaseAnswer::Own.beside_contest(true), LeaseAnswer::Own);
}

#[test]
fn an_answer_that_took_longer_than_the_lease_lets_nothing_go_on() {
    for stake in [Stake::Guarded, Stake::Sole] {
        let mut lease = held();
        assert_eq!(lease.tick(at(3_000), stake).len(), 1);
        // This host slept, which it may not have noticed yet.
        assert!(matches!(lease.tick(at(60_000), stake)[..], [LeaseAction::Freeze(_)]));
        assert_eq!(lease.answered(at(60_001), at(3_000), LeaseAnswer::Own), []);
        assert!(lease.has_run_out());
        assert_eq!(lease.tick(at(60_002), stake).len(), 1, "asked again at once");
        let actions = lease.answered(at(60_100), at(60_002), LeaseAnswer::Own);
        assert_eq!(actions.last(), Some(&LeaseAction::GoOn));
    }
}

/// The sound guest was once ended when its backup had won the VM and could not, or did not, run it.
#[test]
fn what_its_backup_has_won_the_session_finds_out() {
    let moved = |to: &str| {
        let to: HostName = to.parse().unwrap();
        LeaseAnswer::Moved { to: Some(to), why: "it was given away".to_owned() }
    };
    let hosts = ["a", "b"].map(|host| host.parse::<HostName>().unwrap());
    for to in ["a", "b"] {
        let beside = moved(to).beside_session(&hosts);
        assert!(matches!(beside, LeaseAnswer::Unreachable(_)), "{to}: {beside:?}");
    }
    assert_eq!(moved("c").beside_session(&hosts), moved("c"), "it was forced there");
    assert_eq!(moved("b").beside_session(&[]), moved("b"));
    assert_eq!(LeaseAnswer::Own.beside_session(&hosts), LeaseAnswer::Own);
}
