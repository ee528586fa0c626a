//! Doors to the network, for the API and the metrics: how many connections there may be, and for how long one may keep
//! its seat without a request.
//!
//! | module | is |
//! |--------|----|
//! | [`seats`] | how many connections there may be, and there are |
//! | [`patient`] | a connection that ends when nobody asks anything on it |

pub mod patient;
mod seats;

pub use seats::Seats;

use axum::Router;
use axum::extract::connect_info::Connected as ConnectedBy;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use patient::{Patience, Patient, Requests};
use seats::Seat;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::spawn_blocking;
use understudy_daemon::bind_soon;
use understudy_daemon::config::Access;
use understudy_protocol::HostName;
use understudy_report::{ErrorKind, HostError};

/// Pause after an error of the system's.
const PAUSE: Duration = Duration::from_millis(100);

/// The caller, as a connection tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// No name: a token must give it.
    Nameless,
    /// A certificate that the configuration names.
    Known(HostName, Access),
    /// A certificate that counts for nothing, and why.
    Unknown(String),
}

/// The question of who calls, answered for each request: a certificate may have been revoked, or
/// have expired, since the connection began.
pub type Asked = Arc<dyn Fn() -> Caller + Send + Sync>;

/// A connection over the network, as its requests know it.
#[derive(Clone)]
pub struct Connected {
    /// Address that it comes from.
    pub address: IpAddr,
    /// Question of who calls.
    pub caller: Asked,
    /// Requests of it that are being answered.
    pub requests: Requests,
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connected").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The stream that is spoken on a connection that was greeted.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that was greeted, and who calls.
pub type Greeted = (Box<dyn Stream>, Asked);

/// One address at which callers are let in.
#[derive(Clone)]
pub struct Door {
    /// The connections that there may be, at all addresses that have the same.
    pub seats: Seats,
    /// Time for which they may be without a request.
    pub patience: Patience,
}

impl Door {
    /// Serves routes until the daemon ends; `greet` makes of a connection what is spoken on it, or hangs up.
    pub fn serve<F>(
        self,
        listener: TcpListener,
        router: Router,
        greet: impl Fn(TcpStream) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = Option<Greeted>> + Send + 'static,
    {
        let (greeted, ready) = channel(1);
        tokio::spawn(self.let_in(listener, greet, greeted));
        let service =
            router.layer(from_fn(count)).into_make_service_with_connect_info::<Connected>();
        tokio::spawn(axum::serve(Callers { ready }, service).into_future());
    }

    async fn let_in<F>(
        self,
        listener: TcpListener,
        greet: impl Fn(TcpStream) -> F + Send + Sync + 'static,
        greeted: Sender<(Connection, Connected)>,
    ) where
        F: Future<Output = Option<Greeted>> + Send + 'static,
    {
        loop {
            // Never closed.
            let Ok(free) = self.seats.one().await else { return };
            match listener.accept().await {
                Ok((socket, from)) => {
                    // Else it is closed: who has so many has no use for another.
                    if let Some(seat) = self.seats.take(free, from.ip()) {
                        tokio::spawn(self.clone().admit(greet(socket), seat, greeted.clone()));
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Admits a caller, each of whom is greeted apart.
    async fn admit(
        self,
        greeting: impl Future<Output = Option<Greeted>> + Send,
        seat: Seat,
        greeted: Sender<(Connection, Connected)>,
    ) {
        let Some((stream, caller)) = greeting.await else { return };
        let requests = Requests::default();
        let connected = Connected { address: seat.address, caller, requests: requests.clone() };
        let stream = Patient::new(stream, self.patience, requests);
        // Fails if the daemon ends.
        let _ = greeted.send((Connection { stream, _seat: seat }, connected)).await;
    }
}

/// Counts a request as being answered until it is.
async fn count(request: Request, next: Next) -> Response {
    let connected = request.extensions().get::<ConnectInfo<Connected>>();
    let _answering = connected.map(|ConnectInfo(connected)| connected.requests.begin());
    next.run(request).await
}

/// Waits for an address that may be free in a moment. `section` of the configuration names it.
pub async fn bind(
    address: SocketAddr,
    what: &str,
    section: &str,
) -> Result<TcpListener, HostError> {
    let cannot = |error: io::Error| {
        let message = format!(
            "cannot serve {what} on {address}: {error}; correct `listen` in {section} of the \
             configuration"
        );
        HostError::new(ErrorKind::Conflict, message)
    };
    let bound = spawn_blocking(move || bind_soon(&address)).await;
    let listener = bound.unwrap_or_else(|error| Err(error.into())).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    TcpListener::from_std(listener).map_err(cannot)
}

/// Callers who were greeted.
struct Callers {
    ready: Receiver<(Connection, Connected)>,
}

impl Listener for Callers {
    type Io = Connection;
    type Addr = Connected;

    async fn accept(&mut self) -> (Connection, Connected) {
        match self.ready.recv().await {
            Some(connected) => connected,
            // Nobody lets in any more: the daemon ends.
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
    stream: Patient<Box<dyn Stream>>,
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
    use axum::routing::get;
    use std::io::{Read, Write};
    use std::net::TcpStream as Other;
    use std::sync::mpsc;
    use std::thread;

    /// A time longer than anything here takes.
    const LIMIT: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(200);

    /// A door with these seats, and little patience; where it is.
    fn served(runtime: &tokio::runtime::Runtime, seats: Seats) -> SocketAddr {
        let router = Router::new().route("/", get(async || "here"));
        let patience = Patience { idle: 2 * SHORT, head: SHORT };
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let nameless: Asked = Arc::new(|| Caller::Nameless);
            Door { seats, patience }.serve(listener, router, move |socket| {
                let nameless = nameless.clone();
                async move { Some((Box::new(socket) as Box<dyn Stream>, nameless)) }
            });
            address
        })
    }

    /// Asks until there is an answer: a busy machine may take longer than there is patience.
    fn await_answer(address: SocketAddr) {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            let mut other = Other::connect(address).unwrap();
            other.set_read_timeout(Some(LIMIT)).unwrap();
            let mut text = String::new();
            let _ = other.write_all(b"GET / HTTP/1.0\r\n\r\n");
            let _ = other.read_to_string(&mut text);
            if text.ends_with("here") {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "no seat is free");
        }
    }

    #[test]
    fn who_sends_a_request_byte_by_byte_loses_the_seat() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let address = served(&runtime, Seats::new(1, 1));
        let (ended, end) = mpsc::channel();
        thread::spawn(move || {
            let mut dripping = Other::connect(address).unwrap();
            let endless = b"GET / HTTP/1.1\r\nx: ".iter().chain(std::iter::repeat(&b'y'));
            for byte in endless {
                if dripping.write_all(&[*byte]).is_err() {
                    break;
                }
                thread::sleep(SHORT / 10);
            }
            let _ = ended.send(());
        });
        end.recv_timeout(LIMIT).expect("it keeps its seat");
        await_answer(address);
    }

    #[test]
    fn who_only_connects_loses_the_seat_as_well() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let address = served(&runtime, Seats::new(1, 1));
        let mut idle = Other::connect(address).unwrap();
        idle.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(matches!(idle.read(&mut [0]), Ok(0)), "it ends");
        await_answer(address);
    }
}
