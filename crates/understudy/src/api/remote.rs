//! The API over the network: TLS always, and a caller who has a token or a certificate.

use super::Api;
use super::access::{Asked, Caller, Connected, Guard, Tokens};
use super::idle::{Patient, Requests};
use axum::extract::connect_info::Connected as ConnectedBy;
use axum::serve::{IncomingStream, Listener};
use std::collections::HashMap;
use std::future::IntoFuture;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::server::TlsStream;
use understudy_daemon::ApiTls;
use understudy_daemon::config::ApiConfig;
use understudy_report::{ErrorKind, HostError};

/// Connections at a time, so that strangers leave descriptors for the hosts.
const MOST_CONNECTIONS: usize = 128;
/// Those of one address among them, so that no other goes without: a browser has six.
const MOST_OF_ONE: usize = 32;
/// For something to happen on one, while no request is being answered.
const PATIENCE: Duration = Duration::from_secs(60);
/// For a caller to prove that it has the key to its certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After an error of the system's.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves the API on the addresses of the configuration, until the daemon ends.
pub async fn start(api: &Api, config: ApiConfig, tls: ApiTls) -> Result<(), HostError> {
    let tokens = Tokens::new(config.tokens.clone(), api.host.events())?;
    let router = api.router(&Guard::Remote(Arc::new(tokens)));
    let seats = Seats::default();
    for address in &config.listen {
        let listener = bind(*address).await?;
        let (greeted, ready) = channel(1);
        let porter =
            Porter { config: config.clone(), tls: tls.clone(), seats: seats.clone(), greeted };
        tokio::spawn(porter.run(listener));
        let callers = Callers { ready };
        let service = router.clone().into_make_service_with_connect_info::<Connected>();
        tokio::spawn(axum::serve(callers, service).into_future());
        tracing::info!("the API and the dashboard are on https://{address}/");
    }
    Ok(())
}

/// Waits for an address that may be free in a moment.
async fn bind(address: SocketAddr) -> Result<TcpListener, HostError> {
    let deadline = tokio::time::Instant::now() + understudy_daemon::ADDRESS_PATIENCE;
    let error = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if tokio::time::Instant::now() >= deadline => break error,
            Err(error) if understudy_daemon::may_be_bound_soon(&error) => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => break error,
        }
    };
    let message = format!(
        "cannot serve the API on {address}: {error}; correct `listen` in [api] of the configuration"
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// Takes connections, and shakes hands with each of them apart.
struct Porter {
    config: ApiConfig,
    tls: ApiTls,
    seats: Seats,
    greeted: Sender<(Connection, Connected)>,
}

/// How many connections there may be, and there are.
#[derive(Clone)]
struct Seats {
    free: Arc<Semaphore>,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// A connection's place, until it is dropped.
struct Seat {
    _free: OwnedSemaphorePermit,
    address: IpAddr,
    seats: Seats,
}

impl Default for Seats {
    fn default() -> Seats {
        Seats { free: Arc::new(Semaphore::new(MOST_CONNECTIONS)), taken: Arc::default() }
    }
}

impl Seats {
    /// A place for a connection from this address, if it has not all of its own.
    fn take(&self, free: OwnedSemaphorePermit, address: IpAddr) -> Option<Seat> {
        let mut taken = self.taken();
        let of_one = taken.entry(address).or_default();
        if *of_one >= MOST_OF_ONE {
            return None;
        }
        *of_one += 1;
        Some(Seat { _free: free, address, seats: self.clone() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken();
        if let Some(of_one) = taken.get_mut(&self.address) {
            *of_one -= 1;
            if *of_one == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

impl Porter {
    async fn run(self, listener: TcpListener) {
        let porter = Arc::new(self);
        loop {
            // Never closed.
            let Ok(free) = porter.seats.free.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((socket, from)) => {
                    // Else it is closed: who has so many has no use for another.
                    if let Some(seat) = porter.seats.take(free, from.ip()) {
                        let porter = porter.clone();
                        tokio::spawn(async move { porter.greet(socket, seat).await });
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn greet(self: &Arc<Self>, socket: TcpStream, seat: Seat) {
        let handshake = TlsAcceptor::from(self.tls.server()).accept(socket);
        // Whoever speaks no TLS, or not ours, gets no answer.
        let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, handshake).await else { return };
        let requests = Requests::default();
        let connected = Connected { address: seat.address, caller: self.asked(&stream), requests };
        let stream = Patient::new(stream, PATIENCE, connected.requests.clone());
        // Fails if the daemon ends.
        let _ = self.greeted.send((Connection { stream, _seat: seat }, connected)).await;
    }

    /// What there is to be asked of a connection's certificate.
    fn asked(self: &Arc<Self>, stream: &TlsStream<TcpStream>) -> Asked {
        let (_, tls) = stream.get_ref();
        let certificate = tls.peer_certificates().and_then(<[_]>::first).cloned();
        let porter = self.clone();
        Arc::new(move || {
            certificate.as_ref().map_or(Caller::Nameless, |certificate| porter.caller(certificate))
        })
    }

    fn caller(&self, certificate: &CertificateDer<'_>) -> Caller {
        let known = &self.config.certificates;
        match self.tls.whose(certificate, known.keys()) {
            Ok(Some(name)) => Caller::Known(name.clone(), known[name]),
            Ok(None) => Caller::Unknown(
                "your certificate is of this host's CA, and its name has no role: add it to \
                 [api.certificates] of the host's configuration"
                    .to_owned(),
            ),
            Err(why) => Caller::Unknown(format!(
                "your certificate counts for nothing here: {why}; have one issued by this host's \
                 CA (`understudy pki issue NAME`), or show none and use a token"
            )),
        }
    }
}

/// Callers whose handshake is done.
struct Callers {
    ready: Receiver<(Connection, Connected)>,
}

impl Listener for Callers {
    type Io = Connection;
    type Addr = Connected;

    async fn accept(&mut self) -> (Connection, Connected) {
        match self.ready.recv().await {
            Some(connected) => connected,
            // The porter is gone, and with it the daemon.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Connected> {
        let address = IpAddr::from([0, 0, 0, 0]);
        let caller: Asked = Arc::new(|| Caller::Nameless);
        Ok(Connected { address, caller, requests: Requests::default() })
    }
}

impl ConnectedBy<IncomingStream<'_, Callers>> for Connected {
    fn connect_info(stream: IncomingStream<'_, Callers>) -> Connected {
        stream.remote_addr().clone()
    }
}

/// A connection, and its seat.
struct Connection {
    stream: Patient<TlsStream<TcpStream>>,
    _seat: Seat,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_address_leaves_room_for_others() {
        let seats = Seats::default();
        let take = async |last: u8| {
            let free = seats.free.clone().acquire_owned().await.unwrap();
            seats.take(free, IpAddr::from([10, 0, 0, last]))
        };
        let mut taken = Vec::new();
        for _ in 0..MOST_OF_ONE {
            taken.push(take(1).await.expect("there is room"));
        }
        assert!(take(1).await.is_none(), "it has all of its own");
        assert_eq!(seats.free.available_permits(), MOST_CONNECTIONS - MOST_OF_ONE);
        assert!(take(2).await.is_some());
        taken.pop();
        assert!(take(1).await.is_some());
        taken.clear();
        assert!(seats.taken().is_empty());
    }
}
