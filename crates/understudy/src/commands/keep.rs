//! `understudy keep`: the process that runs one VM, started by the daemon, which it outlives.

use super::host::{Signals, crashed, end_in_order, internal, listen, time_to_end};
use crate::api::{Api, Guard, room};
use crate::service_manager::{Notice, ServiceManager};
use crate::socket::ApiSocket;
use nix::sys::prctl::set_name;
use nix::unistd::setsid;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use understudy_client::{Client, Exit, Failure, FailureKind};
use understudy_daemon::config::{Ending, HostConfig};
use understudy_daemon::keeper::SILENCE;
use understudy_daemon::keeper::ending::{self, Heard, Left, Patience};
use understudy_daemon::keeper::order::Order;
use understudy_daemon::keeper::places::{Close, Door};
use understudy_daemon::keeper::rights;
use understudy_daemon::keeper::seclusion::{self, Seclusion};
use understudy_daemon::keeper::view::{self, Files, View};
use understudy_daemon::{AgentFile, Host};
use understudy_protocol::{GroupName, VmName};
use understudy_report::{ErrorKind, HostError};

/// Time for what was asked to be answered: who ended the VM is to hear that, on a busy host, too.
const LAST_ANSWERS: Duration = Duration::from_secs(8);
/// Time for each answer of one that is told to end.
const ANSWER: Duration = Duration::from_secs(5);

/// Keeps a VM, and those of its group that come, until they are gone, or until SIGTERM; follows an order
/// about it first. These files are the VM's.
pub fn run(
    config: &Path,
    agent: &Path,
    (vm, group): (&VmName, Option<GroupName>),
    order: Option<Order>,
    files: &Files,
) -> Result<Exit, Failure> {
    // Its program is `/proc/self/exe`, which would be its name.
    let _ = set_name(c"understudy-keep");
    // What is said to the daemon's terminal is not meant for it. Fails if it leads a session already.
    let _ = setsid();
    let mut config = HostConfig::load(config)?;
    // Of the daemon's program, as this is, which may have been replaced since; and where that lies is not told by this
    // process's own mounts.
    let agent = AgentFile::open(agent)?;
    config.agent = Some(agent.path().to_owned());
    if let View::Whole(why) = view::enter(&config, vm, files)? {
        tracing::warn!(
            "it sees the files of all VMs, and opens all devices of this host: {why}; the service must let it \
             mount, as the packaged understudy.service does (RestrictNamespaces, SystemCallFilter, CapabilityBoundingSet)"
        );
    }
    rights::give_up()?;
    seclude(order.as_ref())?;
    let runtime = room::runtime()
        .map_err(|error| Failure::internal(format!("cannot start threads: {error}")))?;
    let ended = runtime.block_on(serve(config, (vm, group), order));
    // A call that still hangs must not keep the keeper from ending.
    runtime.shutdown_background();
    ended.map(|()| Exit::Ok)
}

/// Has all keepers of a host end, and waits until they have. A configuration that the next daemon would refuse is no
/// hindrance: those that run were begun by another.
pub fn end_all(config: &Path) -> Result<Exit, Failure> {
    let manager = ServiceManager::of_environment();
    let manager = manager.inspect_err(|failure| tracing::warn!("{}", failure.message)).ok();
    let (Ending { state_dir, power_off_timeout }, error) = Ending::load(config);
    if let Some(error) = error {
        let state_dir = state_dir.display();
        tracing::warn!(
            "{error}; the keepers that are found in {state_dir} are told to end all the same"
        );
    }
    let patience = time_to_end(power_off_timeout);
    let goes_on = || {
        if let Some(manager) = &manager {
            manager.tell(&[Notice::StillStopping(patience)]);
        }
    };
    let waits = Patience { end: patience, silence: SILENCE, hears };
    let left = ending::end_all(&state_dir, &waits, goes_on).map_err(|error| {
        Failure::internal(format!(
            "the keepers in {} cannot be found: {error}",
            state_dir.display()
        ))
    })?;
    match unended(&left, patience) {
        None => Ok(Exit::Ok),
        Some(words) => Err(Failure::internal(words)),
    }
}

/// Asks a VM's keeper how it is.
fn hears(vm: &VmName, socket: &Path) -> Heard {
    let status = Client::new(socket).and_then(|client| client.patient(ANSWER).vm_status(vm));
    match status.map_err(|failure| failure.kind) {
        Err(FailureKind::DaemonSilent) => Heard::Silent,
        Err(FailureKind::DaemonUnreachable) => Heard::Closed,
        Ok(_) | Err(_) => Heard::Answers,
    }
}

