//! The connections of one session: the primary opens them all.

use crate::handshake::{Identity, Offer, Purpose, Resumed, Welcome};
use crate::paths::PathMonitor;
use anyhow::Context;
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::slice;
use std::sync::Arc;
use std::time::Duration;
use understudy_link::channel::{Dial, Renewal, Resumption};
use understudy_link::link::{Link, SETUP_TIMEOUT};
use understudy_protocol::{Count, HostName, PathIndex, VmName};

/// A backup that lives resumes a session within this time.
const RESUME_TIMEOUT: Duration = Duration::from_secs(2);

/// Dials the backup, path by path.
#[derive(Clone)]
pub struct Dialler {
    /// Identity of this host.
    pub identity: Identity,
    /// The VM.
    pub vm: VmName,
    /// The backup's host name.
    pub peer: HostName,
    /// Names the session.
    pub session: String,
    /// The backup's addresses, one for each path.
    pub addresses: Vec<SocketAddr>,
}

impl Dialler {
    /// Offers the VM over the first path that the backup answers on.
    pub fn offer(&self, offer: Offer) -> anyhow::Result<(Link, PathIndex, Welcome)> {
        let purpose = |path| Purpose::Protect(Box::new(Offer { path, ..offer.clone() }));
        self.identity.ask(&self.vm, (&self.peer, &self.addresses), purpose, SETUP_TIMEOUT)
    }

    /// The heartbeats of a path.
    pub fn heartbeat(&self, path: PathIndex) -> anyhow::Result<Link> {
        let purpose = Purpose::Heartbeat { session: self.session.clone(), path };
        let (link, _): (_, Welcome) = self.ask(path, purpose, SETUP_TIMEOUT)?;
        Ok(link)
    }

    /// Copies of what the guest receives.
    pub fn inbound(&self, path: PathIndex) -> anyhow::Result<Link> {
        let purpose = Purpose::Inbound { session: self.session.clone() };
        let (link, _): (_, Welcome) = self.ask(path, purpose, SETUP_TIMEOUT)?;
        Ok(link)
    }

    /// The session's data, over another path; `received` messages arrived here.
    pub fn resume(&self, path: PathIndex, received: Count) -> anyhow::Result<Resumption> {
        let purpose = Purpose::Resume { session: self.session.clone(), path, received };
        let (link, resumed): (_, Resumed) = self.ask(path, purpose, RESUME_TIMEOUT)?;
        link.set_read_timeout(None)?;
        Ok((link, resumed.received))
    }

    /// The way in which the session's data gets from one path to the next.
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

    fn ask<T: DeserializeOwned>(
        &self,
        path: PathIndex,
        purpose: Purpose,
        patience: Duration,
    ) -> anyhow::Result<(Link, T)> {
        let address = self.addresses.get(usize::from(path.0)).context("there is no such path")?;
        let to = (&self.peer, slice::from_ref(address));
        let (link, _, answer) = self.identity.ask(&self.vm, to, |_| purpose.clone(), patience)?;
        Ok((link, answer))
    }
}
