//! Changes in a page, run-length coded (Remus 3.4).
//!
//! A delta is a list of runs: how many bytes stay as they are, how many follow, then
//! those bytes. Both numbers are 7 bits a byte, the lower ones first, the highest bit set
//! if another byte follows; bytes after the last run stay as they are.
//!
//! The paper sends old XOR new; where they differ this sends new itself, which has the
//! same length. The XOR is how the difference is found.

use crate::Page;
use understudy_protocol::PAGE_SIZE;

/// Bytes that are compared at once; equal blocks, nearly all of a page as a rule, cost no more.
const BLOCK: usize = 64;

/// A gap of unchanged bytes this short costs less inside a run than between two.
const SHORT_GAP: usize = 2;

/// Appends to `out` what turns `old` into `new`, and makes `old` equal to `new`. If that
/// takes more than `limit` bytes, appends nothing and gives false.
pub fn encode(old: &mut Page, new: &Page, limit: usize, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let mut writer = Writer { new, out, written: 0 };
    let mut run = 0..0;
    for (i, (old, new)) in blocks_mut(old).zip(blocks(new)).enumerate() {
        if old == new {
            continue;
        }
        let mut changed = changed_bytes(old, new);
        *old = *new;
        let mut at = i * BLOCK;
        while changed != 0 {
            let same = changed.trailing_zeros() as usize;
            changed >>= same;
            let length = changed.trailing_ones() as usize;
            changed = changed.checked_shr(length as u32).unwrap_or(0);
            let first = at + same;
            if run.is_empty() {
                run = first..first;
            } else if first > run.end + SHORT_GAP {
                writer.run(run);
                run = first..first;
            }
            at = first + length;
            run.end = at;
        }
        if writer.out.len() - start > limit {
            break;
        }
    }
    if !run.is_empty() {
        writer.run(run);
    }
    if out.len() - start > limit {
        out.truncate(start);
        old.copy_from_slice(new);
        return false;
    }
    true
}

// Arrays: their comparison is a few vector instructions, a slice's is a call.

fn blocks(page: &Page) -> impl Iterator<Item = &[u8; BLOCK]> {
    page.chunks_exact(BLOCK).map(|block| block.try_into().expect("a whole block"))
}

fn blocks_mut(page: &mut Page) -> impl Iterator<Item = &mut [u8; BLOCK]> {
    page.chunks_exact_mut(BLOCK).map(|block| block.try_into().expect("a whole block"))
}

/// Bit *i* is set if byte *i* differs.
fn changed_bytes(old: &[u8; BLOCK], new: &[u8; BLOCK]) -> u64 {
    const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let words = old.chunks_exact(8).zip(new.chunks_exact(8));
    words.enumerate().fold(0, |mask, (i, (old, new))| {
        let xor = word(old) ^ word(new);
        // The highest bit of each byte that is not zero, then those eight side by side.
        let differs = (((xor & LOW_BITS) + LOW_BITS) | xor) & !LOW_BITS;
        mask | (differs >> 7).wrapping_mul(GATHER) >> 56 << (8 * i)
    })
}

struct Writer<'a> {
    new: &'a Page,
    out: &'a mut Vec<u8>,
    /// Bytes of the page that the runs so far cover.
    written: usize,
}

impl Writer<'_> {
    fn run(&mut self, run: std::ops::Range<usize>) {
        self.number(run.start - self.written);
        self.number(run.len());
        self.written = run.end;
        self.out.extend_from_slice(&self.new[run]);
    }

    fn number(&mut self, number: usize) {
        // No more than a page, so two bytes hold it.
        if number < 0x80 {
            self.out.push(number as u8);
        } else {
            self.out.extend_from_slice(&[number as u8 | 0x80, (number >> 7) as u8]);
        }
    }
}

/// Applies a delta to a page; gives false if the delta is malformed, whatever the page
/// holds. What `page` holds then is of no use.
pub fn apply(delta: &[u8], page: &mut Page) -> bool {
    each_run(delta, |at, bytes| page[at..at + bytes.len()].copy_from_slice(bytes))
}

/// Calls `each` with the place in the page and the bytes of every run of a delta, in order; gives
/// false where the delta is malformed.
pub fn each_run(mut delta: &[u8], mut each: impl FnMut(usize, &[u8])) -> bool {
    let mut at = 0;
    while !delta.is_empty() {
        let (Some(skip), Some(length)) = (number(&mut delta), number(&mut delta)) else {
            return false;
        };
        at += skip;
        if length == 0 || length > delta.len() || at + length > PAGE_SIZE {
            return false;
        }
        let (bytes, rest) = delta.split_at(length);
        each(at, bytes);
        delta = rest;
        at += length;
    }
    true
}

fn number(bytes: &mut &[u8]) -> Option<usize> {
    let (&low, rest) = bytes.split_first()?;
    *bytes = rest;
    if low < 0x80 {
        return Some(low.into());
    }
    let (&high, rest) = bytes.split_first()?;
    *bytes = rest;
    // A third byte is in no number that a page needs.
    (high < 0x80).then(|| usize::from(low & 0x7f) | usize::from(high) << 7)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn delta(old: &Page, new: &Page) -> Option<Vec<u8>> {
        let (mut cached, mut out) = (*old, b"before".to_vec());
        let fits = encode(&mut cached, new, PAGE_SIZE, &mut out);
        assert!(cached == *new, "the cache has what was sent");
        assert!(out.starts_with(b"before"));
        fits.then(|| out.split_off(6))
    }

    #[test]
    fn an_equal_page_is_an_empty_delta() {
        assert_eq!(delta(&[7; PAGE_SIZE], &[7; PAGE_SIZE]), Some(vec![]));
    }

    #[test]
    fn a_changed_byte_costs_four() {
        let mut new = [7; PAGE_SIZE];
        new[300] = 8;
        assert_eq!(delta(&[7; PAGE_SIZE], &new), Some(vec![0x80 | 44, 2, 1, 8]));
    }

    #[test]
    fn a_run_goes_on_over_blocks_and_short_gaps() {
        let mut new = [7; PAGE_SIZE];
        new[60..130].fill(1);
        new[100..102].fill(7);
        let delta = delta(&[7; PAGE_SIZE], &new).unwrap();
        assert_eq!((delta[0], delta[1], delta.len()), (60, 70, 72));
    }

    #[test]
    fn a_page_that_changed_all_over_is_no_delta() {
        assert_eq!(delta(&[7; PAGE_SIZE], &[8; PAGE_SIZE]), None);
    }

    fn page() -> impl Strategy<Value = Page> {
        let byte = prop_oneof![9 => Just(0u8), 1 => any::<u8>()];
        proptest::collection::vec(byte, PAGE_SIZE).prop_map(|bytes| bytes.try_into().unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn old_and_delta_make_new(old in page(), new in page()) {
            if let Some(delta) = delta(&old, &new) {
                let mut rebuilt = old;
                prop_assert!(apply(&delta, &mut rebuilt));
                prop_assert!(rebuilt == new);
            }
        }

        #[test]
        fn hostile_deltas_are_refused_or_stay_in_the_page(
            delta in proptest::collection::vec(prop_oneof![Just(1u8), any::<u8>()], 0..5000),
        ) {
            let (mut one, mut other) = ([0; PAGE_SIZE], [255; PAGE_SIZE]);
            // Whether it is malformed does not depend on the page.
            prop_assert_eq!(apply(&delta, &mut one), apply(&delta, &mut other));
        }
    }
}
