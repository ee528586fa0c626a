//! Membership: with an `etcd` arbiter, every host that lives is known to all.
//!
//! `PREFIX/hosts/NAME` says where the host is and how busy; it hangs on a lease,
//! so that a host that is dead, or out of etcd's reach, vanishes by itself. The lease is kept alive, which makes no revision;
//! what is said is put anew only when it has changed: etcd keeps every revision until it is compacted.

use crate::host::Host;
use crate::survey::load_percent;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};
use understudy_arbiter::etcd::{Etcd, Lease};
use understudy_protocol::HostName;

/// Time after which a host speaks up again.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time for which a silent host stays a member, in seconds.
const LEASE_SECONDS: u64 = 7;
/// Shortest time between two reports of how busy a host is.
const REPORT: Duration = Duration::from_secs(60);
/// Change of the memory that is to spare, in parts of it, and of the load, in percent, that is worth a report.
const MEMORY_PARTS: u64 = 8;
const LOAD: u32 = 25;
/// Time for the thread to leave; it may be waiting for etcd.
const LEFT_WITHIN: Duration = Duration::from_secs(5);
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

impl Member {
    /// Whether this is news to who was told `told`.
    fn is_news_after(&self, told: &Member) -> bool {
        let least = told.free_memory / MEMORY_PARTS;
        let same = |report: &Member| (report.addresses.clone(), report.vms, report.version.clone());
        same(self) != same(told)
            || self.free_memory.abs_diff(told.free_memory) > least
            || self.load_percent.abs_diff(told.load_percent) > LOAD
    }
}

/// Report that etcd has of this host.
#[derive(Debug)]
struct Told {
    report: Member,
    at: Instant,
}

impl Told {
    /// Whether it stays as it is.
    fn stays(&self, own: &Member, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < REPORT || !own.is_news_after(&self.report)
    }
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
            if left.recv_timeout(LEFT_WITHIN) == Err(RecvTimeoutError::Timeout) {
                warn!("etcd does not answer: it knows this host for {LEASE_SECONDS} s more");
            }
        }
    }
}

/// The lease of a member.
struct Renewal<'a> {
    etcd: &'a Etcd,
    lease: Option<Lease>,
    /// What etcd has of it.
    told: Option<Told>,
}

impl Renewal<'_> {
    /// Says that this host lives, and reads who else does.
    fn renew(&mut self, host: &Host) -> anyhow::Result<()> {
        let held = match self.lease {
            Some(held) if self.etcd.keep_alive(held)? => held,
            _ => {
                // What was put under the last one has vanished with it.
                self.told = None;
                self.etcd.lease(LEASE_SECONDS)?
            }
        };
        self.lease = Some(held);
        let (own, now) = (describe(host), Instant::now());
        if !self.told.as_ref().is_some_and(|told| told.stays(&own, now)) {
            self.etcd.put(&format!("{FOLDER}{}", host.config.name), &own, held)?;
            self.told = Some(Told { report: own, at: now });
        }
        if !host.look_at_members(self.etcd)? {
            // Somebody has removed it.
            self.told = None;
        }
        Ok(())
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
    let mut members = all(etcd)?;
    members.remove(name);
    Ok(members)
}

fn all(etcd: &Etcd) -> anyhow::Result<BTreeMap<HostName, Member>> {
    let mut members = BTreeMap::new();
    for entry in etcd.list::<Member>(FOLDER)? {
        // What is no host's name is no host's entry.
        let Ok(host) = entry.key.trim_start_matches(FOLDER).parse::<HostName>() else {
            continue;
        };
        members.insert(host, entry.value);
    }
    Ok(members)
}

impl Host {
    /// Looks for members that have joined since the last look, if there are any to be found.
    pub(crate) fn look_for_members(&self) -> anyhow::Result<()> {
        let etcd = self.arbiter.as_ref().and_then(|arbiter| arbiter.etcd());
        etcd.map_or(Ok(()), |etcd| self.look_at_members(etcd).map(drop))
    }

    /// Reads which other hosts live; whether this one is among those that etcd has.
    fn look_at_members(&self, etcd: &Etcd) -> anyhow::Result<bool> {
        let mut members = all(etcd)?;
        let is_there = members.remove(&self.config.name).is_some();
        self.vms.note(|all| all.findings.members = members);
        Ok(is_there)
    }

    /// The other members, as etcd last told; none without etcd.
    pub(crate) fn members(&self) -> BTreeMap<HostName, Member> {
        self.vms.look(|all| all.findings.members.clone())
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
    let (mut well, mut renewal) = (true, Renewal { etcd, lease: None, told: None });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_news_is_not_put_again() {
        const MIB: u64 = 1 << 20;
        let report = Member {
            addresses: vec!["10.0.0.1:7700".parse().unwrap()],
            free_memory: 800 * MIB,
            load_percent: 40,
            vms: 2,
            version: "1".to_owned(),
        };
        let busier = Member { load_percent: 90, ..report.clone() };
        let fuller = Member { free_memory: 600 * MIB, ..report.clone() };
        let restless = Member { free_memory: 780 * MIB, load_percent: 60, ..report.clone() };
        let one_more = Member { vms: 3, ..report.clone() };
        let at = Instant::now();
        let later = at + REPORT;
        let told = Told { report: report.clone(), at };
        for same in [&report, &restless] {
            assert!(told.stays(same, later), "{same:?}");
        }
        for news in [&busier, &fuller, &one_more] {
            assert!(told.stays(news, at), "each change makes a revision");
            assert!(!told.stays(news, later), "{news:?}");
        }
    }
}
