//! A group, seen from the primary. A VM that is protected by itself is a group of one.
//!
//! The members share one state machine, [`Primary`], which decides about output and ownership. Here
//! is what is decided around it: whether the backup could take over now, and so who goes on with a
//! guest that is sick; whose word counts, and when; what a winner's word is worth.

mod due;
mod standing;
mod turn;

pub use due::{Asked, Guests, next_step};
pub use turn::{Look, MACHINE, NoTurn, TURN_PATIENCE, Turning, Way};

use crate::Place;
use crate::hand_back::WinnersWord;
use standing::{FRESH, Standing};
use std::ops::Deref;
use std::time::Duration;
use understudy_protocol::{
    Epoch, Generation, Headway, HostName, Primary, PrimaryAction, PrimaryEvent, PrimaryPhase, Time,
    Verdict, planted,
};

/// An event that happens to the primary of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The backup is ready with a member.
    Ready,
    /// The backup's word about itself: why it could not take over; nothing if it could.
    MayTakeOver(Option<String>),
    /// A checkpoint placed its barrier.
    Captured,
    /// The last checkpoint of a planned fail-over did.
    CapturedLast,
    /// The backup holds the whole of this epoch.
    Acknowledged(Epoch),
    /// A member's first copy is on the backup's disks.
    Whole(Place),
    /// Any sign of life of the backup.
    Heard,
    /// The data connection to the backup ended, or the backup refused to go on.
    PeerGone(String),
    /// A connection to the backup ended that does not carry its words.
    LostAside(String),
    /// Headway: so much has got to the backup by now.
    Headway(Headway),
    /// Time has passed.
    Tick,
    /// The arbiter answered; before it was asked whoever has won the VM said this.
    Verdict(Verdict, WinnersWord),
    /// The operator wants a planned fail-over.
    HandOver,
    /// Another host is to be the backup instead of this one, for this reason.
    Replace(String),
    /// The operator wants no more protection.
    Unprotect,
    /// Whoever wanted no more waits no longer: an end that comes later is a loss.
    StillWanted,
    /// The backup has forgotten a member.
    StoodDown(Place),
    /// The backup runs the VM at this generation.
    LiveElsewhere(Generation),
    /// The guest does not go on here, although its QEMU lives: it hangs, or its disk does.
    GuestSick(String),
    /// No checkpoint of the guest can be taken any more, although its QEMU lives.
    CannotCapture(String),
    /// A member's guest must not run here any more, nor any of its group, for this reason, although the host lives.
    GuestDied(String),
    /// A member's QEMU died although the host lives.
    QemuDied(String),
}

/// An effect that must be brought about, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The state machine's word, for each member.
    Act(PrimaryAction),
    /// The backup could not take over any more, for this reason.
    BackupUnfit(String),
    /// The backup could take over again.
    BackupFit,
    /// It has not been able to for long, for this reason: another host should be the backup, if there is one.
    BackupSick {
        /// The reason.
        reason: String,
        /// How many times as long as it is borne with: it is told of each time.
        times: u32,
    },
    /// The backup is to go on with a guest that is sick, for this reason.
    GiveUp(String),
    /// The backup could not go on with it, for this reason: there is nothing better than to wait.
    HeldBack(String),
}

impl Effect {
    /// The reason why a sick guest stays where it is.
    pub fn into_held_back(self) -> Option<String> {
        match self {
            Effect::HeldBack(obstacle) => Some(obstacle),
            _ => None,
        }
    }
}

/// The stage that protection has got to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The phase.
    pub phase: PrimaryPhase,
    /// The last epoch that the backup acknowledged.
    pub committed: Epoch,
}

/// The primary of a group. What is only to be read is its state machine's.
#[derive(Clone, Debug)]
pub struct Lead {
    core: Primary,
    peer: HostName,
    standing: Standing,
    /// The members whose first copy is on the backup's disks.
    whole: Vec<bool>,
    /// The members whose backup has said its last word.
    stood_down: Vec<bool>,
    hand_over: bool,
}

impl Deref for Lead {
    type Target = Primary;
    fn deref(&self) -> &Primary {
        &self.core
    }
}

impl Lead {
    /// The stage that protection has got to.
    pub fn stage(&self) -> Stage {
        Stage { phase: self.core.phase().clone(), committed: self.core.committed() }
    }

