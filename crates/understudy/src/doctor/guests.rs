//! The needs of some guests beside QEMU: swtpm, and a UEFI firmware.

use super::Check;
use std::path::{Path, PathBuf};
use understudy_daemon::config::HostConfig;
use understudy_daemon::probe;
use understudy_qemu::VmDefinition;
use understudy_qemu::user::RunAs;

const SWTPM: &str = "swtpm";
const INSTALL_SWTPM: &str = "install the package swtpm";
/// Path at which Debian's and Ubuntu's package ovmf has the code.
const OVMF: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const INSTALL_OVMF: &str = "install the package ovmf";

/// The checks of a host, with the VMs that it has by its configuration.
pub fn checks(config: Option<&HostConfig>) -> Vec<Check> {
    let vms = &config.map(probe::recorded).unwrap_or_default()[..];
    let program =
        std::env::var_os("PATH").and_then(|path| find(SWTPM, std::env::split_paths(&path)));
    let home = config.map(|config| (config.state_dir.as_path(), &config.run_as));
    let mut checks = vec![swtpm(program.as_deref(), vms, home), ovmf(Path::new(OVMF), vms)];
    checks.extend(vms.iter().filter_map(firmware));
    checks
}

fn find(program: &str, mut folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    folders.find_map(|folder| Some(folder.join(program)).filter(|path| path.is_file()))
}

/// With a directory for the state of VMs, and as whom they run, it is tried there.
fn swtpm(program: Option<&Path>, vms: &[VmDefinition], home: Option<(&Path, &RunAs)>) -> Check {
    let needed: Vec<&str> =
        vms.iter().filter(|vm| vm.tpm.is_some()).map(|vm| vm.name.as_str()).collect();
    match (program, &needed[..]) {
        (Some(program), needed) => {
            let found = program.display().to_string();
            let tried =
                home.filter(|(state_dir, _)| state_dir.is_dir()).map(|(state_dir, run_as)| {
                    (probe::try_swtpm(program, state_dir, run_as), state_dir)
                });
            let Some((Err(error), state_dir)) = tried else { return Check::ok(SWTPM, found) };
            let detail = format!("{found} begins no TPM in {}: {error:#}", state_dir.display());
            let advice = probe::swtpm_confinement(state_dir);
            match needed {
                [] => Check::note(SWTPM, detail, format!("only VMs with a TPM need it: {advice}")),
                _ => Check::fail(SWTPM, detail, advice),
            }
        }
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
        let check = swtpm(None, &with, None);
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains("db has a TPM"), "{check:?}");
        assert_eq!(check.advice.as_deref(), Some(INSTALL_SWTPM));
        assert_eq!(swtpm(None, &[vm("")], None).state, State::Note);
        assert_eq!(swtpm(Some(Path::new("/usr/bin/swtpm")), &with, None).state, State::Ok);
        let lost = vm("firmware = \"/nowhere/OVMF.fd\"");
        let check = firmware(&lost).unwrap();
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains("/nowhere/OVMF.fd, which db boots"), "{check:?}");
        assert!(firmware(&vm("firmware = \"/etc/hostname\"")).is_none());
        assert_eq!(ovmf(Path::new("/nowhere/OVMF.fd"), &[lost]).state, State::Note);
        assert_eq!(ovmf(Path::new("/etc/hostname"), &[]).state, State::Ok);
    }

    // Before, it was well if the file was there.
    #[test]
    fn a_swtpm_that_ends_at_once_fails() {
        let folder = tempfile::tempdir().unwrap();
        let home = Some((folder.path(), &RunAs::OwnNumber));
        let check = |program: &str, vm| swtpm(Some(Path::new(program)), &[vm], home);
        let failed = check("/bin/false", vm("tpm = \"crb\""));
        assert_eq!(failed.state, State::Fail);
        let line =
            format!("`{}/** rwk,` to /etc/apparmor.d/local/usr.bin.swtpm", folder.path().display());
        assert!(failed.advice.as_ref().is_some_and(|advice| advice.contains(&line)), "{failed:?}");
        assert_eq!(check("/bin/false", vm("")).state, State::Note);
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
