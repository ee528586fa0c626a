use super::standing::{LONGEST_REASON, SICK};
use super::*;
use understudy_protocol::repair::{Candidate, Fitness, Repair, RepairAction, RepairEvent};

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

/// A primary that is protected by host b.
fn protected(size: usize) -> Lead {
    let core = Primary::new(Generation(1), Duration::from_millis(100), at(0));
    let mut lead = Lead::new(core, size, "b".parse().unwrap(), at(0));
    tell(&mut lead, 0, Event::Ready);
    tell(&mut lead, 1, Event::Captured);
    tell(&mut lead, 2, Event::Acknowledged(Epoch(1)));
    assert_eq!(*lead.phase(), PrimaryPhase::Protected);
    for place in 0..size {
        assert_eq!(tell(&mut lead, 3, Event::Whole(place)), []);
    }
    lead
}

fn tell(lead: &mut Lead, ms: u64, event: Event) -> Vec<Effect> {
    let mut effects = Vec::new();
    lead.handle(at(ms), event, &mut effects);
    effects
}

#[test]
fn threads_are_woken_for_what_they_wait_for_alone() {
    let mut lead = protected(1);
    let mut is_news = |ms, event| {
        let (before, effects) = (lead.stage(), tell(&mut lead, ms, event));
        (lead.has_news(&before, &effects), effects)
    };
    for event in [Event::Heard, Event::Tick, Event::Captured, Event::MayTakeOver(None)] {
        assert!(!is_news(10, event.clone()).0, "{event:?}");
    }
    assert!(is_news(20, Event::Acknowledged(Epoch(2))).0);
    assert!(is_news(20, Event::MayTakeOver(Some("its disk hangs".to_owned()))).0);
    assert!(!is_news(20, Event::Captured).0);
    // This host stood still: the acknowledgement releases nothing, but there is room for another epoch.
    let late = is_news(90, Event::Acknowledged(Epoch(3)));
    assert_eq!(late, (true, Vec::new()));
    assert!(is_news(91, Event::PeerGone("it hung up".to_owned())).0);
}

#[test]
fn a_word_grows_old_and_a_new_one_counts() {
    let mut lead = protected(1);
    assert_eq!(lead.obstacle(at(0) + FRESH), None);
    let words = lead.obstacle(at(0) + FRESH * 2).unwrap();
    assert!(words.contains("has not proved for"), "{words}");
    let unfit = tell(&mut lead, 5_000, Event::MayTakeOver(Some("no such directory".to_owned())));
    assert_eq!(unfit, [Effect::BackupUnfit("no such directory".to_owned())]);
    assert_eq!(lead.obstacle(at(5_001)).unwrap(), "no such directory");
    assert_eq!(tell(&mut lead, 5_002, Event::MayTakeOver(None)), [Effect::BackupFit]);
    assert_eq!(lead.obstacle(at(5_003)), None);
    tell(&mut lead, 5_004, Event::MayTakeOver(Some("x".repeat(5_000))));
    assert_eq!(lead.obstacle(at(5_005)).unwrap().len(), LONGEST_REASON);
}

#[test]
fn a_sick_guest_is_left_to_a_backup_that_could_go_on_with_it() {
    let mut lead = protected(1);
    tell(&mut lead, 10, Event::MayTakeOver(Some("its disk hangs".to_owned())));
    let sick = Event::GuestSick("QEMU does not answer".to_owned());
    let held = "host b could not take over: its disk hangs".to_owned();
    assert_eq!(tell(&mut lead, 20, sick.clone()), [Effect::HeldBack(held)]);
    assert_eq!(*lead.phase(), PrimaryPhase::Protected);
    tell(&mut lead, 30, Event::MayTakeOver(None));
    let effects = tell(&mut lead, 40, sick.clone());
    assert_eq!(effects[0], Effect::GiveUp("QEMU does not answer".to_owned()));
    assert_eq!(*lead.phase(), PrimaryPhase::HandingOver);
    assert_eq!(tell(&mut lead, 50, sick), [], "it is being handed over");
}

// Before, it kept its place for good, and a third host was never tried.
#[test]
fn a_backup_that_is_sick_for_long_is_told_of_and_given_up_only_while_it_is() {
    let mut lead = protected(1);
    let (sick, began) = (SICK.as_millis() as u64, 3_000);
    tell(&mut lead, began, Event::MayTakeOver(Some("its disk hangs".to_owned())));
    // It is heard all the while.
    let tick = |lead: &mut Lead, ms| {
        tell(lead, ms, Event::Heard);
        tell(lead, ms, Event::Tick)
    };
    assert_eq!(tick(&mut lead, began + sick - 1), []);
    let told = |times| [Effect::BackupSick { reason: "its disk hangs".to_owned(), times }];
    assert_eq!(tick(&mut lead, began + sick), told(1));
    assert_eq!(tick(&mut lead, began + sick + 1), [], "it is told of once");
    assert_eq!(
        tick(&mut lead, began + 2 * sick),
        told(2),
        "nobody else would do, and might by now"
    );
    let replace = || Event::Replace("c would take it".to_owned());
    let mut well = lead.clone();
    tell(&mut well, began + 2 * sick + 1, Event::MayTakeOver(None));
    assert_eq!(tell(&mut well, began + 2 * sick + 2, replace()), []);
    assert_eq!(tick(&mut well, began + 4 * sick), []);
    let effects = tell(&mut lead, began + 2 * sick + 1, replace());
    assert_eq!(effects, [Effect::Act(PrimaryAction::Contest(Generation(1)))]);
    // It hears of that once the arbiter has answered.
    let verdict = Event::Verdict(Verdict::Granted(Generation(2)), WinnersWord::default());
    let effects = tell(&mut lead, began + 2 * sick + 2, verdict);
    let expected = [PrimaryAction::ClosePeer, PrimaryAction::OpenOutput].map(Effect::Act);
    assert_eq!(effects, expected);
}

