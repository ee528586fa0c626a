//! Whoever dials: a peer may have several addresses, of which some are dead.

use super::{Hello, Purpose};
use anyhow::Context;
use serde::de::DeserializeOwned;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;
use understudy_link::link::{Link, read_json};
use understudy_link::tls::Tls;
use understudy_protocol::wire::{Kind, WIRE_VERSION};
use understudy_protocol::{HostName, PathIndex, VmName};
use understudy_threads::spawn;

/// Time that a connection to a peer may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Time that an address has before the next one is tried beside it.
const STAGGER: Duration = Duration::from_millis(100);

/// Identity that a host shows to its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Its name.
    pub name: HostName,
    /// Its certificates, if it has any.
    pub tls: Option<Arc<Tls>>,
    /// Whether it offers to go on with keepers of its peers.
    pub keepers: bool,
}

impl Identity {
    /// Dials the first of a peer's addresses that answers; returns which one it is. Only there it
    /// says hello: what is asked for is asked for once.
    pub fn dial_first(
        &self,
        peer: &HostName,
        addresses: &[SocketAddr],
        purpose: impl Fn(PathIndex) -> Purpose,
    ) -> anyhow::Result<(Link, PathIndex)> {
        let (dialler, host) = (self.clone(), peer.clone());
        let reach = move |address| dialler.reach(connect(address)?, &host, address);
        let (link, path) = first_reached(addresses, STAGGER, reach)?;
        link.send_json(Kind::Hello, &self.hello(purpose(path)))?;
        Ok((link, path))
    }

    /// Dials the first of a peer's addresses that answers, about a VM; returns the answer, which
    /// the VM's keeper gives if it has one there.
    pub fn ask<T: DeserializeOwned>(
        &self,
        vm: &VmName,
        (peer, addresses): (&HostName, &[SocketAddr]),
        purpose: impl Fn(PathIndex) -> Purpose,
        patience: Duration,
    ) -> anyhow::Result<(Link, PathIndex, T)> {
        let hello = |path| {
            let keeper_of = self.keepers.then(|| vm.clone());
            Hello { keeper_of, ..self.hello(purpose(path)) }
        };
        // A path may carry short frames only: what counts is that an answer comes.
        let ((link, answer), path) = first_that_answers(addresses, |path, address| {
            let link = self.say(connect(address)?, peer, address, &hello(path))?;
            link.set_read_timeout(Some(patience))?;
            let answer = link.receive()?;
            Ok((link, answer))
        })?;
        if answer.header.kind != Kind::BeginAnew || !self.keepers {
            return Ok((link, path, read_json(&answer, Kind::Welcome)?));
        }
        let link = link
            .begin_anew(peer, self.tls.as_deref())
            .with_context(|| format!("the keeper of {vm} on host {peer}"))?;
        link.send_json(Kind::Hello, &hello(path))?;
        link.set_read_timeout(Some(patience))?;
        let answer = link.expect_json(Kind::Welcome)?;
        Ok((link, path, answer))
    }

    /// Dials a peer and says hello.
    pub fn dial(
        &self,
        peer: &HostName,
        address: SocketAddr,
        purpose: Purpose,
    ) -> anyhow::Result<Link> {
        self.greet(connect(address)?, peer, address, purpose)
    }

    /// Says hello on a connection to a peer.
    pub fn greet(
        &self,
        socket: TcpStream,
        peer: &HostName,
        address: SocketAddr,
        purpose: Purpose,
    ) -> anyhow::Result<Link> {
        self.say(socket, peer, address, &self.hello(purpose))
    }

    fn say(
        &self,
        socket: TcpStream,
        peer: &HostName,
        address: SocketAddr,
        hello: &Hello,
    ) -> anyhow::Result<Link> {
        let link = self.reach(socket, peer, address)?;
        link.send_json(Kind::Hello, hello)?;
        Ok(link)
    }

    fn reach(
        &self,
        socket: TcpStream,
        peer: &HostName,
        address: SocketAddr,
    ) -> anyhow::Result<Link> {
        Link::dialled(socket, peer, self.tls.as_deref())
            .with_context(|| format!("host {peer} at {address}"))
    }

    fn hello(&self, purpose: Purpose) -> Hello {
        Hello {
            wire_version: purpose.first_version(),
            wire_highest: Some(WIRE_VERSION),
            product_version: env!("CARGO_PKG_VERSION").to_owned(),
            host: self.name.clone(),
            purpose,
            keeper_of: None,
        }
    }
}

/// Dials a peer's addresses in turn, until one answers; returns which one it is.
fn first_that_answers<T>(
    addresses: &[SocketAddr],
    dial: impl Fn(PathIndex, SocketAddr) -> anyhow::Result<T>,
) -> anyhow::Result<(T, PathIndex)> {
    let mut first_error = None;
    for (path, address) in (0..).map(PathIndex).zip(addresses) {
        match dial(path, *address) {
            Ok(dialled) => return Ok((dialled, path)),
            Err(error) => {
                debug!("{error:#}");
                first_error.get_or_insert(error);
            }
        }
    }
    Err(first_error.context("the peer has no address")?)
}

/// Reaches the first of a peer's addresses that answers; returns which one it is. Each is given the time
/// `stagger`, then the next one is tried beside it: a dead path takes no time from one that is not.
fn first_reached<T: Send + 'static>(
    addresses: &[SocketAddr],
    stagger: Duration,
    reach: impl Fn(SocketAddr) -> anyhow::Result<T> + Clone + Send + 'static,
) -> anyhow::Result<(T, PathIndex)> {
    let (tell, told) = crossbeam_channel::unbounded();
    let mut tell = Some(tell);
    let mut untried = (0..).map(PathIndex).zip(addresses.iter().copied());
    let mut first_error = None;
    loop {
        let heard = match (untried.next(), &tell) {
            (Some((path, address)), Some(tell)) => {
                let (tell, reach) = (tell.clone(), reach.clone());
                // Whoever comes too late is not listened to any more, and hangs up.
                let dial = move || drop(tell.send((path, reach(address))));
                spawn(format!("dial-{address}"), dial).context("cannot start a thread")?;
                told.recv_timeout(stagger).ok()
            }
            _ => {
                tell = None;
                let Ok(heard) = told.recv() else { break };
                Some(heard)
            }
        };
        match heard {
            Some((path, Ok(reached))) => return Ok((reached, path)),
            Some((_, Err(error))) => {
                debug!("{error:#}");
                first_error.get_or_insert(error);
            }
            None => {}
        }
    }
    Err(first_error.context("the peer has no address")?)
}

/// Connects to a peer's address.
pub fn connect(address: SocketAddr) -> anyhow::Result<TcpStream> {
    TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
        .with_context(|| format!("cannot connect to {address}: is its daemon running?"))
}

#[cfg(test)]
#[path = "dial_tests.rs"]
mod tests;
