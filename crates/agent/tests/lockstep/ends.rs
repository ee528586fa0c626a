//! A log ends where its primary dies, or where the last acknowledged batch was cut: behind any of
//! its bytes. A backup must go live from each. Wherever it was brought out there may also be no
//! more of it for a moment, which must not end a backup that is about to stop.

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

/// Bytes of log that are recorded; less than QEMU's socket holds.
const LOG_BYTES: usize = 96 << 10;

/// The event of instructions that were executed.
const INSTRUCTIONS: u8 = 0;

/// Kinds of events with which QEMU answers a question of the instruction that comes before: how
/// much of it was written to a character device, and what is random.
const ANSWERS: [u8; 2] = [22, 27];

/// Logs that end in front of, and within, events of each kind; and of those above.
const ENDS_OF_A_KIND: usize = 2;
const ENDS_OF_AN_ANSWER: usize = 8;

/// The event of a guest's request to power off.
const POWER_OFF: u8 = 16;

/// Times that a backup is stopped at an answer of a kind, until its vCPU asks before its main loop
/// stops it, as in every other one or so.
const MOST_STOPS: usize = 40;

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
    /// Recording of a guest that has its console and its processor answer without end.
    fn of_answers() -> Recording {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        client::run_in_guest(CONSOLE_LOAD);
        run_program(&executable(&RANDOM_LOAD));
        Recording::of(primary)
    }

    /// Recording of a primary, which dies then.
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
        let mut recording = Recording { machine, devices, log };
        // A backup waits for the rest of an event, and for the answer to instructions.
        let end =
            recording.events().windows(2).rfind(|pair| pair[0].1 != INSTRUCTIONS).unwrap()[1].0;
        recording.log.truncate(end);
        recording
    }

    /// Positions where each event begins, and its kind.
    fn events(&self) -> Vec<(usize, u8)> {
        let (mut scanner, mut begins, mut events) = (EventScanner::new(), 0, Vec::new());
        for (n, byte) in self.log.iter().enumerate() {
            scanner.scan(&[*byte]).unwrap();
            if scanner.partial() == 0 {
                events.push((begins, self.log[begins]));
                begins = n + 1;
            }
        }
        events
    }

    /// Positions where the log is to end: in front of events, and within them.
    fn ends(&self) -> Vec<(usize, u8)> {
        let mut events = BTreeMap::<u8, Vec<usize>>::new();
        for (begins, kind) in self.events() {
            events.entry(kind).or_default().push(begins);
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

    /// Instructions that lead to an answer of this kind, and the answer: where they begin.
    fn answered(&self, answer: u8) -> Vec<(usize, usize)> {
        let events = self.events();
        let pairs =
            events.windows(2).filter(|pair| pair[0].1 == INSTRUCTIONS && pair[1].1 == answer);
        pairs.map(|pair| (pair[0].0, pair[1].0)).collect()
    }

    /// A backup that has loaded the machine.
    fn backup(&self) -> Vm {
        let mut backup = Vm::start("backup", LogRole::Replay);
        backup.disk.set_read_only(false);
        let mut replica = Replica::begin(&self.machine, &backup);
        replica.copy_while_running();
        replica.copy_the_rest();
        backup.load(&self.devices);
        backup
    }

    /// A backup takes over from a log that ends there, and answers; or its QEMU says why not.
    fn take_over_at(&self, end: usize) -> Result<(), String> {
        let mut backup = self.backup();
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

    /// The guest has asked to be powered off before these instructions, and its backup gets the
    /// answer to them later, but for so many bytes. Tells whether it had to wait for that, or why
    /// its QEMU ended.
    fn power_off_before(
        &self,
        (instructions, answer): (usize, usize),
        bytes: usize,
    ) -> Result<bool, String> {
        let mut backup = self.backup();
        let cut = answer + bytes;
        let log = [&self.log[..instructions], &[POWER_OFF], &self.log[instructions..cut]];
        (&backup.log.log).write_all(&log.concat()).unwrap();
        backup.log.ask(Request::Follow).unwrap();
        backup.monitor.cont().unwrap();
        let (mut waited, mut is_off) = (false, false);
        wait_for("QEMU to wait or to stop", || {
            waited = backup.log.status().is_blocked;
            is_off = backup.is_powered_off();
            waited || is_off || backup.has_ended()
        });
        // If QEMU has ended, that is told below.
        let _ = (&backup.log.log).write_all(&self.log[cut..]);
        wait_for("the backup to power off", || {
            is_off |= backup.is_powered_off();
            is_off || backup.has_ended()
        });
        if backup.has_ended() {
            return Err(backup.qemu.last_words());
        }
        backup.kill();
        Ok(waited)
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

/// One log for both: it is dear to record.
#[test]
fn a_backup_takes_over_wherever_the_log_ends_and_waits_for_answers_when_it_stops() {
    in_namespace(|| {
        let recording = Recording::of_answers();
        takes_over_wherever_the_log_ends(&recording);
        waits_for_an_answer_when_it_is_about_to_stop(&recording);
    });
}

fn takes_over_wherever_the_log_ends(recording: &Recording) {
    let mut failures = Vec::new();
    for (end, kind) in recording.ends() {
        let taken_over = recording.take_over_at(end);
        println!("at {end}, at the begin of an event {kind} or within: {taken_over:?}");
        failures.extend(taken_over.err());
    }
    assert_eq!(failures, Vec::<String>::new());
}

fn waits_for_an_answer_when_it_is_about_to_stop(recording: &Recording) {
    // In front of the answer, and within it.
    for (answer, bytes) in ANSWERS.into_iter().flat_map(|answer| [(answer, 0), (answer, 5)]) {
        // Late ones: QEMU has translated the code before.
        let stops = recording.answered(answer).into_iter().rev().take(MOST_STOPS);
        let mut stopped = stops.map(|at| recording.power_off_before(at, bytes));
        let waited = stopped.find(|waited| *waited != Ok(false));
        assert_eq!(waited, Some(Ok(true)), "at an event {answer}, {bytes} bytes of it");
    }
}
