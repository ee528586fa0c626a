//! The watch over how far QEMU is, and whether it still follows.

use super::reads::ReadFailure;
use super::{Following, LOOK_INTERVAL};
use crate::backup::Session;
use crate::clock;
use crate::heartbeat::Pulse;
use crate::messages::ToPrimary;
use std::thread;
use std::time::{Duration, Instant};
use understudy_lockstep::{LogPosition, Signs, Stuck, Watchdog};
use understudy_machine::Machine;
use understudy_protocol::wire::LogProgress;

/// Time after which the primary hears of QEMU's progress again.
const TELL_INTERVAL: Duration = Duration::from_millis(50);

/// A QEMU that has log and does nothing for so long has diverged.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time in which its disks have to answer it: a busy host's may take many seconds to write.
const DISK_PATIENCE: Duration = Duration::from_secs(60);

/// Watches QEMU follow until the session is over, or follows no more.
pub fn watch(session: &Session, machine: &Machine, following: &Following) {
    let Some(log) = machine.log() else { return };
    let mut dog = watchdog();
    let (mut told, mut told_at) = (LogProgress::default(), Instant::now());
    while !session.is_over() && !following.is_left() {
        thread::sleep(LOOK_INTERVAL);
        match following.read_failure() {
            Some(ReadFailure::Diverged(reason)) => return session.diverged(&reason),
            Some(ReadFailure::Unusable(reason)) => return session.give_up(&reason),
            None => {}
        }
        let (progress, pending) = following.note(log.status());
        match dog.look(signs(machine, &progress), pending, clock::now()) {
            Some(Stuck::Diverged(time)) => {
                return session.diverged(&format!(
                    "the backup has diverged: it has executed nothing for {:.0} s with {pending} \
                     bytes of log before it; {:?}",
                    time.as_secs_f64(),
                    log.status()
                ));
            }
            Some(Stuck::Disk(time)) => return session.give_up(&silent_disk(time)),
            None => {}
        }
        let still = LogProgress { starved_ns: told.starved_ns, ..progress } == told;
        if told_at.elapsed() >= TELL_INTERVAL && !still {
            session.say(&ToPrimary::Progress(progress));
            (told, told_at) = (progress, Instant::now());
        }
    }
}

/// Notices a QEMU that does nothing.
pub(super) fn watchdog() -> Watchdog {
    Watchdog::new(PATIENCE, DISK_PATIENCE, clock::now())
}

/// The signs that a watchdog looks at.
pub(super) fn signs(machine: &Machine, progress: &LogProgress) -> Signs {
    Signs {
        taken: LogPosition(progress.position),
        instructions: progress.instructions,
        awaits_disk: machine.disks().iter().any(|disk| disk.has_requests()),
    }
}

/// The reason why a QEMU is given up whose disk does not answer.
pub(super) fn silent_disk(time: Duration) -> String {
    format!(
        "the backup's QEMU has waited for its disk for {:.0} s: look at the storage of this host's \
         mirrors",
        time.as_secs_f64()
    )
}
