use super::*;
use understudy_protocol::HostName;
use understudy_protocol::Ownership;

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

/// A group, and what it is told.
struct Played {
    standby: Standby,
    now: Time,
}

impl Played {
    fn new(size: usize) -> Played {
        let core = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut standby = Standby::new(core, size);
        (0..size).for_each(|_| assert!(standby.join()));
        Played { standby, now: at(0) }
    }

    fn tell(&mut self, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.standby.handle(self.now, event, &mut effects);
        effects
    }

    /// The errands that come of it.
    fn errands(&mut self, event: Event) -> Vec<(Place, Errand)> {
        let errand = |effect| match effect {
            Effect::Do(place, errand) => Some((place, errand)),
            _ => None,
        };
        self.tell(event).into_iter().filter_map(errand).collect()
    }

    fn did(&mut self, errand: Errand) -> Vec<Errand> {
        let next = self.errands(Event::Done(0, errand, Ok(())));
        next.into_iter().map(|(_, errand)| errand).collect()
    }

    fn failed(&mut self, errand: Errand, reason: &str) -> Vec<Effect> {
        self.tell(Event::Done(0, errand, Err(reason.to_owned())))
    }

    /// Epoch 1 is applied, and this host has won.
    fn won(size: usize) -> Played {
        let mut played = Played::new(size);
        for place in 0..size {
            played.tell(Event::Staged(place, Epoch(1)));
        }
        played.tell(Event::PeerLost("silence".to_owned()));
        played.win();
        played
    }

    fn win(&mut self) {
        self.tell(Event::Verdict(Verdict::Granted(Generation(2))));
        self.have_all_done(&[Errand::Apply(Epoch(1)), Errand::Settle]);
    }

    /// [`Played::won`], and the records of all are written.
    fn recorded(size: usize) -> Played {
        let mut played = Played::won(size);
        played.record();
        played
    }

    fn record(&mut self) {
        self.have_all_done(&[Errand::Complete, Errand::Settle, Errand::Activate(Generation(2))]);
    }

    /// One after the other: some wait until all members have done them.
    fn have_all_done(&mut self, errands: &[Errand]) {
        for errand in errands {
            for place in 0..self.standby.joined() {
                self.tell(Event::Done(place, errand.clone(), Ok(())));
            }
        }
    }
}

fn taken() -> Verdict {
    let host: HostName = "c".parse().unwrap();
    Verdict::Taken(Ownership { host: Some(host), generation: Generation(2) })
}

#[test]
fn a_member_does_one_errand_at_a_time_and_in_order() {
    let mut played = Played::new(1);
    let first = played.tell(Event::Staged(0, Epoch(1)));
    let expected = [
        Effect::Commit(0, Epoch(1)),
        Effect::Do(0, Errand::Apply(Epoch(1))),
        Effect::Acknowledge(Epoch(1)),
    ];
    assert_eq!(first, expected);
    assert_eq!(
        played.tell(Event::Staged(0, Epoch(2))),
        [Effect::Commit(0, Epoch(2)), Effect::Acknowledge(Epoch(2))]
    );
    assert_eq!(played.did(Errand::Apply(Epoch(1))), [Errand::Apply(Epoch(2))]);
    assert_eq!(played.standby.applied(0), Epoch(1));
    assert_eq!(played.tell(Event::Logged(Epoch(3))), [Effect::Acknowledge(Epoch(3))]);
    assert_eq!(played.did(Errand::Apply(Epoch(2))), []);
}

// Before, epoch 2 was applied behind a failed epoch 1, and completed the mirrors.
#[test]
fn after_one_failure_nothing_is_applied_any_more() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    played.tell(Event::Staged(0, Epoch(2)));
    let effects = played.failed(Errand::Apply(Epoch(1)), "the disk is full");
    let words = "epoch 1 could not be applied: the disk is full".to_owned();
    assert!(effects.contains(&Effect::Say(0, Word::Refuse(words))), "{effects:?}");
    assert!(effects.contains(&Effect::Do(0, Errand::Skip(Epoch(2)))), "{effects:?}");
    assert_eq!(played.did(Errand::Skip(Epoch(2))), [Errand::Forget]);
}

