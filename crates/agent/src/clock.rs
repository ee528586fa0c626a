// SPDX-License-Identifier: GPL-2.0-or-later
//! The guest's clocks, which must not lose the time in which the guest stands still.
//!
//! QEMU stops them in every pause: a guest with forty checkpoints a second would fall behind by
//! some 2 %, which no NTP makes good. From the first run of a machine on they are therefore kept
//! at one distance from this host's clocks, however the pauses are made:
//!
//! - QEMU's virtual clock, on which its timers and emulated clocks depend, and the time stamp
//!   counter of a guest that it emulates: two numbers in its `timers_state`, the distances. They
//!   are noted when the machine first runs, and put back whenever it runs again;
//! - the kvmclock of a guest on KVM: QEMU reads it when the machine stops, and sets it to that
//!   when it runs again, by `ioctl`s that pass through this library. What has passed meanwhile
//!   is added there. The time stamp counter is not stopped by KVM.
//!
//! A machine that goes on from a checkpoint of another host has lost the time since then. The
//! daemon says when that was ([`PausePage::taken`]), and the distances begin so much further on.

use crate::lockstep;
use crate::qemu_symbols::{function, place};
use std::ffi::{c_int, c_ulong, c_void};
use std::fs;
use std::ops::Range;
use std::os::fd::RawFd;
use std::ptr;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use understudy_agent_protocol::{PausePage, monotonic};

type StateHandler = extern "C" fn(*mut c_void, bool, c_int);

/// What a change of the machine's state is told to first: devices start their timers then.
const FIRST: c_int = -1000;

/// What it takes of QEMU.
struct Clocks {
    page: &'static PausePage,
    get_clock: unsafe extern "C" fn() -> i64,
    get_ticks: unsafe extern "C" fn() -> i64,
    /// QEMU's `timers_state`.
    timers: &'static [AtomicI64],
    /// Where the distances are in it, and what they are, once the machine has run; none if they
    /// were not found.
    kept: OnceLock<Option<Kept>>,
    /// This host's clocks when this began, to know the counter's rate.
    began: Reading,
}

/// The distance of the guest's clocks from this host's.
#[derive(Clone, Copy)]
struct Kept {
    clock: Place,
    ticks: Place,
}

/// A number of `timers_state`.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    value: i64,
}

/// This host's clocks at one moment: nanoseconds, and ticks of the time stamp counter.
#[derive(Clone, Copy)]
struct Reading {
    nanoseconds: i64,
    ticks: i64,
}

impl Reading {
    fn now() -> Reading {
        // SAFETY: every processor that this is built for has it.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        Reading { nanoseconds: monotonic() as i64, ticks: ticks as i64 }
    }
}

/// Keeps the guest's clocks from now on, or names what is missing. Does nothing in a QEMU in
/// lockstep, whose time is that of its instructions.
///
/// # Safety
///
/// On QEMU's main thread, in its main loop.
pub unsafe fn keep(page: &'static PausePage) -> Result<(), String> {
    if lockstep::is_on() {
        return Ok(());
    }
    // SAFETY: declared so in QEMU's headers system/cpu-timers.h and system/runstate.h; what the
    // last one returns is not used, and no caller's frame depends on it.
    let (get_clock, get_ticks, on_change) = unsafe {
        type OnChange = unsafe extern "C" fn(StateHandler, *mut c_void, c_int) -> *mut c_void;
        let on_change: OnChange = function(c"qemu_add_vm_change_state_handler_prio")?;
        (function(c"cpu_get_clock")?, function(c"cpu_get_ticks")?, on_change)
    };
    let timers = numbers_at(place(c"timers_state")?);
    let (kept, began) = (OnceLock::new(), Reading::now());
    let clocks = Box::leak(Box::new(Clocks { page, get_clock, get_ticks, timers, kept, began }));
    let opaque = ptr::from_mut(clocks).cast();
    // SAFETY: on the main thread, as the caller vouches; the handler gets what it expects, which
    // lives for good.
    unsafe { on_change(changed, opaque, FIRST) };
    Ok(())
}

/// A variable of QEMU's as numbers.
fn numbers_at(place: Range<usize>) -> &'static [AtomicI64] {
    let (first, count) = (place.start as *const AtomicI64, place.len() / size_of::<i64>());
    // SAFETY: a variable of the program, there as long as the process, aligned as its numbers
    // are; QEMU's other threads read it, and nobody writes it while the main loop has the lock.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// The machine runs again, or not any more.
