//! Whether the backup could take over now, by its own word: it proves every two seconds that it
//! has the arbiter's record of the VM before it, and could write the next one.
//!
//! This is about what "protected" means, not about output: frames go on to be released by the
//! backup's acknowledgements, and by nothing else. An acknowledged epoch is on the backup whether
//! or not that can ask the arbiter now; holding output would make an arbiter's failure the
//! guest's, while nothing has failed of the two hosts that the arbiter is there for.

use super::Effect;
use std::time::Duration;
use understudy_protocol::{Time, planted};

/// A word counts for so long: a backup whose arbiter hangs says nothing.
pub const FRESH: Duration = Duration::from_millis(4_500);

/// A backup that has said for so long that it could not take over is one to be replaced. What merely takes long is over by
/// then, and the next one costs a copy of all memory.
pub const SICK: Duration = Duration::from_secs(30);

/// The first copy may take so many times as long on its way to the backup's disks: it is all that they have to take, and
/// whoever is to have it next begins anew.
const FIRST_COPY: u32 = 20;

/// So much of the backup's reason is kept, in characters.
pub const LONGEST_REASON: usize = 1_000;

/// The backup's last word.
#[derive(Clone, Debug)]
pub struct Standing {
    fresh: Duration,
    heard: Time,
    obstacle: Option<String>,
    /// An obstacle is lasting after so long, and again as long after.
    sick: Duration,
    /// Time from which that counts.
    since: Time,
    /// Number of times that it was lasting.
    lasted: u32,
}

impl Standing {
    /// The standing of a backup which has just taken the offer, and whose words count for so long.
    pub fn new(fresh: Duration, now: Time) -> Standing {
        Standing { fresh, heard: now, obstacle: None, sick: SICK, since: now, lasted: 0 }
    }

    /// The same, of which an obstacle is lasting after so long.
    pub fn lasting_after(self, sick: Duration) -> Standing {
        Standing { sick, ..self }
    }

    /// Counts from now on: the backup is ready, which may have taken its time.
    pub fn begin(&mut self, now: Time) {
        self.heard = now;
    }

    /// Notes what the backup says: why it could not take over; nothing if it could.
    pub fn heard(&mut self, now: Time, obstacle: Option<String>) -> Option<Effect> {
        let shortened = |words: String| words.chars().take(LONGEST_REASON).collect::<String>();
        let before = std::mem::replace(&mut self.obstacle, obstacle.map(shortened));
        self.heard = now;
        match (before, &self.obstacle) {
            (None, Some(reason)) => {
                let reason = reason.clone();
                self.count_anew(now);
                Some(Effect::BackupUnfit(reason))
            }
            (Some(_), None) => Some(Effect::BackupFit),
            _ => None,
        }
    }

    /// What is lasting counts from now.
    pub fn count_anew(&mut self, now: Time) {
        (self.since, self.lasted) = (now, 0);
    }

    /// What the backup has said for long of why it could not take over, and for how many times as long as that takes;
    /// once for each. `first_copy`: that is not yet on its disks.
    pub fn lasting(&mut self, now: Time, first_copy: bool) -> Option<(String, u32)> {
        let sick = if first_copy { self.sick * FIRST_COPY } else { self.sick };
        let lasts = now >= self.since + sick * (self.lasted + 1) && !planted!(KeepTheSick);
        let reason = self.obstacle.as_ref().filter(|_| lasts)?;
        self.lasted += 1;
        Some((reason.clone(), self.lasted))
    }

    /// Why the backup could not take over at `now`, if it could not.
    pub fn obstacle(&self, now: Time) -> Option<String> {
        let age = now - self.heard;
        let silent = || {
            format!(
                "it has not proved for {:.1} s that it reaches the arbiter and could take over: one of them \
                 hangs or is slow",
                age.as_secs_f64()
            )
        };
        let old = age > self.fresh && !planted!(TrustOldWord);
        self.obstacle.clone().or_else(|| old.then(silent))
    }
}
