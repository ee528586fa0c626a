//! The grammar of the commands that set hosts up: `init`, `invite`, `join`.

use clap::Args;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use understudy_daemon::setup::{ArbiterSettings, DIRECTORY, Token};
use understudy_protocol::HostName;

pub(super) const INIT_HELP: &str = "\
Makes an authority and this host's certificate below DIR/pki, and DIR/host.toml. Then
it prints the one command that lets the other host join, and waits for that. Asks on
a terminal for what was not given, and takes what it finds of the machine otherwise.
Nothing that exists is overwritten.

DIR/pki/ca.key is needed to invite further hosts, by no daemon: keep it elsewhere if
this host's administrators are not to be any host.

Example:
  understudy init --arbiter /mnt/shared/arbiter --start";

pub(super) const JOIN_HELP: &str = "\
The token comes from `understudy init` or `understudy invite` on a host that is set
up, is good for one host and some minutes, and is a secret for so long. This host's
own key is made here and stays here.

Example:
  understudy join UJ1-... --start";

/// What a host is to be.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// This host's name, as its peers will know it [default: the machine's].
    #[arg(long, value_name = "NAME")]
    pub name: Option<HostName>,
    /// Where its peers reach it: IP, or IP:PORT [default: where its route to others begins; 7700].
    #[arg(long, value_name = "ADDRESS")]
    pub address: Option<PeerAddress>,
    /// Where its configuration is to be.
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    pub dir: PathBuf,
    /// Enable and start the daemon, as the package's systemd service.
    #[arg(long)]
    pub start: bool,
}

/// `init`
#[derive(Debug, Args)]
pub struct InitArgs {
    /// What this host is to be.
    #[command(flatten)]
    pub host: HostArgs,
    /// The arbiter: a directory that all hosts reach, or etcd's endpoints (http://…,http://…).
    #[arg(long, value_name = "PATH|URLS")]
    pub arbiter: Option<ArbiterSettings>,
    /// Invite no other host now.
    #[arg(long)]
    pub alone: bool,
    /// How the invitation is held.
    #[command(flatten)]
    pub invitation: InvitationArgs,
}

/// `invite`
#[derive(Debug, Args)]
pub struct InviteArgs {
    /// Where this host's configuration is, and its authority.
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    pub dir: PathBuf,
    /// How the invitation is held.
    #[command(flatten)]
    pub invitation: InvitationArgs,
}

/// How an invitation is held.
#[derive(Debug, Args)]
pub struct InvitationArgs {
    /// Minutes until the token expires.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub minutes: u64,
    /// Where to wait for the other host [default: this host's address, one port further].
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<SocketAddr>,
}

impl InvitationArgs {
    /// The time for which the token is good.
    pub fn lifetime(&self) -> Duration {
        Duration::from_secs(self.minutes * 60)
    }
}

/// `join`
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// What the other host has printed.
    pub token: Token,
    /// What this host is to be.
    #[command(flatten)]
    pub host: HostArgs,
}

/// The port that peers use unless told otherwise.
const PEER_PORT: u16 = 7700;

/// The address where peers reach a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

impl From<IpAddr> for PeerAddress {
    fn from(address: IpAddr) -> PeerAddress {
        PeerAddress(SocketAddr::new(address, PEER_PORT))
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for PeerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<PeerAddress, String> {
        let without_port = text.parse::<IpAddr>().map(PeerAddress::from);
        let parsed = without_port.or_else(|_| text.parse().map(PeerAddress));
        parsed.ok().filter(|address| address.0.port() != 0).ok_or_else(|| {
            format!("{text:?} is no address: write for example 10.0.0.1 or 10.0.0.1:{PEER_PORT}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_do_without_its_port() {
        let parse = |text: &str| text.parse::<PeerAddress>();
        assert_eq!(parse("10.0.0.1").unwrap().to_string(), "10.0.0.1:7700");
        assert_eq!(parse("fe80::1").unwrap().to_string(), "[fe80::1]:7700");
        assert_eq!(parse("10.0.0.1:9").unwrap().to_string(), "10.0.0.1:9");
        for wrong in ["host-a", "10.0.0.1:0", ""] {
            assert!(parse(wrong).unwrap_err().contains("10.0.0.1"), "{wrong}");
        }
    }
}