#[test]
fn whoever_wins_settles_and_writes_its_record_before_the_guest_runs() {
    let mut played = Played::won(1);
    assert_eq!(played.did(Errand::Complete), [Errand::Settle]);
    assert_eq!(played.did(Errand::Settle), [Errand::Activate(Generation(2))]);
    assert_eq!(played.did(Errand::Activate(Generation(2))), [Errand::Start]);
    assert!(!played.standby.may_hang_up(0), "the primary is to hear that first");
    assert_eq!(played.did(Errand::Start), [Errand::Open]);
    let effects = played.tell(Event::Done(0, Errand::Open, Ok(())));
    let expected = [
        Effect::Say(0, Word::Live(Generation(2))),
        Effect::Close(0),
        Effect::Do(0, Errand::End(Ending::Live(Generation(2), "silence".to_owned()))),
    ];
    assert_eq!(effects, expected);
    assert!(played.standby.may_hang_up(0));
}

#[test]
fn what_cannot_be_started_is_ended_then_handed_back() {
    let mut played = Played::won(1);
    played.did(Errand::Complete);
    played.did(Errand::Settle);
    played.did(Errand::Activate(Generation(2)));
    let effects = played.failed(Errand::Start, "no KVM");
    assert_eq!(effects, [Effect::Do(0, Errand::Halt)]);
    let effects = played.tell(Event::Done(0, Errand::Halt, Ok(())));
    assert_eq!(effects, [Effect::HandBack(Generation(2))]);
    let returned = Event::Verdict(Verdict::Granted(Generation(3)));
    assert_eq!(played.errands(returned), [(0, Errand::Forget)]);
    assert_eq!(played.did(Errand::Forget), []);
    let gone = played.errands(Event::DataEnded(0, "hung up".to_owned()));
    assert_eq!(gone, [(0, Errand::End(Ending::Returned("no KVM".to_owned())))]);
}

#[test]
fn what_was_handed_back_while_its_disk_hung_is_not_started() {
    let mut played = Played::won(1);
    played.did(Errand::Complete);
    played.now = at(6_000);
    assert_eq!(played.tell(Event::Awaited), [Effect::HandBack(Generation(2))]);
    assert_eq!(played.did(Errand::Settle), [Errand::Halt]);
    assert_eq!(played.tell(Event::Done(0, Errand::Halt, Ok(()))), []);
}

// Before, nothing was handed back from the record's first byte on, and the guest stood still on its host for ever.
#[test]
fn what_was_handed_back_while_its_record_hung_is_not_started() {
    let mut played = Played::won(1);
    played.did(Errand::Complete);
    assert_eq!(played.did(Errand::Settle), [Errand::Activate(Generation(2))]);
    played.now = at(6_000);
    assert_eq!(played.tell(Event::Awaited), [Effect::HandBack(Generation(2))]);
    assert_eq!(played.did(Errand::Activate(Generation(2))), [Errand::Halt]);
    assert_eq!(played.tell(Event::Done(0, Errand::Halt, Ok(()))), []);
}

// Before, the first member that was settled took the hand-back from all.
#[test]
fn a_group_of_which_one_disk_hangs_is_handed_back() {
    let mut played = Played::won(2);
    played.did(Errand::Complete);
    assert_eq!(played.did(Errand::Settle), [], "it waits for the other");
    played.tell(Event::Done(1, Errand::Complete, Ok(())));
    played.now = at(6_000);
    assert_eq!(played.tell(Event::Awaited), [Effect::HandBack(Generation(2))]);
    let late = played.errands(Event::Done(1, Errand::Settle, Ok(())));
    assert_eq!(late, [(0, Errand::Halt), (1, Errand::Halt)]);
}

#[test]
fn a_member_that_cannot_be_settled_keeps_the_others_from_their_records() {
    let mut played = Played::won(2);
    played.did(Errand::Complete);
    assert_eq!(played.did(Errand::Settle), []);
    played.tell(Event::Done(1, Errand::Complete, Ok(())));
    let lost = Event::Done(1, Errand::Settle, Err("its disk failed".to_owned()));
    assert_eq!(played.errands(lost), [(0, Errand::Halt), (1, Errand::Halt)]);
    let copy = |place: Place| played.standby.members[place].copy.clone();
    assert_eq!(copy(1), Copy::Failed("its disk failed".to_owned()));
    let why = "another VM of the group cannot: its disk failed";
    assert_eq!(copy(0), Copy::Failed(why.to_owned()));
}

