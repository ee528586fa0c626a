//! Rights of a keeper on its host: it is root, but has few of root's capabilities and of the
//! kernel's calls, and gains none.

use super::system_calls;
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};
use std::fmt::Display;
use understudy_report::error::{ErrorKind, HostError};

/// Capabilities that it needs, and what for. Its QEMU, of another user, has none of them.
const NEEDED: CapabilitySet = CapabilitySet::empty()
    // Images, certificates and stores that belong to others.
    .union(CapabilitySet::DAC_OVERRIDE)
    // QEMU's directory, sockets and memory, which are given to its user, and closed to all others.
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::FOWNER)
    // QEMU becomes a user of its own.
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    // It is ended, and stopped for a pause.
    .union(CapabilitySet::KILL)
    // Its memory is read, tracked and written, and its sockets are looked into.
    .union(CapabilitySet::SYS_PTRACE)
    // Taps on the host's bridges, and sockets' buffers above the system's bound.
    .union(CapabilitySet::NET_ADMIN)
    // A pause has real-time priority.
    .union(CapabilitySet::SYS_NICE)
    // More descriptors, QEMU's limits, and a word to the kernel on whom to end for want of memory.
    .union(CapabilitySet::SYS_RESOURCE);

/// Gives up everything else for this process and all that it starts; before it has other threads, which would keep it.
pub fn give_up() -> Result<(), HostError> {
    set_no_new_privs(true).map_err(cannot)?;
    drop_beyond(NEEDED).map_err(cannot)?;
    system_calls::give_up().map_err(cannot)
}

fn cannot(error: impl Display) -> HostError {
    let message = format!("a keeper cannot give up rights that it does not need: {error}");
    HostError::new(ErrorKind::Internal, message)
}

/// A test has a keeper try what it may not: to read its daemon's memory, and to make a namespace. What came of it is a
/// line in the file that the fail point names.
pub(crate) fn try_in_a_test() {
    fail::fail_point!("rights", |file| {
        use nix::sched::{CloneFlags, unshare};
        use std::{fs::File, io::Write, process::id};

        let daemon = std::os::unix::process::parent_id();
        let memory = File::open(format!("/proc/{daemon}/mem")).map(drop);
        let namespace = unshare(CloneFlags::CLONE_NEWUSER);
        let line = format!("{} {:?} {namespace:?}\n", id(), memory.map_err(|it| it.kind()));
        let opened = File::options().append(true).open(file.unwrap_or_default());
        if let Err(error) = opened.and_then(|mut file| file.write_all(line.as_bytes())) {
            tracing::error!("what was tried cannot be told: {error}");
        }
    });
}

fn drop_beyond(needed: CapabilitySet) -> Result<(), Errno> {
    let each = (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit));
    for capability in each.filter(|it| !needed.contains(*it)) {
        match remove_capability_from_bounding_set(capability) {
            // The kernel knows none from here on.
            Err(Errno::INVAL) => break,
            // Who may not do that gains nothing from it either: no new privileges.
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err(error),
        }
    }
    let held = capabilities(None)?;
    let left = held.permitted.intersection(needed);
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: left, permitted: left, inheritable })
}
