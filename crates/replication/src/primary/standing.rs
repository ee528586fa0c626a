//! Whether the backup could take over now, by its own word: it proves every two seconds that it
//! has the arbiter's record of the VM before it, and could write the next one.
//!
//! This is about what "protected" means, not about output: frames go on to be released by the
//! backup's acknowledgements, and by nothing else. An acknowledged epoch is on the backup whether
//! or not that can ask the arbiter now; holding output would make an arbiter's failure the
//! guest's, while nothing has failed of the two hosts that the arbiter is there for.

use crate::clock;
use std::time::Duration;
use understudy_protocol::{HostName, Time};
use understudy_report::events::{EventKind, VmEvents};
use understudy_threads::{Mutex, lock};

/// A word counts for so long: a backup whose arbiter hangs says nothing.
const FRESH: Duration = Duration::from_millis(4_500);

/// So much of the backup's reason is kept, in characters.
const LONGEST_REASON: usize = 1_000;

/// The backup's last word.
pub(super) struct Standing(Mutex<Word>);

struct Word {
    heard: Time,
    obstacle: Option<String>,
}

impl Standing {
    /// Makes that of a backup that has just taken the offer, which takes a proof.
    pub fn new() -> Standing {
        Standing(Mutex::new(Word { heard: clock::now(), obstacle: None }))
    }

    /// Counts from now on: the backup is ready, which may have taken its time.
    pub fn begin(&self) {
        lock(&self.0).heard = clock::now();
    }

    /// Notes what the backup says: why it could not take over; nothing if it could.
    pub fn heard(&self, events: &VmEvents, peer: &HostName, obstacle: Option<String>) {
        let obstacle: Option<String> =
            obstacle.map(|words| words.chars().take(LONGEST_REASON).collect());
        let mut word = lock(&self.0);
        match (&word.obstacle, &obstacle) {
            (None, Some(reason)) => {
                events.record(EventKind::BackupUnfit { peer: peer.clone(), reason: reason.clone() })
            }
            (Some(_), None) => events.record(EventKind::BackupFit { peer: peer.clone() }),
            _ => {}
        }
        *word = Word { heard: clock::now(), obstacle };
    }

    /// Why the backup could not take over at `now`, if it could not.
    pub fn obstacle(&self, now: Time) -> Option<String> {
        let word = lock(&self.0);
        let age = now - word.heard;
        let silent = || {
            format!(
                "it has not proved for {:.1} s that it reaches the arbiter and could take over: one of them \
                 hangs or is slow",
                age.as_secs_f64()
            )
        };
        word.obstacle.clone().or_else(|| (age > FRESH).then(silent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_report::events::Journal;

    #[test]
    fn a_word_grows_old_and_a_new_one_counts() {
        let (standing, b) = (Standing::new(), literal("b"));
        let journal = Journal::default();
        let db = journal.of(&literal("db"));
        let now = clock::now();
        assert_eq!(standing.obstacle(now), None);
        let words = standing.obstacle(now + FRESH * 2).unwrap();
        assert!(words.contains("has not proved for"), "{words}");
        standing.heard(&db, &b, Some("no such directory".to_owned()));
        assert_eq!(standing.obstacle(clock::now()).unwrap(), "no such directory");
        standing.heard(&db, &b, None);
        assert_eq!(standing.obstacle(clock::now()), None);
        standing.heard(&db, &b, Some("x".repeat(5_000)));
        assert_eq!(standing.obstacle(clock::now()).unwrap().len(), LONGEST_REASON);
        assert_eq!(db.sentences()[1], "host b could take over again");
    }
}
