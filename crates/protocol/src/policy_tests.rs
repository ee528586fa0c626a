use super::*;
use proptest::prelude::*;

const IDLE: Activity = Activity { idle: true, busy_share: 0.0 };
const FULL_LOAD: Activity = Activity { idle: false, busy_share: 1.0 };
const PERCENT: u32 = 10;
const POLICY: Policy = Policy::Adaptive { max_epoch_ms: 200, pause_budget_percent: PERCENT };

/// 2 ms of pause.
const LAST: LastCheckpoint = LastCheckpoint {
    started: Time(Duration::from_millis(1000)),
    resumed: Time(Duration::from_millis(1002)),
    pages: 0,
    carried: 0,
};

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

/// Output has waited since then.
fn waiting(now: u64, since: u64) -> Situation {
    Situation {
        now: at(now),
        last: LAST,
        length: Duration::ZERO,
        in_flight: 0,
        output_since: Some(at(since)),
        full: false,
    }
}

fn quiet(in_flight: u64) -> Situation {
    Situation {
        now: at(1003),
        last: LAST,
        length: Duration::ZERO,
        in_flight,
        output_since: None,
        full: false,
    }
}

fn nobody_asks() -> Activity {
    panic!("it does not matter what the guest does")
}

#[test]
fn interval_keeps_its_rate_and_the_depth() {
    let policy = Policy::Interval { hz: 40 };
    assert_eq!(policy.due(&quiet(0), nobody_asks), Due::At(at(1025)));
    let output = |in_flight| Situation { in_flight, ..waiting(1003, 1003) };
    assert_eq!(policy.due(&output(1), nobody_asks), Due::At(at(1025)));
    assert_eq!(policy.due(&output(2), nobody_asks), Due::OnChange);
}

#[test]
fn an_epoch_that_is_full_ends_as_soon_as_it_can() {
    let full = |in_flight| Situation { full: true, ..quiet(in_flight) };
    for policy in [POLICY, Policy::Interval { hz: 1 }] {
        assert_eq!(policy.due(&full(0), nobody_asks), Due::At(at(1003)));
        let most = policy.pipeline();
        assert_eq!(policy.due(&full(most), nobody_asks), Due::OnChange);
        assert_eq!(policy.due(&full(most - 1), nobody_asks), Due::At(at(1003)));
    }
    let busy = Situation { full: true, ..waiting(1003, 1003) };
    assert_eq!(POLICY.due(&busy, nobody_asks), Due::At(at(1003)), "whatever its pause costs");
}

#[test]
fn an_idle_guest_never_waits_for_the_budget() {
    assert_eq!(POLICY.due(&waiting(1002, 1002), || IDLE), Due::At(at(1002)));
    assert_eq!(POLICY.due(&waiting(1150, 1003), || IDLE), Due::At(at(1150)));
}

#[test]
fn a_busy_guest_pays_with_time_by_its_share() {
    let due = |now, since, busy_share| {
        POLICY.due(&waiting(now, since), || Activity { idle: false, busy_share })
    };
    assert_eq!(due(1020, 1003, 1.0), Due::At(at(1020)), "2 ms at 10 % cost 18 ms");
    assert!(matches!(due(1019, 1003, 1.0), Due::Look(when) if when <= at(1020)));
    assert_eq!(due(1012, 1003, 0.5), Due::At(at(1011)), "9 ms at half load");
    assert_eq!(due(1100, 1100, 0.0), Due::At(at(1100)), "it hardly ever runs");
    assert_eq!(due(1100, 1098, 1.0), Due::At(at(1100)), "as long as a pause to finish");
    assert!(matches!(due(1100, 1099, 1.0), Due::Look(_)));
}

#[test]
fn a_busy_guest_runs_for_the_length_that_was_found() {
    let due = |length, now, busy_share| {
        let situation = Situation { length: Duration::from_millis(length), ..waiting(now, 1003) };
        POLICY.due(&situation, || Activity { idle: false, busy_share })
    };
    assert_eq!(due(30, 1032, 1.0), Due::At(at(1032)));
    assert!(matches!(due(30, 1031, 1.0), Due::Look(_)));
    assert_eq!(due(30, 1017, 0.5), Due::At(at(1017)), "by the share of its time");
    assert!(matches!(due(5, 1019, 1.0), Due::Look(_)), "the budget is 18 ms");
    assert_eq!(due(1000, 1202, 1.0), Due::At(at(1202)), "output waits for no longer than an epoch");
    let idle = Situation { length: Duration::from_millis(30), ..waiting(1003, 1003) };
    assert_eq!(POLICY.due(&idle, || IDLE), Due::At(at(1003)));
}

#[test]
fn pages_speak_for_longer_epochs_up_to_a_bound() {
    let by_pages = |pages| POLICY.length_by_pages(LastCheckpoint { pages, ..LAST }).as_millis();
    assert_eq!(by_pages(0), 18, "for the pause");
    assert_eq!(by_pages(200), 27, "9 for the pages");
    assert_eq!(by_pages(1 << 40), 43, "25 for any number of pages");
}

