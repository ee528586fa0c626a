//! Snapshots that are taken by themselves, and deleted by themselves.

use super::unix_now;
use crate::config::ClusterConfig;
use crate::containment::spawn_for_request;
use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::GroupName;
use understudy_report::cluster::SnapshotRequest;
use understudy_report::error::HostError;
use understudy_report::events::EventKind;
use understudy_snapshot::{Manifest, Retention};

/// Time after which it is looked again whether a snapshot is due: a daemon that ends is not held up
/// for long.
const LOOK: Duration = Duration::from_secs(1);

/// One thread for each cluster that has a schedule.
pub(crate) fn start(host: &Arc<Host>) {
    for (name, cluster) in host.config.clusters.clone() {
        let host = Arc::downgrade(host);
        if cluster.schedule.is_some() {
            spawn_for_request("schedule", move || run(&host, &name, &cluster));
        }
    }
}

fn run(host: &Weak<Host>, name: &GroupName, cluster: &ClusterConfig) {
    let Some(schedule) = cluster.schedule else { return };
    let mut due = Instant::now() + schedule.every;
    loop {
        thread::sleep(LOOK.min(schedule.every));
        let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
        if Instant::now() < due {
            continue;
        }
        due = Instant::now() + schedule.every;
        if let Err(error) = host.snapshot_cluster(name, &SnapshotRequest::default()) {
            let (group, reason) = (name.clone(), error.to_string());
            host.events.record(EventKind::SnapshotFailed { group, reason });
            continue;
        }
        if let Err(error) = host.expire(name, schedule.retention) {
            warn!("old snapshots of {name} were not deleted: {error}");
        }
    }
}

impl Host {
    /// Deletes the snapshots of a group that are not to be kept.
    fn expire(&self, group: &GroupName, retention: Retention) -> Result<(), HostError> {
        let store = self.open_store(group, None)?;
        let there =
            store.snapshots(group).map_err(|error| super::placement::store_error("", error))?;
        // What cannot be read is not deleted by itself.
        let readable: Vec<Manifest> =
            there.into_iter().filter_map(|listed| listed.manifest.ok()).collect();
        for number in retention.expired(&readable, unix_now()) {
            // One that is being restored is deleted the next time.
            match self.delete_snapshot(group, number, None, false) {
                Ok(_) => info!("snapshot {number} of {group} was old, and is deleted"),
                Err(error) => warn!("snapshot {number} of {group} is old: {error}"),
            }
        }
        Ok(())
    }
}
