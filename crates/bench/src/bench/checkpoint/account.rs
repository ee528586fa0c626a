//! Account of what each thread of some processes has done, as the kernel counts it.

use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::ops::AddAssign;
use std::path::Path;

/// A process whose threads are looked at, and what to call it.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its name in the report.
    pub name: &'static str,
    /// Its number.
    pub pid: u32,
}

/// Process and name of a thread; threads of one name are counted together.
pub type ThreadName = (&'static str, String);

/// Work that a thread has done since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Done {
    /// Nanoseconds that it ran.
    pub ran_ns: u64,
    /// Nanoseconds that it was ready to run, and did not.
    pub waited_ns: u64,
    /// Times that it slept.
    pub slept: u64,
    /// Page faults without a disk.
    pub faults: u64,
}

impl Done {
    /// Work that it did after `before`.
    fn since(self, before: Done) -> Done {
        Done {
            ran_ns: self.ran_ns.saturating_sub(before.ran_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            slept: self.slept.saturating_sub(before.slept),
            faults: self.faults.saturating_sub(before.faults),
        }
    }
}

impl AddAssign for Done {
    fn add_assign(&mut self, other: Done) {
        self.ran_ns += other.ran_ns;
        self.waited_ns += other.waited_ns;
        self.slept += other.slept;
        self.faults += other.faults;
    }
}

/// All threads of some processes at one moment.
#[derive(Clone, Debug, Default)]
pub struct Account(BTreeMap<(ThreadName, u32), Done>);

impl Account {
    /// Looks at every thread. One that ends meanwhile is left out.
    pub fn look(processes: &[Process]) -> Result<Account> {
        let mut account = Account::default();
        for Process { name, pid } in processes {
            let tasks = format!("/proc/{pid}/task");
            let tasks = fs::read_dir(&tasks).with_context(|| format!("cannot read {tasks}"))?;
            for task in tasks.flatten() {
                let id = task.file_name().to_str().and_then(|id| id.parse().ok());
                if let (Some(id), Some((thread, done))) = (id, look_at(&task.path())) {
                    account.0.insert(((*name, thread), id), done);
                }
            }
        }
        Ok(account)
    }

    /// Work that was done since `before`, by the threads' names; what has done nothing is left out.
    pub fn since(&self, before: &Account) -> BTreeMap<ThreadName, Done> {
        let mut sums: BTreeMap<ThreadName, Done> = BTreeMap::new();
        for (key, done) in &self.0 {
            let before = before.0.get(key).copied().unwrap_or_default();
            *sums.entry(key.0.clone()).or_default() += done.since(before);
        }
        sums.retain(|_, done| *done != Done::default());
        sums
    }
}

fn look_at(task: &Path) -> Option<(String, Done)> {
    let read = |file| fs::read_to_string(task.join(file)).ok();
    let name = read("comm")?.trim().to_owned();
    let times = read("schedstat")?;
    let mut times = times.split_whitespace().map(str::parse);
    let (ran_ns, waited_ns) = (times.next()?.ok()?, times.next()?.ok()?);
    let status = read("status")?;
    let slept = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    // proc_pid_stat(5): behind the name, which may have anything in it, minflt is the eighth.
    let stat = read("stat")?;
    let (_, numbers) = stat.rsplit_once(')')?;
    let faults = numbers.split_whitespace().nth(7)?.parse().ok()?;
    Some((name, Done { ran_ns, waited_ns, slept: slept.trim().parse().ok()?, faults }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn what_a_thread_does_is_counted_under_its_name() {
        let here = [Process { name: "test", pid: std::process::id() }];
        let before = Account::look(&here).unwrap();
        let work = || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(20) {}
            Account::look(&here).unwrap()
        };
        let worker = std::thread::Builder::new().name("worker".to_owned());
        let after =
            std::thread::scope(|scope| worker.spawn_scoped(scope, work).unwrap().join().unwrap());
        let worker = after.since(&before)[&("test", "worker".to_owned())];
        assert!(worker.ran_ns > 0 && worker.faults > 0, "{worker:?}");
        assert!(after.since(&after).is_empty(), "nothing was done since");
        let nobody = [Process { name: "nobody", pid: 0 }];
        assert!(Account::look(&nobody).unwrap_err().to_string().contains("/proc/0/task"));
    }
}
