use super::*;
use crate::{Behind, Headway, Verdict};

/// A primary that has just begun, with a detector of 100 ms.
fn fresh() -> Primary {
    Primary::new(Generation(1), Duration::from_millis(100), Time::default())
}

/// The actions at an event, so many milliseconds after it began.
fn handle(primary: &mut Primary, ms: u64, event: PrimaryEvent) -> Vec<PrimaryAction> {
    let mut actions = Vec::new();
    primary.handle(Time(Duration::from_millis(ms)), event, &mut actions);
    actions
}

#[test]
fn after_a_stall_only_a_fresh_acknowledgement_releases() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    assert_eq!(
        handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1))),
        [PrimaryAction::Release(Epoch(1))]
    );
    handle(&mut primary, 3, PrimaryEvent::Captured);
    // The acknowledgement of epoch 2 waited while this host stood still.
    assert_eq!(handle(&mut primary, 3_000, PrimaryEvent::Acknowledged(Epoch(2))), []);
    handle(&mut primary, 3_001, PrimaryEvent::Captured);
    let release = [PrimaryAction::Release(Epoch(3))];
    assert_eq!(handle(&mut primary, 3_002, PrimaryEvent::Acknowledged(Epoch(3))), release);
}

#[test]
fn a_guest_that_hangs_is_handed_over_and_ended_when_the_backup_runs() {
    let mut primary = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    let mut actions = Vec::new();
    let hangs = || PrimaryEvent::GuestHangs("it does not answer".into());
    let mut handle = |event| {
        primary.handle(Time::default(), event, &mut actions);
        (std::mem::take(&mut actions), primary.phase().clone())
    };
    handle(PrimaryEvent::Captured);
    assert_eq!(handle(hangs()), (vec![], PrimaryPhase::Syncing), "nobody could go on with it");
    handle(PrimaryEvent::Acknowledged(Epoch(1)));
    handle(PrimaryEvent::Captured);
    let yields = vec![PrimaryAction::YieldToBackup];
    assert_eq!(handle(hangs()), (yields, PrimaryPhase::HandingOver));
    assert_eq!(handle(hangs()), (vec![], PrimaryPhase::HandingOver), "once");
    // What was on its way when the backup was told.
    let released = vec![PrimaryAction::Release(Epoch(2))];
    assert_eq!(handle(PrimaryEvent::Acknowledged(Epoch(2))).0, released);
    let (halted, _) = handle(PrimaryEvent::LiveElsewhere(Generation(2)));
    let words = "it does not answer; the backup took over at generation 2".to_owned();
    assert_eq!(halted, [PrimaryAction::Halt(words)]);
}

#[test]
fn a_guest_that_hangs_and_wakes_up_goes_on_if_the_backup_cannot() {
    let mut primary = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    let mut actions = Vec::new();
    let mut handle = |event| {
        primary.handle(Time::default(), event, &mut actions);
        std::mem::take(&mut actions)
    };
    handle(PrimaryEvent::Captured);
    handle(PrimaryEvent::Acknowledged(Epoch(1)));
    handle(PrimaryEvent::GuestHangs("it does not answer".into()));
    let contest = PrimaryAction::Contest(Generation(1));
    assert_eq!(
        handle(PrimaryEvent::PeerGone("it cannot ask".into())),
        [PrimaryAction::ClosePeer, contest]
    );
    let granted = PrimaryEvent::Verdict(Verdict::Granted(Generation(2)));
    assert_eq!(handle(granted), [PrimaryAction::OpenOutput]);
    let why = "it does not answer; it cannot ask".to_owned();
    assert_eq!(*primary.phase(), PrimaryPhase::Alone(Some(why)));
}

#[test]
fn a_shorter_pipeline_waits_for_what_is_on_its_way() {
    let new = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    let mut primary = new.with_pipeline(9);
    let handle = |primary: &mut Primary, event| {
        primary.handle(Time::default(), event, &mut Vec::new());
    };
    (0..5).for_each(|_| handle(&mut primary, PrimaryEvent::Captured));
    primary.set_pipeline(PIPELINE_DEPTH);
    assert!(!primary.may_capture());
    handle(&mut primary, PrimaryEvent::Acknowledged(Epoch(3)));
    assert!(!primary.may_capture());
    handle(&mut primary, PrimaryEvent::Acknowledged(Epoch(4)));
    assert!(primary.may_capture());
}

