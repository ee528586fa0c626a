//! A log ends where its primary dies, or where the last acknowledged batch was cut: behind any of
//! its bytes. A backup must go live from each.

use crate::replica::Replica;
use crate::vm::Vm;
use crate::{client, go_live, in_namespace, wait_for};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;
use understudy_lockstep::{EventScanner, Feed};
use understudy_protocol::Time;
use understudy_qemu::lockstep::{LogErrand, LogRole, Request};

/// So much of the log is recorded; less than QEMU's socket holds.
const LOG_BYTES: usize = 96 << 10;

/// Kinds of events with which QEMU answers a question of the instruction that comes before: how
/// much of it was written to a character device, and what is random.
const ANSWERS: [u8; 2] = [22, 27];

/// Logs that end in front of, and within, events of each kind; and of those above.
const ENDS_OF_A_KIND: usize = 2;
const ENDS_OF_AN_ANSWER: usize = 8;

/// The guest writes to its console without end.
const CONSOLE_LOAD: &str = "exec yes > /dev/ttyS0";

/// A program that asks the processor for a random number, does nothing for a while, and so on:
/// `again: rdrand rax; mov ecx, 20000; wait: dec ecx; jnz wait; jmp again`.
const RANDOM_LOAD: [u8; 15] =
    [0x48, 0x0f, 0xc7, 0xf0, 0xb9, 0x20, 0x4e, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xeb, 0xf1];

/// An ELF executable that is nothing but its header and this code.
fn executable(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let length = HEADERS + code.len() as u64;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2_u16, 62].map(u16::to_le_bytes).concat()); // executable, x86-64
    file.extend(1_u32.to_le_bytes());
    file.extend([BASE + HEADERS, 64, 0].map(u64::to_le_bytes).concat()); // entry, segments at
    file.extend(0_u32.to_le_bytes());
    file.extend([64_u16, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat()); // one segment
    file.extend([1_u32, 5].map(u32::to_le_bytes).concat()); // loaded; read and executed
    file.extend([0, BASE, BASE, length, length, 0x1000].map(u64::to_le_bytes).concat());
    file.extend(code);
    file
}

/// Has the guest run a program.
fn run_program(program: &[u8]) {
    let octal: String = program.iter().map(|byte| format!("\\{byte:03o}")).collect();
    client::run_in_guest(&format!(
        "printf '{octal}' > /tmp/program; chmod +x /tmp/program; exec /tmp/program"
    ));
}

/// A machine, and the log that begins with it.
struct Recording {
    /// Has its memory and disk, and never runs.
    machine: Vm,
    devices: Vec<u8>,
    log: Vec<u8>,
}

impl Recording {
    /// Of a primary that dies then.
    fn of(primary: Vm) -> Recording {
        let machine = Vm::start("machine", LogRole::Replay);
        machine.disk.set_read_only(false);
        let mut replica = Replica::begin(&primary, &machine);
        replica.copy_while_running();
        let mut pause = primary.pauser.begin_with(LogErrand::Attach).unwrap().expect("it records");
        let devices = primary.device_state(pause.saved().unwrap());
        replica.copy_the_rest();
        pause.resume().unwrap();
        let mut log = vec![0; LOG_BYTES];
        (&primary.log.log).read_exact(&mut log).unwrap();
        primary.kill();
        machine.port.shut();
        Recording { machine, devices, log }
    }

    /// Where the log is to end: in front of events, and within them.
    fn ends(&self) -> Vec<(usize, u8)> {
        let mut events = BTreeMap::<u8, Vec<usize>>::new();
        let (mut scanner, mut begins) = (EventScanner::new(), 0);
        for (n, byte) in self.log.iter().enumerate() {
            scanner.scan(&[*byte]).unwrap();
            if scanner.partial() == 0 {
                events.entry(self.log[begins]).or_default().push(begins);
                begins = n + 1;
            }
        }
        for answer in ANSWERS {
            assert!(events.contains_key(&answer), "no event {answer}: {:?}", events.keys());
        }
        let chosen = |(kind, all): (&u8, &Vec<usize>)| -> Vec<(usize, u8)> {
            let wanted = if ANSWERS.contains(kind) { ENDS_OF_AN_ANSWER } else { ENDS_OF_A_KIND };
            // Some early, some late; every other one within the event.
            let nth = |n: usize| (all[n * (all.len() - 1) / wanted] + n % 2, *kind);
            (1..=wanted).map(nth).collect()
        };
        events.iter().flat_map(chosen).collect()
    }

    /// A backup takes over from a log that ends there, and answers; or its QEMU says why not.
    fn take_over_at(&self, end: usize) -> Result<(), String> {
        let mut backup = Vm::start("backup", LogRole::Replay);
        backup.disk.set_read_only(false);
        let mut replica = Replica::begin(&self.machine, &backup);
        replica.copy_while_running();
        replica.copy_the_rest();
        backup.load(&self.devices);
        let position = give(&backup, &self.log[..end]);
        backup.log.ask(Request::Follow).unwrap();
        backup.monitor.cont().unwrap();
        wait_for("QEMU to come to the end of its log", || {
            backup.has_ended() || backup.log.status().position >= position && backup.is_at_end()
        });
        if backup.has_ended() {
            return Err(backup.qemu.last_words());
        }
        go_live(&mut backup);
        client::run_in_guest("true");
        backup.kill();
        Ok(())
    }
}

/// Gives a backup all of its log; tells where the last whole event of it ends.
fn give(backup: &Vm, log: &[u8]) -> u64 {
    let mut feed = Feed::new();
    feed.receive(log, Time(Duration::ZERO)).unwrap();
    let dropped = feed.end();
    while !feed.is_over() {
        let given = (&backup.log.log).write(feed.ready()).unwrap();
        feed.gave(given);
    }
    backup.log.log.shutdown(Shutdown::Write).unwrap();
    (log.len() - dropped) as u64
}

#[test]
fn a_backup_takes_over_wherever_the_log_ends() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        client::run_in_guest(CONSOLE_LOAD);
        run_program(&executable(&RANDOM_LOAD));
        let recording = Recording::of(primary);
        let mut failures = Vec::new();
        for (end, kind) in recording.ends() {
            let taken_over = recording.take_over_at(end);
            println!("at {end}, at the begin of an event {kind} or within: {taken_over:?}");
            failures.extend(taken_over.err());
        }
        assert_eq!(failures, Vec::<String>::new());
    });
}
