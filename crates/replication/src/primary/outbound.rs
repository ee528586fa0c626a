//! Frames that wait for an epoch's commit, carried to the backup with it.
//! `understudy_protocol::Carried` says what for.

use super::send::Outgoing;
use super::session::Session;
use crate::messages::Piece;
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_machine::Machine;
use understudy_network::Port;
use understudy_protocol::{Allowance, CARRIED_BYTES, CardFrames, Epoch, Output};
use understudy_report::OutboundReport;

/// The outbound frames of a session that were carried.
#[derive(Debug, Default)]
pub struct Outbound {
    frames: AtomicU64,
    bytes: AtomicU64,
    left_out: AtomicU64,
}

impl Outbound {
    /// The report that `status` shows.
    pub fn report(&self) -> OutboundReport {
        OutboundReport {
            frames: self.frames.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            left_out: self.left_out.load(Ordering::Relaxed),
        }
    }

    /// The card's frames of `epoch`, as many as there is room for.
    fn gather(&self, port: &Port, epoch: Epoch, allowance: &mut Allowance) -> (CardFrames, u64) {
        let mut message = CardFrames::outbound(epoch, port.card());
        let (mut frames, mut bytes) = (0, 0);
        port.held_of(epoch, |frame| {
            if allowance.admit(epoch, frame.len()) && message.push(frame) {
                (frames, bytes) = (frames + 1, bytes + frame.len() as u64);
            } else {
                self.left_out.fetch_add(1, Ordering::Relaxed);
            }
        });
        self.frames.fetch_add(frames, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        (message, frames)
    }
}

/// The allowance of each card's frames that are carried.
pub fn allowances(machine: &Machine) -> Vec<Allowance> {
    machine.ports().iter().map(|_| Allowance::new(CARRIED_BYTES)).collect()
}

/// Queues what the guest sent in `epoch`, which is captured: a part of it.
pub fn queue(session: &Session, epoch: Epoch, allowances: &mut [Allowance]) {
    if session.output() == Output::Unheld {
        return;
    }
    for (port, allowance) in session.machine().ports().iter().zip(allowances) {
        let (message, frames) = session.outbound.gather(port, epoch, allowance);
        if frames > 0 {
            session.outbox.put_now(Outgoing::Piece(epoch, Piece::Outbound(message)));
        }
    }
}