#[test]
fn the_members_of_a_group_go_live_all_or_none() {
    for sound in [true, false] {
        let mut played = Played::won(2);
        for place in 0..2 {
            played.tell(Event::Done(place, Errand::Complete, Ok(())));
            played.tell(Event::Done(place, Errand::Settle, Ok(())));
        }
        let record = Errand::Activate(Generation(2));
        assert_eq!(played.errands(Event::Done(0, record.clone(), Ok(()))), [], "it waits");
        let result = if sound { Ok(()) } else { Err("no room".to_owned()) };
        let next = if sound { Errand::Start } else { Errand::Halt };
        let expected = [(0, next.clone()), (1, next)];
        assert_eq!(played.errands(Event::Done(1, record, result)), expected);
        let why = Copy::Failed("another VM of the group cannot: no room".to_owned());
        assert_eq!(played.standby.members[0].copy == why, !sound);
    }
}

// Before, a member that started was live at once, and the former primary halted all of the group for its sake.
#[test]
fn a_group_of_which_one_guest_cannot_be_started_is_handed_back_once_none_runs() {
    for order in [[0, 1], [1, 0]] {
        let mut played = Played::recorded(2);
        assert_eq!(played.tell(Event::Awaited), []);
        let result = |place| if place == 0 { Ok(()) } else { Err("no KVM".to_owned()) };
        let start = |place| Event::Done(place, Errand::Start, result(place));
        assert_eq!(played.tell(start(order[0])), [], "nothing leaves it, and nobody hears of it");
        let halts = [Effect::Do(0, Errand::Halt), Effect::Do(1, Errand::Halt)];
        assert_eq!(played.tell(start(order[1])), halts);
        assert_eq!(played.tell(Event::Done(0, Errand::Halt, Ok(()))), [], "the other may run");
        let effects = played.tell(Event::Done(1, Errand::Halt, Ok(())));
        assert_eq!(effects, [Effect::HandBack(Generation(2))]);
    }
}

#[test]
fn the_members_of_a_group_are_heard_once_all_run() {
    let mut played = Played::recorded(2);
    assert_eq!(played.errands(Event::Done(1, Errand::Start, Ok(()))), []);
    let open = [(0, Errand::Open), (1, Errand::Open)];
    assert_eq!(played.errands(Event::Done(0, Errand::Start, Ok(()))), open);
}

// Before, the group was handed back to the dead host, and no member ran anywhere.
#[test]
fn what_can_be_started_of_a_group_goes_on_where_its_former_host_is_dead() {
    for guest_died in [false, true] {
        let mut played = Played::new(2);
        (0..2).for_each(|place| drop(played.tell(Event::Staged(place, Epoch(1)))));
        played.tell(Event::Heard);
        match guest_died {
            true => played.tell(Event::TakeOver { planned: false }),
            false => played.tell(Event::PeerLost("silence".to_owned())),
        };
        played.win();
        played.record();
        let lost = Event::Done(1, Errand::Start, Err("no KVM".to_owned()));
        assert_eq!(played.tell(lost), [], "the other may run");
        let failed = Ending::Failed(Generation(2), "no KVM".to_owned());
        let expected = [
            Effect::Do(0, Errand::Open),
            Effect::Say(1, Word::Live(Generation(2))),
            Effect::Close(1),
            Effect::Do(1, Errand::End(failed)),
        ];
        assert_eq!(played.tell(Event::Done(0, Errand::Start, Ok(()))), expected);
    }
}

#[test]
fn a_group_goes_back_to_a_former_host_that_is_heard_or_hands_it_over() {
    for planned in [false, true] {
        let mut played = Played::new(2);
        (0..2).for_each(|place| drop(played.tell(Event::Staged(place, Epoch(1)))));
        played.tell(Event::TakeOver { planned });
        played.win();
        if !planned {
            played.tell(Event::Heard);
        }
        played.record();
        played.tell(Event::Done(1, Errand::Start, Err("no KVM".to_owned())));
        let halts = [(0, Errand::Halt), (1, Errand::Halt)];
        assert_eq!(played.errands(Event::Done(0, Errand::Start, Ok(()))), halts);
    }
}

