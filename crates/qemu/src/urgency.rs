//! Real-time priority for the threads that a paused guest waits for.
//!
//! A pause is a relay of short steps between the capturing thread, two threads of
//! QEMU and its vCPUs, which have to notice that they are to stop. An ordinary scheduler likes to wake each one on the processor
//! where the one before still works, scanning memory in the kernel, though
//! another processor is free, and lets unrelated work in between. Real-time
//! threads are moved to a free processor at once. Only for the pause: for longer,
//! a busy QEMU could starve its host.
#![allow(unsafe_code)] // Two scheduling calls that the libraries do not wrap.

use nix::errno::Errno;
use nix::libc;
use std::{fs, io};

/// The real-time priority: any is above all ordinary threads.
const PRIORITY: libc::c_int = 2;

/// A vCPU runs on until somebody gets to stop it, so that must be able to.
const VCPU_PRIORITY: libc::c_int = 1;

/// The beginnings of QEMU's names for its vCPU threads: `CPU 0/KVM`, or one for all vCPUs.
pub const VCPU_NAMES: [&str; 2] = ["CPU ", "ALL CPUs"];

/// The name that `-name …,debug-threads=on` gives the thread that reads the monitors.
const MONITOR_THREAD: &str = "IO mon_iothread";

/// The threads that share the work of a pause.
#[derive(Debug)]
pub struct Urgency {
    threads: Vec<Thread>,
}

impl Urgency {
    /// The calling thread, those of QEMU that carry out its commands, of which that of its monitors is one if
    /// the pause is theirs, and `others` (thread ids), which QEMU waits for while it stops the guest. Threads
    /// that somebody has given a scheduling policy of their own are left alone, and so are those whose names more
    /// have than the `vcpus` and the monitors need: QEMU chooses its threads' names, and may have been taken over.
    ///
    /// An error if the system does not allow it.
    pub fn new(
        qemu_pid: u32,
        vcpus: u32,
        by_monitor: bool,
        others: impl IntoIterator<Item = i32>,
    ) -> io::Result<Urgency> {
        // This one first, or the vCPUs could keep it from going on.
        let mut threads = vec![(nix::unistd::gettid().as_raw(), PRIORITY)];
        threads.extend(others.into_iter().map(|tid| (tid, PRIORITY)));
        let (mut monitors, mut guests) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(format!("/proc/{qemu_pid}/task"))? {
            let entry = entry?;
            let tid = entry.file_name().to_string_lossy().parse().map_err(io::Error::other)?;
            // It may have ended since it was listed.
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let is_monitor = || by_monitor && name.trim_end() == MONITOR_THREAD;
            if u32::try_from(tid) == Ok(qemu_pid) {
                threads.push((tid, PRIORITY));
            } else if is_monitor() {
                monitors.push((tid, PRIORITY));
            } else if VCPU_NAMES.iter().any(|prefix| name.starts_with(prefix)) {
                guests.push((tid, VCPU_PRIORITY));
            }
        }
        threads.extend(at_most(1, monitors, "the monitors' thread"));
        threads.extend(at_most(vcpus, guests, "a processor's"));
        threads.retain(|&(tid, _)| has_ordinary_policy(tid));
        let urgency = Urgency { threads };
        urgency.raise()?;
        drop(Urgent(&urgency));
        Ok(urgency)
    }

    /// The threads run before all ordinary ones until this is dropped.
    pub fn begin(&self) -> Urgent<'_> {
        // It worked in `new`; if no longer, the pause is longer, and no more.
        let _ = self.raise();
        Urgent(self)
    }

    fn raise(&self) -> io::Result<()> {
        let mut result = Ok(());
        for &(tid, priority) in &self.threads {
            result = result.and(set(tid, libc::SCHED_FIFO, priority));
        }
        result
    }
}

type Thread = (libc::pid_t, libc::c_int);

/// These threads, or none if they are too many: there is no telling which are what their names say.
fn at_most(most: u32, threads: Vec<Thread>, kind: &str) -> Vec<Thread> {
    if threads.len() <= most as usize {
        return threads;
    }
    tracing::warn!(
        "{} of QEMU's threads have the name of {kind}, and it has {most} such: none gets real-time priority, and \
         pauses will be longer",
        threads.len()
    );
    Vec::new()
}

