//! The system calls that neither a keeper nor its QEMU makes: the kernel refuses them, for good.
//!
//! It is a list of what is refused and not of what is allowed: which calls QEMU and its libraries make differs between
//! their releases, and a guest must not end for one that nobody has heard of. QEMU has a filter of its own beside this.

use nix::libc::{self, c_long};
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// Calls that are refused whatever they are asked.
const REFUSED: &[c_long] = &[
    // The kernel itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_personality,
    // Calls that go past this filter, or past the rights to files.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_open_by_handle_at,
    // Other processes. QEMU's memory is read by files of /proc, and its sockets by pidfd_getfd.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    // What the host sees as its file system; other namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    // Keys that other processes have in the kernel.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // The host's clock, name and accounts.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_acct,
    libc::SYS_vhangup,
];

/// Flags of namespaces: in a new one of the user's a process has all capabilities, and so reaches
/// what they guard in the kernel.
const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// The numbers of calls by another interface of the same processor, which a filter could be gone round by.
const X32: std::ops::Range<c_long> = 0x4000_0000..0x4000_0000 + 600;

/// Has the kernel refuse them for this thread and all that it starts.
pub(super) fn give_up() -> Result<(), Error> {
    let (refuse, lack) = (errno(libc::EPERM), errno(libc::ENOSYS));
    apply_filter(&filter(refused()?, refuse)?)?;
    apply_filter(&filter(lacking(), lack)?)
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn errno(errno: i32) -> SeccompAction {
    SeccompAction::Errno(errno.unsigned_abs())
}

fn filter(rules: Rules, action: SeccompAction) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, SeccompAction::Allow, action, TargetArch::x86_64)?.try_into()
}

fn refused() -> Result<Rules, BackendError> {
    let mut rules: Rules = REFUSED.iter().map(|number| (*number, Vec::new())).collect();
    let namespaces: Vec<SeccompRule> =
        NAMESPACES.into_iter().map(has_flag).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_clone, namespaces.clone());
    rules.insert(libc::SYS_unshare, namespaces);
    let families = FAMILIES.into_iter().map(|family| argument(0, SeccompCmpOp::Ne, family));
    let of_others = SeccompRule::new(families.collect::<Result<_, _>>()?)?;
    // Addresses, links and routes; not packet filters, whose rules are programs, too.
    let further_netlink = SeccompRule::new(vec![
        argument(0, SeccompCmpOp::Eq, libc::AF_NETLINK)?,
        argument(2, SeccompCmpOp::Ne, libc::NETLINK_ROUTE)?,
    ])?;
    rules.insert(libc::SYS_socket, vec![of_others, further_netlink]);
    Ok(rules)
}

/// Rules for what is refused as if the kernel did not have it: then libraries take clone, whose
/// flags a filter sees.
fn lacking() -> Rules {
    X32.chain([libc::SYS_clone3]).map(|number| (number, Vec::new())).collect()
}

fn has_flag(flag: i32) -> Result<SeccompRule, BackendError> {
    let bit = u64::from(flag.unsigned_abs());
    SeccompRule::new(vec![argument(0, SeccompCmpOp::MaskedEq(bit), flag)?])
}

