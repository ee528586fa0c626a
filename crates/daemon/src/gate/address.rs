//! The addresses at which this host listens, also those that it does not have yet: a cable without a carrier has none,
//! and a host that waits for its peer's power would start no VM.

use crate::config::HostConfig;
use crate::host::ADDRESS_PATIENCE;
use nix::errno::Errno;
use nix::sys::socket::sockopt::{IpFreebind, ReuseAddr};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
};
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_report::error::{ErrorKind, HostError};

/// Between two tries to have an address.
const LOOK: Duration = Duration::from_millis(50);

/// Listens at an address, whether or not this host has it yet. Waits for one that is free in a moment: a daemon that has
/// just ended still has it.
pub fn bind_soon(address: &SocketAddr) -> io::Result<TcpListener> {
    let deadline = Instant::now() + ADDRESS_PATIENCE;
    loop {
        match bind_ahead(address) {
            Err(Errno::EADDRINUSE) if Instant::now() < deadline => thread::sleep(LOOK),
            bound => return Ok(bound?),
        }
    }
}

fn bind_ahead(address: &SocketAddr) -> Result<TcpListener, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::Inet,
        SocketAddr::V6(_) => AddressFamily::Inet6,
    };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, ReuseAddr, &true)?;
    // Of both families.
    setsockopt(&socket, IpFreebind, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(*address))?;
    // A flood must not fill the queue before it is looked at.
    listen(&socket, Backlog::MAXCONN)?;
    Ok(TcpListener::from(socket))
}

/// Listens for peers at an address.
pub(crate) fn bind_for_peers(address: &SocketAddr) -> Result<TcpListener, HostError> {
    let listener = bind_soon(address).map_err(|error| {
        let message = format!("cannot listen on {address}: {error}; is another daemon running?");
        HostError::new(ErrorKind::Conflict, message)
    })?;
    if is_missing(address) {
        warn!("{}", words("listen", address));
    }
    Ok(listener)
}

/// What is to be said of addresses of the configuration that this host does not have now.
pub(crate) fn problems(config: &HostConfig) -> Vec<String> {
    let of = |field: &'static str| move |address: &SocketAddr| (field, *address);
    let peers = config.listen.iter().map(of("listen"));
    let metrics = config.metrics.iter().map(of("[metrics] listen"));
    let api = config.api.iter().flat_map(|api| &api.listen).map(of("[api] listen"));
    let missing = peers.chain(metrics).chain(api).filter(|(_, address)| is_missing(address));
    missing.map(|(field, address)| words(field, &address)).collect()
}

fn words(field: &str, address: &SocketAddr) -> String {
    format!(
        "{field}: this host does not have the address {}: nobody reaches it there",
        address.ip()
    )
}

fn is_missing(address: &SocketAddr) -> bool {
    let mut any_port = *address;
    any_port.set_port(0);
    UdpSocket::bind(any_port).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CloneFlags, unshare};
    use std::net::TcpStream;
    use std::path::Path;
    use std::process::Command;

    fn ip(line: &str) {
        let status = Command::new("ip").args(line.split(' ')).status().unwrap();
        assert!(status.success(), "ip {line}");
    }

    /// The daemon ended, and systemd gave it up: with one host of a pair back, and no carrier, no VM came up.
    #[test]
    fn an_address_may_come_when_it_is_listened_at() {
        let test = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
            ip("link set lo up");
            for (text, add) in [
                ("10.9.9.1:7700", "address add 10.9.9.1/32 dev lo"),
                ("[fd00:9::1]:7700", "address add fd00:9::1/128 dev lo nodad"),
            ] {
                let address = text.parse().unwrap();
                let listener = bind_for_peers(&address).unwrap();
                assert!(is_missing(&address) && TcpStream::connect(address).is_err());
                ip(add);
                assert!(!is_missing(&address));
                // The way to an address of version 6 comes a moment after it.
                let deadline = Instant::now() + Duration::from_secs(10);
                let connected = || TcpStream::connect(address);
                while connected().is_err() && Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(5));
                }
                let _connection = connected().unwrap();
                listener.accept().unwrap();
                assert_eq!(bind_ahead(&address).unwrap_err(), Errno::EADDRINUSE);
            }
        };
        // Of its own, whose namespace ends with it.
        thread::spawn(test).join().unwrap();
    }

    #[test]
    fn each_address_that_is_missing_is_named() {
        let text = "name = 'a'\nlisten = ['127.0.0.1:7700', '198.51.100.1:7700']\ninsecure = true\n\
                    [metrics]\nlisten = '198.51.100.2:9177'\n";
        let config = HostConfig::from_toml(text, Path::new("/host.toml")).unwrap();
        let said = problems(&config);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].starts_with("listen: this host does not have the address 198.51.100.1"));
        assert!(said[1].starts_with("[metrics] listen: "), "{said:?}");
    }
}
