//! `understudy keep`: the process that runs one VM, started by the daemon, which it outlives.

use super::host::{Signals, crashed, internal, listen, shut_down};
use crate::api::{Api, Guard};
use crate::socket::ApiSocket;
use nix::sys::prctl::set_name;
use nix::unistd::setsid;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use understudy_client::{Exit, Failure};
use understudy_daemon::Host;
use understudy_daemon::config::HostConfig;
use understudy_daemon::keeper::note::End;
use understudy_daemon::keeper::order::Order;
use understudy_daemon::keeper::{self, Connections};
use understudy_protocol::VmName;
use understudy_report::{ErrorKind, HostError};

/// One is for the API, and one for whoever waits on the host.
const API_THREADS: usize = 2;
/// For the daemon to fetch the last events.
const LAST_EVENTS: Duration = Duration::from_millis(200);

/// Keeps a VM until it is gone, or until SIGTERM; carries an order about it out first.
pub fn run(config: &Path, vm: &VmName, order: Option<Order>) -> Result<Exit, Failure> {
    // Its program is `/proc/self/exe`, which would be its name.
    let _ = set_name(c"understudy-keep");
    // What is said to the daemon's terminal is not meant for it. Fails if it leads a session already.
    let _ = setsid();
    keeper::rights::give_up()?;
    let config = HostConfig::load(config)?;
    let claim = keeper::claim(&config, vm)?;
    let connections = keeper::connections(&config, vm)?;
    let socket = ApiSocket::bind(&keeper::socket(&config, vm))?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(API_THREADS)
        .enable_all()
        .build()
        .map_err(|error| Failure::internal(format!("cannot start threads: {error}")))?;
    let ended = runtime.block_on(serve(config, (vm, order), connections, &socket));
    // A call that still hangs must not keep the keeper from ending.
    runtime.shutdown_background();
    let end = ended?;
    drop(socket);
    claim.end(end).map_err(|error| Failure::internal(format!("cannot say the last: {error}")))?;
    Ok(Exit::Ok)
}

async fn serve(
    config: HostConfig,
    (vm, order): (&VmName, Option<Order>),
    connections: Connections,
    socket: &ApiSocket,
) -> Result<End, Failure> {
    let mut signals = Signals::new().map_err(internal)?;
    let name = vm.clone();
    let keep = move || Host::keep(config, name, connections);
    let host = spawn_blocking(keep).await.map_err(crashed)??;
    let (stop, stopped) = oneshot::channel::<()>();
    let router = Api::new(Arc::new(host.clone())).router(&Guard::Local);
    let server = tokio::spawn(listen(socket, router, async {
        // A dropped sender stops the server as well.
        let _ = stopped.await;
    })?);
    tracing::info!(%vm, "its keeper is ready");
    let (keeping, name) = (host.clone(), vm.clone());
    let mut over = spawn_blocking(move || keep_up(&keeping, &name, order));
    let end = tokio::select! {
        end = &mut over => {
            tokio::time::sleep(LAST_EVENTS).await;
            end.map_err(crashed)?
        }
        signal = signals.next() => {
            tracing::info!(%vm, signal, "its keeper ends");
            End::Gone
        }
    };
    shut_down(&host, stop, server, &mut signals).await?;
    Ok(end)
}

/// Follows the order, if there is one, and waits for the end of the VM.
fn keep_up(host: &Arc<Host>, vm: &VmName, order: Option<Order>) -> End {
    let follow = |order| host.follow_order(vm, order, daemon().map_err(cannot_answer)?);
    if let Some(Err(error)) = order.map(follow) {
        tracing::warn!(%vm, "is not started: {error}");
        return End::Gone;
    }
    host.await_end_of_kept()
}

/// The other end of the socket that is the standard input of whoever has an order.
fn daemon() -> io::Result<UnixStream> {
    io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from)
}

fn cannot_answer(error: io::Error) -> HostError {
    HostError::new(ErrorKind::Internal, format!("nobody can be told what came of it: {error}"))
}
