//! `understudy vm console`: this terminal, or a pipe, on a guest's serial port.

use super::relay::Relay;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use understudy_client::{Client, Exit, Failure, FailureKind};
use understudy_report::ErrorKind;

/// Connects until the user or the guest leaves.
pub fn run(client: &Client, name: &str) -> Result<Exit, Failure> {
    let status = client.vm_status(name)?;
    if let Some(unheard) = status.unheard {
        return Err(Failure::new(FailureKind::Host(ErrorKind::Unreachable), unheard));
    }
    let Some(path) = status.console else {
        let message = format!("{name} has no console on this host");
        return Err(Failure::new(FailureKind::Host(ErrorKind::NotFound), message));
    };
    let failed = |error: io::Error| {
        Failure::internal(format!("the console of {name} at {}: {error}", path.display()))
    };
    let console = UnixStream::connect(&path).map_err(failed)?;
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let terminal = stdin.is_terminal();
    let mut relay =
        Relay::new(&console, stdin.as_fd(), stdout.as_fd(), terminal).map_err(failed)?;
    let _raw = if terminal {
        eprintln!("console of {name}; Ctrl-] leaves");
        Some(RawMode::enter(stdin.as_fd()).map_err(|errno| failed(errno.into()))?)
    } else {
        None
    };
    relay.run().map_err(|errno| failed(errno.into()))?;
    Ok(Exit::Ok)
}

/// The terminal hands every key on; undone when dropped.
struct RawMode<'a> {
    terminal: BorrowedFd<'a>,
    before: Termios,
}

impl RawMode<'_> {
    fn enter(terminal: BorrowedFd<'_>) -> nix::Result<RawMode<'_>> {
        let before = tcgetattr(terminal)?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(terminal, SetArg::TCSADRAIN, &raw)?;
        Ok(RawMode { terminal, before })
    }
}

impl Drop for RawMode<'_> {
    fn drop(&mut self) {
        if let Err(error) = tcsetattr(self.terminal, SetArg::TCSADRAIN, &self.before) {
            tracing::warn!(%error, "cannot restore the terminal: run `reset`");
        }
        eprintln!();
    }
}
