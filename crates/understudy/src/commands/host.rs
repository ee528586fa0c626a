//! `understudy host`: the daemon in the foreground.

use super::watchdog::{self, Door};
use crate::api::operators::{self, Asking};
use crate::api::{Api, Guard, Routed, follow, remote, room};
use crate::service_manager::{Notice, ServiceManager};
use crate::socket::ApiSocket;
use crate::{door, metrics};
use nix::sys::signal::Signal as NixSignal;
use std::fs;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use understudy_client::{Exit, Failure};
use understudy_daemon::config::HostConfig;
use understudy_daemon::{ADDRESS_PATIENCE, Host};
use understudy_protocol::VmName;
use understudy_report::{ErrorKind, HostError};

/// Time that calls under way may take to be answered once everything has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Time that the end takes beside the guests' power-off, from each VM on that it has dealt with: protected VMs are handed
/// over before, one after the other.
const HAND_OVERS: Duration = Duration::from_secs(120);
/// Time between two looks at how many are left.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Runs the daemon until SIGTERM, SIGINT or SIGHUP.
pub fn run(config: &Path) -> Result<Exit, Failure> {
    let manager = Arc::new(ServiceManager::of_environment()?);
    let config = HostConfig::load(config)?;
    let socket = bind_socket(&config.socket)?;
    let runtime = room::runtime()
        .map_err(|error| Failure::internal(format!("cannot start threads: {error}")))?;
    let result = runtime.block_on(serve(config, &socket, manager));
    // A call that still hangs must not keep the daemon from ending.
    runtime.shutdown_background();
    result.map(|()| Exit::Ok)
}

/// Time that an end takes, from each VM on that it has dealt with.
pub(super) fn time_to_end(power_off_timeout: Duration) -> Duration {
    2 * power_off_timeout + HAND_OVERS
}

/// Waits for a daemon that is just ending.
fn bind_socket(path: &Path) -> Result<ApiSocket, HostError> {
    let deadline = Instant::now() + ADDRESS_PATIENCE;
    loop {
        match ApiSocket::bind(path) {
            Err(error) if error.kind == ErrorKind::Conflict && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            bound => return bound,
        }
    }
}

async fn serve(
    config: HostConfig,
    socket: &ApiSocket,
    manager: Arc<ServiceManager>,
) -> Result<(), Failure> {
    // From here on a signal waits until the host can be shut down in order.
    let mut signals = Signals::new().map_err(internal)?;
    let (name, file) = (config.name.clone(), config.file.clone());
    let end = time_to_end(config.power_off_timeout);
    let doors = Doors::open(&config, socket).await?;
    let host: Result<Arc<Host>, HostError> =
        spawn_blocking(|| Host::start(config)).await.map_err(crashed)?;
    let host = host?;
    let goes_on = || manager.tell(&[Notice::StillStopping(end)]);
    let (stop, stopped) = oneshot::channel::<()>();
    let (serving, door) = match doors.serve(&host, socket.path(), stopped) {
        Ok(served) => served,
        Err(failure) => {
            // Its guests run by now: an end without order would cut their power, at each further try to start.
            tracing::error!("ending: {}", failure.message);
            manager.tell(&[Notice::Stopping(end)]);
            end_in_order(&host, &mut signals, goes_on).await?;
            return Err(failure);
        }
    };
    let server = tokio::spawn(serving);
    tracing::info!(host = %name, socket = %socket.path().display(), "ready");
    manager.tell(&[Notice::Ready]);
    let alive = tokio::spawn(watchdog::keep(manager.clone(), host.clone(), door));
    let signal = signals.next().await;
    alive.abort();
    manager.tell(&[Notice::Stopping(end), Notice::Status(format!("ending after {signal}"))]);
    tracing::info!(signal, "{}", ending_words(&host.seen_in_keepers(), &file));
    shut_down(&host, stop, server, &mut signals, goes_on).await?;
    tracing::info!("ended");
    Ok(())
}

/// What becomes of this host's VMs now, of which these have keepers.
fn ending_words(kept: &[VmName], file: &Path) -> String {
    if kept.is_empty() {
        return "ending: VMs are handed over or shut down; another signal cuts them".to_owned();
    }
    let names: Vec<&str> = kept.iter().map(VmName::as_str).collect();
    format!(
        "ending: VMs without a keeper are handed over or shut down, and another signal cuts them; those in keepers go \
         on: {} (`understudy end-keepers --config {}` ends them in order)",
        names.join(", "),
        file.display()
    )
}

/// What the daemon listens on, had before a guest runs: what cannot be had ends nothing then.
struct Doors {
    local: UnixListener,
    metrics: Option<TcpListener>,
    api: Option<remote::Addresses>,
}

impl Doors {
    async fn open(config: &HostConfig, socket: &ApiSocket) -> Result<Doors, Failure> {
        Ok(Doors {
            local: listener_of(socket).map_err(internal)?,
            metrics: match config.metrics {
                Some(address) => Some(door::bind(address, "metrics", "[metrics]").await?),
                None => None,
            },
            api: match &config.api {
                Some(api) => Some(remote::Addresses::take(api.clone()).await?),
                None => None,
            },
        })
    }

