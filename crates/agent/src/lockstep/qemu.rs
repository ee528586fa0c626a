// SPDX-License-Identifier: GPL-2.0-or-later
//! Symbols that the agent calls and reads inside QEMU to steer record and replay.
//!
//! QEMU exports its functions and globals to plug-ins; none of these is a promise of
//! QEMU's, so that every name must be there, and [`ReplayState`] has the layout of the
//! builds that were proven (QEMU 10.0).

use super::question::Questions;
use super::queues::Queues;
use crate::qemu_symbols::place;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;

/// Function that runs on QEMU's main loop once.
pub type BottomHalf = unsafe extern "C" fn(*mut c_void);

/// Function that runs for each network card.
type EachNic = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// Function that QEMU calls when the machine begins or ceases to run.
pub type RunHandler = unsafe extern "C" fn(*mut c_void, bool, c_int);

/// Values of QEMU's `replay_mode`.
pub const MODE_RECORD: c_int = 1;
/// A backup that follows a log.
pub const MODE_PLAY: c_int = 2;

/// The event that ends a log (`EVENT_END`).
pub const EVENT_END: u8 = 39;

/// Requests to power off, by their causes (`EVENT_SHUTDOWN` and on).
const SHUTDOWNS: std::ops::RangeInclusive<u32> = 10..=21;

/// The log's first four bytes as replay wants them (`REPLAY_VERSION`, big-endian).
pub const LOG_VERSION: [u8; 4] = [0x00, 0xe0, 0x20, 0x0c];

/// The loops of QEMU that its vCPU wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loop {
    /// The main loop has two contexts.
    Main,
    Handlers,
    /// The thread of the monitors.
    Monitors,
}

impl Loop {
    pub const ALL: [Loop; 3] = [Loop::Main, Loop::Handlers, Loop::Monitors];
}

/// `ReplayState` of QEMU's `replay/replay-internal.h`.
#[repr(C)]
pub struct ReplayState {
    cached_clock: [i64; 2],
    /// Instructions executed up to the last event.
    pub current_icount: u64,
    /// Instructions left until the next event (replay).
    pub instruction_count: c_int,
    current_event: u32,
    /// Kind of the event that replay waits to execute.
    pub data_kind: u32,
    /// Whether `data_kind` was read and not executed yet.
    pub has_unread_data: bool,
    file_offset: u64,
    /// Disk requests so far.
    pub block_request_id: u64,
    /// Number of the asynchronous event that replay waits for, or all ones.
    pub read_event_id: u64,
}

/// QEMU's functions and variables, found by name.
pub struct Qemu {
    aio_context: unsafe extern "C" fn() -> *mut c_void,
    main_context: unsafe extern "C" fn() -> *mut c_void,
    objects: unsafe extern "C" fn() -> *mut c_void,
    object: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
    thread_context: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    notify: unsafe extern "C" fn(*mut c_void),
    in_vcpu_thread: unsafe extern "C" fn() -> bool,
    vcpu_idle: unsafe extern "C" fn() -> bool,
    schedule: unsafe extern "C" fn(*mut c_void, BottomHalf, *mut c_void, *const c_char),
    drain_disks: unsafe extern "C" fn(),
    save_instructions: unsafe extern "C" fn(),
    mutex_locked: unsafe extern "C" fn() -> bool,
    has_events: unsafe extern "C" fn() -> bool,
    find_chardev: unsafe extern "C" fn(*const c_char) -> *mut c_void,
    chardev_room: unsafe extern "C" fn(*mut c_void) -> c_int,
    finish_events: unsafe extern "C" fn(),
    enable_events: unsafe extern "C" fn(),
    finish: unsafe extern "C" fn(),
    fetch_data_kind: unsafe extern "C" fn(),
    on_run: unsafe extern "C" fn(RunHandler, *mut c_void) -> *mut c_void,
    enable_clock: unsafe extern "C" fn(c_int, bool),
    shutdown_requested: unsafe extern "C" fn() -> c_int,
    is_running: unsafe extern "C" fn() -> bool,
    icount_raw: unsafe extern "C" fn() -> i64,
    timer_notify: unsafe extern "C" fn(*mut c_void, c_int),
    foreach_nic: unsafe extern "C" fn(EachNic, *mut c_void),
    nic_queue: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    purge_queue: unsafe extern "C" fn(*mut c_void, bool),
    mode: *const c_int,
    state: *mut ReplayState,
    log_file: *mut *mut libc::FILE,
    pub questions: Questions,
    pub queues: Queues,
}

