//! Leftovers: what was not cleaned up.

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::processes;
use crate::remains::LabName;
use anyhow::Result;
use std::fmt;
use std::path::Path;

/// Things that should be gone; all empty when nothing is left behind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Namespaces of a removed laboratory.
    pub namespaces: Vec<String>,
    /// `NAMESPACE/INTERFACE` of interfaces that the laboratory did not make:
    /// taps of VMs.
    pub interfaces: Vec<String>,
    /// `PID COMMAND LINE` of processes in the namespaces, or with the
    /// laboratory's directory in their command line.
    pub processes: Vec<String>,
    /// Mount points below the laboratory's directory.
    pub mounts: Vec<String>,
    /// Directories of a removed laboratory.
    pub directories: Vec<String>,
}

impl Leftovers {
    /// Whether nothing is left behind.
    pub fn is_empty(&self) -> bool {
        *self == Leftovers::default()
    }

    /// Leftovers: what hosts hold in a living laboratory beyond its own parts.
    pub(crate) fn in_lab(lab: &Lab) -> Result<Leftovers> {
        let mut interfaces = Vec::new();
        let mut inside = Vec::new();
        for host in lab.hosts() {
            let namespace = lab.host(host)?;
            interfaces.extend(Leftovers::interfaces_in(lab, &namespace)?);
            inside.extend(namespace.processes()?);
        }
        let processes = describe(inside, lab.directory().to_string_lossy().as_ref())?;
        let mounts = strings(lab.name().mounts()?);
        Ok(Leftovers { interfaces, processes, mounts, ..Leftovers::default() })
    }
}

impl Leftovers {
    /// Interfaces of a host that are none of the laboratory's own.
    pub(crate) fn interfaces_in(lab: &Lab, namespace: &Namespace) -> Result<Vec<String>> {
        let own = lab.interfaces();
        let others = namespace.interfaces()?.into_iter().filter(|name| !own.contains(name));
        Ok(others.map(|name| format!("{}/{name}", namespace.name())).collect())
    }
}

impl LabName {
    /// Leftovers: what is left of a laboratory that was removed.
    pub fn leftovers(&self) -> Result<Leftovers> {
        let namespaces = self.namespaces();
        let mut inside = Vec::new();
        for namespace in &namespaces {
            inside.extend(namespace.processes()?);
        }
        Ok(Leftovers {
            namespaces: namespaces.iter().map(|namespace| namespace.name().to_owned()).collect(),
            interfaces: Vec::new(),
            processes: describe(inside, &self.directory_prefix())?,
            mounts: strings(self.mounts()?),
            directories: strings(self.directories()),
        })
    }
}

/// The processes `inside`, and those whose command line holds `mark`.
fn describe(inside: Vec<u32>, mark: &str) -> Result<Vec<String>> {
    let describe = |pid: u32| {
        let line = processes::command_line(pid);
        let found = inside.contains(&pid) || line.contains(mark);
        (found && processes::runs(pid)).then(|| format!("{pid} {line}"))
    };
    Ok(processes::all()?.into_iter().filter_map(describe).collect())
}

fn strings(paths: Vec<impl AsRef<Path>>) -> Vec<String> {
    paths.iter().map(|path| path.as_ref().display().to_string()).collect()
}

impl fmt::Display for Leftovers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            ("namespace", &self.namespaces),
            ("interface", &self.interfaces),
            ("process", &self.processes),
            ("mount", &self.mounts),
            ("directory", &self.directories),
        ];
        for (kind, items) in kinds {
            for item in items {
                writeln!(formatter, "{kind} {item}")?;
            }
        }
        Ok(())
    }
}
