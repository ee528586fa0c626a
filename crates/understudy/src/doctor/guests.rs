//! The needs of some guests beside QEMU: swtpm, and a UEFI firmware.

use super::Check;
use std::path::{Path, PathBuf};
use understudy_qemu::VmDefinition;

const SWTPM: &str = "swtpm";
const INSTALL_SWTPM: &str = "install the package swtpm";
/// Path at which Debian's and Ubuntu's package ovmf has the code.
const OVMF: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const INSTALL_OVMF: &str = "install the package ovmf";

/// The checks of a host with these VMs.
pub fn checks(vms: &[VmDefinition]) -> Vec<Check> {
    let program =
        std::env::var_os("PATH").and_then(|path| find(SWTPM, std::env::split_paths(&path)));
    let mut checks = vec![swtpm(program.as_deref(), vms), ovmf(Path::new(OVMF), vms)];
    checks.extend(vms.iter().filter_map(firmware));
    checks
}

fn find(program: &str, mut folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    folders.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}

fn swtpm(program: Option<&Path>, vms: &[VmDefinition]) -> Check {
    let needed: Vec<&str> =
        vms.iter().filter(|vm| vm.tpm.is_some()).map(|vm| vm.name.as_str()).collect();
    match (program, &needed[..]) {
        (Some(program), _) => Check::ok(SWTPM, program.display().to_string()),
        (None, []) => {
            let advice = format!("only VMs with a TPM need it, on every host: {INSTALL_SWTPM}");
            Check::note(SWTPM, "not found", advice)
        }
        (None, needed) => {
            let detail = format!("not found, and {} has a TPM", needed.join(", "));
            Check::fail(SWTPM, detail, INSTALL_SWTPM)
        }
    }
}

/// A backup gets a firmware of its own: only a VM that is first started needs the package.
fn ovmf(code: &Path, vms: &[VmDefinition]) -> Check {
    const NAME: &str = "UEFI firmware";
    if code.is_file() {
        return Check::ok(NAME, code.display().to_string());
    }
    let has_uefi = |vm: &&VmDefinition| vm.firmware.is_some();
    let advice = format!("only a VM with UEFI that is first started here needs it: {INSTALL_OVMF}");
    let detail = match vms.iter().filter(has_uefi).count() {
        0 => format!("there is no {}", code.display()),
        count => format!("there is no {}; {count} VMs here have their own copies", code.display()),
    };
    Check::note(NAME, detail, advice)
}

/// A VM whose firmware is not there any more could not be started again.
fn firmware(vm: &VmDefinition) -> Option<Check> {
    let code = vm.firmware.as_deref().filter(|code| !code.is_file())?;
    let detail = format!("there is no {}, which {} boots", code.display(), vm.name);
    Some(Check::fail("UEFI firmware", detail, INSTALL_OVMF))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    fn vm(more: &str) -> VmDefinition {
        let text = format!(
            "name = \"db\"\nmemory = \"64M\"\nvcpus = 1\n{more}\n[[disk]]\npath = \"/d\"\nformat = \"raw\""
        );
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn what_a_vm_needs_and_the_host_lacks_fails_and_says_what_to_install() {
        let with = [vm("tpm = \"crb\"")];
        let check = swtpm(None, &with);
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains("db has a TPM"), "{check:?}");
        assert_eq!(check.advice.as_deref(), Some(INSTALL_SWTPM));
        assert_eq!(swtpm(None, &[vm("")]).state, State::Note);
        assert_eq!(swtpm(Some(Path::new("/usr/bin/swtpm")), &with).state, State::Ok);
        let lost = vm("firmware = \"/nowhere/OVMF.fd\"");
        let check = firmware(&lost).unwrap();
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains("/nowhere/OVMF.fd, which db boots"), "{check:?}");
        assert!(firmware(&vm("firmware = \"/etc/hostname\"")).is_none());
        assert_eq!(ovmf(Path::new("/nowhere/OVMF.fd"), &[lost]).state, State::Note);
        assert_eq!(ovmf(Path::new("/etc/hostname"), &[]).state, State::Ok);
    }

    #[test]
    fn a_program_is_found_where_the_path_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let folders = || ["/nowhere".into(), folder.path().to_owned()].into_iter();
        assert_eq!(find("swtpm", folders()), None);
        std::fs::write(folder.path().join("swtpm"), "").unwrap();
        assert_eq!(find("swtpm", folders()), Some(folder.path().join("swtpm")));
    }
}
