//! Long runs under mixed load: after each, memory and disk of both sides are the same, byte
//! by byte.

use crate::client::{self, Bulk, Client};
use crate::vm::Vm;
use crate::{BETWEEN_BULKS, LOADS, compare, go_on_alone, in_namespace, protect, seconds, wait_for};
use std::thread;
use std::time::{Duration, Instant};
use understudy_qemu::lockstep::LogRole;

/// Time that a run is under load.
const SECONDS: u64 = 60;

/// Time between two looks at the backup's progress.
const GLANCE: Duration = Duration::from_millis(50);

#[test]
#[ignore = "long: ten runs of a minute, some ten minutes; `make test-long`"]
fn ten_runs_of_a_minute_end_with_identical_machines() {
    soak(10);
}

/// Disk, processes that come and go, and TCP both ways, `runs` times with fresh machines.
fn soak(runs: u32) {
    for run in 1..=runs {
        in_namespace(move || {
            let mut primary = Vm::start("p", LogRole::Record);
            primary.run_until_ready();
            for load in LOADS {
                client::run_in_guest(load);
            }
            let (records, bulk) = (Client::start(), Bulk::start(BETWEEN_BULKS));
            wait_for("some answers", || records.answers() > 50);

            let mut backup = Vm::start("b", LogRole::Replay);
            let mut channel = protect(&primary, &mut backup);
            let until = Instant::now() + seconds("LOCKSTEP_SECONDS", SECONDS);
            while Instant::now() < until {
                thread::sleep(GLANCE);
                channel.note_progress(&backup);
            }
            let account = channel.account();
            compare(&mut primary, &backup, &mut channel);
            // For the clients' sake; the backup is not needed any more.
            go_on_alone(&mut primary, channel);
            primary.monitor.cont().unwrap();
            println!(
                "run {run} of {runs}: identical; {account}; {}; {} bytes each way",
                records.end(),
                bulk.end()
            );
        });
    }
}