// Before, a mirror that took more than 30 s to sync was given up, and so was the next host's.
#[test]
fn a_first_copy_may_take_its_time_on_its_way_to_the_backups_disks() {
    let core = Primary::new(Generation(1), Duration::from_millis(100), at(0));
    let mut lead = Lead::new(core, 2, "b".parse().unwrap(), at(0));
    let slow = || Event::MayTakeOver(Some("its disk has not answered for 3 s".to_owned()));
    let sick = SICK.as_millis() as u64;
    let tick = |lead: &mut Lead, ms| {
        tell(lead, ms, Event::Heard);
        tell(lead, ms, Event::Tick)
    };
    tell(&mut lead, 0, Event::Ready);
    // What is synced meanwhile takes as long.
    tell(&mut lead, 1, slow());
    assert_eq!(tick(&mut lead, 2 * sick), []);
    tell(&mut lead, 2 * sick, Event::Captured);
    tell(&mut lead, 2 * sick, Event::Acknowledged(Epoch(1)));
    for since in [0, sick, 19 * sick] {
        assert_eq!(tick(&mut lead, 2 * sick + since), [], "{since} ms");
    }
    let mut hanging = lead.clone();
    let told = tick(&mut hanging, 22 * sick);
    assert!(matches!(told[..], [Effect::BackupSick { times: 1, .. }]), "{told:?}");
    tell(&mut lead, 20 * sick, Event::Whole(1));
    assert_eq!(tick(&mut lead, 21 * sick + 1), [], "the other is not");
    tell(&mut lead, 21 * sick + 2, Event::Whole(0));
    // That it answers is heard a little later.
    assert_eq!(tick(&mut lead, 21 * sick + 3), []);
    let told = tick(&mut lead, 22 * sick + 2);
    assert!(matches!(told[..], [Effect::BackupSick { times: 1, .. }]), "{told:?}");
}

/// How often a VM's backup is replaced until a first copy is whole, where every host takes so many seconds to write it.
fn replaced_until_whole(seconds: u64) -> u32 {
    let mut repair = Repair::default();
    let mut decide = |now: u64, event| {
        let mut actions = Vec::new();
        repair.handle(at(now), 0, event, &mut actions);
        actions
    };
    let survey = |hosts: [&str; 2]| {
        let fit = |host: &str| Candidate {
            host: host.to_owned().parse().unwrap(),
            answer: Ok(Fitness::default()),
        };
        RepairEvent::Surveyed(hosts.map(fit).to_vec())
    };
    let (mut now, mut hosts, mut replaced) = (1_000, ["b", "c"], 0);
    loop {
        let core = Primary::new(Generation(1), Duration::from_millis(100), at(now));
        let mut lead = Lead::new(core, 1, hosts[0].parse().unwrap(), at(now));
        let began = now;
        for event in [Event::Ready, Event::Captured, Event::Acknowledged(Epoch(1))] {
            tell(&mut lead, now, event);
        }
        decide(now, RepairEvent::Protected);
        tell(&mut lead, now, Event::MayTakeOver(Some("its disk has not answered".to_owned())));
        loop {
            now += 1_000;
            if now >= began + seconds * 1_000 {
                return replaced;
            }
            tell(&mut lead, now, Event::Heard);
            let told = tell(&mut lead, now, Event::Tick).pop();
            let Some(Effect::BackupSick { reason, times }) = told else { continue };
            let host = hosts[0].to_owned().parse().unwrap();
            if decide(now, RepairEvent::Sick { host, reason, times }).is_empty() {
                continue;
            }
            let actions = decide(now, survey(["b", "c"]));
            assert!(matches!(actions[..], [RepairAction::Replace(_)]), "{actions:?}");
            decide(now, RepairEvent::Lost("given up".to_owned()));
            hosts.reverse();
            let next = hosts[0].to_owned().parse().unwrap();
            let attempt = decide(now, survey(["b", "c"]));
            assert_eq!(attempt, [RepairAction::Attempt(next)], "the one that failed comes last");
            replaced += 1;
            break;
        }
    }
}

// Before, from 30 s on a VM was never protected.
#[test]
fn where_every_host_is_slow_a_first_copy_becomes_whole_all_the_same() {
    assert_eq!(replaced_until_whole(30), 0);
    assert_eq!(replaced_until_whole(9 * 60), 0);
    assert_eq!(replaced_until_whole(15 * 60), 2);
    assert_eq!(replaced_until_whole(2 * 3_600), 8);
}

