// SPDX-License-Identifier: GPL-2.0-or-later
//! The pause of a checkpoint, from inside QEMU.
//!
//! It does what the monitor's commands `stop`, `xen-save-devices-state` and `cont` do, in one
//! go in the main loop, which the daemon wakes with a bell. What is left out, and why:
//!
//! - flushing the disks, which `stop` does twice: it makes writes durable, which is no part
//!   of a checkpoint (the daemon answers those flushes without waiting for a disk). Where the format of a
//!   disk keeps back what it has answered, as qcow2 does with its tables, they are flushed once: what is in such a
//!   cache is in no device state, and a guest that goes on elsewhere would not find what it wrote;
//! - the events STOP and RESUME: nobody can see the machine stopped, since the main loop
//!   answers no monitor meanwhile. A machine that is left stopped does send STOP;
//! - resetting I/O errors of disks, which `cont` does for an operator who removed the cause.
//!
//! A request to reset or to power off that the main loop has not served yet would not be part
//! of the device state. So the pause waits until it is served.
//!
//! In a QEMU in lockstep the pause is also where the log begins and ends (`lockstep/pause.rs`),
//! and works on a machine that is stopped already.

use crate::clock;
use crate::dirty_log::{Area, QemuDirtyLog};
use crate::lockstep;
use crate::main_loop::MainLoop;
use crate::qemu_symbols::{address, function};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Duration;
use understudy_agent_protocol::{
    ARM_DESCRIPTORS, Answer, DirtyOutcome, LogErrand, Order, PausePage,
};

/// Run states of QEMU, and what it calls them. One that is `inmigrate` has no state yet.
const INMIGRATE: (c_int, &CStr) = (1, c"inmigrate");
const PAUSED: (c_int, &CStr) = (4, c"paused");
const RUNNING: (c_int, &CStr) = (9, c"running");

/// Longest time to wait for an order between two looks; the daemon's end is seen elsewhere.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

type Action = unsafe extern "C" fn();

/// The functions of QEMU that a pause takes.
#[derive(Clone, Copy)]
pub struct QemuPause {
    main_loop: MainLoop,
    runstate_check: unsafe extern "C" fn(c_int) -> bool,
    runstate_set: unsafe extern "C" fn(c_int),
    reset_requested: unsafe extern "C" fn() -> c_int,
    shutdown_requested: unsafe extern "C" fn() -> c_int,
    disable_ticks: Action,
    enable_ticks: Action,
    pause_vcpus: Action,
    resume_vcpus: Action,
    notify_state: unsafe extern "C" fn(bool, c_int),
    drain_disks: Action,
    flush_disks: unsafe extern "C" fn() -> c_int,
    send_stop_event: Action,
    store_running: Action,
    channel_of_fd: unsafe extern "C" fn(c_int) -> *mut c_void,
    open_for_output: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    unref: unsafe extern "C" fn(*mut c_void),
    save_devices: unsafe extern "C" fn(*mut c_void) -> c_int,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

impl QemuPause {
    /// Finds them, or names what is missing.
    pub fn find() -> Result<QemuPause, String> {
        check_run_states()?;
        // SAFETY: declared so in QEMU's headers system/runstate.h, system/cpus.h,
        // system/cpu-timers.h, block/block-global-state.h, migration/global_state.h,
        // io/channel-file.h, qom/object.h, and migration/{qemu-file,savevm}.h. (The results of
        // `vm_state_notify` and `qemu_save_device_state`, where there are any, are numbers.)
        unsafe {
            Ok(QemuPause {
                main_loop: MainLoop::find()?,
                runstate_check: function(c"runstate_check")?,
                runstate_set: function(c"runstate_set")?,
                reset_requested: function(c"qemu_reset_requested_get")?,
                shutdown_requested: function(c"qemu_shutdown_requested_get")?,
                disable_ticks: function(c"cpu_disable_ticks")?,
                enable_ticks: function(c"cpu_enable_ticks")?,
                pause_vcpus: function(c"pause_all_vcpus")?,
                resume_vcpus: function(c"resume_all_vcpus")?,
                notify_state: function(c"vm_state_notify")?,
                drain_disks: function(c"bdrv_drain_all")?,
                flush_disks: function(c"bdrv_flush_all")?,
                send_stop_event: function(c"qapi_event_send_stop")?,
                store_running: function(c"global_state_store_running")?,
                channel_of_fd: function(c"qio_channel_file_new_fd")?,
                open_for_output: function(c"qemu_file_new_output")?,
                unref: function(c"object_unref")?,
                save_devices: function(c"qemu_save_device_state")?,
                close: function(c"qemu_fclose")?,
            })
        }
    }
}

/// Whether the numbers of run states mean what they should.
fn check_run_states() -> Result<(), String> {
    /// The first field of `QEnumLookup`: the names, by number.
    type Names = *const *const c_char;
    let lookup = address(c"RunState_lookup")?.cast::<Names>();
    for (number, name) in [INMIGRATE, PAUSED, RUNNING] {
        // SAFETY: the table is constant, and has had 15 names and more since QEMU 2.
        let found = unsafe { CStr::from_ptr(*lookup.read().add(number as usize)) };
        if found != name {
            return Err(format!("run state {}", name.to_string_lossy()));
        }
    }
    Ok(())
}

/// Gets ready for pauses; the descriptors are the page's (with what is behind it), the bell and the device state's
/// file. QEMU must be initialised.
pub fn arm(qemu: QemuPause, descriptors: [OwnedFd; ARM_DESCRIPTORS]) -> io::Result<()> {
    let [page, bell, file] = descriptors;
    let page = File::from(page);
    let bytes = page.metadata()?.len() as usize;
    let Some(behind) = bytes.checked_sub(PausePage::BYTES) else {
        return Err(io::Error::other("the page of pauses is too small"));
    };
    // SAFETY: a new mapping, which stays for good. The daemon made the file of this size, and
    // sealed it.
    let mapped = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, page.as_raw_fd(), 0)
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: aligned, never unmapped, and valid whatever it contains: it has atomics only. What
    // is behind the page begins with the next one of the system's.
    let (page, area) = unsafe {
        let behind_page = mapped.cast::<u8>().add(PausePage::BYTES);
        (&*mapped.cast::<PausePage>(), Area::at(behind_page, behind))
    };
    let dirty_log = QemuDirtyLog::find().ok();
    let pauser = Pauser { qemu, page, bell, file, dirty_log, area };
    let pauser: &'static Pauser = Box::leak(Box::new(pauser));
    // SAFETY: the callback gets what it expects, which lives for good.
    unsafe { qemu.main_loop.run(Pauser::listen, pauser.as_opaque()) };
    Ok(())
}

