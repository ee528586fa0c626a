//! The device state of a machine by whose clock time passed, made one of a machine whose time
//! is counted in instructions (`-icount`): QEMU saves both alike, but for a few numbers.
//!
//! Of the sections of QEMU's stream three change. In `timer` the count of instructions begins
//! at 0, where the guest's clock stands. The real-time clock's times are moved from the
//! host's clock to the guest's, as `-rtc clock=vm` wants them. The processor's time stamp
//! counter goes on where it stood. Proven with QEMU 10.0: every section must look as it does
//! there, else nothing is changed.

use crate::clock::TickRate;
use std::time::{SystemTime, UNIX_EPOCH};

const SECTION: u8 = 4;
const FOOTER: u8 = 0x7e;
const SUBSECTION: u8 = 5;

/// Bytes of a section before its name (kind, id, length), and between that and its fields
/// (instance, version).
const BEFORE_NAME: usize = 6;
const AFTER_NAME: usize = 8;

struct Layout {
    name: &'static str,
    version: u32,
    /// Bytes of its fields.
    length: usize,
}

const TIMER: Layout = Layout { name: "timer", version: 2, length: 24 };
const RTC: Layout = Layout { name: "mc146818rtc", version: 3, length: 245 };
const CPU: Layout = Layout { name: "cpu", version: 12, length: 1817 };

/// The real-time clock's fields that are times: two of the periodic interrupt, the last
/// update, the next one, and the alarm.
const RTC_TIMES: [usize; 5] = [157, 165, 213, 229, 237];
/// Offset of the field that is added to the processor's time stamp counter.
const TSC_OFFSET: usize = 896;

/// The device state does not look as it does in the builds that were proven.
#[derive(Debug, thiserror::Error)]
#[error("QEMU's device state has no section {0:?} of the kind that is known")]
pub struct UnknownState(&'static str);

/// Changes the state of a machine that was `stopped` then.
pub fn count_instructions(
    state: &mut Vec<u8>,
    rate: TickRate,
    stopped: SystemTime,
) -> Result<(), UnknownState> {
    let (timer, rtc, cpu) = (find(state, &TIMER)?, find(state, &RTC)?, find(state, &CPU)?);
    let (ticks, clock) = (get(state, timer), get(state, timer + 16));
    let host = stopped.duration_since(UNIX_EPOCH).map_or(0, |then| then.as_nanos() as i64);
    for at in RTC_TIMES.map(|field| rtc + field) {
        let time = get(state, at);
        // Those that are not set are not times.
        if time > 0 {
            put(state, at, time - host + clock);
        }
    }
    let at = cpu + TSC_OFFSET;
    let offset = get(state, at).wrapping_add(ticks.wrapping_sub(rate.ticks(clock)));
    put(state, at, offset);
    let counting = [
        &[SUBSECTION, 12][..],
        b"timer/icount",
        &1u32.to_be_bytes(),
        &clock.to_be_bytes(),
        &0i64.to_be_bytes(),
    ]
    .concat();
    let end = timer + TIMER.length;
    state.splice(end..end, counting);
    Ok(())
}

/// The offset at which the section's fields begin. There must be one of its name, version and
/// length.
fn find(state: &[u8], layout: &Layout) -> Result<usize, UnknownState> {
    let name = [&[layout.name.len() as u8], layout.name.as_bytes()].concat();
    let begins = |at: &usize| -> bool {
        let fields = at + BEFORE_NAME + layout.name.len() + AFTER_NAME;
        let version = state.get(fields - 4..fields);
        let after = state.get(fields + layout.length).copied();
        state[*at] == SECTION
            && state[at + 5..].starts_with(&name)
            && version == Some(&layout.version.to_be_bytes())
            && matches!(after, Some(FOOTER | SUBSECTION))
    };
    let mut found = (0..state.len().saturating_sub(BEFORE_NAME + name.len())).filter(begins);
    match (found.next(), found.next()) {
        (Some(at), None) => Ok(at + BEFORE_NAME + layout.name.len() + AFTER_NAME),
        _ => Err(UnknownState(layout.name)),
    }
}

fn get(state: &[u8], at: usize) -> i64 {
    let bytes = state[at..at + 8].try_into();
    i64::from_be_bytes(bytes.expect("eight bytes of a section that was found"))
}

fn put(state: &mut [u8], at: usize, value: i64) {
    state[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(layout: &Layout, fields: &[(usize, i64)]) -> Vec<u8> {
        let mut bytes = vec![SECTION, 0, 0, 0, 9, layout.name.len() as u8];
        bytes.extend(layout.name.as_bytes());
        bytes.extend(0u32.to_be_bytes());
        bytes.extend(layout.version.to_be_bytes());
        let start = bytes.len();
        bytes.resize(start + layout.length, 0);
        for &(at, value) in fields {
            put(&mut bytes, start + at, value);
        }
        bytes.extend([FOOTER, 0, 0, 0, 9]);
        bytes
    }

    #[test]
    fn clock_and_counter_go_on_where_they_stood() {
        let (clock, ticks) = (10_000_000_000, 26_000_000_001);
        let mut state = b"QEVM".to_vec();
        state.extend(section(&TIMER, &[(0, ticks), (16, clock)]));
        state.extend(section(&CPU, &[(TSC_OFFSET, 7)]));
        let stopped = SystemTime::now();
        let host = stopped.duration_since(UNIX_EPOCH).unwrap().as_nanos() as i64;
        state.extend(section(&RTC, &[(157, -1), (213, host)]));
        let before = state.len();
        let rate = TickRate((26 << 32) / 10);
        count_instructions(&mut state, rate, stopped).unwrap();
        assert_eq!(state.len(), before + 2 + 12 + 4 + 16);
        let timer = find(&state, &TIMER).unwrap();
        let counting = timer + TIMER.length;
        assert_eq!(&state[counting + 2..counting + 14], b"timer/icount");
        assert_eq!((get(&state, counting + 18), get(&state, counting + 26)), (clock, 0));
        let cpu = find(&state, &CPU).unwrap();
        assert_eq!(get(&state, cpu + TSC_OFFSET) + rate.ticks(clock), ticks + 7);
        let rtc = find(&state, &RTC).unwrap();
        assert_eq!(get(&state, rtc + 157), -1);
        assert_eq!(get(&state, rtc + 213), clock);
    }

    #[test]
    fn what_is_not_known_is_left_alone() {
        let mut state = section(&TIMER, &[]);
        let before = state.clone();
        assert!(count_instructions(&mut state, TickRate(1 << 32), SystemTime::now()).is_err());
        assert_eq!(state, before);
        let twice = [section(&RTC, &[]), section(&RTC, &[])].concat();
        assert!(find(&twice, &RTC).is_err());
        assert!(find(b"", &RTC).is_err());
    }
}
