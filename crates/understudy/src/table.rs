//! Text for people: the table of VMs and the page of one VM.

mod events;
mod top;

pub use events::{events, moment};
use indicatif::HumanBytes;
use std::fmt::Write;
use std::time::SystemTime;
pub use top::page as top;
use understudy_client::progress::syncing;
use understudy_encoding::{Compression, Methods};
use understudy_protocol::{PAGE_SIZE, Policy};
use understudy_report::{
    CompressionReport, DiskReads, DiskSync, FillReport, HostStatus, LimitsReport, LockstepReport,
    Mode, PathReport, Protection, Role, ThrottleReport, VmStatus,
};

const NOTHING: &str = "-";

/// One line for each VM of a host.
pub fn host(status: &HostStatus) -> String {
    let mut text = format!(
        "host {}   understudy {}   QEMU {}\n",
        status.name, status.version, status.qemu_version
    );
    if let Some(expires) = status.certificate_expires {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let days = (expires - now.as_secs() as i64).div_euclid(24 * 3600);
        text += &format!("certificate expires in {days} days\n");
    }
    for problem in &status.problems {
        text += &format!("WRONG: {problem}\n");
    }
    for awaited in &status.awaited {
        text += &format!(
            "{} is to come up here, since {}: {}\n",
            awaited.name,
            moment(awaited.since_ms),
            awaited.reason
        );
    }
    if status.vms.is_empty() {
        text.push_str("no VMs\n");
        return text;
    }
    text.push('\n');
    text.push_str(&vms(&status.vms));
    text
}

/// One line for each VM, below a heading.
pub fn vms(vms: &[VmStatus]) -> String {
    let heading =
        ["VM", "ROLE", "GEN", "EPOCH", "LAG", "PAUSE p50/p99/max ms", "SENT/s", "PROTECTION"];
    let rows = vms.iter().map(|vm| {
        [
            vm.name.to_string(),
            role(vm),
            vm.generation.0.to_string(),
            vm.epoch.0.to_string(),
            vm.lag_epochs.to_string(),
            pauses(vm),
            HumanBytes(vm.bandwidth_bytes_per_second).to_string(),
            protection(vm),
        ]
    });
    columns(std::iter::once(heading.map(str::to_owned)).chain(rows).collect())
}

/// The text of how fast the guest may run.
fn processors(throttle: &ThrottleReport, mode: Mode) -> String {
    let because = match mode {
        Mode::Checkpoint => "it writes faster than the link",
        Mode::Lockstep => "it is faster than its backup",
    };
    let cut_short = match throttle.cut_short {
        0 => String::new(),
        epochs => format!("; {epochs} epochs cut short"),
    };
    match (&throttle.unavailable, throttle.vcpu_percent) {
        (Some(reason), _) => {
            format!("not slowed down although {because}: {reason}{cut_short}")
        }
        (None, 100) => format!("all of their time{cut_short}"),
        (None, percent) => format!("{percent} % of their time: {because}{cut_short}"),
    }
}

