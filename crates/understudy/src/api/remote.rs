//! The API over the network: TLS always, and a caller who has a token or a certificate.

use super::Api;
use super::access::{Guard, Tokens};
use crate::door::patient::Patience;
use crate::door::{self, Asked, Caller, Door, Greeted, Seats};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::server::TlsStream;
use understudy_daemon::ApiTls;
use understudy_daemon::config::ApiConfig;
use understudy_report::HostError;

/// Time for a caller to prove that it has the key to its certificate.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The addresses of the API over the network, where nobody is let in yet.
pub struct Addresses {
    config: ApiConfig,
    listeners: Vec<TcpListener>,
}

impl Addresses {
    /// Takes those of the configuration; an error if one cannot be had.
    pub async fn take(config: ApiConfig) -> Result<Addresses, HostError> {
        for problem in config.problems_of_tokens() {
            tracing::warn!("{problem}");
        }
        let mut listeners = Vec::new();
        for address in &config.listen {
            listeners.push(door::bind(*address, "the API", "[api]").await?);
        }
        Ok(Addresses { config, listeners })
    }

    /// Serves the API there, until the daemon ends.
    pub fn serve(self, api: &Api, tls: ApiTls) {
        let tokens = Tokens::new(self.config.clone(), api.host.events());
        let router = api.router(&Guard::Remote(Arc::new(tokens)));
        let door = Door { seats: Seats::default(), patience: Patience::default() };
        for address in &self.config.listen {
            tracing::info!("the API and the dashboard are on https://{address}/");
        }
        let porter = Arc::new(Porter { config: self.config, tls });
        for listener in self.listeners {
            let (porter, router) = (porter.clone(), router.clone());
            door.clone().serve(listener, router, move |socket| porter.clone().greet(socket));
        }
    }
}

/// Shakes hands with callers, and knows what their certificates are.
struct Porter {
    config: ApiConfig,
    tls: ApiTls,
}

impl Porter {
    async fn greet(self: Arc<Self>, socket: TcpStream) -> Option<Greeted> {
        let handshake = TlsAcceptor::from(self.tls.server()).accept(socket);
        // Whoever speaks no TLS, or not ours, gets no answer.
        let stream = timeout(HANDSHAKE_TIMEOUT, handshake).await.ok()?.ok()?;
        let caller = self.asked(&stream);
        Some((Box::new(stream), caller))
    }

    /// The question to be asked of a connection's certificate.
    fn asked(self: Arc<Self>, stream: &TlsStream<TcpStream>) -> Asked {
        let (_, tls) = stream.get_ref();
        let shown = tls.peer_certificates().map(<[_]>::to_vec);
        Arc::new(move || shown.as_ref().map_or(Caller::Nameless, |shown| self.caller(shown)))
    }

    fn caller(&self, shown: &[CertificateDer<'_>]) -> Caller {
        let known = &self.config.certificates;
        match self.tls.whose(shown, known.keys()) {
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
