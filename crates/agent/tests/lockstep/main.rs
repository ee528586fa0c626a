//! Two stock QEMUs in lockstep, with the daemon's sides of everything in this process: its
//! command line, disks, ports, memory, and the logging channel between.
//!
//! It needs root and the guest that `make guests` builds.

mod beginnings;
mod channel;
mod client;
mod ends;
mod replica;
mod soak;
mod stops;
mod vm;

use channel::Channel;
use client::{Bulk, Client};
use replica::Replica;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use understudy_protocol::Epoch;
use understudy_qemu::lockstep::{LogErrand, LogRole, Request};
use vm::Vm;

/// Time that anything may take before a test fails.
const DEADLINE: Duration = Duration::from_secs(240);

/// Time between two looks at what is waited for.
const GLANCE: Duration = Duration::from_millis(5);

/// Time that what a disk was told may take to arrive there.
const SETTLED: Duration = Duration::from_secs(60);

/// Pause between two bulks.
const BETWEEN_BULKS: Duration = Duration::from_millis(100);

/// The copy of the machine; the log's batches follow.
const MACHINE: Epoch = Epoch(1);

/// Disk, fork-heavy shell work and computation, for ever.
const LOADS: [&str; 3] = [
    "exec guest-tools load /data/build",
    "while :; do dd if=/dev/urandom of=/data/z bs=4k count=300 conv=fsync; md5sum /data/z; \
     rm /data/z; sleep 0.2; done",
    "while :; do for i in 1 2 3 4 5; do ls /bin | md5sum; done; sleep 0.3; done",
];

/// Large requests to the disk, one after the other: more than a socket to its server has room for.
const LARGE_WRITES: &str = "while :; do head -c 4194304 /dev/urandom > /tmp/x; \
     dd if=/tmp/x of=/data/y bs=1M conv=fsync; done";

/// Runs a test in a network namespace of its own, which vanishes with its last thread.
fn in_namespace(body: impl FnOnce() + Send + 'static) {
    let test = thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("these tests need root");
        for arguments in [
            "link set lo up",
            // Of its own: else it has that of one of its taps, which come and go, and guests would
            // send to one that is gone until they ask again.
            "link add br0 address 02:00:00:00:00:01 type bridge",
            "addr add 10.9.0.1/24 dev br0",
            "link set br0 up",
        ] {
            let done = Command::new("ip").args(arguments.split(' ')).status().unwrap();
            assert!(done.success(), "ip {arguments}");
        }
        body();
    });
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Waits until `condition` holds.
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(GLANCE);
    }
}

