use super::*;

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

/// A backup that was asked to take over, and has won the VM at generation 2.
fn winner() -> Backup {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let granted = BackupEvent::Verdict(Verdict::Granted(Generation(2)));
    let events = [BackupEvent::Staged(Epoch(1)), BackupEvent::TakeOver, granted];
    for (ms, event) in (1..).zip(events) {
        backup.handle(at(ms), event, &mut Vec::new());
    }
    backup
}

#[test]
fn a_silence_is_borne_until_there_is_something_to_take_over() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1_900), BackupEvent::Tick, &mut actions);
    assert_eq!((backup.phase(), actions.len()), (&BackupPhase::Syncing, 0));
    // Regular signs of life, so that no jitter has been learnt.
    for beat in 96..1_000 {
        backup.handle(at(beat * 20), BackupEvent::Heard, &mut actions);
    }
    backup.handle(at(20_000), BackupEvent::Staged(Epoch(1)), &mut actions);
    actions.clear();
    backup.handle(at(20_101), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, [BackupAction::Contest(Generation(1))]);
}

#[test]
fn a_copy_that_cannot_run_does_not_contest_the_vm() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    actions.clear();
    backup.handle(at(2), BackupEvent::CannotServe("QEMU ended".into()), &mut actions);
    backup.handle(at(3), BackupEvent::PeerGone("it hung up".into()), &mut actions);
    assert_eq!(actions, [BackupAction::Discard("QEMU ended".into())]);
}

/// It could win and be started until it had said why.
#[test]
fn a_copy_that_has_proved_to_be_another_wins_nothing_and_is_not_started() {
    let standing = || {
        let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut Vec::new());
        backup
    };
    let gone = || BackupEvent::PeerGone("it hung up".into());
    let granted = || BackupEvent::Verdict(Verdict::Granted(Generation(2)));
    let cannot = || BackupEvent::CannotServe("it has diverged".into());

    let (mut backup, mut actions) = (standing(), Vec::new());
    backup.handle(at(2), BackupEvent::Doomed, &mut actions);
    backup.handle(at(3), gone(), &mut actions);
    backup.handle(at(1_000), BackupEvent::Tick, &mut actions);
    backup.handle(at(1_001), BackupEvent::Fitness(None), &mut actions);
    backup.handle(at(2_000), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, [BackupAction::ClosePeer], "the primary may ask");
    backup.handle(at(2_001), cannot(), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Discarded);

    let (mut backup, mut actions) = (standing(), Vec::new());
    backup.handle(at(2), gone(), &mut actions);
    backup.handle(at(3), BackupEvent::Doomed, &mut actions);
    backup.handle(at(4), granted(), &mut actions);
    let asked = BackupAction::Contest(Generation(1));
    assert_eq!(actions, [asked, BackupAction::HandBack(Generation(2))]);

    let (mut backup, mut actions) = (standing(), Vec::new());
    backup.handle(at(2), gone(), &mut actions);
    backup.handle(at(3), granted(), &mut actions);
    backup.handle(at(4), BackupEvent::Doomed, &mut actions);
    backup.handle(at(5), BackupEvent::Starts, &mut actions);
    assert!(!backup.may_start() && !backup.may_run());
}

#[test]
fn a_backup_that_cannot_ask_hangs_up_so_that_the_primary_may_ask() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    backup.handle(at(2), BackupEvent::TakeOver, &mut actions);
    actions.clear();
    let silent = Verdict::Unreachable("no answer".into());
    backup.handle(at(3), BackupEvent::Verdict(silent), &mut actions);
    assert_eq!(actions, [BackupAction::ClosePeer]);
    actions.clear();
    backup.handle(at(203), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, [BackupAction::Contest(Generation(1))], "and asks on");
}