extern "C" fn changed(opaque: *mut c_void, running: bool, _state: c_int) {
    // SAFETY: `keep` gave us this; nobody has a mutable reference.
    let clocks = unsafe { &*opaque.cast::<Clocks>() };
    if running {
        clocks.run();
    }
}

impl Clocks {
    /// The machine is about to run; its virtual CPUs still stand.
    fn run(&self) {
        let kept = self.kept.get_or_init(|| self.begin());
        for Place { index, value } in kept.iter().flat_map(|kept| [kept.clock, kept.ticks]) {
            self.timers[index].store(value, Ordering::SeqCst);
        }
    }

    /// Finds the distances, and takes a machine that comes from another host to the present.
    fn begin(&self) -> Option<Kept> {
        let Some((mut clock, mut ticks)) = self.find() else {
            eprintln!("understudy agent: pauses delay the guest's clocks, which were not found");
            return None;
        };
        let now = Reading::now();
        let taken = self.page.taken.load(Ordering::Acquire) as i64;
        if taken != 0 {
            let late = (now.nanoseconds - taken).max(0);
            clock.value += late;
            ticks.value += self.ticks_in(late, now);
            TAKEN.store(taken as u64, Ordering::Release);
            advance_counters(late);
        }
        Some(Kept { clock, ticks })
    }

    /// Which numbers of `timers_state` are the distances of the clock and of the counter. Each
    /// is told by its value, which one number alone can have.
    fn find(&self) -> Option<(Place, Place)> {
        // SAFETY: in the main loop; the calls read variables.
        let (before, clock, ticks, after) =
            unsafe { (Reading::now(), (self.get_clock)(), (self.get_ticks)(), Reading::now()) };
        let clock = self.only(clock - after.nanoseconds..=clock - before.nanoseconds)?;
        let ticks =
            self.only(ticks.wrapping_sub(after.ticks)..=ticks.wrapping_sub(before.ticks))?;
        Some((clock, ticks))
    }

    /// The only number within these bounds.
    fn only(&self, bounds: std::ops::RangeInclusive<i64>) -> Option<Place> {
        let values = self.timers.iter().map(|number| number.load(Ordering::SeqCst)).enumerate();
        let mut fitting = values.filter(|(_, value)| bounds.contains(value));
        let (index, value) = fitting.next()?;
        fitting.next().is_none().then_some(Place { index, value })
    }

    /// How far this host's counter goes in so many nanoseconds.
    fn ticks_in(&self, nanoseconds: i64, now: Reading) -> i64 {
        let passed = (now.nanoseconds - self.began.nanoseconds).max(1);
        let ticks = now.ticks - self.began.ticks;
        (i128::from(nanoseconds) * i128::from(ticks) / i128::from(passed)) as i64
    }
}

/// `<linux/kvm.h>`.
const GET_CLOCK: u32 = 0x8030_ae7c;
const SET_CLOCK: u32 = 0x4030_ae7b;
const GET_TSC_KHZ: c_ulong = 0xaea3;
const SET_DEVICE_ATTR: c_ulong = 0x4018_aee1;
const GET_DEVICE_ATTR: c_ulong = 0x4018_aee2;
/// `KVM_VCPU_TSC_CTRL` and `KVM_VCPU_TSC_OFFSET`.
const TSC_CONTROL: u32 = 0;
const TSC_OFFSET: u64 = 0;

/// `struct kvm_clock_data`.
#[repr(C)]
struct ClockData {
    clock: u64,
    flags: u32,
    _padding: u32,
    realtime: u64,
    _rest: [u64; 3],
}

/// `struct kvm_device_attr`.
#[repr(C)]
struct DeviceAttribute {
    flags: u32,
    group: u32,
    attribute: u64,
    address: u64,
}

/// `KVM_CLOCK_REALTIME`: the time of day that belongs to the clock is there, too. What is set goes
/// on from then.
const HAS_REALTIME: u32 = 1 << 2;
/// By how much the host's time of day may have been corrected between a stop and a run, in
/// nanoseconds; beyond that it is not what has passed.
const MOST_CORRECTION: u64 = 1_000_000;

/// When a machine from another host last ran there, until its kvmclock is first set; 0 without.
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// What QEMU last read of the kvmclock.
static READ: Mutex<Option<ClockRead>> = Mutex::new(None);

