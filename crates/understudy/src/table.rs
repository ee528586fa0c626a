//! Text for people: the table of VMs and the page of one VM.

mod events;
mod top;

pub use events::{events, moment};
use indicatif::HumanBytes;
use std::fmt::Write;
use std::time::SystemTime;
pub use top::page as top;
use understudy_client::progress::syncing;
use understudy_daemon::report::{
    CompressionReport, DiskReads, DiskSync, FillReport, HostStatus, LockstepReport, Mode,
    PathReport, Protection, Role, ThrottleReport, VmStatus,
};
use understudy_encoding::Compression;
use understudy_protocol::{PAGE_SIZE, Policy};

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

/// How fast the guest may run.
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

/// Everything about one VM.
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
    if let Some(error) = &vm.disk_error {
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
    if let Some(pid) = vm.qemu_pid {
        rows.push(["QEMU's process".to_owned(), pid.to_string()]);
    }
    if let Some(console) = &vm.console {
        rows.push(["console".to_owned(), console.display().to_string()]);
    }
    for (number, report) in (1..).zip(&vm.paths) {
        rows.push([format!("path {number}"), path(report)]);
    }
    for card in &vm.cards {
        let text = format!("{}, tap {} on bridge {}", card.mac, card.tap, card.bridge);
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

/// How much of a restored VM is there.
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
        Protection::Off => "off".to_owned(),
        Protection::Protected { peer } => match &vm.group {
            Some(group) => format!("protected with {peer} in group {group}"),
            None => format!("protected with {peer}"),
        },
        Protection::Degraded { reason } => format!("DEGRADED: {reason}"),
        Protection::Unheld { peer } => {
            format!("NOT PROTECTED: output is not held, as asked for; {peer} follows")
        }
        Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds } => {
            syncing(peer, *done_bytes, *total_bytes, *remaining_seconds)
        }
    }
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
    let methods = match (report.methods.xor, report.methods.general) {
        (true, true) => "xor and general",
        (true, false) => "xor",
        (false, true) => "general",
        (false, false) => "zero pages only",
    };
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
pub mod tests {
    use super::*;
    use understudy_daemon::report::FillState;
    use understudy_daemon::report::{
        CardReport, ComparisonCounts, DiskReport, OutputReport, PauseReport,
    };
    use understudy_encoding::{Counters, EncodingPlan, Methods};
    use understudy_protocol::literal;
    use understudy_protocol::{Epoch, Generation};

    /// A status with something in every field.
    pub fn example(protection: Protection) -> VmStatus {
        VmStatus {
            name: literal("db"),
            role: Role::Primary,
            live: true,
            generation: Generation(3),
            epoch: Epoch(1234),
            group: None,
            protection,
            since_ms: Some(1_795_000_000_123),
            disk_sync: Some(DiskSync {
                full_because: None,
                bytes: 3 << 20,
                seconds: 0.5,
                differing_bytes: 1 << 20,
            }),
            mode: Mode::Checkpoint,
            lockstep: None,
            lag_epochs: 1,
            inbound: None,
            outbound: None,
            takeover: None,
            filling: None,
            sampled_pages: None,
            policy: Policy::Interval { hz: 40 },
            checkpoints: 1000,
            pause_ms: PauseReport { p50: 0.8, p99: 1.5, max: 19.25 },
            slow: None,
            output_wait_ms: Some(OutputReport {
                to_checkpoint_p50: 1.5,
                to_checkpoint_p99: 6.0,
                to_release_p50: 3.5,
                to_release_p99: 9.0,
            }),
            pauses_through_qmp: None,
            compression: Some(CompressionReport {
                asked: EncodingPlan::default(),
                methods: Methods { xor: true, general: false },
                ratio: Some(10.0),
                hit_rate: Some(0.99),
                cpu_ms_per_mb: Some(0.5),
                link_bytes_per_second: Some(1 << 30),
                counters: Counters::default(),
            }),
            bytes_sent: 5 * 1024 * 1024,
            uncommitted_ms: Some(12.0),
            dirty_pages_per_second: 300,
            bandwidth_bytes_per_second: 2048,
            throttle: None,
            held_frames: 7,
            held_console_bytes: Some(9),
            display_not_held: true,
            disk_error: Some("an error on disk0: full".into()),
            qemu_pid: Some(4242),
            vnc: None,
            guest_agent: None,
            console: Some("/run/db.console".into()),
            cards: vec![CardReport {
                mac: "52:54:00:00:00:01".into(),
                tap: "us-db-0".into(),
                bridge: "br0".into(),
            }],
            disks: vec![DiskReport { path: "/srv/db.img".into() }],
            paths: vec![
                PathReport {
                    address: "10.0.0.2:7700".parse().unwrap(),
                    up: false,
                    in_use: false,
                    down_seconds: Some(12.3),
                    reason: Some("silent for 101 ms".into()),
                },
                PathReport {
                    address: "10.1.0.2:7700".parse().unwrap(),
                    up: true,
                    in_use: true,
                    down_seconds: None,
                    reason: None,
                },
            ],
            events: vec!["protected with b".into()],
        }
    }

