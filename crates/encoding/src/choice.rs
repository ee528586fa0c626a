//! Choice of the methods that are worth their CPU time on this link.

use crate::{DEFAULT_CACHE_PAGES, MOST_CACHE_PAGES, Reference};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;
use understudy_protocol::PAGE_SIZE;

/// Choice of compression by a user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Each method as long as it saves more time on the link than it costs of the CPU.
    #[default]
    Auto,
    /// No method: zero pages are left out, and nothing else.
    None,
    /// The general compressor.
    General,
    /// Deltas against the cache.
    Xor,
    /// Deltas, and the general compressor for what they do not fit.
    Hybrid,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Auto => "auto",
            Compression::None => "none",
            Compression::General => "general",
            Compression::Xor => "xor",
            Compression::Hybrid => "hybrid",
        })
    }
}

/// Plan for how a session's pages are to be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EncodingPlan {
    /// Methods that may be used.
    pub compression: Compression,
    /// Pages in the cache of what was sent, 1 to [`MOST_CACHE_PAGES`]; 4 KiB each.
    pub cache_pages: u32,
}

impl Default for EncodingPlan {
    fn default() -> EncodingPlan {
        EncodingPlan { compression: Compression::default(), cache_pages: DEFAULT_CACHE_PAGES }
    }
}

impl EncodingPlan {
    /// Checks the plan; an error says what is wrong with it.
    pub fn validate(&self) -> Result<(), String> {
        let pages = self.cache_pages;
        match (1..=MOST_CACHE_PAGES).contains(&pages) {
            true => Ok(()),
            false => Err(format!("cache_pages: is {pages}; it must be 1 to {MOST_CACHE_PAGES}")),
        }
    }
}

/// The methods in use, beside leaving zero pages out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Methods {
    /// Deltas against the cache.
    pub xor: bool,
    /// The general compressor.
    pub general: bool,
    /// References to what the backup has on its mirror. Keepers of older daemons do not tell.
    #[serde(default)]
    pub references: bool,
}

/// Every so many messages the general compressor is tried, and references, to keep their figures
/// true.
const TRIAL: u64 = 64;

/// References are tried so many messages later, so that no message has both trials.
const REFERENCES_LATER: u64 = TRIAL / 2;

/// Seconds that a byte takes of both hosts' processors, however fast the link is: to copy, encrypt
/// and decrypt it, and to find room for it. Measured ([docs/performance/data-plane.md]).
///
/// [docs/performance/data-plane.md]: ../../../docs/performance/data-plane.md
const BYTE: f64 = 1e-9;

/// Work of the backup's processor for a page that was compressed, as a part of the time
/// that compressing took: it unpacks it twice, to check it and to apply it.
const UNPACKING: f64 = 0.5;

/// The backup hashes what a reference means as often, for the same reason.
const CHECKS: f64 = 2.0;

/// Gain that is supposed of references until some were looked for: of so many pages half are found.
const SUPPOSED: Gain =
    Gain { pages: 1000.0, seconds: 1000.0 * 5e-6, saved_bytes: 500.0 * PAGE_SIZE as f64 };

/// A verdict about deltas is reached over so many times the cache's pages: a page
/// must be able to come twice.
const DELTA_SPAN: u64 = 2;

/// Deltas that did not pay rest for so many spans.
const DELTA_REST: u64 = 8;

/// Decides for one session, message by message.
#[derive(Debug)]
pub(crate) struct Choice {
    asked: Compression,
    /// Seconds that a byte takes, on the link if that is known and in the processors.
    byte: f64,
    messages: u64,
    general: Gain,
    delta: Gain,
    references: Gain,
    /// Pages until the next verdict about deltas.
    span: u64,
    until_verdict: u64,
    resting: bool,
}

/// Cost and savings of a method, a page on average.
#[derive(Clone, Copy, Debug, Default)]
struct Gain {
    pages: f64,
    seconds: f64,
    saved_bytes: f64,
}

impl Gain {
    /// Memory in pages: older pages count for less and less.
    const MEMORY: f64 = 20_000.0;

    fn add(&mut self, pages: u64, seconds: f64, saved_bytes: u64) {
        self.pages += pages as f64;
        self.seconds += seconds;
        self.saved_bytes += saved_bytes as f64;
        if self.pages > Gain::MEMORY {
            let fade = Gain::MEMORY / self.pages;
            self.pages *= fade;
            self.seconds *= fade;
            self.saved_bytes *= fade;
        }
    }

    /// Whether it pays where a byte takes so many seconds.
    fn pays(&self, byte: f64) -> bool {
        self.saved_bytes * byte > self.seconds
    }
}

impl Choice {
    pub fn new(plan: EncodingPlan) -> Choice {
        let span = DELTA_SPAN * u64::from(plan.cache_pages);
        Choice {
            asked: plan.compression,
            byte: BYTE,
            messages: 0,
            general: Gain::default(),
            delta: Gain::default(),
            references: SUPPOSED,
            span,
            until_verdict: span,
            resting: false,
        }
    }

