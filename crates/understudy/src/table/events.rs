//! Events as text.

use super::NOTHING;
use std::fmt::Write;
use time::OffsetDateTime;
use understudy_report::events::{Event, Severity};

/// One line for each event: when, how grave, about whom, what.
pub fn events(events: &[Event]) -> String {
    let mut text = String::new();
    for event in events {
        let about = event.vm.as_ref().map_or(NOTHING, |vm| vm.as_str());
        let grave = match event.severity {
            Severity::Info => "",
            Severity::Warning => "WARNING ",
            Severity::Error => "ERROR ",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}  {about}: {grave}{}", moment(event.at_ms), event.text);
    }
    text
}

/// The time of day of a moment, UTC.
pub(super) fn clock(at_ms: u64) -> String {
    let text = moment(at_ms);
    text.get(11..19).map_or(text.clone(), str::to_owned)
}

/// A moment of UTC, to the millisecond.
pub fn moment(at_ms: u64) -> String {
    let seconds = i64::try_from(at_ms / 1000).unwrap_or(i64::MAX);
    let Ok(at) = OffsetDateTime::from_unix_timestamp(seconds) else { return NOTHING.to_owned() };
    let (date, time) = (at.date(), at.time());
    format!(
        "{} {:02}:{:02}:{:02}.{:03}Z",
        date,
        time.hour(),
        time.minute(),
        time.second(),
        at_ms % 1000
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_report::events::EventKind;

    #[test]
    fn an_event_is_one_line() {
        let kind = EventKind::ProtectionLost { reason: "b is silent".into() };
        let event = Event {
            number: 7,
            at_ms: 1_795_000_000_012,
            vm: Some(literal("db")),
            severity: kind.severity(),
            text: kind.to_string(),
            kind,
            told_by: None,
        };
        let line = "2026-11-18 11:06:40.012Z  db: ERROR not protected any more: b is silent\n";
        assert_eq!(events(&[event]), line);
    }
}
