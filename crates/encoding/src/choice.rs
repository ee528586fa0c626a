//! Choice of the methods that are worth their CPU time on this link.

use crate::{DEFAULT_CACHE_PAGES, MOST_CACHE_PAGES, Reference};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;
use understudy_protocol::{PAGE_SIZE, PageIndex};

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

/// While deltas rest, one page in so many is looked up all the same: what it saves tells when they pay again. A
/// database that is being filled writes no page twice, and then writes the same ones for hours.
const SAMPLED_ONE_OF: u64 = 16;

/// The pages that are looked up in the cache, and are in it from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookUp {
    All,
    Sample,
    None,
}

impl LookUp {
    pub fn has(self, index: PageIndex) -> bool {
        match self {
            LookUp::All => true,
            // By no pattern: pages of one kind may lie at even distances.
            LookUp::Sample => {
                (index.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % SAMPLED_ONE_OF == 0
            }
            LookUp::None => false,
        }
    }
}

/// Decides for one session, message by message.
#[derive(Debug)]
pub(crate) struct Choice {
    asked: Compression,
    /// Seconds that a byte takes, on the link if that is known and in the processors.
    byte: f64,
    messages: u64,
    general: Gain,
    delta: Gain,
    /// Seconds that the look-up of a page took when all were looked up.
    seconds_each: f64,
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
            seconds_each: 0.0,
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

    /// The pages of the next message that are looked up.
    pub fn look_up(&self) -> LookUp {
        match (self.methods().xor, self.asked) {
            (true, _) => LookUp::All,
            (false, Compression::Auto) => LookUp::Sample,
            (false, _) => LookUp::None,
        }
    }

    /// `pages` were looked up.
    pub fn delta_did(&mut self, pages: u64, took: Duration, saved_bytes: u64) {
        if self.asked != Compression::Auto {
            return;
        }
        let (one_of, seconds) = match self.resting {
            false => (1, took.as_secs_f64()),
            // Most of that went into the pages that were not.
            true => (SAMPLED_ONE_OF, pages as f64 * self.seconds_each),
        };
        self.delta.add(pages, seconds, saved_bytes);
        self.until_verdict = self.until_verdict.saturating_sub(pages * one_of);
        if self.until_verdict > 0 {
            return;
        }
        if !self.resting {
            self.seconds_each = self.delta.seconds / self.delta.pages;
        }
        self.resting = !self.delta.pays(self.byte);
        self.until_verdict = self.span;
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
    fn deltas_that_never_hit_rest_until_a_sample_hits() {
        let mut choice = choice(FAST);
        assert_eq!(choice.look_up(), LookUp::All);
        choice.delta_did(200, Duration::from_micros(200), 0);
        assert!(!choice.methods().xor);
        assert_eq!(choice.look_up(), LookUp::Sample);
        // Looking a page up took a microsecond, whatever else is done in the time of these messages.
        let sampled = 200u64.div_ceil(SAMPLED_ONE_OF);
        choice.delta_did(sampled, Duration::from_secs(1), sampled * 400);
        assert!(!choice.methods().xor, "they save less than they cost");
        choice.delta_did(sampled - 1, Duration::from_secs(1), sampled * 4000);
        assert!(!choice.methods().xor, "too few to know");
        choice.delta_did(1, Duration::from_secs(1), 0);
        assert!(choice.methods().xor, "they pay now");
        assert_eq!(choice.look_up(), LookUp::All);
        choice.delta_did(200, Duration::from_micros(200), 200 * 4000);
        assert!(choice.methods().xor);
    }

    #[test]
    fn a_sample_is_one_page_in_sixteen_however_they_lie() {
        for step in [1, 2, 16, 512, 4096] {
            let sampled = (0..16_000).filter(|i| LookUp::Sample.has(PageIndex(i * step))).count();
            assert!((700..1400).contains(&sampled), "{sampled} of 16 000 at a distance of {step}");
        }
    }

    #[test]
    fn what_the_user_asked_for_stays() {
        let mut choice = asked(Compression::Xor);
        choice.delta_did(10_000, Duration::from_secs(1), 0);
        let methods = Methods { xor: true, general: false, references: true };
        assert_eq!(choice.next_message(), methods);
        choice.references_did(100_000, Duration::from_secs(1), 0);
        assert_eq!(choice.next_message(), methods);
        assert_eq!(choice.look_up(), LookUp::All);
        for none in [Compression::None, Compression::General] {
            assert_eq!(asked(none).look_up(), LookUp::None);
        }
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
