//! The daemon's own watchdog: tells the service manager that it lives, after a proof of it.
//!
//! The proof is a request to its API, answered over the socket as any caller's would be, and the
//! locks that all of the daemon shares. A timer alone would go on in a daemon that serves nobody.

use crate::service_manager::{Notice, ServiceManager};
use crate::socket::ApiSocket;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;
use understudy_daemon::{Host, Pulse};

/// Time between two proofs when nobody counts them: what the manager shows should be of now.
const UNCOUNTED: Duration = Duration::from_secs(10);
/// Proofs in the time that the manager waits for one.
const PROOFS: u32 = 4;
/// The request: any answer will do, and this one costs nothing.
const REQUEST: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.";

/// Serves the API on a socket.
type Serve = Box<dyn Fn(&ApiSocket) -> io::Result<()> + Send>;

/// Path of the daemon's API, which somebody may remove.
pub struct Door {
    path: PathBuf,
    serve: Serve,
    /// The socket in the place of one that was removed.
    anew: Option<ApiSocket>,
}

impl Door {
    /// A door that is open.
    pub fn new(path: &Path, serve: impl Fn(&ApiSocket) -> io::Result<()> + Send + 'static) -> Door {
        Door { path: path.to_owned(), serve: Box::new(serve), anew: None }
    }

    /// Opens it where there is none any more; whether that was possible.
    fn open_anew(&mut self) -> bool {
        // First of all: its end removes what is at the path.
        self.anew = None;
        let opened = ApiSocket::bind(&self.path).map_err(io::Error::other).and_then(|socket| {
            (self.serve)(&socket)?;
            Ok(socket)
        });
        let path = self.path.display();
        match opened {
            Ok(socket) => {
                warn!(
                    "somebody has removed {path}, by which this daemon is commanded: it is made anew"
                );
                self.anew = Some(socket);
            }
            Err(error) => warn!("somebody has removed {path}, and it cannot be made anew: {error}"),
        }
        self.anew.is_some()
    }
}

/// Tells `manager` for as long as the daemon lives.
pub async fn keep(manager: Arc<ServiceManager>, host: Arc<Host>, mut door: Door) {
    let interval = manager.watchdog().map_or(UNCOUNTED, |longest| longest / PROOFS);
    loop {
        let (host, socket) = (host.clone(), door.path.clone());
        let mut proof = spawn_blocking(move || prove(&host, &socket));
        let proven = match timeout(interval, &mut proof).await {
            Ok(proven) => proven,
            Err(_) => {
                warn!("no sign of life of this daemon for {interval:?}");
                proof.await
            }
        };
        match proven {
            Ok(Ok(pulse)) => manager.tell(&[Notice::Alive, Notice::Status(describe(pulse))]),
            // The next proof is by the new one.
            Ok(Err(error)) if error.kind() == ErrorKind::NotFound && door.open_anew() => continue,
            Ok(Err(error)) => warn!("this daemon's own API does not answer: {error}"),
            Err(error) => warn!("no sign of life of this daemon: {error}"),
        }
        tokio::time::sleep(interval).await;
    }
}

fn prove(host: &Host, socket: &Path) -> io::Result<Pulse> {
    let mut api = UnixStream::connect(socket)?;
    api.write_all(REQUEST)?;
    let mut answer = [0; ANSWER.len()];
    api.read_exact(&mut answer)?;
    if answer != ANSWER {
        return Err(io::Error::other("its answer is not HTTP"));
    }
    Ok(host.pulse())
}

fn describe(pulse: Pulse) -> String {
    let Pulse { running, backed_up, kept } = pulse;
    format!("VMs in the daemon: {running} run, {backed_up} are backed up; in keepers: {kept}")
}
