//! A guest's console: QEMU has one end of it, whoever connects to its socket the other.
//!
//! The daemon stands between, so that QEMU's end is always connected: a port that nobody
//! listens to takes no byte, and in lockstep the backup would show nothing of what was said.
//! It can also hold what the guest says until that is committed ([`ConsoleOutput`]), and keeps
//! the console's log, which has the end of what was let out and nothing else. While nobody speaks
//! a console has no thread: whoever hears QEMU's events waits for its words, too (`hearing`).

mod log;
mod output;
mod relay;

pub use output::{ConsoleOutput, Waiting};
pub(crate) use relay::Relay;

use anyhow::Context;
use log::ConsoleLog;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A client that takes nothing for so long is disconnected: the guest waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// One console, of which a [`Relay`] is the thread's part.
pub struct ConsoleServer {
    output: Arc<ConsoleOutput>,
    qemu: UnixStream,
}

impl ConsoleServer {
    /// Listens at `path`, where nothing may be yet, and appends what may be heard to the file
    /// `log`; returns QEMU's end, too.
    pub(crate) fn serve(
        path: &Path,
        log: &Path,
        waiting: Waiting,
    ) -> anyhow::Result<((ConsoleServer, Relay), UnixStream)> {
        let pair = UnixStream::pair();
        let (ours, qemus) = pair.context("cannot make a pair of sockets for a console")?;
        Ok((ConsoleServer::serve_at(path, log, waiting, ours)?, qemus))
    }

    /// The same for a console of which another process has had this end, from
    /// [`ConsoleServer::duplicate`], and has left its socket.
    pub(crate) fn adopt(
        path: &Path,
        log: &Path,
        waiting: Waiting,
        qemu: UnixStream,
    ) -> anyhow::Result<(ConsoleServer, Relay)> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => ConsoleServer::serve_at(path, log, waiting, qemu),
        }
    }

    /// Duplicates this end of the console, for another process to keep.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.qemu.try_clone()?.into())
    }

    fn serve_at(
        path: &Path,
        log: &Path,
        waiting: Waiting,
        qemu: UnixStream,
    ) -> anyhow::Result<(ConsoleServer, Relay)> {
        let log = ConsoleLog::open(log)
            .with_context(|| format!("cannot write to the console's log {}", log.display()))?;
        let listen = || {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            qemu.set_nonblocking(true)?;
            let kept = qemu.try_clone()?;
            let output = Arc::new(ConsoleOutput::new(qemu.try_clone()?, waiting)?);
            let server = ConsoleServer { output: output.clone(), qemu: kept };
            let (client, typed, log) = (None, Vec::new(), Some(log));
            io::Result::Ok((server, Relay { output, qemu, listener, client, typed, log }))
        };
        listen().with_context(|| format!("cannot serve the console {}", path.display()))
    }

    /// The guest's words, on their way out.
    pub fn output(&self) -> &Arc<ConsoleOutput> {
        &self.output
    }
}

#[cfg(test)]
mod tests;