/// Carries out pauses. What is unsafe in it calls functions of QEMU that want the main thread
/// and the big lock: all its methods but `arm` are called in the main loop.
struct Pauser {
    qemu: QemuPause,
    page: &'static PausePage,
    bell: OwnedFd,
    file: OwnedFd,
    /// None if QEMU does not export what it takes.
    dirty_log: Option<QemuDirtyLog>,
    /// Area behind the page.
    area: Area,
}

impl Pauser {
    fn as_opaque(&'static self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// Begins to listen to the bell.
    extern "C" fn listen(opaque: *mut c_void) {
        // SAFETY: `arm` gave us this; nobody has a mutable reference.
        let pauser = unsafe { &*opaque.cast::<Pauser>() };
        // SAFETY: in the main loop; the bell belongs to `pauser`, which lives for good.
        unsafe { pauser.qemu.main_loop.watch(pauser.bell.as_fd(), Pauser::rung, opaque) };
        // SAFETY: in the main loop.
        if let Err(missing) = unsafe { clock::keep(pauser.page) } {
            eprintln!("understudy agent: pauses delay the guest's clocks: no {missing}");
        }
    }

    /// The bell rings.
    extern "C" fn rung(opaque: *mut c_void) {
        // SAFETY: as in `listen`.
        let pauser = unsafe { &*opaque.cast::<Pauser>() };
        let mut count = 0u64;
        // SAFETY: reads the eight bytes of a ring.
        unsafe { libc::read(pauser.bell.as_raw_fd(), ptr::from_mut(&mut count).cast(), 8) };
        pauser.page.echo();
        pauser.page.stamp(Answer::None);
        pauser.serve_dirty_log();
        Pauser::attend(opaque);
    }

    /// Carries the pause out, or tries again when the main loop has served what is in the way.
    extern "C" fn attend(opaque: *mut c_void) {
        // SAFETY: as in `listen`.
        let pauser = unsafe { &*opaque.cast::<Pauser>() };
        if pauser.page.order() == Order::Begin as u32 && !pauser.pause() {
            // SAFETY: as in `arm`.
            unsafe { pauser.qemu.main_loop.run(Pauser::attend, opaque) };
        }
    }

    /// One pause, from beginning to end. False if it must be tried again.
    fn pause(&self) -> bool {
        if self.has_requests() {
            return false;
        }
        let errand = LogErrand::from_number(self.page.errand.get());
        let runs = self.is_in(RUNNING);
        let Some(errand) = errand.filter(|&errand| self.takes(errand, runs)) else {
            self.page.tell(Answer::Refused);
            return true;
        };
        if runs {
            self.stop();
            if self.has_requests() {
                self.start();
                return false;
            }
        }
        let saved = self.settle_and_save(errand);
        self.page.tell(if saved { Answer::Saved } else { Answer::NotSaved });
        let order = self.await_order();
        if runs && order == Order::Resume as u32 {
            self.start();
            self.page.tell(Answer::Running);
            return true;
        }
        if runs {
            // SAFETY: in the main loop.
            unsafe { (self.qemu.send_stop_event)() };
        }
        self.page.tell(Answer::Staying);
        true
    }

    fn is_in(&self, state: (c_int, &CStr)) -> bool {
        // SAFETY: in the main loop; the call reads a variable.
        unsafe { (self.qemu.runstate_check)(state.0) }
    }

    fn takes(&self, errand: LogErrand, runs: bool) -> bool {
        !self.is_in(INMIGRATE) && lockstep::takes(errand, runs)
    }

    /// The machine stands still: what is left of a pause before its end.
    fn settle_and_save(&self, errand: LogErrand) -> bool {
        // SAFETY: in the main loop, and the machine is stopped.
        let settled = unsafe {
            let detached = || self.page.tell(Answer::Detached);
            lockstep::settle(errand, detached, || self.write_back())
        };
        let Some(mut position) = settled else { return false };
        self.page.tell(Answer::Stopped);
        if !self.save() {
            return false;
        }
        if errand == LogErrand::Attach {
            position = lockstep::attach();
        }
        self.page.log_position.store(position, Ordering::Relaxed);
        true
    }

    /// Writes what the formats of disks keep back to the disks, which all are drained. False if
    /// that failed.
    fn write_back(&self) -> bool {
        let kept = self.page.writes_back.load(Ordering::Relaxed) != 0;
        // SAFETY: in the main loop, and the machine is stopped.
        !kept || unsafe { (self.qemu.flush_disks)() } >= 0
    }

    fn has_requests(&self) -> bool {
        // SAFETY: in the main loop; the calls read a variable each.
        unsafe { (self.qemu.reset_requested)() != 0 || (self.qemu.shutdown_requested)() != 0 }
    }

    /// Does what QEMU's `do_vm_stop` does, in its order but for the clocks: they are stopped behind
    /// the vCPUs. Stopping them takes a lock by spinning, which an emulated vCPU holds while it
    /// reads its counter. In a pause this thread and the vCPUs have real-time priorities: spinning
    /// here, it could keep the holder from its processor for ever, and another vCPU that spins,
    /// too, from the other.
    fn stop(&self) {
        // SAFETY: in the main loop, with a machine that runs.
        unsafe {
            (self.qemu.runstate_set)(PAUSED.0);
            (self.qemu.pause_vcpus)();
            (self.qemu.disable_ticks)();
            (self.qemu.notify_state)(false, PAUSED.0);
            (self.qemu.drain_disks)();
        }
    }

    /// Does what QEMU's `vm_start` does, in its order. A pending request to stop, as for an error
    /// of a disk, stays pending: the main loop serves it next.
    fn start(&self) {
        // SAFETY: in the main loop, with a machine that `stop` stopped.
        unsafe {
            (self.qemu.enable_ticks)();
            (self.qemu.runstate_set)(RUNNING.0);
            (self.qemu.notify_state)(true, RUNNING.0);
            (self.qemu.resume_vcpus)();
        }
    }

    /// Does what QEMU's `qmp_xen_save_devices_state` does once the machine is stopped. The file
    /// keeps its memory: what lies behind the new content is no part of it.
    fn save(&self) -> bool {
        let file = self.file.as_raw_fd();
        // SAFETY: in the main loop. QEMU owns the copy of the descriptor from
        // `channel_of_fd` on, which shares its position with ours, and closes it with the
        // file; the reference to the channel goes over to the file.
        let (saved, end) = unsafe {
            (self.qemu.store_running)();
            libc::lseek(file, 0, libc::SEEK_SET);
            let copy = libc::fcntl(file, libc::F_DUPFD_CLOEXEC, 0);
            if copy < 0 {
                return false;
            }
            let channel = (self.qemu.channel_of_fd)(copy);
            let output = (self.qemu.open_for_output)(channel);
            (self.qemu.unref)(channel);
            let saved = (self.qemu.save_devices)(output);
            let closed = (self.qemu.close)(output);
            (saved >= 0 && closed >= 0, libc::lseek(file, 0, libc::SEEK_CUR))
        };
        let bytes = u64::try_from(end).unwrap_or(0);
        self.page.device_state_bytes.store(bytes, Ordering::Relaxed);
        saved && bytes > 0
    }

    /// Waits until the daemon says how the pause ends. However long: the machine stands
    /// still as long as the daemon wants, and the daemon's end ends this process.
    fn await_order(&self) -> u32 {
        loop {
            let seen = self.page.orders.get();
            self.serve_dirty_log();
            match self.page.order() {
                order if order == Order::Begin as u32 => {
                    self.page.orders.wait(seen, LONGEST_WAIT);
                }
                order => return order,
            }
        }
    }

    /// Does what is wanted of the dirty log, if anything is.
    fn serve_dirty_log(&self) {
        self.page.serve_dirty_log(|wish| {
            let blocks = self.page.dirty_blocks.load(Ordering::Relaxed);
            let Some(log) = self.dirty_log else { return DirtyOutcome::Missing };
            let Some((wish, area)) = wish.zip(self.area.with(blocks)) else {
                return DirtyOutcome::NotCovered;
            };
            // SAFETY: in the main loop.
            unsafe { log.serve(wish, area) }
        });
    }
}