    /// Whether an event that brought these effects about, at a stage before, has changed anything that somebody
    /// may wait for: no sign of life has, of which there are many, and no capture.
    pub fn has_news(&self, before: &Stage, effects: &[Effect]) -> bool {
        let is_there =
            before.phase == *self.core.phase() && before.committed == self.core.committed();
        !effects.is_empty() || !is_there
    }

    /// A group of so many members, whose state machine this is and whose backup is the host `peer`.
    pub fn new(core: Primary, size: usize, peer: HostName, now: Time) -> Lead {
        let standing = Standing::new(FRESH, now);
        let none = vec![false; size];
        Lead { core, peer, standing, whole: none.clone(), stood_down: none, hand_over: false }
    }

    /// The same, for which a backup's word on itself counts for so long.
    pub fn with_freshness(self, fresh: Duration, now: Time) -> Lead {
        Lead { standing: Standing::new(fresh, now), ..self }
    }

    /// The same, for which a backup is to be replaced that could not take over for so long.
    pub fn with_patience(self, sick: Duration) -> Lead {
        Lead { standing: self.standing.lasting_after(sick), ..self }
    }

    /// So many epochs may be captured and not acknowledged, from now on.
    pub fn set_pipeline(&mut self, epochs: u64) {
        self.core.set_pipeline(epochs);
    }

    /// The reason why the backup could not take over at `now`, if it could not.
    pub fn obstacle(&self, now: Time) -> Option<String> {
        self.standing.obstacle(now)
    }

    /// The reason why the guest's output waits for longer than it should, although its backup could
    /// take over, if it does: nobody is called protected meanwhile.
    pub fn delay(&self, now: Time) -> Option<String> {
        let age = self.core.overdue(now).filter(|_| !planted!(CallSlowProtected))?;
        let (epoch, seconds) = (self.core.committed().next(), age.as_secs_f64());
        Some(format!("output has waited for it for {seconds:.1} s: epoch {epoch} is not on it yet"))
    }

    /// Whether a member's first copy is not yet on the backup's disks.
    fn is_first_copy(&self) -> bool {
        self.whole.contains(&false)
    }

    /// Whether a planned fail-over was asked for.
    pub fn is_handed_over(&self) -> bool {
        self.hand_over
    }

    /// Whether a planned fail-over that was asked for has ended as such: the guest goes on where it was, on the other host.
    pub fn has_gone_over(&self) -> bool {
        self.hand_over && self.core.goes_on_elsewhere()
    }

    /// Ends it whatever its state is: to be called when that may be half changed.
    pub fn condemn(&mut self, reason: &str) {
        self.core.condemn(reason);
    }

