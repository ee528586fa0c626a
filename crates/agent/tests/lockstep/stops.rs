//! A log ends where its guest is stopped: there is room for the last of it, however late somebody
//! reads, and no request to a disk that waits until then is answered before.

use crate::vm::Vm;
use crate::{client, in_namespace, wait_for};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use understudy_disk::{ReadRecorder, Reads, Span};
use understudy_lockstep::EventScanner;
use understudy_protocol::DiskIndex;
use understudy_qemu::lockstep::{LogErrand, LogRole};

/// Writes to the console, and reads the disk itself, without end.
const LOADS: [&str; 2] = [
    "exec yes > /dev/ttyS0",
    "while :; do echo 3 > /proc/sys/vm/drop_caches; head -c 65536 /dev/vda > /dev/null; done",
];

/// Has the guest's reads wait until they are let pass.
#[derive(Default)]
struct Waiting {
    came: AtomicBool,
    passes: Mutex<bool>,
    changed: Condvar,
}

impl ReadRecorder for Waiting {
    fn came(&self, _: DiskIndex) -> u64 {
        self.came.store(true, Ordering::Release);
        let passes = self.passes.lock().unwrap();
        drop(self.changed.wait_while(passes, |passes| !*passes).unwrap());
        0
    }

    fn gave(&self, _: DiskIndex, _: u64, _: Span, _: Result<&[u8], u32>) {}

    fn let_pass(&self) {
        *self.passes.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// Appends the log that is there.
fn read_log(primary: &Vm, log: &mut Vec<u8>) {
    let mut piece = vec![0; 64 << 10];
    // Ends with an error: nothing more is there.
    while let Ok(read) = primary.log.read_now(&mut piece) {
        log.extend_from_slice(&piece[..read]);
    }
}

#[test]
fn a_log_ends_whole_though_there_is_no_room_for_it_and_a_read_waits_for_its_end() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        LOADS.iter().for_each(|load| client::run_in_guest(load));
        let mut pause = primary.pauser.begin_with(LogErrand::Attach).unwrap().expect("it records");
        pause.saved().unwrap();
        let begins = pause.log_position();
        let reads = Arc::new(Waiting::default());
        primary.disk.set_reads(Reads::Recorded(reads.clone()));
        pause.resume().unwrap();
        let mut log = Vec::new();
        wait_for("a read that waits", || {
            read_log(&primary, &mut log);
            reads.came.load(Ordering::Acquire)
        });
        wait_for("a log without room", || primary.log.status().is_blocked);
        let mut detached_at = None;
        let detached = || {
            detached_at = Some(primary.log.status().position);
            primary.disk.let_pass();
        };
        let ended = primary.pauser.begin_at_end(&mut || read_log(&primary, &mut log), detached);
        let mut pause = ended.unwrap().expect("it records");
        pause.saved().unwrap();
        let ends = pause.log_position();
        drop(pause);
        read_log(&primary, &mut log);
        assert_eq!((detached_at, log.len() as u64), (Some(ends), ends - begins));
        let mut events = EventScanner::new();
        events.scan(&log).unwrap();
        assert_eq!(events.partial(), 0, "of {} events the last is not whole", events.events());
    });
}
