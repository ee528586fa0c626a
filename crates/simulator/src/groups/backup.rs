//! The group's backup: each member's errands by themselves.

use super::primary::TIMEOUT;
use super::schedule::Side;
use super::world::{Event, Said, World};
use std::time::Duration;
use understudy_protocol::{Backup, BackupPhase, Epoch, Generation, Time};
use understudy_session::backup::{Awaited, Effect, Ending, Errand, Event as BackupEvent, Standby};

const LOOKS: Duration = Duration::from_millis(200);
const PROVES: Duration = Duration::from_secs(1);

/// The backup's side.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) standby: Standby,
    pub(crate) disk_fails: Vec<bool>,
    pub(crate) hangs_until: Vec<Time>,
    pub(crate) cannot_start: Vec<bool>,
    /// Since when each member's errand has been waited for.
    since: Vec<Option<Time>>,
    /// The errand of each.
    pub(crate) busy: Vec<Option<Errand>>,
    pub(crate) recorded: Vec<bool>,
    pub(crate) settled: Vec<bool>,
    pub(crate) started: Vec<bool>,
    pub(crate) open: Vec<bool>,
    pub(crate) endings: Vec<Option<Ending>>,
}

impl Backing {
    pub(crate) fn new(members: usize, now: Time) -> Backing {
        let mut standby = Standby::new(Backup::new(Generation(1), TIMEOUT, now), members);
        (0..members).for_each(|_| assert!(standby.join(), "it has just begun"));
        let none = vec![false; members];
        Backing {
            standby,
            disk_fails: none.clone(),
            hangs_until: vec![now; members],
            cannot_start: none.clone(),
            since: vec![None; members],
            busy: vec![None; members],
            recorded: none.clone(),
            settled: none.clone(),
            started: none.clone(),
            open: none,
            endings: vec![None; members],
        }
    }

    /// Whether its guests run, and are heard.
    pub(crate) fn is_live(&self) -> bool {
        self.endings.iter().any(|ending| matches!(ending, Some(Ending::Live(..))))
    }

    /// Whether nothing of the group is here any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.endings.iter().all(Option::is_some)
    }
}

impl World {
    pub(crate) fn stand_by(&mut self, event: BackupEvent) {
        let now = self.now;
        let Some(b) = &mut self.b else { return };
        let mut effects = Vec::new();
        let before = b.standby.phase().clone();
        b.standby.handle(now, event, &mut effects);
        let after = b.standby.phase().clone();
        if before != after {
            self.coverage.group_contests += u64::from(matches!(after, BackupPhase::Contesting(_)));
            self.note(Some(Side::B), || format!("{after:?}"));
        }
        effects.into_iter().for_each(|effect| self.bring_about(effect));
    }

    fn bring_about(&mut self, effect: Effect) {
        match effect {
            Effect::Acknowledge(epoch) => {
                self.check_acknowledged(epoch);
                self.send(Side::B, 0, Said::Acknowledge(epoch));
            }
            Effect::Contest(from) => self.ask(Side::B, from),
            Effect::HandBack(from) => self.soon(1, 40, Event::HandsBack(from)),
            Effect::Do(member, errand) => self.begin_errand(member, errand),
            Effect::Say(member, word) => self.send(Side::B, member, Said::Word(word)),
            Effect::Close(member) => {
                self.close(Side::B, member);
                let all = (0..self.schedule.members).all(|way| !self.ways[way].open[1]);
                if all {
                    self.close(Side::B, self.heartbeats());
                }
            }
            Effect::TellObstacle(obstacle) => {
                self.send(Side::B, 0, Said::MayTakeOver(obstacle));
            }
            _ => {}
        }
    }

    pub(crate) fn backup_hears(&mut self, way: usize, said: Said) {
        let event = match said {
            Said::Heartbeat => BackupEvent::Heard,
            Said::Part(epoch) => {
                self.truth.staged[way] = epoch;
                BackupEvent::Staged(way, epoch)
            }
            Said::TakeOver { planned } => BackupEvent::TakeOver { planned },
            Said::StandDown => BackupEvent::StandDown,
            Said::End if way == self.heartbeats() => {
                BackupEvent::PeerLost("the heartbeats ended".into())
            }
            Said::End => BackupEvent::DataEnded(way, "a connection ended".into()),
            _ => return,
        };
        self.stand_by(event);
    }

