//! The inviting host: waits for the one host that has the token, certifies its key and adds it to
//! this host's [peers].

use super::host_file::{self, ArbiterSettings};
use super::message::{Grant, LIMIT, Reply, Request, receive_request, send_reply};
use super::token::{Fingerprint, Secret, Token};
use crate::config::HostConfig;
use crate::deadline::Bounded;
use anyhow::{Context, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crossbeam_channel::{Receiver, Sender};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde::Serialize;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_link::pki::{self, PublicKey};
use understudy_link::tls::TlsFiles;
use understudy_protocol::HostName;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// The port beside the daemon's, on which invitations wait.
const PORT_DISTANCE: u16 = 1;
/// Conversations at once: strangers can hold up no more, and none for long.
const MOST_CONVERSATIONS: usize = 16;
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// An invitation that waits for its host.
pub struct Invitation {
    token: Token,
    until: Instant,
    lifetime: Duration,
    listener: TcpListener,
    inviter: Arc<Inviter>,
}

/// Host that has joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Joined {
    /// The host.
    pub name: HostName,
    /// Addresses of that host.
    pub addresses: Vec<SocketAddr>,
    /// Hosts whose [peers] lack its line. With etcd they find each other while they live; of one that is down they know
    /// by that line alone.
    pub unknown_to: Vec<HostName>,
    /// Line for their configurations.
    pub line: String,
}

/// A host that asks to be let in, of whoever waits: that one alone lets anybody in, once.
struct Asked {
    request: Request,
    /// The answer goes here; whoever drops it lets nobody in any more.
    answer: Sender<Result<Grant, HostError>>,
    /// Closed once the host was answered.
    answered: Receiver<()>,
}

struct Inviter {
    secret: Secret,
    file: PathBuf,
    pki: PathBuf,
    tls: Arc<ServerConfig>,
    conversations: AtomicUsize,
}

impl Invitation {
    /// Begins to wait, with the configuration and the authority below `directory`. `address`: by
    /// default this host's own, one port further.
    pub fn open(
        directory: &Path,
        address: Option<SocketAddr>,
        lifetime: Duration,
    ) -> Result<Invitation, HostError> {
        let file = directory.join(super::HOST_FILE);
        let config = HostConfig::load(&file).map_err(|error| match error.kind {
            ErrorKind::NotFound => {
                let advice =
                    format!("{}; set this host up first: `understudy init`", error.message);
                HostError::new(ErrorKind::NotFound, advice)
            }
            _ => error,
        })?;
        let pki = directory.join(super::PKI);
        let Some(tls) = &config.tls else {
            let message = format!("{} has no [tls]: make certificates first", file.display());
            return Err(HostError::new(ErrorKind::Invalid, message));
        };
        if !pki.join(pki::CA_KEY).exists() {
            let message = format!(
                "{} is not on this host: invite on the host where `understudy init` ran, or bring \
                 it back from where it is kept",
                pki.join(pki::CA_KEY).display()
            );
            return Err(HostError::new(ErrorKind::NotFound, message));
        }
        let address = address.unwrap_or_else(|| beside(config.listen[0]));
        let (server, authority) = show(tls, &pki).map_err(|error| {
            HostError::new(ErrorKind::Invalid, format!("[tls] of {}: {error:#}", file.display()))
        })?;
        let listener = listen(address)?;
        let secret = Secret::fresh()
            .map_err(|error| HostError::new(ErrorKind::Internal, format!("no secret: {error}")))?;
        let conversations = AtomicUsize::new(0);
        let inviter = Inviter { secret, file, pki, tls: server, conversations };
        let token = Token { address, authority, secret };
        let until = Instant::now() + lifetime;
        Ok(Invitation { token, until, lifetime, listener, inviter: Arc::new(inviter) })
    }

    /// Token that the host that is to join must be told.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Waits until a host has joined, or the invitation has expired.
    pub fn wait(self) -> Result<Joined, HostError> {
        let (asking, asked) = crossbeam_channel::unbounded();
        while Instant::now() < self.until {
            self.look(&asking);
            if let Some((joined, answered)) = self.inviter.answer(&asked) {
                // Nobody else is let in, and hears so meanwhile.
                drop(asked);
                // Whoever waits here may end the process.
                let _ = answered.recv();
                return Ok(joined);
            }
        }
        let message = format!(
            "nobody has joined within {} minutes, and the token is of no more use: `understudy invite` makes another",
            self.lifetime.as_secs().div_ceil(60)
        );
        Err(HostError::new(ErrorKind::Unreachable, message))
    }

    /// Has whoever connects meanwhile ask.
    fn look(&self, asking: &Sender<Asked>) {
        let mut ready = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        let interval = PollTimeout::try_from(LOOK_INTERVAL).unwrap_or(PollTimeout::ZERO);
        // An error (a signal) is looked after by trying to accept.
        let _ = poll(&mut ready, interval);
        if let Ok((stream, from)) = self.listener.accept() {
            let (inviter, asking) = (self.inviter.clone(), asking.clone());
            let talk = move || inviter.talk(stream, from, &asking);
            if let Err(error) = thread::Builder::new().name("invited".to_owned()).spawn(talk) {
                warn!("a connection has to wait: {error}");
            }
        }
    }
}

