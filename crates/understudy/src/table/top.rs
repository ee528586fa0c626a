//! The page of `understudy top`: what the dashboard shows, as lines of text.

use super::events::clock;
use super::{NOTHING, syncing};
use console::{Style, truncate_str};
use indicatif::HumanBytes;
use understudy_protocol::PAGE_SIZE;
use understudy_report::events::{Event, Severity};
use understudy_report::{HostStatus, Protection, Role, TakeoverReport, VmStatus};

/// The bar of a synchronisation, in characters.
const BAR: usize = 30;

/// All about a host and what happened there, newest first; cut to so many rows and columns.
pub fn page(
    status: &HostStatus,
    events: &[Event],
    now_ms: u64,
    (rows, columns): (usize, usize),
) -> String {
    let mut lines = head(status, now_ms);
    for vm in &status.vms {
        lines.push(String::new());
        lines.extend(of_vm(vm, now_ms));
    }
    if status.vms.is_empty() {
        lines.extend([String::new(), "no VM runs here, and none is backed up here".to_owned()]);
    }
    lines.push(String::new());
    lines.extend(events.iter().rev().map(of_event));
    lines.truncate(rows.max(1));
    let cut = lines.iter().map(|line| truncate_str(line, columns, "…"));
    cut.collect::<Vec<_>>().join("\n")
}

fn head(status: &HostStatus, now_ms: u64) -> Vec<String> {
    let arbiter = match &status.arbiter {
        None => Style::new().yellow().apply_to("no arbiter".to_owned()),
        Some(one) if one.problem.is_some() => {
            Style::new().red().apply_to(format!("arbiter ({}) lost", one.kind))
        }
        Some(one) => Style::new().green().apply_to(format!("arbiter ({}) reached", one.kind)),
    };
    let name = Style::new().bold().apply_to(format!("host {}", status.name));
    let others: Vec<&str> = status.peers.iter().map(|peer| peer.as_str()).collect();
    let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
    let mut lines = vec![format!("{name}   {arbiter}   other hosts: {others}   {}", clock(now_ms))];
    let problem = |problem: &String| Style::new().red().apply_to(problem).to_string();
    lines.extend(status.problems.iter().map(problem));
    lines
}

fn of_vm(vm: &VmStatus, now_ms: u64) -> Vec<String> {
    let (style, badge, why) = standing(vm);
    let since = vm.since_ms.map_or_else(String::new, |at| {
        format!(", since {} ({})", clock(at), ago(now_ms.saturating_sub(at)))
    });
    let name = Style::new().bold().apply_to(format!("{:<16}", vm.name.as_str()));
    let mut lines = vec![format!("{name} {}{since}", style.apply_to(badge)), format!("  {why}")];
    if let Some(sync) = bar(vm) {
        lines.push(sync);
    }
    // While somebody follows.
    if vm.throttle.is_some() {
        lines.extend(figures(vm));
    }
    if let Some(takeover) = &vm.takeover {
        lines.push(of_takeover(takeover));
    }
    lines
}

/// The standing of a VM now: in two words and a sentence.
fn standing(vm: &VmStatus) -> (Style, &'static str, String) {
    let (good, busy, watch, bad) =
        (Style::new().green(), Style::new().cyan(), Style::new().yellow(), Style::new().red());
    if let Some(error) = vm.lease_over.as_ref().or(vm.disk_error.as_ref()) {
        return (bad, "STANDS STILL", error.clone());
    }
    let backup = vm.role == Role::Backup;
    match (&vm.protection, vm.role) {
        (Protection::Degraded { reason }, Role::Fenced) => (bad, "HALTED HERE", reason.clone()),
        (Protection::Degraded { reason }, Role::Backup) => {
            (bad, "COULD NOT TAKE OVER", reason.clone())
        }
        (Protection::Degraded { reason }, _) => (bad, "NOT PROTECTED", reason.clone()),
        (Protection::Protected { peer }, _) if backup => {
            (good, "stands by", format!("runs on host {peer}; this host would go on with it"))
        }
        (Protection::Protected { peer }, _) => {
            (good, "protected", format!("runs here; host {peer} stands by"))
        }
        (Protection::Unheld { peer }, _) => {
            (watch, "NOT PROTECTED", format!("followed by host {peer}, output is not held"))
        }
        (Protection::Syncing { peer, .. }, _) if backup => {
            (busy, "being copied", format!("runs on host {peer}, which copies it here"))
        }
        (Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds }, _) => {
            (busy, "being copied", syncing(peer, *done_bytes, *total_bytes, *remaining_seconds))
        }
        (Protection::Off, _) => (Style::new().dim(), "unprotected", "runs here".to_owned()),
    }
}

fn bar(vm: &VmStatus) -> Option<String> {
    let Protection::Syncing { done_bytes, total_bytes, .. } = vm.protection else { return None };
    if vm.role != Role::Primary || total_bytes == 0 {
        return None;
    }
    let done = (BAR as u64 * done_bytes / total_bytes) as usize;
    let percent = 100 * done_bytes / total_bytes;
    Some(format!("  [{}{}] {percent} %", "=".repeat(done), " ".repeat(BAR - done)))
}

