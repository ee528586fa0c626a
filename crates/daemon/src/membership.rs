//! Membership: with an `etcd` arbiter, every host that lives is known to all.
//!
//! `PREFIX/hosts/NAME` says where the host is and how busy; it hangs on a lease,
//! so that a host that is dead, or out of etcd's reach, vanishes by itself.

use crate::host::Host;
use crate::survey::load_percent;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{debug, info, warn};
use understudy_arbiter::etcd::{Etcd, Lease};
use understudy_protocol::HostName;
use understudy_threads::Common;

/// Time after which a host speaks up again.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time for which a silent host stays a member, in seconds.
const LEASE_SECONDS: u64 = 7;
const FOLDER: &str = "/hosts/";

/// Report of a host on itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Addresses at which its peers reach it.
    pub addresses: Vec<SocketAddr>,
    /// Bytes of memory that it has to spare.
    pub free_memory: u64,
    /// Runnable threads for each 100 processors.
    pub load_percent: u32,
    /// VMs that it runs or backs up.
    pub vms: u32,
    /// Its product version.
    pub version: String,
}

/// The other hosts, as etcd last told; empty without etcd.
#[derive(Debug, Default)]
pub struct Members {
    others: Common<BTreeMap<HostName, Member>>,
    lease: Common<Option<Lease>>,
}

impl Members {
    /// The other members.
    pub fn others(&self) -> BTreeMap<HostName, Member> {
        self.others.lock().clone()
    }

    /// Leaves, as far as etcd can be reached.
    pub fn leave(&self, etcd: &Etcd) {
        let Some(lease) = self.lease.lock().take() else { return };
        if let Err(error) = etcd.revoke(lease) {
            info!("still a member for {LEASE_SECONDS} s: {error:#}");
        }
    }

    /// Says that this host lives, and reads who else does.
    fn renew(&self, etcd: &Etcd, name: &HostName, own: &Member) -> anyhow::Result<()> {
        let mut lease = self.lease.lock();
        let held = match *lease {
            Some(held) if etcd.keep_alive(held)? => held,
            _ => etcd.lease(LEASE_SECONDS)?,
        };
        *lease = Some(held);
        drop(lease);
        etcd.put(&format!("{FOLDER}{name}"), own, held)?;
        self.look(etcd, name)
    }

    /// Reads which other hosts live.
    fn look(&self, etcd: &Etcd, name: &HostName) -> anyhow::Result<()> {
        let others = members(etcd, name)?;
        *self.others.lock() = others;
        Ok(())
    }
}

/// All but this host, as etcd says.
pub(crate) fn members(etcd: &Etcd, name: &HostName) -> anyhow::Result<BTreeMap<HostName, Member>> {
    let mut others = BTreeMap::new();
    for entry in etcd.list::<Member>(FOLDER)? {
        // What is no host's name is no host's entry.
        let Ok(host) = entry.key.trim_start_matches(FOLDER).parse::<HostName>() else {
            continue;
        };
        if host != *name {
            others.insert(host, entry.value);
        }
    }
    Ok(others)
}

impl Host {
    /// Looks for members that have joined since the last look, if there are any to be found.
    pub(crate) fn look_for_members(&self) -> anyhow::Result<()> {
        let etcd = self.arbiter.as_ref().and_then(|arbiter| arbiter.etcd());
        etcd.map_or(Ok(()), |etcd| self.members.look(etcd, &self.config.name))
    }
}

/// Whether etcd says that this host is a member.
pub fn is_member(etcd: &Etcd, name: &str) -> bool {
    matches!(etcd.get::<Member>(&format!("{FOLDER}{name}")), Ok(Some(_)))
}

/// Joins the members, if the arbiter is etcd, for as long as the host lives.
pub fn join(host: &Arc<Host>) {
    let Some(etcd) = host.arbiter.as_ref().and_then(|arbiter| arbiter.etcd()).cloned() else {
        return;
    };
    if host.config.listen.iter().any(|address| address.ip().is_unspecified()) {
        warn!("not a member: `listen` names no address that other hosts could use");
        return;
    }
    let host = Arc::downgrade(host);
    let spawned =
        thread::Builder::new().name("membership".to_owned()).spawn(move || run(&host, &etcd));
    if let Err(error) = spawned {
        warn!("not a member: cannot start a thread: {error}");
    }
}

/// Reads who the members are, for a keeper: its daemon is the one that speaks for the host.
pub fn look_on(host: &Arc<Host>) {
    if host.arbiter.as_ref().and_then(|arbiter| arbiter.etcd()).is_none() {
        return;
    }
    let host = Arc::downgrade(host);
    let look = move || {
        while let Some(host) = host.upgrade() {
            if let Err(error) = host.look_for_members() {
                debug!("the members stay as they were: {error:#}");
            }
            drop(host);
            thread::sleep(INTERVAL);
        }
    };
    if let Err(error) = thread::Builder::new().name("membership".to_owned()).spawn(look) {
        warn!("members are not looked for: cannot start a thread: {error}");
    }
}

fn run(host: &Weak<Host>, etcd: &Etcd) {
    let mut well = true;
    while let Some(host) = host.upgrade() {
        if host.is_powering_off() {
            return;
        }
        let renewed = host.members.renew(etcd, &host.config.name, &describe(&host));
        match &renewed {
            Err(error) if well => warn!("not seen as a member: {error:#}"),
            Ok(()) if !well => info!("seen as a member again"),
            _ => {}
        }
        well = renewed.is_ok();
        drop(host);
        thread::sleep(INTERVAL);
    }
}

fn describe(host: &Host) -> Member {
    let vms = (host.vms.lock().len() + host.keepers().len()) as u32;
    Member {
        addresses: host.config.listen.clone(),
        free_memory: host.free_memory(),
        load_percent: load_percent(),
        vms,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}