impl Inviter {
    fn talk(&self, stream: TcpStream, from: SocketAddr, asking: &Sender<Asked>) {
        if self.conversations.fetch_add(1, Ordering::AcqRel) < MOST_CONVERSATIONS
            && let Err(error) = self.converse(stream, asking)
        {
            warn!("{from} has not joined: {error:#}");
        }
        self.conversations.fetch_sub(1, Ordering::AcqRel);
    }

    fn converse(&self, stream: TcpStream, asking: &Sender<Asked>) -> anyhow::Result<()> {
        stream.set_nonblocking(false)?;
        let connection = ServerConnection::new(self.tls.clone())?;
        let mut stream = StreamOwned::new(connection, Bounded::new(stream, LIMIT));
        let (request, asked) = receive_request(&mut stream, &self.secret)?;
        let (_answering, answered) = crossbeam_channel::bounded::<()>(0);
        let answer = match request {
            Ok(request) => ask(asking, request, answered).map_err(|error| error.to_string()),
            Err(wrong) => Err(wrong.to_string()),
        };
        let refused = answer.as_ref().err().cloned();
        let reply = match answer {
            Ok(grant) => Reply::Granted(Box::new(grant)),
            Err(reason) => Reply::Refused(reason),
        };
        let sent = send_reply(&mut stream, &self.secret, &asked, &reply);
        stream.conn.send_close_notify();
        let _ = stream.conn.complete_io(&mut stream.sock);
        match refused {
            // Who is certified is a peer, whether or not it has heard of it.
            None => sent.context("it is a peer now, and may not know: invite it again if so"),
            Some(reason) => Err(anyhow::anyhow!(reason)),
        }
    }

    /// Answers the next host that asks, if one does. One that was let in is returned, and what is closed once it was
    /// answered.
    fn answer(&self, asked: &Receiver<Asked>) -> Option<(Joined, Receiver<()>)> {
        let Asked { request, answer, answered } = asked.try_recv().ok()?;
        let (admitted, answer_with) = match self.admit(&request) {
            Ok((grant, joined)) => (Some((joined, answered)), Ok(grant)),
            Err(error) => (None, Err(error)),
        };
        // It has room for one, and whoever asks may have gone: it is a peer, whether or not it has heard of it.
        let _ = answer.send(answer_with);
        admitted
    }

    /// Makes the host that asks a peer.
    fn admit(&self, request: &Request) -> Result<(Grant, Joined), HostError> {
        let refuse = |message: String| HostError::new(ErrorKind::Conflict, message);
        let text =
            fs::read_to_string(&self.file).map_err(|error| cannot("read", &self.file, &error))?;
        let config = HostConfig::from_toml(&text, &self.file)?;
        if request.name == config.name {
            let name = &config.name;
            return Err(refuse(format!(
                "{name} is the inviting host's own name: --name gives another"
            )));
        }
        let key = BASE64_STANDARD.decode(&request.public_key).ok().and_then(PublicKey::parse);
        let key = key.ok_or_else(|| refuse("its public key is none of P-256".to_owned()))?;
        let extended = host_file::with_peer(&text, &self.file, &request.name, &request.listen)?;
        self.check_name(&config, request)?;
        let certificate = pki::certify(&self.pki, &request.name, &key, pki::HOST_DAYS)?;
        let grant = self.grant(&config, request, certificate)?;
        host_file::replace(&self.file, &extended)?;
        Ok((grant, newcomer(&config, request)))
    }

    /// Refuses names that mean somebody else already: a token is for a host, not for what another may do.
    fn check_name(&self, config: &HostConfig, request: &Request) -> Result<(), HostError> {
        let name = &request.name;
        let refuse = |message: String| Err(HostError::new(ErrorKind::Conflict, message));
        if config.api.as_ref().is_some_and(|api| api.certificates.contains_key(name)) {
            return refuse(format!(
                "{name} is in [api.certificates] of {}, whose certificate may do more than a host's: --name gives \
                 another",
                config.name
            ));
        }
        // `with_peer` has seen to it that it is where it was: its files may be lost.
        let is_back = config.peers.contains_key(name);
        if !is_back && pki::is_certified(&self.pki, name)? {
            return refuse(format!(
                "there is a certificate for {name}, which is no peer of {}: --name gives another, or revoke that one \
                 first, `understudy pki revoke {name} --dir {}`",
                config.name,
                self.pki.display()
            ));
        }
        Ok(())
    }

