//! The connections of one session: the primary opens them all.

use crate::handshake::{Identity, Offer, Purpose, Resumed, Welcome};
use crate::paths::PathMonitor;
use anyhow::Context;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use understudy_link::channel::{Dial, Renewal, Resumption};
use understudy_link::link::Link;
use understudy_protocol::HostName;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Count, PathIndex};

/// A backup that lives resumes a session within this time.
const RESUME_TIMEOUT: Duration = Duration::from_secs(2);

/// Dials the backup, path by path.
#[derive(Clone)]
pub struct Dialler {
    /// Identity of this host.
    pub identity: Identity,
    /// The backup's host name.
    pub peer: HostName,
    /// Names the session.
    pub session: String,
    /// The backup's addresses, one for each path.
    pub addresses: Vec<SocketAddr>,
}

impl Dialler {
    /// Offers the VM over the first path that the backup answers on.
    pub fn offer(&self, offer: Offer) -> anyhow::Result<(Link, PathIndex)> {
        self.identity.dial_first(&self.peer, &self.addresses, |path| {
            Purpose::Protect(Box::new(Offer { path, ..offer.clone() }))
        })
    }

    /// The heartbeats of a path.
    pub fn heartbeat(&self, path: PathIndex) -> anyhow::Result<Link> {
        let link = self.dial(path, Purpose::Heartbeat { session: self.session.clone(), path })?;
        let _: Welcome = link.expect_json(Kind::Welcome)?;
        Ok(link)
    }

    /// Copies of what the guest receives.
    pub fn inbound(&self, path: PathIndex) -> anyhow::Result<Link> {
        let link = self.dial(path, Purpose::Inbound { session: self.session.clone() })?;
        let _: Welcome = link.expect_json(Kind::Welcome)?;
        Ok(link)
    }

    /// The session's data, over another path; `received` messages arrived here.
    pub fn resume(&self, path: PathIndex, received: Count) -> anyhow::Result<Resumption> {
        let purpose = Purpose::Resume { session: self.session.clone(), path, received };
        let link = self.dial(path, purpose)?;
        link.set_read_timeout(Some(RESUME_TIMEOUT))?;
        let resumed: Resumed = link.expect_json(Kind::Welcome)?;
        link.set_read_timeout(None)?;
        Ok((link, resumed.received))
    }

    /// How the session's data gets from one path to the next.
    pub fn renewal(&self, paths: &Arc<PathMonitor>) -> Renewal {
        if !paths.are_several() {
            return Renewal::Never;
        }
        let (dialler, paths) = (self.clone(), paths.clone());
        let dial: Dial = Box::new(move |received| {
            let mut result = Ok(None);
            for path in paths.candidates() {
                match dialler.resume(path, received) {
                    Ok(resumption) => {
                        paths.use_path(path);
                        return Ok(Some(resumption));
                    }
                    Err(error) => result = Err(error),
                }
            }
            result
        });
        Renewal::Dial(dial)
    }

    fn dial(&self, path: PathIndex, purpose: Purpose) -> anyhow::Result<Link> {
        let address = self.addresses.get(usize::from(path.0)).context("there is no such path")?;
        self.identity.dial(&self.peer, *address, purpose)
    }
}