#[test]
fn unheld_output_needs_a_permit_that_runs_out() {
    let at = |ms| Time(Duration::from_millis(ms));
    let mut actions = Vec::new();
    let new = Primary::new(Generation(1), Duration::from_millis(100), at(0));
    let mut primary = new.with_output(Output::Unheld);
    let mut handle = |ms, event| {
        primary.handle(at(ms), event, &mut actions);
        assert!(!primary.holds_output(), "it is no output commit");
        let permits = actions.drain(..).filter_map(|action| match action {
            PrimaryAction::Permit(length) => Some(length.as_millis()),
            _ => None,
        });
        permits.collect::<Vec<_>>()
    };
    assert!(handle(100, PrimaryEvent::Captured).is_empty());
    assert!(handle(110, PrimaryEvent::Captured).is_empty());
    // It counts from the capture of the epoch that was acknowledged.
    assert_eq!(handle(130, PrimaryEvent::Acknowledged(Epoch(1))), [970]);
    assert_eq!(handle(140, PrimaryEvent::Acknowledged(Epoch(2))), [970]);
    assert!(handle(150, PrimaryEvent::Captured).is_empty());
    // The acknowledgement waited while this host stood still.
    assert_eq!(handle(9_000, PrimaryEvent::Acknowledged(Epoch(3))), [0]);
    assert!(handle(9_001, PrimaryEvent::PeerGone("it hung up".into())).is_empty());
    assert!(primary.guards_output(), "until the arbiter's word");
}

// Before, it went on under the last permit, beside the backup.
#[test]
fn unheld_output_ends_before_the_backup_is_told_to_take_over() {
    let sick: [fn() -> PrimaryEvent; 3] = [
        || PrimaryEvent::GuestHangs("it does not answer".into()),
        || PrimaryEvent::CannotCapture("no answer".into()),
        || PrimaryEvent::GuestDied("a signal".into()),
    ];
    for event in sick {
        let mut primary = fresh().with_output(Output::Unheld);
        handle(&mut primary, 1, PrimaryEvent::Captured);
        handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
        handle(&mut primary, 3, PrimaryEvent::Captured);
        let ended = [PrimaryAction::Permit(Duration::ZERO), PrimaryAction::YieldToBackup];
        assert_eq!(handle(&mut primary, 4, event())[..2], ended);
        // What was on its way to the backup permits nothing any more.
        let late = handle(&mut primary, 5, PrimaryEvent::Acknowledged(Epoch(2)));
        let permits = |action: &PrimaryAction| matches!(action, PrimaryAction::Permit(_));
        assert!(!late.iter().any(permits), "{late:?}");
    }
}

#[test]
fn a_silence_is_borne_until_output_is_held() {
    let at = |ms| Time(Duration::from_millis(ms));
    let mut primary = Primary::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    primary.handle(at(1_900), PrimaryEvent::Tick, &mut actions);
    assert_eq!((primary.phase(), actions.len()), (&PrimaryPhase::Syncing, 0));
    // Regular signs of life, so that no jitter has been learnt.
    for beat in 96..1_001 {
        primary.handle(at(beat * 20), PrimaryEvent::Heard, &mut actions);
    }
    primary.handle(at(20_000), PrimaryEvent::Captured, &mut actions);
    primary.handle(at(20_301), PrimaryEvent::Tick, &mut actions);
    let contest = PrimaryAction::Contest(Generation(1));
    assert_eq!(actions, [PrimaryAction::ClosePeer, contest]);
}

