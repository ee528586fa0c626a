//! The rate of the processor's time stamp counter, by which a guest on KVM measures time.
//!
//! A host that cannot give the guest the rate that it had lets it run by another one, and QEMU says
//! no more than a line in its log: the guest's clocks would go wrong after a take-over.
#![allow(unsafe_code)] // System calls to /dev/kvm.

use nix::errno::Errno;
use nix::libc::{self, c_int, c_ulong};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// KVM's requests, and what says that it can scale the counter.
const CREATE_VM: c_ulong = 0xae01;
const CHECK_EXTENSION: c_ulong = 0xae03;
const CREATE_VCPU: c_ulong = 0xae41;
const GET_TSC_KHZ: c_ulong = 0xaea3;
const TSC_CONTROL: c_int = 60;

/// KVM takes rates for one and the same that differ by so many millionths.
const TOLERANCE: u64 = 250;

/// A rate, in kHz.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TscRate(pub u32);

impl fmt::Display for TscRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kHz", self.0)
    }
}

/// The help of this host's KVM for a guest's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTsc {
    /// The rate of the processor's own.
    pub rate: TscRate,
    /// Whether a guest may have another one.
    scales: bool,
}

impl HostTsc {
    /// Asks KVM, by a VM of a moment.
    ///
    /// # Errors
    /// Without KVM, and where the counter has no rate of its own.
    pub fn of_this_machine() -> io::Result<HostTsc> {
        let kvm: OwnedFd = File::options().read(true).write(true).open("/dev/kvm")?.into();
        let vm = descriptor(ask(&kvm, CREATE_VM, 0)?);
        let vcpu = descriptor(ask(&vm, CREATE_VCPU, 0)?);
        let rate = TscRate(ask(&vcpu, GET_TSC_KHZ, 0)?.unsigned_abs());
        Ok(HostTsc { rate, scales: ask(&kvm, CHECK_EXTENSION, TSC_CONTROL)? > 0 })
    }

    /// Whether a guest that had this rate has it here, too.
    pub fn gives(&self, wanted: TscRate) -> bool {
        let difference = u64::from(self.rate.0.abs_diff(wanted.0));
        self.scales || difference * 1_000_000 <= u64::from(wanted.0) * TOLERANCE
    }
}

fn ask(descriptor: &OwnedFd, request: c_ulong, argument: c_int) -> io::Result<c_int> {
    // SAFETY: none of these requests takes a pointer.
    let answer = unsafe { libc::ioctl(descriptor.as_raw_fd(), request, argument) };
    Ok(Errno::result(answer)?)
}

fn descriptor(number: c_int) -> OwnedFd {
    // SAFETY: KVM has just made it, for us alone.
    unsafe { OwnedFd::from_raw_fd(number) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TickRate;

    #[test]
    fn another_rate_needs_a_host_that_scales() {
        let host = |scales| HostTsc { rate: TscRate(2_600_000), scales };
        for (wanted, given) in [(2_600_000, true), (2_600_600, true), (2_601_000, false)] {
            assert_eq!(host(false).gives(TscRate(wanted)), given, "{wanted}");
            assert!(host(true).gives(TscRate(wanted)));
        }
    }

    #[test]
    fn a_host_knows_its_own_rate() {
        let host = match HostTsc::of_this_machine() {
            Ok(host) => host,
            Err(error) => return eprintln!("SKIPPED: needs KVM: {error}"),
        };
        let measured = (TickRate::of_this_host().ticks(1_000_000)) as u32;
        assert!(host.rate.0.abs_diff(measured) < measured / 100, "{host:?}, measured {measured}");
        assert!(host.gives(host.rate));
    }
}
