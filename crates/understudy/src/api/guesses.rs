//! Wrong tokens, by where they come from: who shows many is not listened to for a while.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The number of wrong tokens from one address that are a typing error, or a program with an old
/// one.
const MOST: u32 = 10;
/// The time in which they are counted, and for which no token counts afterwards.
const SPAN: Duration = Duration::from_secs(60);
/// Addresses that are remembered.
const MOST_ADDRESSES: usize = 4096;

/// The answer to a wrong token comes so much later.
pub(super) const DELAY: Duration = Duration::from_secs(1);

/// The wrong tokens of late.
#[derive(Debug, Default)]
pub struct Guesses(Mutex<HashMap<IpAddr, Guessed>>);

#[derive(Debug)]
struct Guessed {
    wrong: u32,
    since: Instant,
}

impl Guesses {
    /// The time for which no token from there counts; none if one would.
    pub(super) fn shut_out(&self, from: IpAddr, now: Instant) -> Option<Duration> {
        let known = self.known();
        let guessed = known.get(&from).filter(|guessed| guessed.wrong >= MOST)?;
        (guessed.since + SPAN).checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// A token from there was wrong; whether none counts any more.
    pub(super) fn note(&self, from: IpAddr, now: Instant) -> bool {
        let mut known = self.known();
        if known.len() >= MOST_ADDRESSES {
            known.retain(|_, guessed| guessed.since + SPAN > now);
        }
        let guessed = known.entry(from).or_insert(Guessed { wrong: 0, since: now });
        if guessed.since + SPAN <= now {
            *guessed = Guessed { wrong: 0, since: now };
        }
        guessed.wrong += 1;
        if guessed.wrong == MOST {
            guessed.since = now;
        }
        guessed.wrong == MOST
    }

    fn known(&self) -> MutexGuard<'_, HashMap<IpAddr, Guessed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_guesses_is_shut_out_for_a_while_and_nobody_else() {
        let (guesses, began) = (Guesses::default(), Instant::now());
        let (one, other): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let at = |seconds| began + Duration::from_secs(seconds);
        for n in 1..MOST {
            assert!(!guesses.note(one, at(n.into())), "{n}");
            assert_eq!(guesses.shut_out(one, at(n.into())), None, "{n}");
        }
        assert!(guesses.note(one, at(20)), "told once");
        assert!(!guesses.note(one, at(21)), "not again");
        assert_eq!(guesses.shut_out(one, at(30)), Some(Duration::from_secs(50)));
        assert_eq!(guesses.shut_out(other, at(30)), None);
        assert_eq!(guesses.shut_out(one, at(80)), None);
        assert!(!guesses.note(one, at(81)), "it begins anew");
    }

    #[test]
    fn a_wrong_token_now_and_then_does_no_harm() {
        let (guesses, began) = (Guesses::default(), Instant::now());
        let one: IpAddr = [10, 0, 0, 1].into();
        for minute in 0..100 {
            let now = began + SPAN * minute;
            assert!(!guesses.note(one, now));
            assert_eq!(guesses.shut_out(one, now), None);
        }
    }
}
