//! Definitions as another host, or a snapshot, has them: what they name there is nothing here.
//!
//! This host opens, as root, what a definition of its own names. So a definition that comes from elsewhere has no path
//! until there is a file of this host's in each one's place.

use super::VmDefinition;
use crate::command::BootFiles;
use serde::{Deserialize, Serialize};
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// A path below which there can be nothing.
const NOWHERE: &str = "/dev/null";

/// A definition whose paths are another host's: it reads as one whose files are nowhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "VmDefinition", into = "VmDefinition")]
pub struct ForeignDefinition {
    nowhere: VmDefinition,
    there: BootFiles,
}

/// A boot file that is in the definition alone, or that came without being in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BootFilesDiffer {
    /// The definition names one that did not come.
    #[error("the definition names the file of another host for \"{0}\", and no file comes for it")]
    Absent(&'static str),
    /// A file came that the definition does not name.
    #[error("a file comes for \"{0}\", which the definition does not have")]
    Unnamed(&'static str),
}

impl From<VmDefinition> for ForeignDefinition {
    fn from(mut definition: VmDefinition) -> ForeignDefinition {
        let nowhere = |name: &str| Path::new(NOWHERE).join(name);
        let take = |place: &mut Option<PathBuf>, name| {
            place.as_mut().map(|path| std::mem::replace(path, nowhere(name)))
        };
        let there = BootFiles {
            firmware: take(&mut definition.firmware, "firmware"),
            kernel: take(&mut definition.kernel, "kernel"),
            initrd: take(&mut definition.initrd, "initrd"),
        };
        for (index, disk) in definition.disks.iter_mut().enumerate() {
            disk.path = nowhere(&format!("disk{index}"));
        }
        // What a TPM keeps comes with the machine's state.
        definition.tpm_state = None;
        ForeignDefinition { nowhere: definition, there }
    }
}

impl From<ForeignDefinition> for VmDefinition {
    fn from(foreign: ForeignDefinition) -> VmDefinition {
        foreign.with_boot(foreign.there.clone())
    }
}

impl Deref for ForeignDefinition {
    type Target = VmDefinition;

    fn deref(&self) -> &VmDefinition {
        &self.nowhere
    }
}

impl ForeignDefinition {
    /// The paths at which the other host has what the guest boots from. Here another file may be
    /// there, which is nobody's business: only one that is known to have the same in it may be
    /// used.
    pub fn boot_there(&self) -> &BootFiles {
        &self.there
    }

    /// An error unless there is a boot file for each one that it names, and no other.
    pub fn check_boot<T>(&self, came: &BootFiles<T>) -> Result<(), BootFilesDiffer> {
        let named = self.there.each();
        for ((what, named), (_, came)) in named.into_iter().zip(came.each()) {
            match (named.is_some(), came.is_some()) {
                (true, false) => return Err(BootFilesDiffer::Absent(what)),
                (false, true) => return Err(BootFilesDiffer::Unnamed(what)),
                _ => {}
            }
        }
        Ok(())
    }

    /// The definition as it is on this host, where all of these files are its own.
    ///
    /// # Panics
    /// If there are not as many disks as it has.
    pub fn here(
        &self,
        boot: BootFiles,
        disks: Vec<PathBuf>,
    ) -> Result<VmDefinition, BootFilesDiffer> {
        self.check_boot(&boot)?;
        assert_eq!(disks.len(), self.nowhere.disks.len(), "one image for each disk");
        let mut definition = self.with_boot(boot);
        for (disk, path) in definition.disks.iter_mut().zip(disks) {
            disk.path = path;
        }
        Ok(definition)
    }

    fn with_boot(&self, BootFiles { firmware, kernel, initrd }: BootFiles) -> VmDefinition {
        VmDefinition { firmware, kernel, initrd, ..self.nowhere.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn of(change: impl FnOnce(&mut Value)) -> ForeignDefinition {
        let disk = |path| json!({ "path": path, "format": "raw" });
        let mut definition = json!({
            "name": "db", "memory": "64M", "vcpus": 1, "kernel": "/boot/vmlinuz",
            "disk": [disk("/srv/db.img"), disk("/srv/data.img")],
        });
        change(&mut definition);
        serde_json::from_value(definition).unwrap()
    }

    fn boot(kernel: Option<&str>, initrd: Option<&str>) -> BootFiles {
        let [kernel, initrd] = [kernel, initrd].map(|path| path.map(PathBuf::from));
        BootFiles { firmware: None, kernel, initrd }
    }

    fn paths_of(definition: &VmDefinition) -> Vec<PathBuf> {
        let boot = [&definition.firmware, &definition.kernel, &definition.initrd];
        let disks = definition.disks.iter().map(|disk| &disk.path);
        boot.into_iter().chain([&definition.tpm_state]).flatten().chain(disks).cloned().collect()
    }

    /// The files were once opened here, as root, and the guest of whoever had named them read them.
    #[test]
    fn what_another_host_names_is_nothing_here() {
        let foreign = of(|definition| {
            definition["initrd"] = json!("/etc/shadow");
            definition["firmware"] = json!("/etc/shadow");
            definition["tpm"] = json!("crb");
            definition["tpm_state"] = json!("/etc");
        });
        let paths = paths_of(&foreign);
        assert_eq!(paths.len(), 5, "{paths:?}");
        assert!(paths.iter().all(|path| path.starts_with(NOWHERE) && !path.exists()), "{paths:?}");
    }

    #[test]
    fn what_came_is_what_the_definition_names() {
        let foreign = of(|definition| definition["initrd"] = json!("/etc/shadow"));
        let here = |boot| foreign.here(boot, vec!["/state/0".into(), "/state/1".into()]);
        let whole = here(boot(Some("/state/kernel"), Some("/state/initrd"))).unwrap();
        let wanted = ["/state/kernel", "/state/initrd", "/state/0", "/state/1"].map(PathBuf::from);
        assert_eq!(paths_of(&whole), wanted);
        assert_eq!(here(boot(Some("/k"), None)), Err(BootFilesDiffer::Absent("initrd")));
        let unnamed = of(|_| ()).check_boot(&boot(Some("/k"), Some("/i")));
        assert_eq!(unnamed, Err(BootFilesDiffer::Unnamed("initrd")));
    }

    /// The daemon passes it on to a keeper, which compares it with what the peer says once more.
    #[test]
    fn it_is_the_same_once_it_was_passed_on() {
        let foreign = of(|_| ());
        let json = serde_json::to_string(&foreign).unwrap();
        assert_eq!(serde_json::from_str::<ForeignDefinition>(&json).unwrap(), foreign);
        assert_eq!(foreign.boot_there().kernel, Some("/boot/vmlinuz".into()));
    }
}
