//! Seclusion of a keeper from its host's processes: it reaches itself, and those that it starts.
//! The kernel sees to that (Landlock), for good.
//!
//! One that goes on with the QEMU of the last keeper is not secluded: that QEMU is none of its own, and it must reach it.

use landlock::{AccessFs, Ruleset, RulesetAttr, RulesetError, RulesetStatus, Scope};
use std::fmt;
use std::thread;
use understudy_report::error::{ErrorKind, HostError};

/// Extent to which this kernel sees to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seclusion {
    /// The keeper reaches no other process.
    Whole,
    /// The keeper looks into no other process and changes none, but may send them signals.
    ButForSignals,
    /// The keeper reaches all of them.
    None,
}

impl Seclusion {
    /// Remedy: what to do for more, if there is something.
    pub fn remedy(self) -> Option<&'static str> {
        match self {
            Seclusion::Whole => None,
            Seclusion::ButForSignals => Some("Linux 6.12 is the first that refuses that, too"),
            Seclusion::None => {
                Some("boot with `landlock` before what /sys/kernel/security/lsm has, in `lsm=`")
            }
        }
    }
}

impl fmt::Display for Seclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Seclusion::Whole => "a keeper reaches no processes but its own",
            Seclusion::ButForSignals => {
                "a keeper looks into no processes but its own, and can end others"
            }
            Seclusion::None => {
                "a keeper can read and change all processes of this host: the kernel's Landlock is not there, or not on"
            }
        })
    }
}

/// Secludes this thread, and all that it starts.
pub fn begin() -> Result<Seclusion, HostError> {
    seclude().map_err(cannot)
}

/// Seclusion that this kernel would give: tried in a thread that ends.
pub fn probe() -> Result<Seclusion, HostError> {
    let tried = thread::Builder::new().name("seclusion".to_owned()).spawn(begin).map_err(cannot)?;
    tried.join().unwrap_or_else(|_| Err(cannot("the thread that tried it panicked")))
}

fn cannot(error: impl fmt::Display) -> HostError {
    let message = format!("a keeper cannot be kept from other processes: {error}");
    HostError::new(ErrorKind::Internal, message)
}

/// Secludes this thread: whoever has any restriction of this kind reaches only those that have it,
/// too.
fn seclude() -> Result<Seclusion, RulesetError> {
    let restricted = Ruleset::default()
        // Nothing else of files is restricted. It could make none of these anyhow.
        .handle_access(AccessFs::MakeChar | AccessFs::MakeBlock)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?
        .create()?
        .restrict_self()?;
    Ok(match restricted.ruleset {
        RulesetStatus::FullyEnforced => Seclusion::Whole,
        RulesetStatus::PartiallyEnforced => Seclusion::ButForSignals,
        RulesetStatus::NotEnforced => Seclusion::None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    use std::fs::File;
    use std::io;
    use std::process::{Child, Command};

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// Whether a process's memory can be had, and whether signals can be sent to it.
    fn reaches(process: &Child) -> (io::Result<()>, Result<(), Errno>) {
        let memory = File::options().read(true).open(format!("/proc/{}/mem", process.id()));
        (memory.map(drop), kill(Pid::from_raw(process.id() as i32), None))
    }

    fn end(mut process: Child) {
        process.kill().unwrap();
        process.wait().unwrap();
    }

    #[test]
    fn a_keeper_reaches_its_own_processes_and_no_others() {
        let stranger = sleeper();
        let before = reaches(&stranger);
        assert!(before.0.is_ok() && before.1.is_ok(), "this test takes root: {before:?}");
        let (seclusion, theirs, its_own) = thread::scope(|scope| {
            let keeper = scope.spawn(|| {
                let (seclusion, child) = (begin().unwrap(), sleeper());
                let (theirs, its_own) = (reaches(&stranger), reaches(&child));
                end(child);
                (seclusion, theirs, its_own)
            });
            keeper.join().unwrap()
        });
        end(stranger);
        assert_ne!(seclusion, Seclusion::None, "this test takes a kernel with Landlock");
        assert_eq!(theirs.0.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let refused = seclusion == Seclusion::Whole;
        assert_eq!(theirs.1, if refused { Err(Errno::EPERM) } else { Ok(()) });
        assert!(its_own.0.is_ok() && its_own.1.is_ok(), "{its_own:?}");
    }

    #[test]
    fn to_try_it_changes_nothing_for_whoever_asks() {
        let process = sleeper();
        assert_ne!(probe().unwrap(), Seclusion::None);
        let after = reaches(&process);
        end(process);
        assert!(after.0.is_ok() && after.1.is_ok(), "{after:?}");
    }
}