/// All about one VM.
pub fn vm(vm: &VmStatus) -> String {
    let mut rows = vec![
        ["VM".to_owned(), vm.name.to_string()],
        ["role".to_owned(), role(vm)],
        ["protection".to_owned(), protection(vm)],
        ["since".to_owned(), vm.since_ms.map_or_else(|| NOTHING.to_owned(), moment)],
        ["mode".to_owned(), mode(vm)],
        ["generation".to_owned(), vm.generation.0.to_string()],
        ["epoch".to_owned(), format!("{}, {} not acknowledged", vm.epoch.0, vm.lag_epochs)],
        ["checkpoints".to_owned(), vm.checkpoints.to_string()],
        ["pause p50/p99/max".to_owned(), format!("{} ms", pauses(vm))],
        ["output waits p50/p99".to_owned(), output_wait(vm)],
        ["sent".to_owned(), sent(vm)],
        ["frames held".to_owned(), vm.held_frames.to_string()],
    ];
    if let Some(age) = vm.uncommitted_ms {
        rows.push(["backup's state".to_owned(), format!("{age:.0} ms old")]);
    }
    if let Some(bytes) = vm.held_console_bytes {
        rows.push(["console held".to_owned(), format!("{bytes} bytes")]);
    }
    if let Some(error) = vm.lease_over.as_ref().or(vm.disk_error.as_ref()) {
        rows.push(["guest".to_owned(), format!("STANDS STILL: {error}")]);
    }
    if let Some(socket) = &vm.guest_agent {
        let what = format!("{} (not held: it answers before it is committed)", socket.display());
        rows.push(["guest agent".to_owned(), what]);
    }
    if let Some(socket) = &vm.vnc {
        rows.push(["VNC".to_owned(), socket.display().to_string()]);
    }
    if vm.display_not_held {
        rows.push([
            "display".to_owned(),
            "not held: VNC shows it before it is committed".to_owned(),
        ]);
    }
    if let Some(fill) = &vm.filling {
        rows.push(["restored".to_owned(), filling(fill)]);
    }
    if let Some(pages) = vm.sampled_pages {
        let mib = pages * PAGE_SIZE as u64 / (1 << 20);
        rows.push(["working set".to_owned(), format!("{pages} pages ({mib} MiB), sampled")]);
    }
    if let Some(lockstep) = &vm.lockstep {
        rows.push(["lockstep".to_owned(), self::lockstep(lockstep)]);
    }
    if let Some(reason) = &vm.slow {
        rows.push(["slower".to_owned(), reason.clone()]);
    }
    if let Some(reason) = &vm.pauses_through_qmp {
        rows.push(["pauses".to_owned(), format!("through QMP, which takes longer: {reason}")]);
    }
    if let Some(compression) = &vm.compression {
        rows.push(["compression".to_owned(), self::compression(compression)]);
    }
    if let Some(sync) = &vm.disk_sync {
        rows.push(["disks copied".to_owned(), disk_sync(sync)]);
    }
    if let Some(throttle) = &vm.throttle {
        rows.push(["processors".to_owned(), processors(throttle, vm.mode)]);
    }
    if let Some(pid) = vm.keeper_pid {
        rows.push(["keeper's process".to_owned(), pid.to_string()]);
    }
    if let Some(pid) = vm.qemu_pid {
        rows.push(["QEMU's process".to_owned(), pid.to_string()]);
    }
    if let Some(limits) = &vm.limits {
        rows.push(["QEMU's limits".to_owned(), self::limits(limits)]);
    }
    if let Some(console) = &vm.console {
        rows.push(["console".to_owned(), console.display().to_string()]);
    }
    for (number, report) in (1..).zip(&vm.paths) {
        rows.push([format!("path {number}"), path(report)]);
    }
    for card in &vm.cards {
        let mut text = format!("{}, tap {} on bridge {}", card.mac, card.tap, card.bridge);
        if let Some(problem) = &card.problem {
            text += &format!(", NOT CONNECTED: {problem}");
        }
        rows.push(["card".to_owned(), text]);
    }
    for disk in &vm.disks {
        rows.push(["disk".to_owned(), disk.path.display().to_string()]);
    }
    let mut text = columns(rows);
    if !vm.events.is_empty() {
        text.push_str("events, newest last:\n");
    }
    for event in &vm.events {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {event}");
    }
    text
}

/// The text of how much of a restored VM is there.
fn filling(fill: &FillReport) -> String {
    let mib = |units: u64| units * PAGE_SIZE as u64 / (1 << 20);
    let part = |there, all| format!("{} of {} MiB", mib(there), mib(all));
    let stalled = fill.memory.stalled.as_ref().map(|why| format!("; STALLED: {why}"));
    format!(
        "{} of memory, {} of disks{}",
        part(fill.memory.pages, fill.memory.all),
        part(fill.disk_blocks, fill.all_disk_blocks),
        stalled.unwrap_or_default()
    )
}

fn role(vm: &VmStatus) -> String {
    let role = match vm.role {
        Role::Primary => "primary",
        Role::Backup => "backup",
        Role::Fenced => "fenced",
    };
    // Only a primary runs the guest; anything else is worth a word.
    match (vm.role, vm.live) {
        (Role::Primary, false) => format!("{role}, stopped"),
        (Role::Backup | Role::Fenced, true) => format!("{role}, live"),
        _ => role.to_owned(),
    }
}

fn protection(vm: &VmStatus) -> String {
    match &vm.protection {
        Protection::Off => match (&vm.former_backup, &vm.former_command) {
            (Some(backup), Some(command)) => format!(
                "off; it was protected to {backup} before it was started again, and is so by `{command}`"
            ),
            _ => "off".to_owned(),
        },
        Protection::Protected { peer } => match &vm.group {
            Some(group) => format!("protected with {peer} in group {group}"),
            None => format!("protected with {peer}"),
        },
        Protection::Degraded { reason } => format!("DEGRADED: {reason}"),
        Protection::Unheld { peer } => {
            format!("NOT PROTECTED: output is not held, as asked for; {peer} follows")
        }
        Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds } => {
            let text = syncing(peer, *done_bytes, *total_bytes, *remaining_seconds);
            match vm.restoring {
                true => format!("DEGRADED: protection was lost, and is being restored: {text}"),
                false => text,
            }
        }
    }
}

fn limits(report: &LimitsReport) -> String {
    let memory = report.memory_bytes.map(|most| match report.memory_used_bytes {
        Some(used) => format!("{} of {} memory", HumanBytes(used), HumanBytes(most)),
        None => format!("{} memory", HumanBytes(most)),
    });
    let threads = report.threads.map(|threads| format!("{threads} threads"));
    let files = Some(format!("{} open files", report.descriptors));
    let limited: Vec<String> = [memory, threads, files].into_iter().flatten().collect();
    let mut text = limited.join(", ");
    for missing in &report.missing {
        text += &format!("; NOT LIMITED: {missing}");
    }
    text
}