#[test]
fn the_primary_hears_why_before_a_connection_ends() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    played.did(Errand::Apply(Epoch(1)));
    let effects = played.tell(Event::CannotServe("its QEMU died".to_owned()));
    assert!(effects.contains(&Effect::Say(0, Word::Refuse("its QEMU died".to_owned()))));
    assert!(played.standby.is_over() && !played.standby.may_hang_up(0));
    assert_eq!(played.did(Errand::Forget), [], "the primary has yet to hang up");
    played.now = at(1_900);
    assert_eq!(played.tell(Event::Tick), []);
    played.now = at(2_000);
    let end = Effect::Do(0, Errand::End(Ending::Discarded));
    assert_eq!(played.tell(Event::Tick), [Effect::Close(0), end]);
    assert!(played.standby.may_hang_up(0));
    assert_eq!(played.tell(Event::Tick), []);
}

#[test]
fn whoever_lost_or_was_let_go_does_not_wait_for_a_primary_that_has_hung_up() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    played.did(Errand::Apply(Epoch(1)));
    played.tell(Event::DataEnded(0, "reset".to_owned()));
    played.did(Errand::Settle);
    played.tell(Event::Verdict(taken()));
    assert_eq!(played.did(Errand::Forget), [Errand::End(Ending::Discarded)]);

    let mut played = Played::new(1);
    assert_eq!(played.errands(Event::StandDown), [(0, Errand::Forget)]);
    // Before, it could: to the primary a backup that took its time to forget was silent.
    assert!(!played.standby.may_hang_up(0), "it has yet to say that all is forgotten");
    let effects = played.tell(Event::Done(0, Errand::Forget, Ok(())));
    assert_eq!(effects[0], Effect::Say(0, Word::StoodDown));
    assert_eq!(effects[1], Effect::Close(0));
    assert!(played.standby.may_hang_up(0));
}

#[test]
fn whoever_is_let_go_applies_no_more_before_it_forgets() {
    let mut played = Played::new(1);
    (1..=3).for_each(|epoch| drop(played.tell(Event::Staged(0, Epoch(epoch)))));
    assert_eq!(played.errands(Event::StandDown), [], "one is being applied");
    assert_eq!(played.did(Errand::Apply(Epoch(1))), [Errand::Forget]);
}

#[test]
fn after_a_panic_under_the_lock_all_that_is_left_is_to_forget() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    played.standby.condemn();
    assert!(played.standby.is_over() && !played.standby.may_hang_up(0), "nobody knows yet");
    assert_eq!(played.errands(Event::Panicked("a bug".to_owned())), [(0, Errand::Forget)]);
    assert_eq!(played.did(Errand::Apply(Epoch(1))), [], "which was under way");
    assert_eq!(played.did(Errand::Forget), []);
    let ended = played.errands(Event::DataEnded(0, "hung up".to_owned()));
    assert_eq!(ended, [(0, Errand::End(Ending::Discarded))]);
}

#[test]
fn where_the_thread_that_applies_is_no_more_the_connections_end_all_the_same() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    let effects = played.tell(Event::Panicked("a bug".to_owned()));
    assert!(effects.contains(&Effect::Say(0, Word::Refuse("a bug".to_owned()))), "{effects:?}");
    played.now = at(60_000);
    played.tell(Event::Tick);
    assert!(!played.standby.may_hang_up(0), "its last errand never ends");
    assert_eq!(played.tell(Event::Abandoned), [Effect::EndLog, Effect::Close(0)]);
    assert!(played.standby.may_hang_up(0));
}

/// A turn that cannot be carried out is no turn yet, and what is committed is whole. The primary that wanted it hears
/// that, or is lost by then.
#[test]
fn a_backup_that_cannot_turn_is_one_until_its_primary_hangs_up() {
    let mut played = Played::new(1);
    played.tell(Event::Staged(0, Epoch(1)));
    let refuses = Effect::Say(0, Word::Refuse("its QEMU ended".to_owned()));
    assert_eq!(played.tell(Event::CannotTurn("its QEMU ended".to_owned())), [refuses]);
    assert_eq!(*played.standby.phase(), BackupPhase::Standing);
    let ended = played.tell(Event::DataEnded(0, "the connection ended".to_owned()));
    assert!(!ended.iter().any(|effect| matches!(effect, Effect::Contest(..))), "{ended:?}");
    played.now = played.now + YIELDS;
    played.tell(Event::Tick);
    played.win();
    assert_eq!(*played.standby.phase(), BackupPhase::Live);
    let mut forgets = Played::new(1);
    forgets.tell(Event::StandDown);
    assert_eq!(forgets.tell(Event::CannotTurn("its QEMU ended".to_owned())), []);
}