    /// Lets everybody in; on the socket, whoever runs what is returned. With it comes the door at the socket's `path`.
    fn serve(
        self,
        host: &Arc<Host>,
        path: &Path,
        stopped: oneshot::Receiver<()>,
    ) -> Result<(impl Future<Output = io::Result<()>> + Send + 'static, Door), Failure> {
        follow(host).map_err(internal)?;
        let routed = Arc::new(Routed(host.clone()));
        let api = Api::new(routed.clone());
        if let Some(listener) = self.metrics {
            metrics::serve(listener, routed);
        }
        if let (Some(addresses), Some(tls)) = (self.api, host.api_tls()) {
            addresses.serve(&api, tls);
        }
        let router = operators::only(api.router(&Guard::Local));
        let service = router.into_make_service_with_connect_info::<Asking>();
        // Behind all that may fail, and before anybody hears that this daemon is up.
        host.arm_watchdog()?;
        let again = service.clone();
        let door = Door::new(path, move |socket| {
            let serving = axum::serve(listener_of(socket)?, again.clone());
            // Ends with the daemon.
            drop(tokio::spawn(serving.into_future()));
            Ok(())
        });
        let serving = axum::serve(self.local, service).with_graceful_shutdown(async {
            // A dropped sender stops the server as well.
            let _ = stopped.await;
        });
        Ok((serving.into_future(), door))
    }
}

/// Ends a host's work in order, and its API with it; a further signal cuts its VMs.
async fn shut_down(
    host: &Arc<Host>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<io::Result<()>>,
    signals: &mut Signals,
    goes_on: impl Fn(),
) -> Result<(), Failure> {
    let _ = stop.send(());
    end_in_order(host, signals, goes_on).await?;
    match tokio::time::timeout(LAST_ANSWERS, server).await {
        Ok(ended) => ended.map_err(crashed)?.map_err(internal)?,
        Err(_) => tracing::warn!("some API calls were not answered"),
    }
    Ok(())
}

/// Ends a host's work in order; a further signal cuts its VMs. Each time that one is dealt with, `goes_on` is called.
pub(super) async fn end_in_order(
    host: &Arc<Host>,
    signals: &mut Signals,
    goes_on: impl Fn(),
) -> Result<(), Failure> {
    let ending = host.clone();
    let mut ended = spawn_blocking(move || ending.shutdown());
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    let mut left = host.still_running();
    loop {
        tokio::select! {
            ended = &mut ended => return ended.map_err(crashed),
            signal = signals.next() => {
                // Whoever loses its terminal hears that more than once, or right behind a SIGTERM: it asks for no hurry.
                if signal != HANG_UP {
                    tracing::warn!(signal, "waiting for no guest any more");
                    host.hurry();
                }
            }
            _ = looks.tick() => {
                let before = std::mem::replace(&mut left, host.still_running());
                if left < before {
                    goes_on();
                }
            }
        }
    }
}

fn listener_of(socket: &ApiSocket) -> io::Result<UnixListener> {
    socket.listener().and_then(UnixListener::from_std)
}

pub(super) fn listen(
    socket: &ApiSocket,
    router: axum::Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<impl Future<Output = io::Result<()>> + Send + 'static, Failure> {
    let listener = listener_of(socket).map_err(internal)?;
    Ok(axum::serve(listener, router).with_graceful_shutdown(stop).into_future())
}

/// The signal that says that the terminal is gone.
const HANG_UP: &str = "SIGHUP";

/// The signals that end the daemon.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// Its terminal is gone; none if that is to be ignored, as under `nohup`.
    hang_up: Option<Signal>,
}

impl Signals {
    pub(super) fn new() -> io::Result<Signals> {
        let terminate = signal(SignalKind::terminate())?;
        let interrupt = signal(SignalKind::interrupt())?;
        let hang_up = (!is_hang_up_ignored()).then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Signals { terminate, interrupt, hang_up })
    }

    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            Some(_) = of_any(&mut self.hang_up) => HANG_UP,
        }
    }
}

async fn of_any(signal: &mut Option<Signal>) -> Option<()> {
    signal.as_mut()?.recv().await
}

/// Whether whoever started this wants it to outlive its terminal.
fn is_hang_up_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    ignored.is_some_and(|bits| bits & 1 << (NixSignal::SIGHUP as i32 - 1) != 0)
}

pub(super) fn internal(error: io::Error) -> Failure {
    Failure::internal(format!("the API cannot be served: {error}"))
}

pub(super) fn crashed(error: JoinError) -> Failure {
    Failure::internal(format!("the daemon failed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    /// Whoever ended a daemon in a terminal was told that its VMs ended with it, and they ran on.
    #[test]
    fn whoever_ends_a_daemon_hears_which_vms_run_on_and_how_they_are_ended() {
        let words = |kept: &[VmName]| ending_words(kept, Path::new("/etc/host.toml"));
        assert!(words(&[]).starts_with("ending: VMs are handed over or shut down;"));
        let told = words(&[literal("db"), literal("web")]);
        assert!(told.contains("those in keepers go on: db, web ("), "{told}");
        assert!(told.contains("`understudy end-keepers --config /etc/host.toml`"), "{told}");
    }
}
