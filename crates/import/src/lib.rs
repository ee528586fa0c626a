//! Definitions made of what other managers know of a VM: libvirt's domain XML, Proxmox's
//! configuration, a command line of QEMU's.
//!
//! An importer goes through everything that it is given and says what becomes of it ([`Outcome`]):
//! taken over, changed, left out, or refused. What it does not know is refused, never passed
//! over: a device that is not carried would be gone after a fail-over. Text in, report and
//! definition out: it touches neither files nor hosts.

mod draft;
mod finding;
mod libvirt;
mod proxmox;
mod qemu;
mod xml;

pub use finding::{Finding, Outcome};
pub use libvirt::libvirt;
pub use proxmox::proxmox;
pub use qemu::qemu;

use std::collections::BTreeMap;
use std::path::PathBuf;
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;

/// Facts that the text itself does not tell.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// The VM's name here, if not the one that it has.
    pub name: Option<VmName>,
    /// Bridges, by the name of the manager's network that each is.
    pub bridges: BTreeMap<String, String>,
    /// Files or block devices, by the name of the manager's volume.
    pub volumes: BTreeMap<String, PathBuf>,
}

impl Surroundings {
    /// Name of a VM here: as somebody says, else as it is called there, with `-` for what a
    /// name cannot have within it.
    fn name(&self, there: &str) -> Result<VmName, String> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let allowed = |c: char| if matches!(c, '.' | ' ' | '+') { '-' } else { c };
        let begins = there.starts_with(|c: char| c.is_ascii_alphanumeric());
        let name = if begins { there.chars().map(allowed).collect() } else { there.to_owned() };
        name.parse().map_err(|error| format!("{error}; give it another by --name"))
    }
}

/// Outcome of importing a VM.
#[derive(Clone, Debug)]
pub struct Import {
    /// The VM; none if anything was refused.
    pub definition: Option<VmDefinition>,
    /// Findings about each part, in the order of the text.
    pub findings: Vec<Finding>,
    /// Files that the definition names and that are to be made first.
    pub copies: Vec<Template>,
}

impl Import {
    /// Nothing can be made of the whole text.
    fn refused(line: usize, what: &str, why: String) -> Import {
        let what = what.to_owned();
        let refused = Finding { outcome: Outcome::Refused, line, what, why };
        Import { definition: None, findings: vec![refused], copies: Vec::new() }
    }
}

/// A firmware's variables that do not exist yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// The firmware's own file of variables.
    pub from: PathBuf,
    /// The VM's.
    pub to: PathBuf,
}