fn set(tid: libc::pid_t, policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    // Threads that it starts meanwhile are ordinary ones.
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: the call reads `parameters` and changes no memory.
    let set = unsafe { libc::sched_setscheduler(tid, policy, &parameters) };
    Ok(Errno::result(set).map(drop)?)
}

/// Puts the calling thread before all ordinary ones for good: for a thread that
/// does little and must not be late, such as one that beats like a heart.
///
/// An error if the system does not allow it.
pub fn raise_this_thread() -> io::Result<()> {
    set(nix::unistd::gettid().as_raw(), libc::SCHED_FIFO, PRIORITY)
}

fn has_ordinary_policy(tid: libc::pid_t) -> bool {
    // SAFETY: the call takes a number and touches no memory.
    unsafe { libc::sched_getscheduler(tid) & !libc::SCHED_RESET_ON_FORK == libc::SCHED_OTHER }
}

/// Keeps the threads of an [`Urgency`] urgent while it lives.
#[must_use = "the threads are urgent until it is dropped"]
#[derive(Debug)]
pub struct Urgent<'a>(&'a Urgency);

impl Drop for Urgent<'_> {
    fn drop(&mut self) {
        // The vCPUs first, as they came last. One that has ended needs no policy.
        for &(tid, _) in self.0.threads.iter().rev() {
            let _ = set(tid, libc::SCHED_OTHER, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_urgent_only_for_so_long() {
        let me = nix::unistd::gettid().as_raw();
        // A process of ours in the place of QEMU.
        let Ok(urgency) = Urgency::new(std::process::id(), 0, false, []) else {
            return assert!(!nix::unistd::geteuid().is_root(), "root may raise priorities");
        };
        assert!(has_ordinary_policy(me));
        let urgent = urgency.begin();
        assert!(!has_ordinary_policy(me));
        drop(urgent);
        assert!(has_ordinary_policy(me));
    }

    /// A thread of this name, until it is dropped.
    struct Named {
        tid: libc::pid_t,
        _ends: std::sync::mpsc::Sender<()>,
    }

    impl Named {
        fn new(name: &str) -> Named {
            let (told, tids) = std::sync::mpsc::channel();
            let (ends, until) = std::sync::mpsc::channel::<()>();
            let body = move || {
                told.send(nix::unistd::gettid().as_raw()).unwrap();
                let _ = until.recv();
            };
            std::thread::Builder::new().name(name.to_owned()).spawn(body).unwrap();
            Named { tid: tids.recv().unwrap(), _ends: ends }
        }
    }

    /// Regression: whoever had taken a QEMU over had as many real-time threads as it liked.
    #[test]
    fn no_more_threads_are_urgent_than_there_are_processors() {
        const VCPUS: u32 = 3;
        let mut threads: Vec<Named> =
            (0..VCPUS).map(|n| Named::new(&format!("CPU {n}/KVM"))).collect();
        for is_one_too_many in [false, true] {
            if is_one_too_many {
                threads.push(Named::new("CPU 0/KVM"));
            }
            let Ok(urgency) = Urgency::new(std::process::id(), VCPUS, false, []) else {
                return assert!(!nix::unistd::geteuid().is_root(), "root may raise priorities");
            };
            let urgent = urgency.begin();
            for thread in &threads {
                assert_eq!(has_ordinary_policy(thread.tid), is_one_too_many);
            }
            drop(urgent);
        }
    }

    #[test]
    fn the_monitors_thread_is_urgent_where_the_monitor_pauses() {
        let thread = Named::new(MONITOR_THREAD);
        let monitors = thread.tid;
        for by_monitor in [true, false] {
            let Ok(urgency) = Urgency::new(std::process::id(), 0, by_monitor, []) else {
                return assert!(!nix::unistd::geteuid().is_root(), "root may raise priorities");
            };
            let urgent = urgency.begin();
            assert_eq!(has_ordinary_policy(monitors), !by_monitor);
            drop(urgent);
            assert!(has_ordinary_policy(monitors));
        }
        drop(thread);
    }

    #[test]
    fn a_raised_thread_stays_so() {
        let raised = std::thread::spawn(|| {
            raise_this_thread().map(|()| has_ordinary_policy(nix::unistd::gettid().as_raw()))
        });
        match raised.join().unwrap() {
            Ok(ordinary) => assert!(!ordinary),
            Err(_) => assert!(!nix::unistd::geteuid().is_root(), "root may raise priorities"),
        }
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert!(Urgency::new(u32::MAX, 0, true, []).is_err());
    }
}