fn path(path: &PathReport) -> String {
    let address = path.address;
    let state = match (path.down_seconds, &path.reason) {
        (Some(seconds), reason) => {
            format!("DOWN for {seconds:.0} s: {}", reason.as_deref().unwrap_or(NOTHING))
        }
        (None, _) if !path.up => "connecting".to_owned(),
        (None, _) if path.in_use => "up, in use".to_owned(),
        (None, _) => "up".to_owned(),
    };
    format!("{address} {state}")
}

fn disk_sync(sync: &DiskSync) -> String {
    let copied = format!("{} in {:.1} s", HumanBytes(sync.bytes), sync.seconds);
    match &sync.full_because {
        Some(why) => format!("{copied}, all data: {why}"),
        None => format!("{copied}, only what had changed"),
    }
}

/// A policy is one of checkpoints.
fn mode(vm: &VmStatus) -> String {
    match vm.mode {
        Mode::Checkpoint => format!("checkpoints, {}", policy(&vm.policy)),
        Mode::Lockstep => "lockstep".to_owned(),
    }
}

fn lockstep(report: &LockstepReport) -> String {
    let blocked = if report.blocked { ", BLOCKED by the log" } else { "" };
    let reads = match report.disk_reads {
        DiskReads::Backup => String::new(),
        DiskReads::Log => format!(", with disk reads {:.2} Mbit/s", report.disk_read_mbit_s),
    };
    let compared = report.comparison.map_or_else(String::new, |counts| {
        format!(", compared {} times, last {:.0} s ago", counts.comparisons, counts.seconds_ago)
    });
    format!(
        "{:.1} ms and {} instructions behind, log {:.2} Mbit/s{reads}{compared}{blocked}",
        report.lag_ms, report.lag_instructions, report.log_mbit_s
    )
}

fn policy(policy: &Policy) -> String {
    match policy {
        Policy::Interval { hz } => format!("interval, {hz} a second"),
        Policy::Adaptive { max_epoch_ms, pause_budget_percent } => format!(
            "adaptive, epochs of at most {max_epoch_ms} ms, paused at most {pause_budget_percent} %"
        ),
    }
}

fn pauses(vm: &VmStatus) -> String {
    if vm.checkpoints == 0 {
        return NOTHING.to_owned();
    }
    let pause = vm.pause_ms;
    format!("{:.2}/{:.2}/{:.2}", pause.p50, pause.p99, pause.max)
}

fn output_wait(vm: &VmStatus) -> String {
    let Some(wait) = vm.output_wait_ms else { return NOTHING.to_owned() };
    format!(
        "{:.1}/{:.1} ms for a checkpoint, {:.1}/{:.1} ms until it leaves",
        wait.to_checkpoint_p50, wait.to_checkpoint_p99, wait.to_release_p50, wait.to_release_p99
    )
}

fn sent(vm: &VmStatus) -> String {
    let rate = HumanBytes(vm.bandwidth_bytes_per_second);
    format!("{}, now {rate}/s", HumanBytes(vm.bytes_sent))
}

fn compression(report: &CompressionReport) -> String {
    let asked = match report.asked.compression {
        Compression::Auto => "auto",
        Compression::None => "none",
        Compression::General => "general",
        Compression::Xor => "xor",
        Compression::Hybrid => "hybrid",
    };
    let Methods { xor, general, references } = report.methods;
    let used = [(xor, "xor"), (general, "general"), (references, "references")];
    let used: Vec<&str> = used.iter().filter(|method| method.0).map(|method| method.1).collect();
    let methods = if used.is_empty() { "zero pages only".to_owned() } else { used.join(", ") };
    let mut text = format!("{asked}: {methods}");
    // Writing to a string cannot fail.
    if let Some(ratio) = report.ratio {
        let _ = write!(text, ", {ratio:.1} : 1");
    }
    if let Some(hit_rate) = report.hit_rate {
        let _ = write!(text, ", {:.0} % cache hits", hit_rate * 100.0);
    }
    if report.counters.reference > 0 {
        let saved = HumanBytes(report.counters.reference_saved_bytes);
        let _ = write!(text, ", {saved} saved by reading the mirror");
    }
    if let Some(cpu) = report.cpu_ms_per_mb {
        let _ = write!(text, ", {cpu:.2} ms CPU/MB");
    }
    if let Some(speed) = report.link_bytes_per_second {
        let _ = write!(text, ", link carries {}/s", HumanBytes(speed));
    }
    text
}

/// Rows of equal length as aligned columns.
fn columns<const N: usize>(rows: Vec<[String; N]>) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
pub mod tests;
