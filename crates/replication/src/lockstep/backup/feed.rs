//! QEMU gets the log, and stops at the places where both machines are compared.

use super::following::{Following, Turn};
use crate::backup::Session;
use crate::heartbeat::Pulse;
use crate::lockstep::compare::Differing;
use crate::lockstep::compare::backup as compare;
use crate::messages::ToPrimary;
use std::io::Write;
use std::net::Shutdown;
use tracing::warn;
use understudy_lockstep::{Comparison, Findings, Mark};
use understudy_machine::Machine;
use understudy_qemu::lockstep::LogChannel;

/// Gives QEMU the log until its end.
pub fn feed(session: &Session, machine: &Machine, following: &Following) {
    let Some(log) = machine.log() else { return };
    while let Some(turn) = following.next_turn() {
        match turn {
            Turn::Piece(mut piece) => {
                spoil(&mut piece);
                if (&log.log).write_all(&piece).is_err() {
                    // QEMU has ended, which others notice.
                    return;
                }
                following.gave(&piece);
            }
            Turn::Compare(comparison, mark) => {
                let differing = compare_at(session, (machine, log), following, &comparison, &mark);
                following.compared(differing);
            }
        }
    }
    // So that QEMU finds the end. If it has ended itself, others notice that.
    let _ = log.log.shutdown(Shutdown::Write);
}

/// Compares at a place up to which QEMU has got the log, and tells the primary.
fn compare_at(
    session: &Session,
    (machine, log): (&Machine, &LogChannel),
    following: &Following,
    comparison: &Comparison,
    mark: &Mark,
) -> Differing {
    let is_over = || following.has_ended() || session.is_over();
    let place = &comparison.place;
    let compared = match compare::await_place(log, place, is_over) {
        None => return Vec::new(),
        Some(true) => compare::compare(machine, comparison, mark),
        Some(false) => Ok((Findings { number: place.number, ..Default::default() }, Vec::new())),
    };
    match compared {
        Ok((findings, differing)) => {
            session.say(&ToPrimary::Compared(findings));
            differing
        }
        Err(error) => {
            warn!(vm = %session.vm, "cannot compare: {error:#}");
            let none = Findings { number: place.number, ..Default::default() };
            session.say(&ToPrimary::Compared(none));
            Vec::new()
        }
    }
}

/// A test makes the log another one here.
fn spoil(_piece: &mut [u8]) {
    // No kind of event: QEMU ends, whatever stood there.
    fail::fail_point!("spoil-log", |_| _piece[0] = 0xff);
}