    /// The QEMU that a member's copy is in dies.
    pub(crate) fn copy_dies(&mut self, member: usize) {
        let Some(b) = &mut self.b else { return };
        if b.open[member] {
            return;
        }
        b.cannot_start[member] = true;
        self.stand_by(BackupEvent::CannotServe("its QEMU died".into()));
    }

    fn begin_errand(&mut self, member: usize, errand: Errand) {
        let now = self.now;
        if let Errand::End(ending) = errand {
            return self.ends(member, ending);
        }
        let Some(b) = &mut self.b else { return };
        (b.since[member], b.busy[member]) = (Some(now), Some(errand.clone()));
        self.check_begun(member, &errand);
        let time = match errand {
            Errand::Apply(_) => self.random.millis(1, 20),
            Errand::Skip(_) | Errand::Complete | Errand::Open => self.random.micros(10, 2_000),
            Errand::Settle | Errand::Activate(_) => self.random.millis(1, 40),
            Errand::Start | Errand::Halt | Errand::Forget => self.random.millis(2, 80),
            Errand::End(_) => Duration::ZERO,
        };
        self.after(time, Event::Done(member, errand));
    }

    pub(crate) fn done(&mut self, member: usize, errand: Errand) {
        let now = self.now;
        let Some(b) = &mut self.b else { return };
        let on_disk = matches!(errand, Errand::Apply(_) | Errand::Settle | Errand::Activate(_));
        if on_disk && b.hangs_until[member] > now {
            let later = b.hangs_until[member] - now;
            return self.after(later, Event::Done(member, errand));
        }
        (b.since[member], b.busy[member]) = (None, None);
        let result = match &errand {
            _ if on_disk && b.disk_fails[member] => Err("its disk fails".to_owned()),
            Errand::Start if b.cannot_start[member] => Err("no room".to_owned()),
            _ => Ok(()),
        };
        match (&errand, &result) {
            (Errand::Apply(_), _) => b.settled[member] = false,
            (Errand::Settle, Ok(())) => b.settled[member] = true,
            (Errand::Activate(_), Ok(())) => b.recorded[member] = true,
            (Errand::Start, Ok(())) => b.started[member] = true,
            (Errand::Halt | Errand::Forget, _) => b.started[member] = false,
            _ => {}
        }
        if result.is_err() {
            self.coverage.group_errands_failed += 1;
            self.note(Some(Side::B), || format!("member {member} fails: {errand:?}"));
        }
        match (&errand, &result) {
            (Errand::Apply(Epoch(1)), Ok(())) => self.send(Side::B, member, Said::Settled),
            (Errand::Open, _) => self.opens(member),
            _ => {}
        }
        self.stand_by(BackupEvent::Done(member, errand, result));
    }

    fn opens(&mut self, member: usize) {
        self.check_opened(member);
        if let Some(b) = &mut self.b {
            b.open[member] = true;
        }
    }

    fn ends(&mut self, member: usize, ending: Ending) {
        self.note(Some(Side::B), || format!("member {member} ends: {ending:?}"));
        match &ending {
            Ending::Live(..) => self.coverage.group_members_live += 1,
            Ending::Failed(..) => self.coverage.group_members_left_out += 1,
            Ending::Discarded => self.coverage.group_members_forgotten += 1,
            Ending::Returned(_) => self.coverage.group_members_returned += 1,
        }
        if let Some(b) = &mut self.b {
            b.endings[member] = Some(ending);
        }
    }

    pub(crate) fn look(&mut self) {
        self.after(LOOKS, Event::Look);
        let Some(b) = &self.b else { return };
        let awaited = |since: &Option<Time>| Awaited { disk: *since, qemu: None };
        let awaited: Vec<Awaited> = b.since.iter().map(awaited).collect();
        self.stand_by(BackupEvent::Look(awaited));
    }

    pub(crate) fn prove(&mut self) {
        self.after(PROVES, Event::Prove);
        let proof = match self.arbiter_answers() {
            true => Ok(()),
            false => Err("no arbiter".to_owned()),
        };
        self.stand_by(BackupEvent::Proven(proof));
    }
}