#[test]
fn a_backup_that_cannot_ask_lets_go_when_the_primary_owns_a_later_generation() {
    let mut backup = Backup::new(Generation(3), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    let owned = |generation| {
        let (host, generation) = (Some(crate::literal("a")), Generation(generation));
        BackupEvent::OwnedElsewhere(Ownership { host, generation })
    };
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    backup.handle(at(2), owned(4), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Standing, "it follows somebody");
    backup.handle(at(2), BackupEvent::PeerGone("the link was cut".into()), &mut actions);
    let silent = Verdict::Unreachable("no answer".into());
    backup.handle(at(3), BackupEvent::Verdict(silent), &mut actions);
    backup.handle(at(4), owned(3), &mut actions);
    assert!(matches!(backup.phase(), BackupPhase::Contesting(_)), "that is what it had");
    actions.clear();
    backup.handle(at(5), owned(4), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Discarded);
    assert!(
        matches!(&actions[..], [BackupAction::Discard(words)] if words.contains("as that host says"))
    );
    backup.handle(at(6), BackupEvent::Verdict(Verdict::Granted(Generation(4))), &mut actions);
    assert!(matches!(backup.phase(), BackupPhase::HandingBack(_)), "an answer that comes too late");
}

#[test]
fn a_primary_that_holds_nothing_is_waited_for() {
    let new = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut backup = new.with_output(Output::Unheld);
    let mut actions = Vec::new();
    backup.handle(at(100), BackupEvent::Staged(Epoch(1)), &mut actions);
    let asked = backup.clone();
    actions.clear();
    backup.handle(at(101), BackupEvent::PeerGone("it hung up".into()), &mut actions);
    assert_eq!(actions, [BackupAction::ClosePeer]);
    actions.clear();
    backup.handle(at(1_199), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, []);
    backup.handle(at(1_200), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, [BackupAction::Contest(Generation(1))]);
    let mut backup = asked;
    actions.clear();
    backup.handle(at(101), BackupEvent::TakeOver, &mut actions);
    assert_eq!(actions, [BackupAction::Contest(Generation(1))], "it was asked to");
}

#[test]
fn a_long_silence_ends_the_first_synchronisation() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(2_001), BackupEvent::Tick, &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Discarded);
}

#[test]
fn a_winner_that_cannot_start_hands_the_vm_back() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    let early = BackupEvent::NotStarted("it broke".into());
    backup.handle(at(2), early.clone(), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Standing, "it has won nothing");
    backup.handle(at(2), BackupEvent::TakeOver, &mut actions);
    let granted = BackupEvent::Verdict(Verdict::Granted(Generation(2)));
    backup.handle(at(3), granted, &mut actions);
    actions.clear();
    let mut handle = |ms, event| {
        backup.handle(at(ms), event, &mut actions);
        (std::mem::take(&mut actions), backup.phase().clone())
    };
    let back = BackupAction::HandBack(Generation(2));
    assert_eq!(handle(4, early).0, std::slice::from_ref(&back));
    let silent = BackupEvent::Verdict(Verdict::Unreachable("no answer".into()));
    assert_eq!(handle(5, silent).0, []);
    assert_eq!(handle(100, BackupEvent::CannotServe("QEMU ended".into())).0, [], "it must ask on");
    assert_eq!(handle(205, BackupEvent::Tick).0, [back]);
    let (discarded, phase) = handle(206, BackupEvent::Verdict(Verdict::Granted(Generation(3))));
    assert_eq!(discarded, [BackupAction::Discard("it broke; handed back".into())]);
    assert_eq!(phase, BackupPhase::Discarded);
}

#[test]
fn a_winner_whose_copy_died_gives_it_to_whoever_waits_at_once_unless_it_runs() {
    for runs in [false, true] {
        let (mut backup, mut actions) = (winner(), Vec::new());
        backup.handle(at(4), BackupEvent::Awaited, &mut actions);
        backup.handle(at(5), BackupEvent::CannotServe("QEMU ended".into()), &mut actions);
        assert_eq!(actions, [], "nobody is known to be there who could take it");
        if runs {
            backup.handle(at(6), BackupEvent::Starts, &mut actions);
        }
        backup.handle(at(7), BackupEvent::Awaited, &mut actions);
        let back = [BackupAction::HandBack(Generation(2))];
        assert_eq!(actions, if runs { &[][..] } else { &back[..] });
    }
}

