//! Remains of a laboratory in the system, and how they are taken away: at the
//! end of its life, at a signal, or after its process was killed.

use crate::namespace::{DIRECTORY, Namespace};
use crate::processes;
use anyhow::{Context, Result};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The name of a laboratory, `us<pid>-<count>`: the beginning of everything
/// that it creates in the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabName {
    pid: u32,
    count: u32,
}

impl LabName {
    /// A name that no laboratory of this machine has.
    pub(crate) fn unique() -> LabName {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        LabName { pid: std::process::id(), count: COUNT.fetch_add(1, Ordering::Relaxed) }
    }

    /// The laboratory that created a thing called `name`, if one did.
    fn of(name: &str) -> Option<LabName> {
        let mut parts = name.strip_prefix("us")?.splitn(3, '-');
        let (pid, count) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        parts.next().map(|_| LabName { pid, count })
    }

    /// The laboratory's namespace of that role: "a", "client".
    pub(crate) fn namespace(&self, role: &str) -> Namespace {
        Namespace::named(format!("{self}-{role}"))
    }

    /// Beginning of its directory's name.
    pub(crate) fn directory_prefix(&self) -> String {
        format!("{self}-lab-")
    }

    /// Its namespaces that exist now.
    pub(crate) fn namespaces(&self) -> Vec<Namespace> {
        entries(Path::new(DIRECTORY), |name| LabName::of(name).as_ref() == Some(self))
            .into_iter()
            .map(|(_, name)| Namespace::named(name))
            .collect()
    }

    /// Its directories that exist now: one, or none.
    pub(crate) fn directories(&self) -> Vec<PathBuf> {
        entries(&std::env::temp_dir(), |name| name.starts_with(&self.directory_prefix()))
            .into_iter()
            .map(|(path, _)| path)
            .collect()
    }

    /// Ends every process in the laboratory and removes all that it created.
    /// Does nothing when nothing is left.
    pub(crate) fn remove(&self) -> Result<()> {
        let namespaces = self.namespaces();
        for namespace in &namespaces {
            let mut inside = namespace.processes()?;
            inside.retain(|&pid| pid != std::process::id());
            processes::signal_all(&inside, Signal::SIGKILL)?;
            processes::wait_until_gone(&inside)?;
        }
        for namespace in &namespaces {
            namespace.remove()?;
        }
        for mount in self.mounts()? {
            umount2(&mount, MntFlags::MNT_DETACH)
                .with_context(|| format!("cannot unmount {}", mount.display()))?;
        }
        for directory in self.directories() {
            match fs::remove_dir_all(&directory) {
                Err(_) if !directory.exists() => {}
                result => {
                    result.with_context(|| format!("cannot remove {}", directory.display()))?
                }
            }
        }
        Ok(())
    }

    /// Mount points below its directories, the innermost first.
    pub(crate) fn mounts(&self) -> Result<Vec<PathBuf>> {
        let table = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
        let directories = self.directories();
        let below = |point: &PathBuf| directories.iter().any(|dir| point.starts_with(dir));
        let points = table.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
        let mut mounts: Vec<PathBuf> = points.filter(below).collect();
        mounts.reverse();
        Ok(mounts)
    }
}

impl fmt::Display for LabName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "us{}-{}", self.pid, self.count)
    }
}

/// The entries of a directory whose name is wanted; none if it is absent.
fn entries(directory: &Path, wanted: impl Fn(&str) -> bool) -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = |entry: fs::DirEntry| Some((entry.path(), entry.file_name().into_string().ok()?));
    entries.filter_map(named).filter(|(_, name)| wanted(name)).collect()
}

/// Removes what laboratories of processes that no longer run have left. What
/// cannot be removed does not hinder a new one.
pub(crate) fn remove_stale() {
    let of_dead = |name: &str| LabName::of(name).is_some_and(|lab| !processes::runs(lab.pid));
    let directories =
        entries(&std::env::temp_dir(), |name| name.contains("-lab-") && of_dead(name));
    let namespaces = entries(Path::new(DIRECTORY), of_dead);
    for (_, name) in namespaces.into_iter().chain(directories) {
        if let Some(stale) = LabName::of(&name) {
            tracing::info!("removing the laboratory {stale}, whose process is gone");
            if let Err(error) = stale.remove() {
                // Perhaps another process removes it at this moment.
                tracing::warn!("cannot remove the laboratory {stale}: {error:#}");
            }
        }
    }
}

static LIVING: Mutex<Vec<LabName>> = Mutex::new(Vec::new());

fn living() -> MutexGuard<'static, Vec<LabName>> {
    // The list is whole at every instant; a panic elsewhere does not harm it.
    LIVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes a laboratory, before its first namespace exists, for [`remove_all`].
pub(crate) fn register(name: &LabName) {
    static SIGNALS: Once = Once::new();
    SIGNALS.call_once(remove_on_signals);
    living().push(name.clone());
}

/// Removes one laboratory and forgets it.
pub(crate) fn remove(name: &LabName) -> Result<()> {
    living().retain(|other| other != name);
    name.remove()
}

/// Removes every laboratory of this process. Reports what fails and goes on.
pub(crate) fn remove_all() {
    drain(&mut living());
}

fn drain(names: &mut Vec<LabName>) {
    for name in names.drain(..) {
        if let Err(error) = name.remove() {
            tracing::error!("cannot remove the laboratory {name}: {error:#}");
        }
    }
}

/// Removes every laboratory on SIGINT and SIGTERM, then dies of the signal.
fn remove_on_signals() {
    let mut signals = match Signals::new([SIGINT, SIGTERM]) {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!("laboratories will not be removed at a signal: {error}");
            return;
        }
    };
    std::thread::spawn(move || {
        for signal in signals.forever() {
            // Never given back: a thread whose laboratory is taken away under
            // it waits in `remove` for the end, instead of reporting errors.
            let mut names = living();
            drain(&mut names);
            // Returns only if the signal cannot be raised again.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_recognised_in_what_it_names() {
        let name = LabName { pid: 12, count: 3 };
        assert_eq!(LabName::of(name.namespace("a").name()), Some(name.clone()));
        assert_eq!(LabName::of(&format!("{}XYZ", name.directory_prefix())), Some(name));
        for foreign in ["user-1-a", "us12", "us12-3", "usx-3-a", "cni-12-3"] {
            assert_eq!(LabName::of(foreign), None, "{foreign}");
        }
    }
}
