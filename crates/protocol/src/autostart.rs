//! The decision about a VM that is to come up with its host, from what all hosts know.

use crate::HostName;
use crate::validity::Finding;

/// The knowledge about a VM that this host does not run.
#[derive(Clone, Debug)]
pub struct Knowledge {
    /// The finding about whose images are valid.
    pub finding: Finding,
    /// A host that runs it.
    pub runner: Option<HostName>,
    /// A host that does something with it, and what.
    pub busy: Option<(HostName, String)>,
}

/// The decision what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Autostart {
    /// Start it on this host's images.
    Start,
    /// Leave it for good: it is another host's, for this reason.
    Leave(String),
    /// Wait, for this reason.
    Wait(String),
}

/// Decides for the host `here`.
pub fn decide(here: &HostName, known: &Knowledge) -> Autostart {
    if let Some(host) = &known.runner {
        return Autostart::Leave(format!("host {host} runs it"));
    }
    // A backup that is about to take over, or a host that is about to let go.
    if let Some((host, what)) = &known.busy {
        return Autostart::Wait(format!("host {host} {what}"));
    }
    match &known.finding {
        Finding::Valid { host, .. } if host == here => Autostart::Start,
        Finding::Valid { host, why, .. } => {
            Autostart::Leave(format!("its valid images are on host {host}: {why}"))
        }
        Finding::Undecided(why) => Autostart::Wait(why.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Generation, literal};

    fn valid(host: &'static str) -> Finding {
        Finding::Valid { host: literal(host), generation: Generation(3), why: "it ran it".into() }
    }

    fn decided(finding: Finding, runner: Option<&'static str>, busy: Option<&str>) -> Autostart {
        let busy = busy.map(|what| (literal("b"), what.to_owned()));
        decide(&literal("a"), &Knowledge { finding, runner: runner.map(literal), busy })
    }

    #[test]
    fn it_starts_on_valid_images_of_its_own_alone() {
        assert_eq!(decided(valid("a"), None, None), Autostart::Start);
        let elsewhere = Autostart::Leave("its valid images are on host b: it ran it".into());
        assert_eq!(decided(valid("b"), None, None), elsewhere);
        let silent = "host b does not answer";
        let undecided = decided(Finding::Undecided(silent.into()), None, None);
        assert_eq!(undecided, Autostart::Wait(silent.into()));
    }

    #[test]
    fn whoever_runs_it_keeps_it_and_a_standby_has_the_first_word() {
        let runs = decided(valid("a"), Some("b"), Some("runs it"));
        assert_eq!(runs, Autostart::Leave("host b runs it".into()));
        let stands_by = decided(valid("a"), None, Some("stands by for host a"));
        assert_eq!(stands_by, Autostart::Wait("host b stands by for host a".into()));
    }
}