struct ClockRead {
    clock: u64,
    /// The host's time of day then, if KVM says it.
    realtime: Option<u64>,
    /// When, by the clock that a kvmclock runs by, and how long KVM took to answer.
    at: u64,
    took: u64,
}

/// Whether this request to the kernel is about a kvmclock. QEMU has such numbers in an `int`, which
/// makes other ones of those with the highest bit.
pub fn is_kvmclock(request: c_ulong) -> bool {
    matches!(request as u32, GET_CLOCK | SET_CLOCK)
}

/// Passes a request about a kvmclock on: what is set is what was read, and the time since then.
///
/// # Safety
///
/// `argument` is what the kernel expects of this request.
pub unsafe fn ioctl(fd: RawFd, request: c_ulong, argument: *mut c_void) -> c_int {
    let pass_on = |argument: *mut c_void| {
        // SAFETY: as the caller vouches.
        unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) as c_int }
    };
    let data: *mut ClockData = argument.cast();
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if request as u32 == GET_CLOCK {
        let before = raw();
        let result = pass_on(argument);
        let took = raw() - before;
        // SAFETY: the kernel has filled it, if it succeeded.
        let ClockData { clock, flags, realtime, .. } = unsafe { data.read() };
        let realtime = (flags & HAS_REALTIME != 0).then_some(realtime);
        *read = (result == 0).then_some(ClockRead { clock, realtime, at: before + took / 2, took });
        return result;
    }
    // SAFETY: QEMU passes a structure of its own, set up for this one call.
    let data = unsafe { &mut *data };
    match &*read {
        Some(read) if read.clock == data.clock => go_on(read, data),
        _ => match TAKEN.swap(0, Ordering::Acquire) {
            0 => {}
            taken => data.clock += monotonic().saturating_sub(taken),
        },
    }
    pass_on(argument)
}

/// What is set is what was read, and the time since then. KVM itself can tell that exactly, by the
/// time of day; else what it takes to answer is taken to be the same both times.
fn go_on(read: &ClockRead, data: &mut ClockData) {
    let passed = (raw() + read.took / 2).saturating_sub(read.at);
    match read.realtime.filter(|&then| time_of_day().abs_diff(then + passed) < MOST_CORRECTION) {
        Some(then) => (data.flags, data.realtime) = (HAS_REALTIME, then),
        None => data.clock += passed,
    }
}

fn time_of_day() -> u64 {
    read_clock(libc::CLOCK_REALTIME)
}

/// The clock that a kvmclock runs by.
fn raw() -> u64 {
    read_clock(libc::CLOCK_MONOTONIC_RAW)
}

fn read_clock(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `time`; every Linux has these clocks.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Puts the time stamp counters of a machine on KVM so much further on, all by the same.
fn advance_counters(nanoseconds: i64) {
    for vcpu in vcpus() {
        if let Err(error) = advance_counter(vcpu, nanoseconds) {
            eprintln!("understudy agent: cannot advance a time stamp counter: {error}");
        }
    }
}

/// The descriptors of this process that are virtual CPUs of KVM's.
fn vcpus() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let is_vcpu = |path: &std::path::Path| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("anon_inode:kvm-vcpu:"))
    };
    entries
        .filter(|entry| is_vcpu(&entry.path()))
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn advance_counter(vcpu: RawFd, nanoseconds: i64) -> std::io::Result<()> {
    let result = |code: i64| match code {
        0.. => Ok(code),
        _ => Err(std::io::Error::last_os_error()),
    };
    let mut offset = 0u64;
    let attribute = DeviceAttribute {
        flags: 0,
        group: TSC_CONTROL,
        attribute: TSC_OFFSET,
        address: ptr::from_mut(&mut offset) as u64,
    };
    // SAFETY: requests to a virtual CPU, which stands still; the structure and the number that it
    // points to live through the calls.
    unsafe {
        let kilohertz = result(libc::syscall(libc::SYS_ioctl, vcpu, GET_TSC_KHZ, 0))?;
        result(libc::syscall(libc::SYS_ioctl, vcpu, GET_DEVICE_ATTR, &attribute))?;
        let ticks = i128::from(nanoseconds) * i128::from(kilohertz) / 1_000_000;
        ptr::from_mut(&mut offset).write_volatile(offset.wrapping_add(ticks as u64));
        result(libc::syscall(libc::SYS_ioctl, vcpu, SET_DEVICE_ATTR, &attribute))?;
    }
    Ok(())
}
