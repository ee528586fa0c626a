//! The API over the network: TLS always, and a caller who has a token or a certificate.

use super::Api;
use super::access::{Caller, Guard, Tokens};
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use std::future::IntoFuture;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use understudy_daemon::config::ApiConfig;
use understudy_daemon::{ApiTls, ErrorKind, HostError};

/// Connections at a time, so that strangers leave descriptors for the hosts.
const MOST_CONNECTIONS: usize = 128;
/// For a caller to prove that it has the key to its certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After an error of the system's.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves the API on the addresses of the configuration, until the daemon ends.
pub async fn start(api: &Api, config: ApiConfig, tls: ApiTls) -> Result<(), HostError> {
    let tokens = Tokens::new(config.tokens.clone())?;
    let router = api.router(&Guard::Remote(Arc::new(tokens)));
    let seats = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    for address in &config.listen {
        let listener = bind(*address).await?;
        let (greeted, ready) = channel(1);
        let porter =
            Porter { config: config.clone(), tls: tls.clone(), seats: seats.clone(), greeted };
        tokio::spawn(porter.run(listener));
        let callers = Callers { ready };
        let service = router.clone().into_make_service_with_connect_info::<Caller>();
        tokio::spawn(axum::serve(callers, service).into_future());
        tracing::info!("the API and the dashboard are on https://{address}/");
    }
    Ok(())
}

/// Waits for an address that a daemon which has just ended still has.
async fn bind(address: SocketAddr) -> Result<TcpListener, HostError> {
    let deadline = tokio::time::Instant::now() + understudy_daemon::ADDRESS_PATIENCE;
    let error = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(error) if tokio::time::Instant::now() >= deadline => break error,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
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
    seats: Arc<Semaphore>,
    greeted: Sender<(Connection, Caller)>,
}

impl Porter {
    async fn run(self, listener: TcpListener) {
        let porter = Arc::new(self);
        loop {
            // Never closed.
            let Ok(seat) = porter.seats.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((socket, _)) => {
                    let porter = porter.clone();
                    tokio::spawn(async move { porter.greet(socket, seat).await });
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn greet(&self, socket: TcpStream, seat: OwnedSemaphorePermit) {
        let handshake = TlsAcceptor::from(self.tls.server()).accept(socket);
        // Whoever speaks no TLS, or not ours, gets no answer.
        let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, handshake).await else { return };
        let caller = self.caller(&stream);
        // Fails if the daemon ends.
        let _ = self.greeted.send((Connection { stream, _seat: seat }, caller)).await;
    }

    fn caller(&self, stream: &TlsStream<TcpStream>) -> Caller {
        let (_, tls) = stream.get_ref();
        let Some(certificate) = tls.peer_certificates().and_then(<[_]>::first) else {
            return Caller::Nameless;
        };
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
    ready: Receiver<(Connection, Caller)>,
}

impl Listener for Callers {
    type Io = Connection;
    type Addr = Caller;

    async fn accept(&mut self) -> (Connection, Caller) {
        match self.ready.recv().await {
            Some(caller) => caller,
            // The porter is gone, and with it the daemon.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Caller> {
        Ok(Caller::Nameless)
    }
}

impl Connected<IncomingStream<'_, Callers>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Callers>) -> Caller {
        stream.remote_addr().clone()
    }
}

/// A connection, and its seat.
struct Connection {
    stream: TlsStream<TcpStream>,
    _seat: OwnedSemaphorePermit,
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