fn figures(vm: &VmStatus) -> [String; 2] {
    let exposure = vm.uncommitted_ms.map_or_else(|| NOTHING.to_owned(), |ms| format!("{ms:.1} ms"));
    let wait = vm.output_wait_ms.map_or_else(
        || NOTHING.to_owned(),
        |wait| format!("{:.1}/{:.1} ms", wait.to_release_p50, wait.to_release_p99),
    );
    let pause = vm.pause_ms;
    let link = vm.compression.and_then(|compression| compression.link_bytes_per_second);
    let link = link.map_or_else(String::new, |bytes| format!(" of {}/s", HumanBytes(bytes)));
    let percent = vm.throttle.as_ref().map_or(100, |throttle| throttle.vcpu_percent);
    let up = vm.paths.iter().filter(|path| path.up).count();
    let writes = HumanBytes(vm.dirty_pages_per_second * PAGE_SIZE as u64);
    [
        format!(
            "  exposure {exposure} ({} on the way)   held {} frames   output {wait}   pause \
             {:.1}/{:.1}/{:.1} ms",
            vm.lag_epochs, vm.held_frames, pause.p50, pause.p99, pause.max
        ),
        format!(
            "  writes {writes}/s   link {}/s{link}   processors {percent} %   paths {up} of {}",
            HumanBytes(vm.bandwidth_bytes_per_second),
            vm.paths.len()
        ),
    ]
}

fn of_takeover(one: &TakeoverReport) -> String {
    let noticed = (one.outage_ms - one.total_ms).max(0.0);
    let log = if one.lag_ms > 0.0 { format!(", log {:.1}", one.log_ms) } else { String::new() };
    let how = if one.planned { "came over as planned" } else { "took over" };
    format!(
        "  {how}: clients waited {:.1} ms at most: noticed {noticed:.1}, arbiter {:.1}{log}, \
         disks {:.1}, start {:.1}",
        one.outage_ms, one.arbiter_ms, one.activation_ms, one.restart_ms
    )
}

fn of_event(event: &Event) -> String {
    let style = match event.severity {
        Severity::Info => Style::new(),
        Severity::Warning => Style::new().yellow(),
        Severity::Error => Style::new().red(),
    };
    let about = event.vm.as_ref().map_or("host", |vm| vm.as_str());
    format!("{}  {about:<16} {}", clock(event.at_ms), style.apply_to(&event.text))
}

/// The time since then, roughly.
fn ago(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::{example, host_of};
    use understudy_protocol::literal;
    use understudy_report::ThrottleReport;
    use understudy_report::events::EventKind;

    const NOW: u64 = 1_795_000_020_123;

    fn event(kind: EventKind) -> Event {
        let (severity, text) = (kind.severity(), kind.to_string());
        Event {
            number: 1,
            at_ms: NOW,
            vm: Some(literal("db")),
            severity,
            kind,
            text,
            told_by: None,
        }
    }

    #[test]
    fn the_page_says_what_counts_and_never_more_than_fits() {
        let throttle = ThrottleReport {
            vcpu_percent: 80,
            unavailable: None,
            cut_short: 0,
            link_pages_per_second: None,
        };
        let takeover = TakeoverReport { outage_ms: 42.0, total_ms: 12.0, ..Default::default() };
        let vm = VmStatus {
            disk_error: None,
            throttle: Some(throttle),
            takeover: Some(takeover),
            ..example(Protection::Protected { peer: literal("b") })
        };
        let status = host_of(vec![vm]);
        let events =
            [event(EventKind::Started), event(EventKind::Protected { peer: literal("b") })];
        let text = page(&status, &events, NOW, (40, 200));
        let text = console::strip_ansi_codes(&text).into_owned();
        for words in [
            "host a   no arbiter",
            "db               protected, since 11:06:40 (20 s)",
            "runs here; host b stands by",
            "exposure 12.0 ms (1 on the way)   held 7 frames   output 3.5/9.0 ms",
            "writes 1.17 MiB/s   link 2.00 KiB/s of 1.00 GiB/s   processors 80 %   paths 1 of 2",
            "clients waited 42.0 ms at most: noticed 30.0",
        ] {
            assert!(text.contains(words), "{words:?} is not in:\n{text}");
        }
        assert!(
            text.find("protected: b stands by") < text.find("started"),
            "newest first:\n{text}"
        );
        let small = page(&status, &events, NOW, (3, 20));
        assert_eq!(small.lines().count(), 3);
        assert!(small.lines().all(|line| console::measure_text_width(line) <= 20), "{small}");
    }

    #[test]
    fn a_copy_has_a_bar_and_trouble_is_loud() {
        let syncing = Protection::Syncing {
            peer: literal("b"),
            done_bytes: 1,
            total_bytes: 3,
            remaining_seconds: None,
        };
        let copied = VmStatus { disk_error: None, ..example(syncing) };
        let lost = VmStatus {
            disk_error: None,
            ..example(Protection::Degraded { reason: "b is silent".into() })
        };
        let text = page(&host_of(vec![copied, lost]), &[], NOW, (40, 200));
        let text = console::strip_ansi_codes(&text).into_owned();
        assert!(text.contains("[==========                    ] 33 %"), "{text}");
        assert!(text.contains("NOT PROTECTED") && text.contains("b is silent"), "{text}");
    }
}
