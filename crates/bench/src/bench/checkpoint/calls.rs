//! System calls of some processes' threads, counted by `perf`.

use super::account::{Process, ThreadName};
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};

/// A count that goes on until it is ended.
pub struct CallCount {
    perf: Child,
    processes: Vec<Process>,
}

impl CallCount {
    /// Begins to count: each call costs a little more meanwhile.
    pub fn begin(processes: &[Process]) -> Result<CallCount> {
        let pids: Vec<String> = processes.iter().map(|process| process.pid.to_string()).collect();
        let mut command = Command::new("perf");
        command.args(["stat", "--per-thread", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p"]);
        command.arg(pids.join(",")).stdout(Stdio::null()).stderr(Stdio::piped());
        let perf = command.spawn().context("system calls are counted by `perf`")?;
        Ok(CallCount { perf, processes: processes.to_vec() })
    }

    /// The calls since then, by the threads' names.
    pub fn end(self) -> Result<BTreeMap<ThreadName, u64>> {
        let threads = threads(&self.processes);
        kill(Pid::from_raw(self.perf.id() as i32), Signal::SIGINT)?;
        let output = self.perf.wait_with_output().context("`perf stat`")?;
        let text = String::from_utf8_lossy(&output.stderr);
        let counts: Vec<_> = text.lines().filter_map(count).collect();
        if counts.is_empty() {
            bail!("`perf stat` counted no system calls: {text}");
        }
        let mut sums = BTreeMap::new();
        for (id, calls) in counts {
            if let Some(thread) = threads.get(&id) {
                *sums.entry(thread.clone()).or_default() += calls;
            }
        }
        Ok(sums)
    }
}

/// Names of the threads, by their ids.
fn threads(processes: &[Process]) -> BTreeMap<u32, ThreadName> {
    let mut threads = BTreeMap::new();
    for Process { name, pid } in processes {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            let comm = std::fs::read_to_string(task.path().join("comm"));
            let id = task.file_name().to_str().and_then(|id| id.parse().ok());
            if let (Some(id), Ok(comm)) = (id, comm) {
                threads.insert(id, (*name, comm.trim().to_owned()));
            }
        }
    }
    threads
}

/// Thread and count of a line `NAME-THREAD,COUNT,…`. A thread that called nothing has no count.
fn count(line: &str) -> Option<(u32, u64)> {
    let (thread, rest) = line.split_once(',')?;
    let (count, _) = rest.split_once(',')?;
    let (_, id) = thread.rsplit_once('-')?;
    Some((id.parse().ok()?, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_by_thread() {
        let line = "capture-db-1234,5678,,raw_syscalls:sys_enter,100,100.00,,";
        assert_eq!(count(line), Some((1234, 5678)));
        let line = "bash-6426,<not counted>,,raw_syscalls:sys_enter,0,100.00,,";
        assert_eq!(count(line), None);
        assert_eq!(count("Workload failed"), None);
    }
}
