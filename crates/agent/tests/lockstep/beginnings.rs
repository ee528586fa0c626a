//! A log may begin at any moment of a guest that is busy with its cards and disks: what the
//! primary's QEMU knows of their queues, and no saved state has, must make no difference. One in
//! fifty such backups hung when it did.

use crate::client::{self, Bulk, Client};
use crate::vm::Vm;
use crate::{LOADS, await_backup, go_on_alone, in_namespace, protect, wait_for};
use nix::sys::socket::{MsgFlags, recv};
use std::os::fd::AsRawFd;
use std::time::Duration;
use understudy_qemu::lockstep::{LogErrand, LogRole, Request};

/// Answers of a guest until its backup must have followed.
const ANSWERS: usize = 5;

/// Pause between bulks, so that frames come in bursts all the time.
const BETWEEN_BULKS: Duration = Duration::from_millis(5);

/// Fills its socket soon.
const FLOOD: &str = "exec yes > /dev/ttyS0";

/// Regression: whoever waits for room in a log as that ends gives the rest when there is some. That
/// was the beginning of the next backup's log, which diverged at its first event.
#[test]
fn the_rest_of_a_log_is_no_part_of_the_next_one() {
    in_namespace(|| {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        client::run_in_guest(FLOOD);
        wait_for("a log that leaves a rest", || {
            end_a_full_log(&primary);
            let socket = primary.log.log.as_raw_fd();
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            recv(socket, &mut [0], flags).is_ok_and(|bytes| bytes > 0)
        });
        let mut backup = Vm::start("b", LogRole::Replay);
        let channel = protect(&primary, &mut backup);
        let end = channel.position_of(primary.log.ask(Request::Flush).unwrap());
        await_backup("the backup to follow", &backup, || {
            channel.note_progress(&backup);
            assert!(!backup.has_ended(), "{}", backup.qemu.last_words());
            backup.log.status().position >= end
        });
    });
}

/// A log that nobody reads while it flows; its end makes room, as much as the sender waits for.
fn end_a_full_log(primary: &Vm) {
    let mut pause = primary.pauser.begin_with(LogErrand::Attach).unwrap().expect("it records");
    pause.saved().unwrap();
    primary.log.begin_log(pause.log_position()).unwrap();
    pause.resume().unwrap();
    wait_for("a log without room", || primary.log.status().is_blocked);
    primary.log.ask(Request::Detach).unwrap();
    let mut piece = [0; 4096];
    wait_for("the sender to have room", || {
        // There may be nothing while the sender wakes.
        let _ = primary.log.read_now(&mut piece);
        !primary.log.status().is_blocked
    });
}

#[test]
fn a_log_may_begin_amid_traffic() {
    begin_again_and_again(10);
}

#[test]
#[ignore = "takes some minutes; the same as the one above, more often"]
fn sixty_logs_may_begin_amid_traffic() {
    begin_again_and_again(60);
}

/// Gives a busy primary one backup after the other.
fn begin_again_and_again(times: usize) {
    in_namespace(move || {
        let mut primary = Vm::start("p", LogRole::Record);
        primary.run_until_ready();
        client::run_in_guest(LOADS[1]);
        let clients = [Client::start(), Client::start()];
        let bulks = [(); 4].map(|()| Bulk::start(BETWEEN_BULKS));
        for n in 0..times {
            let mut backup = Vm::start(&format!("b{n}"), LogRole::Replay);
            let channel = protect(&primary, &mut backup);
            let before = clients[0].answers();
            wait_for("answers under protection", || clients[0].answers() > before + ANSWERS);
            let end = channel.position_of(primary.log.ask(Request::Flush).unwrap());
            await_backup("the backup to follow", &backup, || {
                channel.note_progress(&backup);
                backup.log.status().position >= end
            });
            println!("beginning {n} of {times}: {end} bytes followed");
            backup.kill();
            go_on_alone(&mut primary, channel);
        }
        for client in clients {
            println!("{}", client.end());
        }
        for bulk in bulks {
            println!("{} bytes each way", bulk.end());
        }
    });
}