#[test]
fn a_grant_that_comes_too_late_is_returned() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    backup.handle(at(2), BackupEvent::TakeOver, &mut actions);
    backup.handle(at(3), BackupEvent::CannotServe("QEMU ended".into()), &mut actions);
    actions.clear();
    backup.handle(at(4), BackupEvent::Verdict(Verdict::Granted(Generation(2))), &mut actions);
    assert_eq!(actions, [BackupAction::HandBack(Generation(2))]);
    actions.clear();
    let taken = Ownership { host: Some(crate::literal("c")), generation: Generation(3) };
    backup.handle(at(5), BackupEvent::Verdict(Verdict::Taken(taken)), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Discarded, "somebody has it");
}

#[test]
fn a_winner_that_hangs_hands_the_vm_back_to_whoever_keeps_it() {
    let (mut backup, mut actions) = (winner(), Vec::new());
    let mut started = backup.clone();
    for (ms, back) in [(5_003, vec![]), (5_004, vec![BackupAction::HandBack(Generation(2))])] {
        backup.handle(at(ms), BackupEvent::Awaited, &mut actions);
        assert_eq!(actions, back);
    }
    backup.handle(at(5_005), BackupEvent::Starts, &mut actions);
    assert!(!backup.may_run(), "it woke up too late");
    started.handle(at(5_003), BackupEvent::Starts, &mut Vec::new());
    assert!(started.may_run());
    actions.clear();
    started.handle(at(60_000), BackupEvent::Awaited, &mut actions);
    assert_eq!(actions, []);
}

/// The VM was once nobody's: its former primary had lost it, and kept it for a host that did not
/// know.
#[test]
fn a_grant_that_was_not_heard_of_is_returned_by_a_copy_that_cannot_be_started() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    backup.handle(at(2), BackupEvent::TakeOver, &mut actions);
    let silence = Verdict::Unreachable("no answer".into());
    backup.handle(at(3), BackupEvent::Verdict(silence), &mut actions);
    actions.clear();
    let mut fit = backup.clone();
    fit.handle(at(4), BackupEvent::Awaited, &mut actions);
    assert_eq!(actions, [], "it asks again, and goes on");
    backup.handle(at(4), BackupEvent::Fitness(Some("its disk hangs".into())), &mut actions);
    backup.handle(at(5), BackupEvent::Awaited, &mut actions);
    assert_eq!(actions, [BackupAction::HandBack(Generation(2))]);
    actions.clear();
    let granted = |generation| BackupEvent::Verdict(Verdict::Granted(Generation(generation)));
    backup.handle(at(6), granted(2), &mut actions);
    assert!(matches!(backup.phase(), BackupPhase::HandingBack(_)), "that is the grant itself");
    backup.handle(at(7), BackupEvent::Awaited, &mut actions);
    assert_eq!(actions, []);
    backup.handle(at(8), granted(3), &mut actions);
    assert_eq!(*backup.phase(), BackupPhase::Discarded);
}

#[test]
fn a_copy_that_could_not_be_started_does_not_ask_before_it_could() {
    let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
    let mut actions = Vec::new();
    backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
    backup.handle(at(2), BackupEvent::Fitness(Some("its disk hangs".into())), &mut actions);
    actions.clear();
    backup.handle(at(3), BackupEvent::TakeOver, &mut actions);
    assert_eq!(actions, [BackupAction::ClosePeer], "the primary may go on");
    actions.clear();
    backup.handle(at(9_000), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, []);
    backup.handle(at(9_001), BackupEvent::Fitness(None), &mut actions);
    backup.handle(at(9_002), BackupEvent::Tick, &mut actions);
    assert_eq!(actions, [BackupAction::Contest(Generation(1))]);
}