#[test]
fn whoever_cannot_save_its_guest_contests_it_where_nobody_else_could_go_on() {
    let mut lead = protected(1);
    tell(&mut lead, 10, Event::MayTakeOver(Some("no arbiter".to_owned())));
    let effects = tell(&mut lead, 20, Event::CannotCapture("no space".to_owned()));
    assert!(effects.contains(&Effect::Act(PrimaryAction::Contest(Generation(1)))), "{effects:?}");
}

#[test]
fn while_the_backup_forgets_the_vm_its_last_word_counts() {
    let mut lead = protected(2);
    tell(&mut lead, 10, Event::Unprotect);
    assert_eq!(tell(&mut lead, 11, Event::LostAside("heartbeat: end".to_owned())), []);
    assert_eq!(tell(&mut lead, 12, Event::StoodDown(1)), [], "one member of two");
    tell(&mut lead, 13, Event::StoodDown(0));
    assert_eq!(*lead.phase(), PrimaryPhase::Alone(None));
}

#[test]
fn the_arbiters_word_comes_before_that_of_a_winner() {
    let owner = |generation| understudy_protocol::Ownership {
        host: Some("b".parse().unwrap()),
        generation: Generation(generation),
    };
    let lost = || {
        let mut lead = protected(1);
        tell(&mut lead, 10, Event::PeerGone("reset".to_owned()));
        let word = WinnersWord::default();
        tell(&mut lead, 11, Event::Verdict(Verdict::Taken(owner(2)), word));
        assert!(matches!(lead.phase(), PrimaryPhase::Frozen(_)));
        lead
    };
    let ran = WinnersWord { runs: None, ran: Some(Generation(2)) };
    let mut lead = lost();
    tell(&mut lead, 20, Event::Verdict(Verdict::Returned(Generation(3)), ran));
    assert!(matches!(lead.phase(), PrimaryPhase::Alone(_)), "it came back since");
    let mut lead = lost();
    tell(&mut lead, 20, Event::Verdict(Verdict::Unreachable("no answer".to_owned()), ran));
    assert!(matches!(lead.phase(), PrimaryPhase::Frozen(_)), "nobody knows");
    tell(&mut lead, 30, Event::Verdict(Verdict::Taken(owner(2)), ran));
    assert!(matches!(lead.phase(), PrimaryPhase::Halted(_)));
}

// Before, all members were halted, which nobody else had.
#[test]
fn a_member_that_dies_in_the_first_copy_takes_none_of_its_group_along() {
    let syncing = |size| {
        let core = Primary::new(Generation(1), Duration::from_millis(100), at(0));
        let mut lead = Lead::new(core, size, "b".parse().unwrap(), at(0));
        tell(&mut lead, 0, Event::Ready);
        lead
    };
    let died = || Event::QemuDied("killed".to_owned());
    let apart = [PrimaryAction::ClosePeer, PrimaryAction::OpenOutput].map(Effect::Act);
    let mut group = syncing(2);
    assert_eq!(tell(&mut group, 1, died()), apart);
    assert_eq!(tell(&mut group, 2, died()), [], "told once more, it ended the other one");
    // What is on its way may be all that there is of the one that died.
    let mut on_its_way = syncing(2);
    tell(&mut on_its_way, 1, Event::Captured);
    let contest = Effect::Act(PrimaryAction::Contest(Generation(1)));
    assert!(tell(&mut on_its_way, 2, died()).contains(&contest));
    assert_eq!(tell(&mut on_its_way, 3, died()), [], "the arbiter decides");
    let halt = [Effect::Act(PrimaryAction::Halt("killed".to_owned()))];
    assert_eq!(tell(&mut syncing(1), 1, died()), halt, "there is nothing else");
    let lost = Event::GuestDied("another host has it".to_owned());
    assert!(matches!(tell(&mut syncing(2), 1, lost)[..], [Effect::Act(PrimaryAction::Halt(_))]));
    // An epoch of all members is on the backup, which takes them over.
    let both = tell(&mut protected(2), 5, died());
    assert_eq!(both[0], Effect::Act(PrimaryAction::YieldToBackup));
    let mut released = protected(2);
    tell(&mut released, 5, Event::Unprotect);
    assert_eq!(tell(&mut released, 6, died()), [], "the backup forgets them, and they go on");
}

#[test]
fn a_planned_fail_over_that_a_death_came_before_is_none() {
    let mut lead = protected(1);
    tell(&mut lead, 4, Event::HandOver);
    let mut moved = lead.clone();
    tell(&mut lead, 5, Event::QemuDied("killed".to_owned()));
    assert!(lead.is_elsewhere() && !lead.has_gone_over());
    tell(&mut moved, 5, Event::CapturedLast);
    tell(&mut moved, 6, Event::Acknowledged(Epoch(2)));
    tell(&mut moved, 7, Event::LiveElsewhere(Generation(2)));
    assert!(moved.has_gone_over());
}
