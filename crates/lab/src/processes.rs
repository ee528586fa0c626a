//! The process table, as far as the laboratory needs it.

use crate::wait_for;
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Time for stopped processes to stand still.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// A killed process is gone as soon as the kernel has taken its memory apart.
const DEATH_LIMIT: Duration = Duration::from_secs(60);

/// Every process id on this machine.
pub(crate) fn all() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("cannot list /proc")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// `root` and its descendants, parents before children.
pub(crate) fn subtree(root: u32) -> Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for pid in all()? {
        if let Some((_, parent)) = state_and_parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(&pid) = tree.get(next) {
        tree.extend(children.remove(&pid).unwrap_or_default());
        next += 1;
    }
    Ok(tree)
}

/// Whether a process still executes (a zombie does not).
pub(crate) fn runs(pid: u32) -> bool {
    state_and_parent(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// How a child has ended that was not waited for yet. The status is the last field of its stat.
pub(crate) fn end_of(pid: u32) -> Option<ExitStatus> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let status = fields(&stat)?.last()?.parse().ok()?;
    (!runs(pid)).then(|| ExitStatus::from_raw(status))
}

/// State and parent of a process from `/proc/PID/stat`.
fn state_and_parent(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = fields(&stat)?;
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// The processor time of a process and of its children that it waited for.
pub(crate) fn processor_time(pid: u32) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks_per_second = sysconf(SysconfVar::CLK_TCK).ok()??;
    Some(Duration::from_secs_f64(ticks(&stat)? as f64 / ticks_per_second as f64))
}

/// proc_pid_stat(5): utime, stime, cutime and cstime are its fields 14 to 17.
fn ticks(stat: &str) -> Option<u64> {
    fields(stat)?.skip(11).take(4).map(|field| field.parse::<u64>().ok()).sum()
}

/// The fields of `/proc/PID/stat` after the name, from the state on.
fn fields(stat: &str) -> Option<impl Iterator<Item = &str>> {
    // The name may hold anything, also ')': the fields begin after the last.
    Some(stat[stat.rfind(')')? + 1..].split_whitespace())
}

/// The command line, its words joined by blanks; empty when it cannot be read.
pub(crate) fn command_line(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ").trim_end().to_owned()
}

/// Signals every process, back to back; those already gone are no error.
pub(crate) fn signal_all(pids: &[u32], signal: Signal) -> Result<()> {
    for &pid in pids {
        match kill(Pid::from_raw(pid as i32), signal) {
            Ok(()) | Err(nix::errno::Errno::ESRCH) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot send {signal} to {pid}"));
            }
        }
    }
    Ok(())
}

/// Waits until none of the processes has anything any more: its files, its locks among them, until the last of its threads
/// has ended.
pub(crate) fn wait_until_gone(pids: &[u32]) -> Result<()> {
    wait_for("the killed processes to be gone", DEATH_LIMIT, || {
        Ok(pids.iter().all(|&pid| all_threads(pid, "ZX")).then_some(()))
    })
}

/// Stops processes and waits until all their threads stand still: until the one that took the
/// signal has run, which takes a while on a busy machine, the others of its process go on.
pub(crate) fn stop_all(pids: &[u32]) -> Result<()> {
    signal_all(pids, Signal::SIGSTOP)?;
    wait_for("the stopped processes to stand still", STOP_LIMIT, || {
        Ok(pids.iter().all(|&pid| stands_still(pid)).then_some(()))
    })
}

/// Whether no thread of a process executes, or would before it takes the signal: one that waits in
/// the kernel ('D') takes it on its way out.
fn stands_still(pid: u32) -> bool {
    all_threads(pid, "TDZX")
}

/// Whether all threads of a process are in one of these states.
fn all_threads(pid: u32, wanted: &str) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let mut states = threads.flatten().filter_map(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        fields(&stat)?.next()?.chars().next()
    });
    states.all(|state| wanted.contains(state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn finds_and_ends_a_subtree() {
        let mut shell = Command::new("sh").args(["-c", "sleep 1000 & wait"]).spawn().unwrap();
        let tree = wait_for("the shell's child", Duration::from_secs(10), || {
            let tree = subtree(shell.id())?;
            Ok((tree.len() == 2).then_some(tree))
        })
        .unwrap();
        assert_eq!(tree[0], shell.id());
        signal_all(&tree, Signal::SIGKILL).unwrap();
        shell.wait().unwrap();
        wait_until_gone(&tree).unwrap();
        assert!(!runs(tree[1]));
    }

    #[test]
    fn a_process_that_is_stopped_stands_still() {
        let mut sleeper = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!stands_still(std::process::id()));
        stop_all(&[sleeper.id()]).unwrap();
        assert!(stands_still(sleeper.id()));
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        stop_all(&[sleeper.id()]).unwrap();
    }

    #[test]
    fn processor_time_is_read() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 10 20 0 0 150 25 3 4 20 0 1 0 5";
        assert_eq!(ticks(stat), Some(150 + 25 + 3 + 4));
        assert!(processor_time(std::process::id()).is_some());
        assert_eq!(processor_time(u32::MAX), None);
    }

    #[test]
    fn reads_this_process() {
        let own = std::process::id();
        assert!(all().unwrap().contains(&own));
        assert!(runs(own));
        assert!(command_line(own).contains("lab"), "{}", command_line(own));
    }
}