    pub fn set_link(&mut self, seconds_per_byte: f64) {
        self.byte = seconds_per_byte + BYTE;
    }

    /// The methods in use now.
    pub fn methods(&self) -> Methods {
        let all = Methods { xor: true, general: true, references: true };
        match self.asked {
            Compression::None => Methods::default(),
            Compression::General => Methods { xor: false, ..all },
            Compression::Xor => Methods { general: false, ..all },
            Compression::Hybrid => all,
            Compression::Auto => Methods {
                xor: !self.resting,
                general: self.general.pays(self.byte),
                references: self.references.pays(self.byte),
            },
        }
    }

    /// The methods for the next message: those in use, and what is to be tried.
    pub fn next_message(&mut self) -> Methods {
        self.messages += 1;
        let tries = |later| self.asked == Compression::Auto && self.messages % TRIAL == later;
        let methods = self.methods();
        Methods {
            general: methods.general || tries(1),
            references: methods.references || tries(1 + REFERENCES_LATER),
            ..methods
        }
    }

    /// `pages` were given to the general compressor.
    pub fn general_did(&mut self, pages: u64, took: Duration, saved_bytes: u64) {
        self.general.add(pages, took.as_secs_f64() * (1.0 + UNPACKING), saved_bytes);
    }

    /// Notes that of `pages` so many were found on the backup's mirror.
    pub fn references_did(&mut self, pages: u64, took: Duration, found: u64) {
        if pages > 0 {
            let checked = CHECKS * found as f64 / pages as f64;
            let seconds = took.as_secs_f64() * (1.0 + checked);
            self.references.add(pages, seconds, found * saved(Reference::BYTES));
        }
    }

    /// `pages` were looked up, or would have been.
    pub fn delta_did(&mut self, pages: u64, took: Duration, saved_bytes: u64) {
        if self.asked != Compression::Auto {
            return;
        }
        if !self.resting {
            self.delta.add(pages, took.as_secs_f64(), saved_bytes);
        }
        self.until_verdict = self.until_verdict.saturating_sub(pages);
        if self.until_verdict > 0 {
            return;
        }
        self.resting = !self.resting && !self.delta.pays(self.byte);
        self.until_verdict = self.span * if self.resting { DELTA_REST } else { 1 };
        self.delta = Gain::default();
    }
}

/// Bytes that a page needs less, encoded in `bytes`.
pub(crate) fn saved(bytes: usize) -> u64 {
    PAGE_SIZE.saturating_sub(bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: f64 = 1e-9;
    const SLOW: f64 = 80e-9; // 100 Mbit/s

    fn asked(compression: Compression) -> Choice {
        Choice::new(EncodingPlan { compression, cache_pages: 100 })
    }

    fn choice(link: f64) -> Choice {
        let mut choice = asked(Compression::Auto);
        choice.set_link(link);
        choice
    }

    #[test]
    fn the_general_compressor_must_be_worth_its_time() {
        for (link, worth) in [(FAST, false), (SLOW, true)] {
            let mut choice = choice(link);
            assert!(choice.next_message().general, "tried once to know");
            choice.general_did(256, Duration::from_micros(256 * 8), 256 * 2000);
            assert_eq!(choice.next_message().general, worth);
            let trials = (0..TRIAL).filter(|_| choice.next_message().general).count();
            assert_eq!(trials, if worth { TRIAL as usize } else { 1 });
        }
    }

    #[test]
    fn deltas_that_never_hit_rest_and_are_tried_again() {
        let mut choice = choice(FAST);
        assert!(choice.methods().xor);
        choice.delta_did(200, Duration::from_micros(200), 0);
        assert!(!choice.methods().xor);
        choice.delta_did(200 * (DELTA_REST - 1), Duration::ZERO, 0);
        assert!(!choice.methods().xor);
        choice.delta_did(200, Duration::ZERO, 0);
        assert!(choice.methods().xor);
        choice.delta_did(200, Duration::from_micros(200), 200 * 4000);
        assert!(choice.methods().xor, "they pay now");
    }

    #[test]
    fn what_the_user_asked_for_stays() {
        let mut choice = asked(Compression::Xor);
        choice.delta_did(10_000, Duration::from_secs(1), 0);
        let methods = Methods { xor: true, general: false, references: true };
        assert_eq!(choice.next_message(), methods);
        choice.references_did(100_000, Duration::from_secs(1), 0);
        assert_eq!(choice.next_message(), methods);
    }

    #[test]
    fn references_are_looked_for_where_the_link_is_slow_and_some_are_found() {
        let mut choice = choice(FAST);
        let looks = (0..TRIAL).filter(|_| choice.next_message().references).count();
        assert_eq!(looks, 1, "tried to know");
        choice.set_link(SLOW);
        assert!(choice.next_message().references, "some may be found");
        choice.references_did(100_000, Duration::from_micros(100_000 * 3), 0);
        assert!(!choice.methods().references, "none were");
        choice.references_did(10_000, Duration::from_micros(10_000 * 3), 5_000);
        assert!(choice.methods().references);
    }
}