fn argument(place: u8, is: SeccompCmpOp, value: i32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(place, SeccompCmpArgLen::Dword, is, u64::from(value.unsigned_abs()))
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use std::process::Command;
    use std::thread;

    /// Argument that is not a valid one, for any of the calls below: whoever is let through hears
    /// so, and nothing happens.
    const NONSENSE: c_long = -1;

    fn call(number: c_long, arguments: [c_long; 3]) -> Result<c_long, Errno> {
        let ([first, second, third], fourth) = (arguments, NONSENSE);
        // SAFETY: whatever of these is an address is none that can be read or written.
        Errno::result(unsafe { libc::syscall(number, first, second, third, fourth, NONSENSE) })
    }

    /// Acts in a thread of its own, which has all of root's capabilities: only the filter refuses.
    fn without_them<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = thread::spawn(|| {
            give_up().unwrap();
            act()
        });
        thread.join().unwrap()
    }

    #[test]
    fn what_no_keeper_needs_is_refused() {
        let calls = [
            ("init_module", libc::SYS_init_module),
            ("kexec_load", libc::SYS_kexec_load),
            ("reboot", libc::SYS_reboot),
            ("bpf", libc::SYS_bpf),
            ("perf_event_open", libc::SYS_perf_event_open),
            ("io_uring_setup", libc::SYS_io_uring_setup),
            ("open_by_handle_at", libc::SYS_open_by_handle_at),
            ("ptrace", libc::SYS_ptrace),
            ("process_vm_readv", libc::SYS_process_vm_readv),
            ("process_vm_writev", libc::SYS_process_vm_writev),
            ("mount", libc::SYS_mount),
            ("umount2", libc::SYS_umount2),
            ("move_mount", libc::SYS_move_mount),
            ("pivot_root", libc::SYS_pivot_root),
            ("chroot", libc::SYS_chroot),
            ("setns", libc::SYS_setns),
            ("swapon", libc::SYS_swapon),
            ("add_key", libc::SYS_add_key),
            ("keyctl", libc::SYS_keyctl),
            ("settimeofday", libc::SYS_settimeofday),
            ("clock_settime", libc::SYS_clock_settime),
            ("adjtimex", libc::SYS_adjtimex),
            ("sethostname", libc::SYS_sethostname),
            ("personality", libc::SYS_personality),
        ];
        let let_through: Vec<_> = without_them(move || {
            let answers = calls.map(|(name, number)| (name, call(number, [NONSENSE; 3])));
            answers.into_iter().filter(|(_, answer)| *answer != Err(Errno::EPERM)).collect()
        });
        assert!(let_through.is_empty(), "not refused: {let_through:?}");
    }

    #[test]
    fn no_namespace_is_made() {
        // A user's namespace cannot be had together with this, so that nothing is made without the filter either.
        let (user, fs) = (libc::CLONE_NEWUSER.into(), c_long::from(libc::CLONE_FS));
        let [cloned, cloned3, unshared, own_directory] = without_them(move || {
            [
                call(libc::SYS_clone, [user | fs, 0, 0]),
                call(libc::SYS_clone3, [NONSENSE; 3]),
                call(libc::SYS_unshare, [user, 0, 0]),
                // Stores of snapshots need it.
                call(libc::SYS_unshare, [fs, 0, 0]),
            ]
        });
        assert_eq!((cloned, unshared), (Err(Errno::EPERM), Err(Errno::EPERM)));
        assert_eq!((cloned3, own_directory), (Err(Errno::ENOSYS), Ok(0)));
    }

    #[test]
    fn sockets_are_those_of_files_and_of_the_network() {
        let socket = |family: i32, kind: i32, protocol: i32| {
            call(libc::SYS_socket, [family.into(), kind.into(), protocol.into()])
        };
        let (refused, allowed) = without_them(move || {
            let refused = [
                socket(libc::AF_PACKET, libc::SOCK_RAW, 0),
                socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
                socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0),
                socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER),
            ];
            let allowed = [
                socket(libc::AF_UNIX, libc::SOCK_STREAM, 0),
                socket(libc::AF_INET, libc::SOCK_STREAM, 0),
                socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE),
            ];
            (refused, allowed)
        });
        assert_eq!(refused, [Err(Errno::EPERM); 4]);
        assert!(allowed.iter().all(Result::is_ok), "{allowed:?}");
    }

    #[test]
    fn threads_and_processes_are_started_as_before_and_have_the_same_filter() {
        let (in_thread, of_process) = without_them(|| {
            let in_thread = thread::spawn(|| call(libc::SYS_ptrace, [NONSENSE; 3])).join().unwrap();
            let mut process = Command::new("grep");
            process.args(["-c", "^Seccomp:.*2$", "/proc/self/status"]);
            (in_thread, process.output().unwrap())
        });
        assert_eq!(in_thread, Err(Errno::EPERM));
        assert_eq!(String::from_utf8_lossy(&of_process.stdout), "1\n", "{of_process:?}");
    }
}
