//! Checks whether this machine can run and protect VMs; tries things instead
//! of believing version numbers, and leaves nothing behind.

mod configuration;
mod guests;
mod machine;
mod software;
mod tap;

use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use understudy_daemon::config::HostConfig;

/// The report of what was found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether nothing is in the way.
    pub ok: bool,
    /// Every check, in order.
    pub checks: Vec<Check>,
}

/// The result of one check.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Name of what was checked.
    pub name: String,
    /// State in which it came out.
    pub state: State,
    /// Text about what was found.
    pub detail: String,
    /// Advice what to do, when something is to be done.
    pub advice: Option<String>,
}

/// The state in which a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// All is as it should be.
    Ok,
    /// The thing works, but not as well as it could.
    Note,
    /// The thing does not work.
    Fail,
}

impl Check {
    fn ok(name: &str, detail: impl Into<String>) -> Check {
        Check { name: name.to_owned(), state: State::Ok, detail: detail.into(), advice: None }
    }

    fn note(name: &str, detail: impl Into<String>, advice: impl Into<String>) -> Check {
        let advice = Some(advice.into());
        Check { name: name.to_owned(), state: State::Note, detail: detail.into(), advice }
    }

    fn fail(name: &str, detail: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { state: State::Fail, ..Check::note(name, detail, advice) }
    }
}

/// Checks this machine, and with `config` what that configuration names.
pub fn examine(config: Option<&Path>) -> Report {
    let mut checks = machine::checks();
    match config.map(HostConfig::load) {
        None => {
            checks.extend(software::checks(None));
            checks.extend(guests::checks(None));
        }
        Some(Ok(config)) => {
            checks.extend(software::checks(Some(&config)));
            checks.extend(configuration::checks(&config));
            checks.extend(guests::checks(Some(&config)));
        }
        Some(Err(error)) => {
            checks.extend(software::checks(None));
            checks.push(Check::fail("configuration", error.message, "correct the file"));
        }
    }
    Report::new(checks)
}

impl Report {
    fn new(checks: Vec<Check>) -> Report {
        Report { ok: checks.iter().all(|check| check.state != State::Fail), checks }
    }

    /// One line for each check, with what to do below it.
    pub fn text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        let mut text = String::new();
        for check in &self.checks {
            let state = match check.state {
                State::Ok => "ok  ",
                State::Note => "note",
                State::Fail => "FAIL",
            };
            let advice = match &check.advice {
                Some(advice) => format!("; {advice}"),
                None => String::new(),
            };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{state}  {:width$}  {}{advice}", check.name, check.detail);
        }
        text.push_str(match self.ok {
            true => "this machine is ready\n",
            false => "this machine is not ready: see the lines with FAIL\n",
        });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_is_enough_and_says_what_to_do() {
        let report = Report::new(vec![
            Check::ok("kernel", "Linux 6.18"),
            Check::note("KVM", "no /dev/kvm", "TCG will be used"),
            Check::fail("qemu-img", "not found", "install qemu-utils"),
        ]);
        assert!(!report.ok);
        let text = report.text();
        assert!(text.contains("ok    kernel    Linux 6.18\n"), "{text}");
        assert!(text.contains("FAIL  qemu-img  not found; install qemu-utils\n"), "{text}");
        assert!(text.ends_with("FAIL\n"), "{text}");
    }

    #[test]
    fn notes_do_not_fail() {
        let report = Report::new(vec![Check::note("KVM", "no /dev/kvm", "TCG will be used")]);
        assert!(report.ok);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["checks"][0]["state"], "note");
    }

    #[test]
    fn a_bad_configuration_fails_with_its_own_words() {
        let report = examine(Some(Path::new("/nonexistent/host.toml")));
        let check = report.checks.iter().find(|check| check.name == "configuration").unwrap();
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains("/nonexistent/host.toml"), "{}", check.detail);
        assert!(!report.ok);
    }
}