#[test]
fn looks_become_rarer() {
    let look = |now: Time| {
        let situation = Situation { now, ..waiting(0, 1003) };
        match POLICY.due(&situation, || FULL_LOAD) {
            Due::Look(when) => when - now,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(look(at(1003)), Duration::from_micros(100));
    assert_eq!(look(at(1009)), Duration::from_millis(3));
}

#[test]
fn batches_form_until_the_commit() {
    let situation = Situation { in_flight: 1, ..waiting(1100, 1003) };
    assert_eq!(POLICY.due(&situation, nobody_asks), Due::OnChange);
}

#[test]
fn without_output_epochs_stretch_to_the_longest() {
    assert_eq!(POLICY.due(&quiet(0), nobody_asks), Due::At(at(1200)));
    assert_eq!(POLICY.due(&quiet(1), nobody_asks), Due::OnChange);
}

#[test]
fn an_epoch_should_arrive_within_its_own_length() {
    let target = |policy: Policy| policy.transfer_target().as_millis();
    assert_eq!(target(Policy::default()), 200);
    assert_eq!(target(Policy::Interval { hz: 2 }), 500);
    assert_eq!(target(Policy::Interval { hz: 1000 }), 100);
}

#[test]
fn one_very_long_pause_does_not_hold_up_output() {
    let last = LastCheckpoint { resumed: at(11_000), ..LAST };
    let due = |now| {
        let situation = Situation { last, ..waiting(now, 11_000) };
        POLICY.due(&situation, || FULL_LOAD)
    };
    assert!(matches!(due(11_199), Due::Look(_)));
    assert_eq!(due(11_200), Due::At(at(11_200)));
}

#[test]
fn wrong_numbers_are_named() {
    assert!(Policy::Interval { hz: 0 }.validate().unwrap_err().contains("hz"));
    let policy = Policy::Adaptive { max_epoch_ms: 10, pause_budget_percent: 100 };
    assert!(policy.validate().unwrap_err().contains("pause_budget_percent"));
    assert!(Policy::default().validate().is_ok());
}

/// A guest that is played against the policy, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Play {
    pause: u64,
    commit: u64,
    /// Output begins to wait so long after the guest runs again; never, if none.
    output_after: Option<u64>,
    activity: Activity,
}

/// The time at which the next pause begins, from the resumption before it on.
fn next_pause(policy: Policy, play: &Play) -> u64 {
    let last = LastCheckpoint {
        started: Time(Duration::ZERO),
        resumed: micros(play.pause),
        pages: 0,
        carried: 0,
    };
    let commit = play.pause + play.commit;
    let output = play.output_after.map(|after| play.pause + after);
    let mut now = play.pause;
    // What comes next of what was waited for, and of what changes.
    let next = |now: u64, time: Option<Time>| {
        let changes = [Some(commit), output].into_iter().flatten().filter(|change| *change > now);
        let time = time.map(|time| (time.0.as_nanos() as u64).div_ceil(1_000).max(now + 1));
        changes.chain(time).min().expect("something happens")
    };
    for _ in 0..100_000 {
        let situation = Situation {
            now: micros(now),
            last,
            length: Duration::ZERO,
            in_flight: u64::from(now < commit),
            output_since: output.filter(|output| *output <= now).map(micros),
            full: false,
        };
        now = match policy.due(&situation, || play.activity) {
            Due::At(time) if time <= micros(now) => return now,
            Due::At(time) | Due::Look(time) => next(now, Some(time)),
            Due::OnChange => next(now, None),
        };
    }
    panic!("no checkpoint is taken: {play:?}");
}

fn micros(micros: u64) -> Time {
    Time(Duration::from_micros(micros))
}

fn play(activity: Activity) -> impl Strategy<Value = Play> {
    (100u64..5_000, 100u64..50_000, prop::option::of(0u64..500_000)).prop_map(
        move |(pause, commit, output_after)| Play { pause, commit, output_after, activity },
    )
}

proptest! {
    #[test]
    fn under_full_load_the_pauses_stay_within_the_budget(
        play in play(FULL_LOAD),
        percent in 3u32..=90,
    ) {
        let policy = Policy::Adaptive { max_epoch_ms: 200, pause_budget_percent: percent };
        let paused = play.pause as f64 / next_pause(policy, &play) as f64;
        prop_assert!(paused <= f64::from(percent) / 100.0 + 1e-6, "{paused}");
    }

    #[test]
    fn output_of_an_idle_guest_waits_for_the_commit_alone(play in play(IDLE)) {
        let begins = next_pause(POLICY, &play);
        let output = play.output_after.map_or(u64::MAX, |after| play.pause + after);
        let free = play.pause + play.commit;
        let longest = free.max(200_000);
        prop_assert_eq!(begins, output.max(free).min(longest.max(free)));
    }

    #[test]
    fn output_never_waits_for_longer_than_the_bound(
        play in play(FULL_LOAD),
        busy_share in 0.0f64..=1.0,
    ) {
        let play = Play { activity: Activity { idle: false, busy_share }, ..play };
        let begins = next_pause(POLICY, &play);
        let since = play.output_after.map_or(0, |after| play.pause + after);
        let gap = play.pause * u64::from(100 - PERCENT) / u64::from(PERCENT);
        // After the commit, the share of the gap, or a pause's length to finish in.
        let bound = (play.pause + gap).max(since + play.pause).max(play.pause + play.commit);
        prop_assert!(begins <= bound.max(200_000), "{begins} > {bound}");
    }

    #[test]
    fn a_guest_that_sends_nothing_is_paused_as_rarely_as_allowed(play in play(FULL_LOAD)) {
        let play = Play { output_after: None, ..play };
        let begins = next_pause(POLICY, &play);
        prop_assert!(begins >= 200_000);
        prop_assert!(begins <= (200_000).max(play.pause + play.commit));
    }
}
