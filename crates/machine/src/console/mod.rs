//! A guest's console: QEMU has one end of it, whoever connects to its socket the other.
//!
//! The daemon stands between, so that QEMU's end is always connected: a port that nobody
//! listens to takes no byte, and in lockstep the backup would show nothing of what was said.
//! It can also hold what the guest says until that is committed ([`ConsoleOutput`]), and keeps
//! the console's log, which has the end of what was let out and nothing else.

mod log;
mod output;
mod relay;

pub use output::{ConsoleOutput, Waiting};

use anyhow::Context;
use log::ConsoleLog;
use nix::sys::eventfd::{EfdFlags, EventFd};
use relay::Relay;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// A client that takes nothing for so long is disconnected: the guest waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves one console until it is dropped.
pub struct ConsoleServer {
    output: Arc<ConsoleOutput>,
    qemu: UnixStream,
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl ConsoleServer {
    /// Listens at `path`, where nothing may be yet, and appends what may be heard to the file
    /// `log`; returns QEMU's end, too.
    pub fn serve(
        path: &Path,
        log: &Path,
        waiting: Waiting,
    ) -> anyhow::Result<(ConsoleServer, UnixStream)> {
        let pair = UnixStream::pair();
        let (ours, qemus) = pair.context("cannot make a pair of sockets for a console")?;
        Ok((ConsoleServer::serve_at(path, log, waiting, ours)?, qemus))
    }

    /// The same for a console of which another process has had this end, from
    /// [`ConsoleServer::duplicate`], and has left its socket.
    pub fn adopt(
        path: &Path,
        log: &Path,
        waiting: Waiting,
        qemu: UnixStream,
    ) -> anyhow::Result<ConsoleServer> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", path.display()))
            }
            _ => ConsoleServer::serve_at(path, log, waiting, qemu),
        }
    }

    /// This end of the console, for another process to keep.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.qemu.try_clone()?.into())
    }

    fn serve_at(
        path: &Path,
        log: &Path,
        waiting: Waiting,
        qemu: UnixStream,
    ) -> anyhow::Result<ConsoleServer> {
        let log = ConsoleLog::open(log)
            .with_context(|| format!("cannot write to the console's log {}", log.display()))?;
        let listen = || {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            qemu.set_nonblocking(true)?;
            let kept = qemu.try_clone()?;
            let output = Arc::new(ConsoleOutput::new(qemu.try_clone()?, waiting)?);
            let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
            let relay = Relay {
                output: output.clone(),
                qemu,
                listener,
                client: None,
                typed: Vec::new(),
                log: Some(log),
                stop: stop.clone(),
            };
            let thread = understudy_threads::spawn("console", move || relay.run())?;
            io::Result::Ok(ConsoleServer { output, qemu: kept, stop, thread: Some(thread) })
        };
        listen().with_context(|| format!("cannot serve the console {}", path.display()))
    }

    /// What the guest says, on its way out.
    pub fn output(&self) -> &Arc<ConsoleOutput> {
        &self.output
    }
}

impl Drop for ConsoleServer {
    fn drop(&mut self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