    fn grant(
        &self,
        config: &HostConfig,
        request: &Request,
        certificate: String,
    ) -> Result<Grant, HostError> {
        let read = |file: &str| {
            let path = self.pki.join(file);
            fs::read_to_string(&path).map_err(|error| cannot("read", &path, &error))
        };
        let mut peers = config.peers.clone();
        peers.remove(&*request.name);
        peers.insert(config.name.clone(), config.listen.clone());
        Ok(Grant {
            host: config.name.clone(),
            certificate,
            ca: read(pki::CA_CERT)?,
            revoked: read(pki::REVOKED)?,
            arbiter: config.arbiter.as_ref().map(ArbiterSettings::from),
            peers,
        })
    }
}

/// Asks whoever waits, and hears whether a host is let in.
fn ask(
    asking: &Sender<Asked>,
    request: Request,
    answered: Receiver<()>,
) -> Result<Grant, HostError> {
    let (answer, hears) = crossbeam_channel::bounded(1);
    // An error closes the other end of the answer, too.
    let _ = asking.send(Asked { request, answer, answered });
    hears.recv().unwrap_or_else(|_| {
        let message =
            "the token was used by another host, or has expired: `understudy invite` makes one";
        Err(HostError::new(ErrorKind::Conflict, message.to_owned()))
    })
}

fn newcomer(config: &HostConfig, request: &Request) -> Joined {
    let others = config.peers.keys().filter(|name| **name != request.name);
    Joined {
        name: request.name.clone(),
        addresses: request.listen.clone(),
        unknown_to: others.cloned().collect(),
        line: host_file::peer_line(&request.name, &request.listen),
    }
}

/// Certificates that are shown to the host that joins: this host's certificate, and the
/// authority's, which it knows by its fingerprint.
fn show(tls: &TlsFiles, pki: &Path) -> anyhow::Result<(Arc<ServerConfig>, Fingerprint)> {
    let certificate = |path: &Path| {
        CertificateDer::from_pem_file(path)
            .with_context(|| format!("cannot read the certificate {}", path.display()))
    };
    let authority = certificate(&pki.join(pki::CA_CERT))?;
    ensure!(
        certificate(&tls.ca)? == authority,
        "{} is another authority than the one in {}",
        tls.ca.display(),
        pki.display()
    );
    let key = PrivateKeyDer::from_pem_file(&tls.key)
        .with_context(|| format!("cannot read {}", tls.key.display()))?;
    let fingerprint = Fingerprint::of(&authority);
    let chain = vec![certificate(&tls.cert)?, authority];
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    server.send_tls13_tickets = 0;
    Ok((Arc::new(server), fingerprint))
}

fn beside(listen: SocketAddr) -> SocketAddr {
    SocketAddr::new(listen.ip(), listen.port().checked_add(PORT_DISTANCE).unwrap_or(1024))
}

fn listen(address: SocketAddr) -> Result<TcpListener, HostError> {
    let listener = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|error| {
        let message = format!(
            "cannot wait for a host on {address}: {error}; does another invitation wait there? \
             --listen gives another address"
        );
        HostError::new(ErrorKind::Conflict, message)
    })
}

#[cfg(test)]
mod tests {
    use super::super::token::Secret;
    use super::*;
    use crate::setup::{ArbiterSettings, Plan, init};
    use understudy_protocol::literal;

    /// It was certified and a peer, and whoever had invited it was told that nobody had joined.
    #[test]
    fn who_was_let_in_is_known_before_it_is_answered() {
        let site = tempfile::tempdir().unwrap();
        let at = |name: &str| site.path().join(name);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let a = Plan { directory: at("a"), name: literal("a"), address };
        init(&a, ArbiterSettings::File { path: at("arbiter") }).unwrap();
        let (pki, file) = (a.directory.join("pki"), a.directory.join("host.toml"));
        let config = HostConfig::load(&file).unwrap();
        let inviter = Inviter {
            secret: Secret::fresh().unwrap(),
            tls: show(config.tls.as_ref().unwrap(), &pki).unwrap().0,
            conversations: AtomicUsize::new(0),
            file,
            pki,
        };
        let public_key = BASE64_STANDARD.encode(pki::HostKey::generate().unwrap().public());
        let request = || Request {
            name: literal("b"),
            listen: vec!["127.0.0.1:9".parse().unwrap()],
            public_key: public_key.clone(),
        };
        let (asking, asked) = crossbeam_channel::unbounded();
        thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&asking, request(), crossbeam_channel::bounded(0).1));
            let joined = loop {
                if let Some((joined, _)) = inviter.answer(&asked) {
                    break joined;
                }
                assert!(!asks.is_finished(), "it is answered before it is known");
                thread::yield_now();
            };
            assert_eq!(joined.name, "b");
            assert_eq!(asks.join().unwrap().unwrap().host, "a");
        });
        // Whoever waited has gone: nobody is let in, whether it asked before or after.
        let late = thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&asking, request(), crossbeam_channel::bounded(0).1));
            while asked.is_empty() {
                thread::yield_now();
            }
            drop(asked);
            asks.join().unwrap()
        });
        assert!(late.unwrap_err().message.contains("has expired"));
        let late = ask(&asking, request(), crossbeam_channel::bounded(0).1);
        assert!(late.unwrap_err().message.contains("has expired"));
    }
}