    /// A host with these.
    pub fn host_of(vms: Vec<VmStatus>) -> HostStatus {
        let (version, qemu_version) = ("0.1.0".into(), "10.0.2".into());
        HostStatus {
            name: literal("a"),
            version,
            qemu_version,
            problems: Vec::new(),
            certificate_expires: None,
            arbiter: None,
            peers: Vec::new(),
            vms,
        }
    }

    #[test]
    fn a_vm_is_one_line_with_all_that_counts() {
        let text = host(&host_of(vec![example(Protection::Protected { peer: literal("b") })]));
        let line = text.lines().last().unwrap();
        for word in
            ["db", "primary", "3", "1234", "0.80/1.50/19.25", "2.00 KiB", "protected with b"]
        {
            assert!(line.contains(word), "{word:?} is missing: {line}");
        }
    }

    #[test]
    fn columns_are_aligned() {
        let mut other = example(Protection::Off);
        other.name = literal("a-much-longer-name");
        let text = vms(&[example(Protection::Off), other]);
        let places: Vec<_> =
            text.lines().map(|l| l.find("primary").or(l.find("ROLE")).unwrap()).collect();
        assert!(places.windows(2).all(|pair| pair[0] == pair[1]), "{text}");
    }

    #[test]
    fn a_member_shows_its_group() {
        let mut member = example(Protection::Protected { peer: literal("b") });
        member.group = Some(literal("shop"));
        assert!(vms(&[member]).contains("protected with b in group shop"));
    }

    #[test]
    fn an_empty_host_says_so() {
        assert!(host(&host_of(vec![])).contains("no VMs"));
    }

    #[test]
    fn the_page_of_a_vm_shows_every_part() {
        let text = vm(&example(Protection::Degraded { reason: "backup b is gone".into() }));
        for word in [
            "DEGRADED: backup b is gone",
            "interval, 40 a second",
            "1234, 1 not acknowledged",
            "1.5/6.0 ms for a checkpoint, 3.5/9.0 ms until it leaves",
            "auto: xor, 10.0 : 1, 99 % cache hits, 0.50 ms CPU/MB, link carries 1.00 GiB/s",
            "4242",
            "3.00 MiB in 0.5 s, only what had changed",
            "not held: VNC shows it before",
            "STANDS STILL: an error on disk0: full",
            "/run/db.console",
            "us-db-0",
            "10.0.0.2:7700 DOWN for 12 s: silent for 101 ms",
            "10.1.0.2:7700 up, in use",
            "/srv/db.img",
            "  protected with b",
        ] {
            assert!(text.contains(word), "{word:?} is missing:\n{text}");
        }
    }

    #[test]
    fn a_restored_vm_shows_what_is_there_and_why_it_stalls() {
        let mut status = example(Protection::Off);
        let stalled = Some("the store is gone".to_owned());
        let memory = FillState { pages: 512, all: 2048, stalled, complete: false };
        status.filling = Some(FillReport { memory, disk_blocks: 256, all_disk_blocks: 25_600 });
        let text = vm(&status);
        let expected = "2 of 8 MiB of memory, 1 of 100 MiB of disks; STALLED: the store is gone";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_vm_that_was_sampled_shows_its_working_set() {
        let mut status = example(Protection::Off);
        assert!(!vm(&status).contains("working set"));
        status.sampled_pages = Some(1025);
        assert!(vm(&status).contains("1025 pages (4 MiB), sampled"));
    }

    #[test]
    fn a_vm_in_lockstep_shows_how_far_both_are_apart() {
        let mut status = example(Protection::Protected { peer: literal("b") });
        status.mode = Mode::Lockstep;
        let (lag_ms, log_mbit_s) = (1.25, 0.4);
        let report =
            LockstepReport { lag_ms, lag_instructions: 77, log_mbit_s, ..Default::default() };
        status.lockstep = Some(report);
        let text = vm(&status);
        assert!(text.contains("1.2 ms and 77 instructions behind, log 0.40 Mbit/s\n"), "{text}");
        assert!(!text.contains("interval"), "{text}");
        let logged =
            LockstepReport { disk_reads: DiskReads::Log, disk_read_mbit_s: 12.5, ..report };
        status.lockstep = Some(logged);
        assert!(vm(&status).contains("0.40 Mbit/s, with disk reads 12.50 Mbit/s\n"));
        let comparison =
            ComparisonCounts { comparisons: 3, seconds_ago: 7.4, ..Default::default() };
        status.lockstep = Some(LockstepReport { comparison: Some(comparison), ..report });
        assert!(vm(&status).contains("0.40 Mbit/s, compared 3 times, last 7 s ago\n"));
        status.lockstep = Some(LockstepReport { blocked: true, ..report });
        assert!(vm(&status).contains("BLOCKED"));
    }
}
