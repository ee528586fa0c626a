//! QEMU, its tools and the agent library.

use super::Check;
use std::path::PathBuf;
use std::process::Command;
use understudy_daemon::config::HostConfig;
use understudy_qemu::Capabilities;
use understudy_qemu::pause::is_proven;
use understudy_qemu::programs::{Missing, find_agent, find_qemu};

const INSTALL_QEMU: &str = "install the package qemu-system-x86, version 8.2 or later \
                            (Debian 13, or backports of Debian 12)";

const SHORTER_PAUSES: &str = "nothing has to be done; with QEMU 10.0 pauses are shorter";

pub fn checks(config: Option<&HostConfig>) -> Vec<Check> {
    let qemu_path = config.map_or_else(find_qemu, HostConfig::qemu_path);
    let agent_path = config.map_or_else(find_agent, HostConfig::agent_path);
    vec![qemu(qemu_path), qemu_img(), agent(agent_path)]
}

fn qemu(path: Result<PathBuf, Missing>) -> Check {
    const NAME: &str = "QEMU";
    let path = match path {
        Ok(path) => path,
        Err(error) => return Check::fail(NAME, error.0, INSTALL_QEMU),
    };
    match Capabilities::probe(&path) {
        Ok(found) => {
            let detail = format!("{} in {} has what is needed", found.version, path.display());
            if is_proven(found.version) {
                return Check::ok(NAME, detail);
            }
            let detail = format!("{detail}; checkpoints pause its guests through QMP");
            Check::note(NAME, detail, SHORTER_PAUSES)
        }
        Err(error) => Check::fail(NAME, error.to_string(), INSTALL_QEMU),
    }
}

fn qemu_img() -> Check {
    const NAME: &str = "qemu-img";
    match Command::new(NAME).arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            Check::ok(NAME, text.lines().next().unwrap_or_default())
        }
        Ok(output) => {
            let detail = format!("ends with {}", output.status);
            Check::fail(NAME, detail, "reinstall the package qemu-utils")
        }
        Err(error) => {
            Check::fail(NAME, format!("cannot run: {error}"), "install the package qemu-utils")
        }
    }
}

fn agent(path: Result<PathBuf, Missing>) -> Check {
    const NAME: &str = "agent library";
    match path {
        Ok(path) => Check::ok(NAME, path.display().to_string()),
        Err(error) => Check::fail(NAME, error.0, "build it with `make`, or install the package"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_program_that_is_no_qemu_fails_and_says_what_to_install() {
        let check = qemu(Ok("/bin/false".into()));
        assert_eq!(check.state, State::Fail);
        assert!(check.advice.unwrap().contains("qemu-system-x86"));
    }

    #[test]
    fn what_is_not_found_fails() {
        let missing = || Err(Missing("not there".to_owned()));
        assert_eq!(qemu(missing()).detail, "not there");
        assert_eq!(agent(missing()).state, State::Fail);
    }
}
