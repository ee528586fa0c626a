// SPDX-License-Identifier: GPL-2.0-or-later
//! The clocks of a guest on KVM.
//!
//! QEMU reads the kvmclock when the machine stops, and sets it to that when it runs again, by
//! `ioctl`s that pass through this library: what has passed meanwhile is added here. KVM does not
//! stop the time stamp counter; only that of a machine from another host is advanced.

use std::ffi::{c_int, c_ulong, c_void};
use std::fs;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use understudy_agent_protocol::{monotonic, time_of};

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
/// Largest correction of the host's time of day between a stop and a run, in
/// nanoseconds; beyond that it is not what has passed.
const MOST_CORRECTION: u64 = 1_000_000;

/// Time at which a machine from another host last ran there, until its kvmclock is first set; 0
/// without.
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// Value that QEMU last read of the kvmclock.
static READ: Mutex<Option<ClockRead>> = Mutex::new(None);

struct ClockRead {
    clock: u64,
    /// The host's time of day then, if KVM says it.
    realtime: Option<u64>,
    /// Time, by the clock that a kvmclock runs by, and how long KVM took to answer.
    at: u64,
    took: u64,
}

/// Takes the clocks of a machine to the present that last ran on another host at `taken`
/// (`CLOCK_MONOTONIC`), so many nanoseconds ago. Its virtual CPUs stand still.
pub fn continue_from(taken: u64, late: i64) {
    TAKEN.store(taken, Ordering::Release);
    advance_counters(late);
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

/// Sets what was read, and the time since then. KVM itself can tell that exactly, by the
/// time of day; else what it takes to answer is taken to be the same both times.
fn go_on(read: &ClockRead, data: &mut ClockData) {
    let passed = (raw() + read.took / 2).saturating_sub(read.at);
    match read
        .realtime
        .filter(|&then| time_of(libc::CLOCK_REALTIME).abs_diff(then + passed) < MOST_CORRECTION)
    {
        Some(then) => (data.flags, data.realtime) = (HAS_REALTIME, then),
        None => data.clock += passed,
    }
}

/// The clock that a kvmclock runs by.
fn raw() -> u64 {
    time_of(libc::CLOCK_MONOTONIC_RAW)
}

/// Puts the time stamp counters of a machine on KVM so much further on, all by the same.
fn advance_counters(nanoseconds: i64) {
    for vcpu in vcpus() {
        if let Err(error) = advance_counter(vcpu, nanoseconds) {
            eprintln!(
                "understudy agent: a time stamp counter stays {} ms behind, and the guest's clock \
                 with it until its NTP corrects it: KVM would not advance it: {error}",
                nanoseconds / 1_000_000
            );
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