/// The same for what a backup does, which may be far behind: as long as it gets on.
fn await_backup(what: &str, backup: &Vm, mut condition: impl FnMut() -> bool) {
    let (mut position, mut deadline) = (0, Instant::now());
    while !condition() {
        let now = backup.log.status().position;
        if now != std::mem::replace(&mut position, now) {
            deadline = Instant::now() + DEADLINE;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(GLANCE);
    }
}

fn seconds(variable: &str, default: u64) -> Duration {
    let wanted = std::env::var(variable).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(wanted.unwrap_or(default))
}

/// Starts a backup of a running VM: copied while it runs, paused for the rest.
fn protect(primary: &Vm, backup: &mut Vm) -> Channel {
    let mut replica = Replica::begin(primary, backup);
    replica.copy_while_running();
    let frozen = Instant::now();
    let mut pause = primary.pauser.begin_with(LogErrand::Attach).unwrap().expect("it records");
    let stopped = frozen.elapsed();
    let state = primary.device_state(pause.saved().unwrap());
    let begins = pause.log_position();
    primary.log.begin_log(begins).unwrap();
    let saved = frozen.elapsed();
    let pages = replica.copy_the_rest();
    let copied = frozen.elapsed();
    primary.port.hold(MACHINE.next());
    backup.load(&state);
    let loaded = frozen.elapsed();
    let channel = Channel::open(primary, backup, begins);
    pause.resume().unwrap();
    println!(
        "frozen for {:.1} ms (stop {stopped:.1?}, devices {saved:.1?}, {pages} pages \
         {copied:.1?}, load {loaded:.1?})",
        frozen.elapsed().as_secs_f64() * 1e3
    );
    wait_for("the first of the log", || channel.has_log());
    backup.log.ask(Request::Follow).unwrap();
    backup.monitor.cont().unwrap();
    channel
}

/// Stops the primary, lets the backup come to the same instruction, and compares. The primary
/// stays stopped: to stop is no part of the log, and a card that has frames to send when it is
/// stopped asks for that once more when it runs again, which its backup does not.
///
/// The log ends here. A backup that waits for more does nothing else: of a large request to its
/// disk, what its socket had no room for would wait as well.
fn compare(primary: &mut Vm, backup: &Vm, channel: &mut Channel) {
    primary.monitor.stop().unwrap();
    let end = channel.position_of(primary.log.ask(Request::Flush).unwrap());
    await_backup("the backup to come to the same instruction", backup, || {
        channel.note_progress(backup);
        let (one, other) = (primary.log.status(), backup.log.status());
        other.position >= end && other.is_blocked && other.instructions == one.instructions
    });
    let none = Vec::<String>::new();
    assert_eq!(replica::memory_differences(primary, backup), none, "after {end} bytes");
    channel.end();
    assert_eq!(lasting_disk_differences(primary, backup), none, "after {end} bytes");
}

/// Places where two disks differ for good. What the backup's was told before its guest came to this
/// instruction may still be under way: it gets some time to arrive.
fn lasting_disk_differences(primary: &Vm, backup: &Vm) -> Vec<String> {
    let deadline = Instant::now() + SETTLED;
    loop {
        let differences = replica::disk_differences(primary, backup);
        if differences.is_empty() || Instant::now() > deadline {
            return differences;
        }
        thread::sleep(40 * GLANCE);
    }
}

/// The backup of a primary that is gone goes on in its place.
fn take_over(backup: &mut Vm, mut channel: Channel) {
    let began = Instant::now();
    channel.end();
    backup.await_end_of_log();
    let drained = began.elapsed();
    go_live(backup);
    println!("live after {:.1?}, of which the rest of the log {drained:.1?}", began.elapsed());
}

/// A backup at the end of its log becomes an ordinary VM.
fn go_live(backup: &mut Vm) {
    backup.monitor.stop().unwrap();
    backup.log.ask(Request::GoLive).unwrap();
    backup.disk.set_read_only(false);
    backup.port.discard_inbound();
    backup.monitor.cont().unwrap();
    backup.open_network();
}

/// The primary of a backup that is gone goes on by itself.
fn go_on_alone(primary: &mut Vm, mut channel: Channel) {
    primary.log.ask(Request::Detach).unwrap();
    channel.end();
    primary.log.discard_log().unwrap();
    primary.port.open_gate();
}

/// Moves a VM that took over into a QEMU that records, so that it can have a backup again.
fn succeed(former: &Vm, next: &mut Vm) {
    let mut replica = Replica::begin(former, next);
    replica.copy_while_running();
    let frozen = Instant::now();
    let mut pause = former.pauser.begin().unwrap().expect("it has ended its replay");
    let state = former.device_state(pause.saved().unwrap());
    drop(pause);
    replica.copy_the_rest();
    next.load(&state);
    former.port.shut();
    next.port.discard_inbound();
    next.monitor.cont().unwrap();
    next.open_network();
    println!("moved: frozen for {:.1?}", frozen.elapsed());
}

#[test]
fn one_connection_outlives_two_primaries() {
    in_namespace(|| {
        let mut first = Vm::start("p", LogRole::Record);
        first.run_until_ready();
        client::run_in_guest(LOADS[1]);
        let client = Client::start();
        let wait_for_answers = |count| {
            let before = client.answers();
            wait_for("answers", || client.answers() > before + count);
        };
        let mut second = Vm::start("b", LogRole::Replay);
        let channel = protect(&first, &mut second);
        wait_for_answers(100);
        first.kill();
        take_over(&mut second, channel);
        wait_for_answers(50);

        let mut third = Vm::start_successor("c");
        succeed(&second, &mut third);
        drop(second);
        wait_for_answers(50);
        let mut fourth = Vm::start("d", LogRole::Replay);
        let mut channel = protect(&third, &mut fourth);
        wait_for_answers(100);
        compare(&mut third, &fourth, &mut channel);
        third.kill();
        take_over(&mut fourth, channel);
        wait_for_answers(50);
        println!("{}", client.end());
    });
}

#[test]
fn a_primary_outlives_its_backup_and_gets_another() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        client::run_in_guest(LARGE_WRITES);
        let client = Client::start();
        for name in ["b", "c"] {
            let mut backup = Vm::start(name, LogRole::Replay);
            let mut channel = protect(&primary, &mut backup);
            let before = client.answers();
            wait_for("answers under protection", || client.answers() > before + 100);
            compare(&mut primary, &backup, &mut channel);
            backup.kill();
            go_on_alone(&mut primary, channel);
            primary.monitor.cont().unwrap();
            let before = client.answers();
            wait_for("answers without a backup", || client.answers() > before + 100);
        }
        println!("{}", client.end());
    });
}

#[test]
fn a_guest_reboots_on_both_sides() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        let mut backup = Vm::start("b", LogRole::Replay);
        let mut channel = protect(&primary, &mut backup);
        let began = Instant::now();
        client::run_in_guest("reboot");
        wait_for("the primary's guest to boot again", || primary.boots() == 2);
        let rebooted = began.elapsed();
        await_backup("the backup's guest to boot again", &backup, || backup.boots() == 1);
        println!("the primary rebooted in {rebooted:.1?}, the backup in {:.1?}", began.elapsed());
        compare(&mut primary, &backup, &mut channel);
    });
}

#[test]
fn a_guest_powers_off_on_both_sides() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        let mut backup = Vm::start("b", LogRole::Replay);
        let _channel = protect(&primary, &mut backup);
        client::run_in_guest("poweroff");
        wait_for("the primary to power off", || primary.is_powered_off());
        await_backup("the backup to power off", &backup, || backup.is_powered_off());
    });
}

#[test]
fn a_backup_follows_byte_by_byte_and_takes_over_an_open_connection() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        for load in LOADS {
            client::run_in_guest(load);
        }
        let (client, bulk) = (Client::start(), Bulk::start(BETWEEN_BULKS));
        wait_for("some answers", || client.answers() > 50);

        let mut backup = Vm::start("b", LogRole::Replay);
        let mut channel = protect(&primary, &mut backup);
        let console = primary.console_bytes();
        let until = Instant::now() + seconds("LOCKSTEP_SECONDS", 3);
        while Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
            channel.note_progress(&backup);
        }
        println!("{}", channel.account());
        let before = client.answers();
        wait_for("answers under protection", || client.answers() > before + 50);
        compare(&mut primary, &backup, &mut channel);

        primary.kill();
        let said = primary.console_since(console);
        take_over(&mut backup, channel);
        let before = client.answers();
        wait_for("answers from the new primary", || client.answers() > before + 200);
        println!("{}; {} bytes each way", client.end(), bulk.end());
        assert!(backup.console_since(0).starts_with(&said), "the backup's console differs");
    });
}
