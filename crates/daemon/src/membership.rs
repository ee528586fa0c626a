//! Membership: with an `etcd` arbiter, every host that lives is known to all.
//!
//! `PREFIX/hosts/NAME` says where the host is and how busy; it hangs on a lease,
//! so that a host that is dead, or out of etcd's reach, vanishes by itself.

use crate::host::Host;
use crate::survey::load_percent;
use crossbeam_channel::{Receiver, Sender};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{debug, info, warn};
use understudy_arbiter::etcd::{Etcd, Lease};
use understudy_protocol::HostName;

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

/// This host's membership. The thread that renews it has the lease, and gives it back.
pub(crate) struct Membership {
    /// Whether there is that thread, and it has not been told to leave.
    is_renewed: AtomicBool,
    orders: Sender<Leave>,
    inbox: Receiver<Leave>,
}

/// Order to leave; it is dropped when that is done.
type Leave = Sender<()>;

impl Membership {
    /// None yet.
    pub fn new() -> Membership {
        let (orders, inbox) = crossbeam_channel::unbounded();
        Membership { is_renewed: AtomicBool::new(false), orders, inbox }
    }

    /// Leaves, as far as etcd can be reached.
    pub fn leave(&self) {
        if self.is_renewed.swap(false, Ordering::AcqRel) {
            let (leaving, left) = crossbeam_channel::bounded(0);
            // The inbox is this value's own.
            let _ = self.orders.send(leaving);
            let _ = left.recv();
        }
    }
}

/// The lease of a member.
struct Renewal<'a> {
    etcd: &'a Etcd,
    lease: Option<Lease>,
}

impl Renewal<'_> {
    /// Says that this host lives, and reads who else does.
    fn renew(&mut self, host: &Host) -> anyhow::Result<()> {
        let held = match self.lease {
            Some(held) if self.etcd.keep_alive(held)? => held,
            _ => self.etcd.lease(LEASE_SECONDS)?,
        };
        self.lease = Some(held);
        let name = &host.config.name;
        self.etcd.put(&format!("{FOLDER}{name}"), &describe(host), held)?;
        host.look_at_members(self.etcd)
    }

    fn end(self) {
        if let Some(lease) = self.lease
            && let Err(error) = self.etcd.revoke(lease)
        {
            info!("still a member for {LEASE_SECONDS} s: {error:#}");
        }
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
        etcd.map_or(Ok(()), |etcd| self.look_at_members(etcd))
    }

    fn look_at_members(&self, etcd: &Etcd) -> anyhow::Result<()> {
        let others = members(etcd, &self.config.name)?;
        self.findings.lock().members = others;
        Ok(())
    }

    /// The other members, as etcd last told; none without etcd.
    pub(crate) fn members(&self) -> BTreeMap<HostName, Member> {
        self.findings.lock().members.clone()
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
    let (weak, inbox) = (Arc::downgrade(host), host.membership.inbox.clone());
    let spawned = thread::Builder::new()
        .name("membership".to_owned())
        .spawn(move || run(&weak, &etcd, &inbox));
    match spawned {
        Ok(_) => host.membership.is_renewed.store(true, Ordering::Release),
        Err(error) => warn!("not a member: cannot start a thread: {error}"),
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

fn run(host: &Weak<Host>, etcd: &Etcd, inbox: &Receiver<Leave>) {
    let (mut well, mut renewal) = (true, Renewal { etcd, lease: None });
    while let Some(host) = host.upgrade() {
        // Then it waits to leave.
        if !host.is_powering_off() {
            let renewed = renewal.renew(&host);
            match &renewed {
                Err(error) if well => warn!("not seen as a member: {error:#}"),
                Ok(()) if !well => info!("seen as a member again"),
                _ => {}
            }
            well = renewed.is_ok();
        }
        drop(host);
        if let Ok(_leaving) = inbox.recv_timeout(INTERVAL) {
            return renewal.end();
        }
    }
}

fn describe(host: &Host) -> Member {
    let vms = (host.vms.count() + host.keepers().len()) as u32;
    Member {
        addresses: host.config.listen.clone(),
        free_memory: host.free_memory(),
        load_percent: load_percent(),
        vms,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}