/// Heartbeats alone do not make a backup: the arbiter is asked before it hears of it, since it
/// would win, and could do nothing with the VM.
#[test]
fn a_backup_that_is_heard_and_acknowledges_nothing_is_given_up() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    handle(&mut primary, 3, PrimaryEvent::Captured);
    let moved = PrimaryEvent::Headway(Headway { bytes: 1 << 20, ..Headway::default() });
    for beat in 1..=75 {
        assert_eq!(handle(&mut primary, beat * 20, PrimaryEvent::Heard), []);
        if beat == 25 {
            assert_eq!(handle(&mut primary, 500, moved.clone()), []);
        }
        assert_eq!(handle(&mut primary, beat * 20, PrimaryEvent::Tick), [], "at beat {beat}");
    }
    handle(&mut primary, 1_501, PrimaryEvent::Heard);
    assert_eq!(
        handle(&mut primary, 1_501, PrimaryEvent::Tick),
        [PrimaryAction::Contest(Generation(1))]
    );
    // What it acknowledges now it would still take over with.
    let late = handle(&mut primary, 1_502, PrimaryEvent::Acknowledged(Epoch(2)));
    assert_eq!(late, [PrimaryAction::Release(Epoch(2))]);
    let granted = PrimaryEvent::Verdict(Verdict::Granted(Generation(2)));
    assert_eq!(
        handle(&mut primary, 1_503, granted),
        [PrimaryAction::ClosePeer, PrimaryAction::OpenOutput]
    );
    let PrimaryPhase::Alone(Some(reason)) = primary.phase() else { panic!() };
    assert!(reason.contains("epoch 2 has been on its way to it for 1498 ms"), "{reason}");
}

/// There is nothing to contest: no epoch is its own, and no barrier holds the output that would wait for the verdict.
#[test]
fn a_first_copy_that_is_stuck_for_want_of_room_ends_and_contests_nothing() {
    let mut primary = fresh();
    let behind = Behind { held_up: Some(Time(Duration::from_millis(10))), output_due: None };
    let waits = PrimaryEvent::Headway(Headway { behind, ..Headway::default() });
    assert_eq!(handle(&mut primary, 20, waits), []);
    let mut told = Vec::new();
    for beat in 1..600 {
        handle(&mut primary, beat * 20, PrimaryEvent::Heard);
        told.extend(handle(&mut primary, beat * 20, PrimaryEvent::Tick));
    }
    assert_eq!(told, [PrimaryAction::ClosePeer, PrimaryAction::OpenOutput]);
    assert!(matches!(primary.phase(), PrimaryPhase::Alone(Some(_))), "{:?}", primary.phase());
}

#[test]
fn a_backup_that_does_not_take_what_it_is_handed_is_given_up() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    // It will not be acknowledged any more: the backup is to take over.
    handle(&mut primary, 3, PrimaryEvent::Captured);
    handle(&mut primary, 4, PrimaryEvent::GuestHangs("it does not answer".into()));
    for beat in 1..=500 {
        handle(&mut primary, beat * 20, PrimaryEvent::Heard);
        assert_eq!(handle(&mut primary, beat * 20, PrimaryEvent::Tick), [], "at beat {beat}");
    }
    handle(&mut primary, 10_020, PrimaryEvent::Heard);
    assert_eq!(
        handle(&mut primary, 10_020, PrimaryEvent::Tick),
        [PrimaryAction::Contest(Generation(1))]
    );
    assert_eq!(
        handle(
            &mut primary,
            10_021,
            PrimaryEvent::Verdict(Verdict::Unreachable("no answer".into()))
        ),
        [PrimaryAction::ClosePeer],
        "it may be reached by the backup"
    );
}