    /// Takes one event; appends what must be done to `effects`.
    pub fn handle(&mut self, now: Time, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Ready => {
                self.standing.begin(now);
                self.decide(now, PrimaryEvent::Heard, effects);
            }
            Event::MayTakeOver(obstacle) => effects.extend(self.standing.heard(now, obstacle)),
            Event::Captured => self.decide(now, PrimaryEvent::Captured, effects),
            Event::CapturedLast => self.decide(now, PrimaryEvent::CapturedLast, effects),
            Event::Acknowledged(epoch) => {
                let syncs = *self.core.phase() == PrimaryPhase::Syncing;
                self.decide(now, PrimaryEvent::Acknowledged(epoch), effects);
                if syncs && *self.core.phase() == PrimaryPhase::Protected {
                    self.standing.count_anew(now);
                }
            }
            Event::Whole(place) => {
                self.whole[place] = true;
                if !self.is_first_copy() {
                    self.standing.count_anew(now);
                }
            }
            Event::Heard => self.decide(now, PrimaryEvent::Heard, effects),
            Event::PeerGone(reason) => self.decide(now, PrimaryEvent::PeerGone(reason), effects),
            // While the backup forgets the VM, and others of its group, it hangs up: then its last
            // word counts, which comes with the data, and nothing else.
            Event::LostAside(reason) => {
                if *self.core.phase() != PrimaryPhase::StandingDown {
                    self.decide(now, PrimaryEvent::PeerGone(reason), effects);
                }
            }
            Event::Headway(headway) => self.decide(now, PrimaryEvent::Headway(headway), effects),
            Event::Tick => {
                self.decide(now, PrimaryEvent::Tick, effects);
                if *self.core.phase() == PrimaryPhase::Protected {
                    let told = |(reason, times)| Effect::BackupSick { reason, times };
                    let first_copy = self.is_first_copy();
                    effects.extend(self.standing.lasting(now, first_copy).map(told));
                }
            }
            // It may be well again.
            Event::Replace(reason) => {
                if self.obstacle(now).is_some() {
                    self.decide(now, PrimaryEvent::Replace(reason), effects);
                }
            }
            Event::Verdict(verdict, word) => self.verdict(now, verdict, word, effects),
            Event::HandOver => self.hand_over = true,
            Event::Unprotect => self.decide(now, PrimaryEvent::Unprotect, effects),
            Event::StillWanted => self.decide(now, PrimaryEvent::StillWanted, effects),
            Event::StoodDown(place) => {
                self.stood_down[place] = true;
                if self.stood_down.iter().all(|down| *down) {
                    self.decide(now, PrimaryEvent::StoodDown, effects);
                }
            }
            Event::LiveElsewhere(generation) => {
                self.decide(now, PrimaryEvent::LiveElsewhere(generation), effects);
            }
            Event::GuestSick(reason) => self.guest_sick(now, reason, effects),
            Event::CannotCapture(reason) => self.cannot_capture(now, reason, effects),
            Event::GuestDied(reason) => self.decide(now, PrimaryEvent::GuestDied(reason), effects),
            Event::QemuDied(reason) => self.qemu_died(now, reason, effects),
        }
    }

    /// A QEMU of a group's takes the others along only to a backup that has them. In the first copy they may be nowhere
    /// else; about an epoch that is on its way the arbiter decides. Of one death two threads tell.
    fn qemu_died(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        let is_group = self.whole.len() > 1 && !planted!(EndTheOthers);
        let event = match self.core.phase() {
            // They go on, or the arbiter or the backup's last word has them go on, or end.
            PrimaryPhase::Alone(_) | PrimaryPhase::Contesting(_) | PrimaryPhase::StandingDown
                if is_group =>
            {
                return;
            }
            PrimaryPhase::Syncing if is_group => PrimaryEvent::PeerGone(reason),
            _ => PrimaryEvent::GuestDied(reason),
        };
        self.decide(now, event, effects);
    }

    /// The state machine's word.
    fn decide(&mut self, now: Time, event: PrimaryEvent, effects: &mut Vec<Effect>) {
        let mut actions = Vec::new();
        self.core.handle(now, event, &mut actions);
        effects.extend(actions.into_iter().map(Effect::Act));
    }

    /// Takes the arbiter's verdict. What the winner said before the arbiter was asked counts only
    /// if it has not handed the VM back since; that it ran the VM once, only if the arbiter has
    /// said whose it is.
    fn verdict(
        &mut self,
        now: Time,
        verdict: Verdict,
        word: WinnersWord,
        effects: &mut Vec<Effect>,
    ) {
        if planted!(WinnersWordFirst)
            && let Some(generation) = word.runs.or(word.ran)
        {
            self.decide(now, PrimaryEvent::LiveElsewhere(generation), effects);
        }
        let decided = !matches!(verdict, Verdict::Unreachable(_));
        self.decide(now, PrimaryEvent::Verdict(verdict), effects);
        let ran = word.ran.filter(|_| decided);
        if let Some(generation) = word.runs.or(ran) {
            self.decide(now, PrimaryEvent::LiveElsewhere(generation), effects);
        }
    }

    /// Gives a sick guest up to the backup, but to none that could not go on with it.
    fn guest_sick(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        let obstacle = match self.core.phase() {
            PrimaryPhase::Protected => self.obstacle(now),
            PrimaryPhase::HandingOver => return,
            phase => Some(format!("it is {phase:?}")),
        };
        match obstacle.filter(|_| !planted!(GiveToTheUnfit)) {
            None => {
                effects.push(Effect::GiveUp(reason.clone()));
                self.decide(now, PrimaryEvent::GuestHangs(reason), effects);
            }
            Some(obstacle) => {
                let words = format!("host {} could not take over: {obstacle}", self.peer);
                effects.push(Effect::HeldBack(words));
            }
        }
    }

    fn cannot_capture(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        let event = match self.obstacle(now) {
            None => PrimaryEvent::CannotCapture(reason),
            Some(obstacle) => {
                let peer = &self.peer;
                PrimaryEvent::PeerGone(format!(
                    "{reason}; host {peer} could not take over: {obstacle}"
                ))
            }
        };
        self.decide(now, event, effects);
    }
}

#[cfg(test)]
mod tests;
