//! Rights of a keeper on its host: it is root, but has few of root's capabilities and of the
//! kernel's calls, and gains none.

use super::system_calls;
use crate::config::HostConfig;
use nix::sys::socket::{getsockopt, sockopt};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};
use std::fmt::Display;
use std::os::fd::{AsFd, AsRawFd};
use std::{fs, io};
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

/// Whether whoever has connected to a unix socket is a keeper, or was started by one: it has no more rights, and can get
/// none. A process that is not there any more counts as one.
pub fn are_only_a_keepers(connection: &impl AsFd) -> bool {
    // Who has connected is another process by now only if that has ended.
    let held = getsockopt(connection, sockopt::PeerPidfd);
    let permitted = || -> io::Result<u64> {
        let asking = match &held {
            Ok(process) => number_of(process)?,
            // Linux before 6.5.
            Err(_) => getsockopt(connection, sockopt::PeerCredentials)?.pid(),
        };
        // Of another namespace, which no keeper can make.
        if asking == 0 {
            return Ok(u64::MAX);
        }
        let permitted = permitted_to(asking)?;
        let ended = held.as_ref().is_ok_and(|it| number_of(it).ok() != Some(asking));
        if ended { Err(io::ErrorKind::NotFound.into()) } else { Ok(permitted) }
    };
    permitted().map_or(true, |permitted| permitted & !NEEDED.bits() == 0)
}

/// The number of the process that a descriptor holds, here; an error if it has ended.
fn number_of(process: &impl AsRawFd) -> io::Result<i32> {
    let path = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let number = field(&fs::read_to_string(path)?, "Pid:", 10)?;
    i32::try_from(number).map_err(io::Error::other)
}

/// The capabilities that it has, or could take.
fn permitted_to(process: i32) -> io::Result<u64> {
    field(&fs::read_to_string(format!("/proc/{process}/status"))?, "CapPrm:", 16)
}

fn field(text: &str, name: &str, radix: u32) -> io::Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let value = value.ok_or(io::ErrorKind::InvalidData)?;
    u64::from_str_radix(value.trim(), radix).map_err(io::Error::other)
}

fn cannot(error: impl Display) -> HostError {
    let message = format!("a keeper cannot give up rights that it does not need: {error}");
    HostError::new(ErrorKind::Internal, message)
}

/// A test has a keeper try what it may not: to read its daemon's memory, to make a namespace, to read the authority's key,
/// another VM's disk, to ask its daemon as an operator does, to open each block device of `/dev`, the kernel's log and a
/// terminal, and to make a device. What came of it is a line in the file that the fail point names.
pub(crate) fn try_in_a_test(_config: &HostConfig) {
    fail::fail_point!("rights", |file| {
        use nix::sched::{CloneFlags, unshare};
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        use std::io::{BufRead, BufReader, Write};
        use std::os::unix::{fs::FileTypeExt, net::UnixStream};
        use std::{fs::File, process::id};

        let daemon = std::os::unix::process::parent_id();
        let key = _config.tls.as_ref().map(|tls| tls.ca.with_file_name("ca.key"));
        let files = [
            format!("/proc/{daemon}/mem").into(),
            key.unwrap_or_default(),
            _config.state_dir.join("another/disk0.img"),
        ];
        let opened = files.map(|path| File::open(path).map(drop).map_err(|error| error.kind()));
        let namespace = unshare(CloneFlags::CLONE_NEWUSER);
        let asked = UnixStream::connect(&_config.socket).and_then(|mut daemon| {
            daemon.write_all(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
            let mut answer = String::new();
            BufReader::new(daemon).read_line(&mut answer)?;
            Ok(answer.trim().to_owned())
        });
        let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
        let is_tried = |path: &std::path::PathBuf| {
            let kind = fs::metadata(path).map(|it| it.file_type());
            kind.is_ok_and(|it| it.is_block_device())
                || ["/dev/kmsg", "/dev/ptmx"].iter().any(|it| path.ends_with(it))
        };
        let tried = devices.map(|entry| entry.path()).filter(is_tried);
        let devices: Vec<_> = tried.filter(|path| File::open(path).is_ok()).collect();
        let node = std::env::temp_dir().join(format!("understudy-{}", id()));
        let made = mknod(&node, SFlag::S_IFBLK, Mode::S_IRUSR, makedev(7, 0)).is_ok();
        let line = format!("{} {opened:?} {namespace:?} {asked:?} {devices:?} {made}\n", id());
        let told = File::options().append(true).open(file.unwrap_or_default());
        if let Err(error) = told.and_then(|mut file| file.write_all(line.as_bytes())) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    /// Whether a process is taken for a keeper that has connected, and lives, or has ended.
    fn is_taken_for_one(confined: bool, lives: bool) -> bool {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let address = UnixAddr::new(&path).unwrap();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let dial = move || -> io::Result<()> {
            if confined {
                give_up().map_err(|_| io::ErrorKind::Other)?;
            }
            let connection =
                socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None)?;
            // The program has it from here on.
            Ok(connect(connection.into_raw_fd(), &address)?)
        };
        // SAFETY: in the child, which has one thread, and takes no lock.
        #[allow(unsafe_code)]
        unsafe {
            command.pre_exec(dial);
        }
        let mut asking = command.spawn().unwrap();
        let connection: UnixStream = listener.accept().unwrap().0;
        if !lives {
            asking.kill().unwrap();
            asking.wait().unwrap();
        }
        let taken = are_only_a_keepers(&connection);
        let _ = asking.kill();
        asking.wait().unwrap();
        taken
    }

    #[test]
    fn a_keeper_is_told_from_an_operator() {
        assert!(is_taken_for_one(true, true), "a keeper");
        assert!(!is_taken_for_one(false, true), "an operator");
        assert!(is_taken_for_one(false, false), "nobody knows what it was");
        let (own, _other) = UnixStream::pair().unwrap();
        assert!(!are_only_a_keepers(&own), "this process has all of root's capabilities");
    }
}