/// Words about the VMs whose keepers have not ended.
fn unended(left: &Left, patience: Duration) -> Option<String> {
    let about = |vms: &[VmName], why: &str, remedy: &str| {
        let names: Vec<&str> = vms.iter().map(VmName::as_str).collect();
        (!vms.is_empty()).then(|| format!("the keepers of {} {why}: {remedy}", names.join(", ")))
    };
    let untold = about(
        &left.untold,
        "cannot be told to end (why is in the log), and their VMs run on",
        "hand these over or stop them through the daemon, or try once more",
    );
    let seconds = patience.as_secs();
    let late = about(
        &left.unended,
        &format!("have not ended within {seconds} s"),
        "what they wait for is in their logs; SIGTERM to one that ends already cuts its guests",
    );
    let silent = about(
        &left.silent,
        &format!("have answered nothing for {} s and have not ended: they hang", SILENCE.as_secs()),
        "`understudy vm stop VM --force` ends one and what it runs or backs up here; the end of this host cuts them",
    );
    let words: Vec<String> = untold.into_iter().chain(late).chain(silent).collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// Secludes this process before there are other threads, which would not be.
fn seclude(order: Option<&Order>) -> Result<(), Failure> {
    if matches!(order, Some(Order::Adopt)) {
        tracing::info!(
            "not kept from other processes: its QEMU is the last keeper's. The next start of the VM changes that"
        );
        return Ok(());
    }
    match seclusion::begin()? {
        Seclusion::Whole => {}
        less => tracing::warn!("{less} (`understudy doctor` says what to do)"),
    }
    Ok(())
}

async fn serve(
    config: HostConfig,
    (vm, group): (&VmName, Option<GroupName>),
    order: Option<Order>,
) -> Result<(), Failure> {
    let mut signals = Signals::new().map_err(internal)?;
    let ordered = order.map(|order| Ok((order, daemon()?))).transpose().map_err(cannot_answer)?;
    let (name, runtime) = (vm.clone(), Handle::current());
    let door: Door = Box::new(move |host, path| open(&runtime, host, path));
    let adopts = matches!(ordered, Some((Order::Adopt, _)));
    let keep = move || match adopts {
        true => Host::keep_later(config, group, door),
        false => Host::keep(config, &name, group, door),
    };
    let host = spawn_blocking(keep).await.map_err(crashed)??;
    if !adopts {
        tracing::info!(%vm, "its keeper is ready");
    }
    let (keeping, name) = (host.clone(), vm.clone());
    let mut over = spawn_blocking(move || keep_up(&keeping, &name, ordered));
    tokio::select! {
        over = &mut over => over.map_err(crashed)??,
        signal = signals.next() => tracing::info!(%vm, signal, "its keeper ends"),
    }
    end_in_order(&host, &mut signals, || ()).await?;
    spawn_blocking(move || host.leave_all()).await.map_err(crashed)
}

/// Serves the host's API on a socket; returns what closes it. To be called, and closed, on a thread that may wait.
fn open(runtime: &Handle, host: &Arc<Host>, path: &Path) -> Result<Close, HostError> {
    let _within = runtime.enter();
    let socket = ApiSocket::bind(path)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let api = Api::new(Arc::new(host.clone()));
    let router = api.router(&Guard::Local);
    let serving = listen(&socket, router, async {
        // A dropped sender stops the server as well.
        let _ = stopped.await;
    });
    let cannot = |failure: Failure| HostError::new(ErrorKind::Internal, failure.message);
    let (server, runtime) = (runtime.spawn(serving.map_err(cannot)?), runtime.clone());
    Ok(Box::new(move || {
        drop(stop);
        // The daemon always waits for the next event.
        api.end_waits();
        // What hangs is not waited for.
        let _ = runtime.block_on(async { timeout(LAST_ANSWERS, server).await });
        drop(socket);
    }))
}

/// Has the order followed, if there is one, and waits for the end of the VMs. An error: it has none, and what there is
/// of one is not its own to end.
fn keep_up(
    host: &Arc<Host>,
    vm: &VmName,
    ordered: Option<(Order, UnixStream)>,
) -> Result<(), HostError> {
    match ordered {
        Some((Order::Adopt, daemon)) => host.adopt_as_ordered(vm, daemon)?,
        Some((order, daemon)) => host.take_first_order(vm, order, daemon),
        None => {}
    }
    host.await_end_of_kept();
    Ok(())
}

/// The other end of the socket that is the standard input of whoever has an order.
fn daemon() -> io::Result<UnixStream> {
    io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from)
}

fn cannot_answer(error: io::Error) -> Failure {
    Failure::internal(format!("nobody can be told what came of its order: {error}"))
}
