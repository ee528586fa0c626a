// SPDX-License-Identifier: GPL-2.0-or-later
//! Requests of the daemon besides pauses.

use super::{Lockstep, Role, hold};
use std::ffi::{c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use understudy_agent_protocol::Request;

/// Starts a thread without signals: QEMU handles them on its own.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let spawn = || {
        let previous = crate::block_all_signals()?;
        let started = thread::Builder::new().name(name.to_owned()).spawn(body);
        crate::restore_signals(&previous)?;
        started.map(drop)
    };
    spawn().map_err(|e| format!("cannot start a thread: {e}"))
}

/// Starts to serve the daemon.
pub fn start(lockstep: &'static Lockstep, socket: c_int) -> Result<(), String> {
    // SAFETY: the daemon has passed this descriptor on for this use alone.
    let socket = unsafe { UnixStream::from_raw_fd(socket) };
    spawn("understudy-ctl", move || serve(lockstep, socket))
}

/// The daemon's end is watched elsewhere: QEMU ends with it.
fn serve(lockstep: &'static Lockstep, mut socket: UnixStream) {
    let mut byte = [0];
    while socket.read_exact(&mut byte).is_ok() {
        let answer = match Request::from_byte(byte[0]) {
            // At once, not on the main loop, which may wait for room in the log.
            Some(Request::Detach) => {
                lockstep.flowing.store(false, Ordering::Release);
                lockstep.passed.load(Ordering::Acquire)
            }
            Some(Request::Hold) => hold::begin(lockstep),
            Some(Request::LetGo) => {
                lockstep.hold.end();
                lockstep.passed.load(Ordering::Acquire)
            }
            Some(request) => on_main_loop(lockstep, request),
            None => Request::REFUSED,
        };
        if socket.write_all(&answer.to_le_bytes()).is_err() {
            return;
        }
    }
}

struct Errand {
    lockstep: &'static Lockstep,
    request: Request,
    answer: SyncSender<u64>,
}

fn on_main_loop(lockstep: &'static Lockstep, request: Request) -> u64 {
    unsafe extern "C" fn run(errand: *mut c_void) {
        // SAFETY: the box given below; QEMU calls this once.
        let errand = unsafe { Box::from_raw(errand.cast::<Errand>()) };
        // SAFETY: this is the main loop.
        let answer = unsafe { errand.lockstep.perform(errand.request) };
        // It waits for it.
        let _ = errand.answer.send(answer.unwrap_or(Request::REFUSED));
    }
    let (answer, answered) = sync_channel(1);
    let errand = Box::into_raw(Box::new(Errand { lockstep, request, answer }));
    // SAFETY: the box is `run`'s from here on.
    unsafe { lockstep.qemu.schedule(run, errand.cast()) };
    answered.recv().unwrap_or(Request::REFUSED)
}

impl Lockstep {
    /// Does what the daemon asked for; the daemon has stopped the machine.
    ///
    /// # Safety
    /// Only on QEMU's main loop.
    unsafe fn perform(&self, request: Request) -> Option<u64> {
        // SAFETY: on the main loop, of a stopped machine, in the role that each call needs.
        unsafe {
            match (request, self.role()) {
                (Request::Flush, Role::Record) => self.flush_now(),
                (Request::Follow, Role::Replay) => {
                    self.flowing.store(true, Ordering::Release);
                    self.qemu.refetch();
                    // Whoever is answered must not see the end that QEMU found before.
                    self.show_event();
                }
                (Request::GoLive, Role::Replay) => {
                    self.role.store(Role::Live as u8, Ordering::Release);
                    self.qemu.finish();
                }
                _ => return None,
            }
        }
        Some(self.passed.load(Ordering::Acquire))
    }
}