// SAFETY: the pointers are to functions and to variables that exist as long as the process;
// who may touch them when is said at each method.
unsafe impl Send for Qemu {}
// SAFETY: as above.
unsafe impl Sync for Qemu {}

/// Finds a symbol of the program; its type is the caller's word.
pub fn find<T>(name: &str) -> Result<T, String> {
    let symbol = CString::new(name).expect("names have no zero byte");
    // SAFETY: asks the dynamic linker; the name ends with a zero byte.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    if address.is_null() {
        return Err(format!("no {name}"));
    }
    assert_eq!(mem::size_of::<T>(), mem::size_of::<*mut c_void>());
    // SAFETY: `T` is a pointer or a function pointer (same size; not null).
    Ok(unsafe { mem::transmute_copy(&address) })
}

/// Checks that a variable of QEMU's has the size of our `T`.
fn check_size<T>(name: &CStr) -> Result<(), String> {
    match place(name)?.len() {
        bytes if bytes == mem::size_of::<T>() => Ok(()),
        bytes => Err(format!("{} has {bytes} bytes", name.to_string_lossy())),
    }
}

impl Qemu {
    /// Finds everything, or says what is missing or different.
    pub fn find() -> Result<Qemu, String> {
        check_size::<ReplayState>(c"replay_state")?;
        check_size::<c_int>(c"replay_mode")?;
        Ok(Qemu {
            aio_context: find("iohandler_get_aio_context")?,
            main_context: find("qemu_get_aio_context")?,
            objects: find("object_get_internal_root")?,
            object: find("object_resolve_path_component")?,
            thread_context: find("iothread_get_aio_context")?,
            notify: find("aio_notify")?,
            in_vcpu_thread: find("qemu_in_vcpu_thread")?,
            vcpu_idle: find("all_cpu_threads_idle")?,
            schedule: find("aio_bh_schedule_oneshot_full")?,
            drain_disks: find("bdrv_drain_all")?,
            save_instructions: find("replay_save_instructions")?,
            mutex_locked: find("replay_mutex_locked")?,
            has_events: find("replay_has_events")?,
            find_chardev: find("qemu_chr_find")?,
            chardev_room: find("qemu_chr_be_can_write")?,
            finish_events: find("replay_finish_events")?,
            enable_events: find("replay_enable_events")?,
            finish: find("replay_finish")?,
            fetch_data_kind: find("replay_fetch_data_kind")?,
            on_run: find("qemu_add_vm_change_state_handler")?,
            enable_clock: find("qemu_clock_enable")?,
            shutdown_requested: find("qemu_shutdown_requested_get")?,
            is_running: find("runstate_is_running")?,
            icount_raw: find("icount_get_raw")?,
            timer_notify: find("qemu_timer_notify_cb")?,
            foreach_nic: find("qemu_foreach_nic")?,
            nic_queue: find("qemu_get_queue")?,
            purge_queue: find("qemu_flush_or_purge_queued_packets")?,
            mode: find("replay_mode")?,
            state: find("replay_state")?,
            log_file: find("replay_file")?,
            questions: Questions::find()?,
            queues: Queues::find()?,
        })
    }

    /// Lets `run` be called once on the main loop. May be called on any thread.
    ///
    /// # Safety
    /// `argument` must be good for `run` until it has run.
    pub unsafe fn schedule(&self, run: BottomHalf, argument: *mut c_void) {
        const NAME: &CStr = c"understudy";
        // SAFETY: both functions may be called on any thread; the argument is the caller's.
        unsafe { (self.schedule)((self.aio_context)(), run, argument, NAME.as_ptr()) }
    }

