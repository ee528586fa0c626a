//! Rules on who may ask for what over the link between hosts.
//!
//! A certificate says who a peer is. What that host may ask for is decided here, before anything
//! is done for it.
//!
//! | request | who may ask |
//! |---|---|
//! | `protect` | a known host; the arbiter must say that it owns the VM at the offer's generation, and every member of the offered group (`Host::check_arbiter`) |
//! | `heartbeat`, `inbound`, `resume` | the primary of that very session |
//! | `survey`, `may-follow`, `probe`, `clock`, `images`, `kept`, `may-restore` | a known host; what is kept goes back to a host only by the arbiter's record of this one, and only to whom it was the backup of |
//! | `group` (orders about snapshots and restores) | a known host, since the command may be given on any |
//! | `frames` | a known host; each frame must fit the members' generations besides |
//!
//! Known are the `[peers]` of this host's configuration and, with etcd, the registered members.
//! What a primary orders within a session (hand-over, mode switches, images to be kept) comes on
//! the session's own connection, hence from the host whose offer was taken.

use std::fmt;
use understudy_replication::handshake::Purpose;

/// Facts that this host knows of whoever asks.
#[derive(Clone, Copy, Debug)]
pub struct Asker<'a> {
    /// Its name, which its certificate bears.
    pub host: &'a str,
    /// Whether it is a configured peer or a registered member.
    pub known: bool,
}

/// Reason why a request is not answered; for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The host is neither a peer nor a member.
    Unknown(String),
    /// No session of that name has this host as its primary.
    NoSession(String, String),
}

/// Decides whether the asker's request may be carried out. `primary_of` names the primary of a
/// session that this host is the backup in.
pub fn authorize(
    asker: Asker<'_>,
    purpose: &Purpose,
    primary_of: impl FnOnce(&str) -> Option<String>,
) -> Result<(), Denied> {
    match purpose {
        Purpose::Heartbeat { session, .. }
        | Purpose::Inbound { session }
        | Purpose::Resume { session, .. } => match primary_of(session) {
            Some(primary) if primary == asker.host => Ok(()),
            _ => Err(Denied::NoSession(session.clone(), asker.host.to_owned())),
        },
        Purpose::Protect(_)
        | Purpose::Survey { .. }
        | Purpose::MayFollow { .. }
        | Purpose::Probe
        | Purpose::Clock
        | Purpose::Images { .. }
        | Purpose::Kept { .. }
        | Purpose::Group
        | Purpose::MayRestore(_)
        | Purpose::Frames { .. } => match asker.known {
            true => Ok(()),
            false => Err(Denied::Unknown(asker.host.to_owned())),
        },
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Denied::Unknown(host) => write!(
                f,
                "host {host} is not known here: add it to the [peers] of this host's \
                 configuration, or use one etcd arbiter for both"
            ),
            Denied::NoSession(session, host) => {
                write!(f, "there is no session {session:?} of host {host} here")
            }
        }
    }
}

impl std::error::Error for Denied {}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{PathIndex, literal};
    use understudy_qemu::{Accelerator, CpuNeeds};

    const STRANGER: Asker<'_> = Asker { host: "mallory", known: false };
    const PEER: Asker<'_> = Asker { host: "a", known: true };

    fn questions() -> Vec<Purpose> {
        let (vm, group) = (literal("db"), literal("shop"));
        let cpu = CpuNeeds { accelerator: Accelerator::Tcg, model: None, tsc: None, vendor: None };
        vec![
            Purpose::Survey { vm, memory: 1, cpu, cards: Vec::new(), offered: None },
            Purpose::MayFollow { build: None },
            Purpose::Clock,
            Purpose::Group,
            Purpose::Frames { cluster: group },
        ]
    }

    fn of_session() -> Vec<Purpose> {
        let session = || "s".to_owned();
        vec![
            Purpose::Heartbeat { session: session(), path: PathIndex(0) },
            Purpose::Inbound { session: session() },
            Purpose::Resume { session: session(), path: PathIndex(0), received: 0 },
        ]
    }

    /// Regression: every certificate of the authority was answered.
    #[test]
    fn only_known_hosts_are_answered() {
        for purpose in questions() {
            assert_eq!(authorize(PEER, &purpose, |_| None), Ok(()), "{purpose:?}");
            let denied = authorize(STRANGER, &purpose, |_| None).unwrap_err();
            assert_eq!(denied, Denied::Unknown("mallory".into()), "{purpose:?}");
            assert!(denied.to_string().contains("[peers]"), "{denied}");
        }
    }

    #[test]
    fn a_session_is_its_primarys_alone() {
        for purpose in of_session() {
            let decide = |asker, primary: Option<&str>| {
                authorize(asker, &purpose, |session| {
                    assert_eq!(session, "s");
                    primary.map(str::to_owned)
                })
            };
            assert_eq!(decide(PEER, Some("a")), Ok(()), "{purpose:?}");
            // A peer that is known is not the primary for that, nor is a session made up.
            assert!(decide(PEER, Some("c")).is_err(), "{purpose:?}");
            assert!(decide(PEER, None).is_err(), "{purpose:?}");
            // Members may vanish from etcd while a session lives.
            let forgotten = Asker { host: "a", known: false };
            assert_eq!(decide(forgotten, Some("a")), Ok(()), "{purpose:?}");
        }
    }
}