// Before, the epochs that it acknowledged no more were its loss.
#[test]
fn a_backup_has_time_to_forget_the_vm_and_not_for_ever() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    assert_eq!(handle(&mut primary, 10, PrimaryEvent::Unprotect), [PrimaryAction::StandDown]);
    handle(&mut primary, 20, PrimaryEvent::Captured);
    let mut silent = primary.clone();
    let lost = [PrimaryAction::ClosePeer, PrimaryAction::Contest(Generation(1))];
    assert_eq!(handle(&mut silent, 1_900, PrimaryEvent::Tick), lost);
    for ms in (30..3_010).step_by(20) {
        handle(&mut primary, ms, PrimaryEvent::Heard);
        assert_eq!(handle(&mut primary, ms, PrimaryEvent::Tick), [], "{ms} ms");
        assert!(primary.deadline() > Some(Time(Duration::from_millis(ms))), "it would never rest");
    }
    let mut hanging = primary.clone();
    let contest = [PrimaryAction::Contest(Generation(1))];
    assert_eq!(handle(&mut hanging, 3_020, PrimaryEvent::Tick), contest);
    assert!(matches!(hanging.phase(), PrimaryPhase::Contesting(_)));
    let alone = [PrimaryAction::ClosePeer, PrimaryAction::OpenOutput];
    assert_eq!(handle(&mut primary, 3_020, PrimaryEvent::StoodDown), alone);

    // Before, it was to go on where it was being forgotten.
    let mut dies = fresh();
    handle(&mut dies, 1, PrimaryEvent::Captured);
    handle(&mut dies, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    handle(&mut dies, 10, PrimaryEvent::Unprotect);
    let actions = handle(&mut dies, 11, PrimaryEvent::GuestDied("QEMU was killed".to_owned()));
    assert!(!actions.contains(&PrimaryAction::YieldToBackup), "{actions:?}");
    assert!(matches!(dies.phase(), PrimaryPhase::Halted(_)) && !dies.is_elsewhere());
}

// Before, a VM that should be protected was not, and nothing said so.
#[test]
fn an_end_of_protection_that_nobody_waits_for_any_more_is_a_loss() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    handle(&mut primary, 3, PrimaryEvent::Unprotect);
    assert_eq!(handle(&mut primary, 4, PrimaryEvent::StillWanted), []);
    let mut again = primary.clone();
    handle(&mut primary, 5, PrimaryEvent::StoodDown);
    assert!(matches!(primary.phase(), PrimaryPhase::Alone(Some(_))), "{:?}", primary.phase());
    handle(&mut again, 5, PrimaryEvent::Unprotect);
    handle(&mut again, 6, PrimaryEvent::StoodDown);
    assert_eq!(*again.phase(), PrimaryPhase::Alone(None));
}

// Before, it had gone over as its operator wanted, and nothing was wrong.
#[test]
fn a_guest_that_died_before_its_last_checkpoint_does_not_go_on_where_it_was() {
    let mut primary = fresh();
    handle(&mut primary, 1, PrimaryEvent::Captured);
    handle(&mut primary, 2, PrimaryEvent::Acknowledged(Epoch(1)));
    let mut captured = primary.clone();
    handle(&mut primary, 3, PrimaryEvent::GuestDied("QEMU was killed".to_owned()));
    assert!(primary.is_elsewhere() && !primary.goes_on_elsewhere());
    handle(&mut captured, 3, PrimaryEvent::CapturedLast);
    assert!(!captured.goes_on_elsewhere(), "it is here");
    handle(&mut captured, 4, PrimaryEvent::Acknowledged(Epoch(2)));
    handle(&mut captured, 5, PrimaryEvent::LiveElsewhere(Generation(2)));
    assert!(captured.goes_on_elsewhere());
}

/// A primary that a backup takes over from, in the midst of a contest.
fn contesting() -> Primary {
    let mut primary = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    let events = [
        PrimaryEvent::Captured,
        PrimaryEvent::Acknowledged(Epoch(1)),
        PrimaryEvent::Captured,
        PrimaryEvent::PeerGone("it hung up".into()),
    ];
    for event in events {
        primary.handle(Time::default(), event, &mut Vec::new());
    }
    primary
}

fn taken(host: &'static str, generation: u64) -> PrimaryEvent {
    let (host, generation) = (Some(crate::literal(host)), Generation(generation));
    PrimaryEvent::Verdict(Verdict::Taken(Ownership { host, generation }))
}