    /// `MODE_RECORD`, `MODE_PLAY`, or none.
    pub fn mode(&self) -> c_int {
        // SAFETY: a word that changes at the start and at go-live only.
        unsafe { self.mode.read_volatile() }
    }

    /// Kind of the event that replay waits to execute; what another thread changes
    /// meanwhile may be seen late.
    pub fn data_kind(&self) -> u32 {
        // SAFETY: an aligned word of a variable that is always there.
        unsafe { (&raw const (*self.state).data_kind).read_volatile() }
    }

    /// Number of the event that replay waits to execute.
    pub fn event_number(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.state).current_event).read_volatile() }
    }

    /// Whether this is the thread of the vCPU.
    pub fn is_vcpu_thread(&self) -> bool {
        // SAFETY: looks at a variable of the thread's.
        unsafe { (self.in_vcpu_thread)() }
    }

    /// Whether the vCPU has nothing to execute: its guest waits for an interrupt, or the machine
    /// stands still. What another thread changes meanwhile may be seen late.
    pub fn is_vcpu_idle(&self) -> bool {
        // SAFETY: reads words of a vCPU that is never removed.
        unsafe { (self.vcpu_idle)() }
    }

    /// Has a loop look around once, if it sleeps. For the main thread.
    pub fn wake(&self, which: Loop) {
        // SAFETY: a context may be woken from any thread. The monitors' thread is made before
        // the main loop runs, and stays.
        unsafe {
            let context = match which {
                Loop::Main => (self.main_context)(),
                Loop::Handlers => (self.aio_context)(),
                Loop::Monitors => {
                    let thread = (self.object)((self.objects)(), c"mon_iothread".as_ptr());
                    if thread.is_null() {
                        return;
                    }
                    (self.thread_context)(thread)
                }
            };
            if !context.is_null() {
                (self.notify)(context);
            }
        }
    }

    /// Instructions executed, as of the last event.
    pub fn instructions(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.state).current_icount).read_volatile() }
    }

    /// Whether instructions were executed that are not in the log yet. Where the log is written.
    pub fn has_executed(&self) -> bool {
        // SAFETY: counts, on a thread that may ask for it.
        let executed = unsafe { (self.icount_raw)() };
        executed as u64 != self.instructions()
    }

    /// Requests to disks that have begun.
    pub fn disk_requests(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (&raw const (*self.state).block_request_id).read_volatile() }
    }

    /// Whether events wait for being logged. May be called on any thread.
    pub fn has_events(&self) -> bool {
        // SAFETY: looks whether a list is empty.
        unsafe { (self.has_events)() }
    }

    /// Bytes that the port of the guest's console has room for. On QEMU's main thread, which
    /// reads what is typed.
    pub fn console_room(&self) -> usize {
        // SAFETY: looks for a name, and asks the port, which nobody removes.
        let room = unsafe {
            let console = (self.find_chardev)(c"console".as_ptr());
            if console.is_null() { 0 } else { (self.chardev_room)(console) }
        };
        usize::try_from(room).unwrap_or(0)
    }

    /// Whether the machine runs. May be called on any thread.
    pub fn runs(&self) -> bool {
        // SAFETY: reads a variable.
        unsafe { (self.is_running)() }
    }

    /// Whether the machine stands still, or is about to: it powers off, and no lock is needed
    /// to know it. May be called on any thread.
    pub fn is_stopping(&self) -> bool {
        // SAFETY: reads a variable.
        let requested = unsafe { (self.shutdown_requested)() != 0 };
        requested || !self.runs() || SHUTDOWNS.contains(&self.data_kind())
    }

    /// Wakes the vCPU thread, which then logs what waits. May be called on any thread.
    pub fn wake_vcpu(&self) {
        const QEMU_CLOCK_VIRTUAL: c_int = 1;
        // SAFETY: kicks the vCPU; the first argument is not used by QEMU.
        unsafe { (self.timer_notify)(std::ptr::null_mut(), QEMU_CLOCK_VIRTUAL) }
    }

    /// Brings the instruction count into the log, if this thread may write there.
    pub fn save_instructions(&self) {
        // SAFETY: asks whether this thread holds the replay lock, which the call needs.
        unsafe {
            if (self.mutex_locked)() {
                (self.save_instructions)();
            }
        }
    }

    /// Has `handler` called on the main loop whenever the machine begins or ceases to run.
    ///
    /// # Safety
    /// On QEMU's main thread, after its main loop was made.
    pub unsafe fn on_run(&self, handler: RunHandler) {
        // SAFETY: as the caller vouches.
        unsafe { (self.on_run)(handler, std::ptr::null_mut()) };
    }

    /// Whether timers of the clock VIRTUAL_RT are served.
    ///
    /// # Safety
    /// On QEMU's main thread, after its main loop was made, and not out of a timer, for whose
    /// end this would wait.
    pub unsafe fn enable_timers(&self, enabled: bool) {
        const VIRTUAL_RT: c_int = 3;
        // SAFETY: as the caller vouches.
        unsafe { (self.enable_clock)(VIRTUAL_RT, enabled) };
    }

    /// Leaves nothing under way: no event to be logged, no disk request, no frame in a queue. `write_back` is called
    /// when there is no disk request; gives what it returns.
    ///
    /// # Safety
    /// Only on the main loop of a stopped machine that records.
    pub unsafe fn quiesce(&self, write_back: impl FnOnce() -> bool) -> bool {
        unsafe extern "C" fn purge(nic: *mut c_void, qemu: *mut c_void) {
            // SAFETY: QEMU gives a card, and the argument is the `Qemu` below.
            unsafe {
                let qemu = &*qemu.cast::<Qemu>();
                (qemu.purge_queue)((qemu.nic_queue)(nic), true);
            }
        }
        // SAFETY: the caller's word.
        unsafe {
            (self.finish_events)();
            (self.drain_disks)();
        }
        // Behind the last event: the requests of what is written are none of the log's.
        let written = write_back();
        // SAFETY: the caller's word; `purge` is done with `self` when the call returns.
        unsafe {
            (self.foreach_nic)(purge, std::ptr::from_ref(self).cast_mut().cast());
            (self.enable_events)();
        }
        self.save_instructions();
        written
    }

    /// Forgets the event read ahead and reads the next from the log, which may block.
    ///
    /// # Safety
    /// Only on the main loop of a stopped machine that replays.
    pub unsafe fn refetch(&self) {
        // SAFETY: the caller's word.
        unsafe {
            (*self.state).has_unread_data = false;
            (self.fetch_data_kind)();
        }
    }

    /// Ends replay: the machine is an ordinary one from here on, with the same disks.
    ///
    /// # Safety
    /// Only on the main loop of a stopped machine whose log is used up.
    pub unsafe fn finish(&self) {
        // SAFETY: the caller's word.
        unsafe {
            (self.finish)();
            (self.drain_disks)();
        }
    }

    /// Makes a machine that ended replay one whose device state can be saved for another
    /// that records: saving wants a log file and the true instruction count.
    ///
    /// # Safety
    /// Only on the main loop of a stopped machine after [`Qemu::finish`].
    pub unsafe fn prepare_for_save(&self) -> Result<(), String> {
        // SAFETY: the caller's word; nobody reads or writes the file: replay is over.
        unsafe {
            if (*self.log_file).is_null() {
                let file = libc::fopen(c"/dev/null".as_ptr(), c"w".as_ptr());
                if file.is_null() {
                    return Err("cannot open /dev/null".to_owned());
                }
                *self.log_file = file;
            }
            (*self.state).current_icount = (self.icount_raw)() as u64;
            (*self.state).data_kind = EVENT_END.into();
            (*self.state).has_unread_data = false;
            (*self.state).instruction_count = 0;
        }
        Ok(())
    }
}
