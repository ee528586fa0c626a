//! Tests of what the texts say.

use super::*;
use understudy_encoding::{Counters, EncodingPlan, Methods};
use understudy_protocol::literal;
use understudy_protocol::{Epoch, Generation};
use understudy_report::FillState;
use understudy_report::{CardReport, ComparisonCounts, DiskReport, OutputReport, PauseReport};

/// A status with something in every field.
pub fn example(protection: Protection) -> VmStatus {
    VmStatus {
        name: literal("db"),
        role: Role::Primary,
        keeper_pid: None,
        live: true,
        elsewhere: false,
        generation: Generation(3),
        epoch: Epoch(1234),
        group: None,
        protection,
        lapse: None,
        unheard: None,
        restoring: false,
        former_backup: None,
        former_command: None,
        wanted: None,
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
            methods: Methods { xor: true, general: false, references: true },
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
        qemu_obstacle: None,
        lease_over: None,
        qemu_pid: Some(4242),
        limits: Some(LimitsReport {
            memory_bytes: Some(1 << 30),
            memory_used_bytes: Some(1 << 20),
            threads: None,
            descriptors: 4096,
            missing: vec!["threads: no pids controller".into()],
        }),
        vnc: None,
        guest_agent: None,
        console: Some("/run/db.console".into()),
        cards: vec![CardReport {
            mac: "52:54:00:00:00:01".into(),
            tap: "us-db-0".into(),
            bridge: "br0".into(),
            problem: None,
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
        awaited: Vec::new(),
        lost: Vec::new(),
        vms,
    }
}

#[test]
fn a_vm_is_one_line_with_all_that_counts() {
    let text = host(&host_of(vec![example(Protection::Protected { peer: literal("b") })]));
    let line = text.lines().last().unwrap();
    for word in ["db", "primary", "3", "1234", "0.80/1.50/19.25", "2.00 KiB", "protected with b"] {
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

/// A VM that ran without a backup meanwhile was once no trouble to anybody.
#[test]
fn a_vm_that_is_copied_anew_is_degraded() {
    let syncing = Protection::Syncing {
        peer: literal("b"),
        done_bytes: 1,
        total_bytes: 2,
        remaining_seconds: None,
    };
    let sound = VmStatus { disk_error: None, lease_over: None, ..example(syncing) };
    assert!(!sound.is_degraded() && !vms(std::slice::from_ref(&sound)).contains("DEGRADED"));
    let lost = VmStatus { restoring: true, ..sound };
    assert!(lost.is_degraded() && vms(&[lost]).contains("DEGRADED: protection was lost"));
}

#[test]
fn a_vm_that_was_protected_before_it_was_started_says_how_it_is_so_again() {
    let command = "understudy protect db --to b --hold-console";
    let status = VmStatus {
        former_backup: Some("b".into()),
        former_command: Some(command.into()),
        ..example(Protection::Off)
    };
    assert!(vm(&status).contains(&format!("is so by `{command}`")));
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
        "auto: xor, references, 10.0 : 1, 99 % cache hits, 0.50 ms CPU/MB, link carries 1.00 GiB/s",
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
    let report = LockstepReport { lag_ms, lag_instructions: 77, log_mbit_s, ..Default::default() };
    status.lockstep = Some(report);
    let text = vm(&status);
    assert!(text.contains("1.2 ms and 77 instructions behind, log 0.40 Mbit/s\n"), "{text}");
    assert!(!text.contains("interval"), "{text}");
    let logged = LockstepReport { disk_reads: DiskReads::Log, disk_read_mbit_s: 12.5, ..report };
    status.lockstep = Some(logged);
    assert!(vm(&status).contains("0.40 Mbit/s, with disk reads 12.50 Mbit/s\n"));
    let comparison = ComparisonCounts { comparisons: 3, seconds_ago: 7.4, ..Default::default() };
    status.lockstep = Some(LockstepReport { comparison: Some(comparison), ..report });
    assert!(vm(&status).contains("0.40 Mbit/s, compared 3 times, last 7 s ago\n"));
    status.lockstep = Some(LockstepReport { blocked: true, ..report });
    assert!(vm(&status).contains("BLOCKED"));
}