#[test]
fn a_loser_keeps_its_guest_until_the_winner_runs() {
    let mut primary = contesting();
    let mut actions = Vec::new();
    let at = |ms| Time(Duration::from_millis(ms));
    primary.handle(at(1), taken("b", 2), &mut actions);
    assert_eq!(std::mem::take(&mut actions), [PrimaryAction::Freeze]);
    assert!(primary.holds_output() && !primary.may_capture());
    // Too late: nothing is let out any more.
    primary.handle(at(2), PrimaryEvent::Acknowledged(Epoch(2)), &mut actions);
    primary.handle(at(201), PrimaryEvent::Tick, &mut actions);
    assert_eq!(std::mem::take(&mut actions), [PrimaryAction::Contest(Generation(1))], "it asks on");
    primary.handle(at(202), taken("b", 2), &mut actions);
    assert_eq!(actions, []);
    let mut handed_back = primary.clone();
    primary.handle(at(203), PrimaryEvent::LiveElsewhere(Generation(2)), &mut actions);
    assert!(matches!(&actions[..], [PrimaryAction::Halt(why)] if why.ends_with("and runs it")));
    actions.clear();
    let returned = PrimaryEvent::Verdict(Verdict::Returned(Generation(3)));
    handed_back.handle(at(203), returned, &mut actions);
    assert_eq!(actions, [PrimaryAction::OpenOutput]);
    assert_eq!(handed_back.generation(), Generation(3));
    let PrimaryPhase::Alone(Some(reason)) = handed_back.phase() else { panic!() };
    assert!(reason.starts_with("it hung up; the arbiter says that b owns"), "{reason}");
}

#[test]
fn a_loser_keeps_nothing_once_somebody_has_run_the_vm() {
    let mut actions = Vec::new();
    // More than one change of owner.
    let mut primary = contesting();
    primary.handle(Time::default(), taken("b", 3), &mut actions);
    assert!(matches!(actions[..], [PrimaryAction::Halt(_)]), "{actions:?}");
    let mut primary = contesting();
    actions.clear();
    primary.handle(Time::default(), taken("b", 2), &mut actions);
    primary.handle(Time::default(), taken("c", 3), &mut actions);
    assert!(matches!(actions[..], [PrimaryAction::Freeze, PrimaryAction::Halt(_)]), "{actions:?}");
}

/// The arbiter granted it to this very host, whose images were held to be out of date.
#[test]
fn a_guest_that_died_in_a_contest_is_no_other_hosts_yet() {
    let died = || PrimaryEvent::GuestDied("a signal".into());
    let mut actions = Vec::new();
    let mut primary = contesting();
    primary.handle(Time::default(), died(), &mut actions);
    assert_eq!(std::mem::take(&mut actions), [PrimaryAction::Halt("a signal".into())]);
    assert!(!primary.is_elsewhere());
    // It keeps no copy that could go on.
    let granted = PrimaryEvent::Verdict(Verdict::Granted(Generation(2)));
    primary.handle(Time::default(), granted, &mut actions);
    assert_eq!(actions, []);
    let mut frozen = contesting();
    frozen.handle(Time::default(), taken("b", 2), &mut actions);
    frozen.handle(Time::default(), died(), &mut actions);
    assert!(frozen.is_elsewhere(), "the winner is known");
    let mut yielded = fresh();
    yielded.handle(Time::default(), PrimaryEvent::Captured, &mut actions);
    yielded.handle(Time::default(), PrimaryEvent::Acknowledged(Epoch(1)), &mut actions);
    assert!(!yielded.is_elsewhere());
    yielded.handle(Time::default(), died(), &mut actions);
    assert!(yielded.is_elsewhere(), "the backup was told to take it");
}

#[test]
fn a_guest_that_cannot_be_saved_is_handed_over_not_contested() {
    let mut primary = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    let mut actions = Vec::new();
    let cannot = || PrimaryEvent::CannotCapture("no answer".into());
    let mut handle = |event| {
        primary.handle(Time::default(), event, &mut actions);
        std::mem::take(&mut actions)
    };
    handle(PrimaryEvent::Captured);
    handle(PrimaryEvent::Acknowledged(Epoch(1)));
    assert_eq!(handle(cannot()), [PrimaryAction::YieldToBackup]);
    assert_eq!(handle(cannot()), [], "once");
    let contest = PrimaryAction::Contest(Generation(1));
    let gone = handle(PrimaryEvent::PeerGone("it cannot ask".into()));
    assert_eq!(gone, [PrimaryAction::ClosePeer, contest], "then it is better than nobody");
    let mut syncing = Primary::new(Generation(1), Duration::from_millis(100), Time::default());
    syncing.handle(Time::default(), cannot(), &mut actions);
    assert!(matches!(syncing.phase(), PrimaryPhase::Alone(Some(_))), "nobody could go on with it");
}
