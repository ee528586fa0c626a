//! `[cluster.NAME]`: VMs that are snapshotted, and restored, as one.
//!
//! ```toml
//! [cluster.shop]
//! members = { web = "a", db = "b" }    # VMs, and the host that each belongs on
//! store = "/srv/snapshots"             # optional: else each command names one
//! every_minutes = 60                   # optional: on one host of the cluster only
//! keep = 24                            # the newest, beside those with a label
//! keep_hours = 48                      # and all that are younger
//! ```

use super::source::Source;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use toml::Spanned;
use tracing::warn;
use understudy_cluster::store_keys::{KeyOfStores, StoreKeys, Stores};
use understudy_protocol::{GroupName, HostName, VmName};
use understudy_report::error::HostError;
use understudy_snapshot::{NoAddress, Retention, StoreAddress};

/// A group of VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Its VMs, and the host that each belongs on. The members are numbered in the order of
    /// their names.
    pub members: BTreeMap<VmName, HostName>,
    /// Store of its snapshots, unless a command says otherwise.
    pub store: Option<StoreAddress>,
    /// Schedule by which this host takes snapshots by itself.
    pub schedule: Option<Schedule>,
}

impl ClusterConfig {
    /// Whether its only member is the VM of this name.
    pub fn is_only(&self, name: &GroupName) -> bool {
        self.members.len() == 1 && self.members.keys().all(|vm| GroupName::from(vm) == *name)
    }
}

/// Snapshots that are taken by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Time between two.
    pub every: Duration,
    /// Retention: which are kept.
    pub retention: Retention,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCluster {
    members: Spanned<BTreeMap<VmName, HostName>>,
    store: Option<Spanned<String>>,
    every_minutes: Option<Spanned<i64>>,
    keep: Option<Spanned<i64>>,
    keep_hours: Option<Spanned<i64>>,
}

/// Stands for the file of a key: below an encrypted store, one that is not.
const PLAIN: &str = "plain";

/// A year has so many: what is meant to be longer is meant to be never.
const MOST_MINUTES: i64 = 366 * 24 * 60;
/// Members that a cluster may have.
pub(crate) const MOST_MEMBERS: usize = 64;

pub(super) fn check(
    source: &Source<'_>,
    raw: BTreeMap<Spanned<String>, RawCluster>,
) -> Result<BTreeMap<GroupName, ClusterConfig>, HostError> {
    let mut clusters: BTreeMap<GroupName, ClusterConfig> = BTreeMap::new();
    for (name, raw) in raw {
        let field = format!("cluster.{}", name.get_ref());
        let parsed: GroupName = source.name(&field, &name)?;
        let members_span = raw.members.span();
        let cluster = raw.check(source, &field)?;
        let elsewhere = clusters.iter().find_map(|(other, known)| {
            let twice = cluster.members.keys().find(|vm| known.members.contains_key(*vm))?;
            Some(format!("{twice} is in [cluster.{other}] already; a VM is in one cluster"))
        });
        if let Some(message) = elsewhere {
            return Err(source.wrong(&format!("{field}.members"), members_span, &message));
        }
        clusters.insert(parsed, cluster);
    }
    for (name, cluster) in &clusters {
        let is_vm =
            |known: &ClusterConfig| known.members.keys().any(|vm| GroupName::from(vm) == *name);
        if clusters.values().any(is_vm) && !cluster.is_only(name) {
            // It was let pass once, and a host that does not start is worse than a VM without snapshots of its own.
            warn!(
                "[cluster.{name}]: a VM is called {name}, too: its own snapshots and the cluster's would be one, so \
                 the VM has none; give the cluster another name"
            );
        }
    }
    Ok(clusters)
}

/// `[snapshot_keys]`: which stores are encrypted, and the files of their keys.
pub(super) fn check_keys(
    source: &Source<'_>,
    raw: BTreeMap<Spanned<String>, Spanned<PathBuf>>,
) -> Result<StoreKeys, HostError> {
    let check = |(location, file): (Spanned<String>, Spanned<PathBuf>)| {
        let field = format!("snapshot_keys.{:?}", location.get_ref());
        let address = check_store(source, &field, &location)?;
        let key = match file.get_ref().to_str() {
            Some(PLAIN) => KeyOfStores::Plain,
            _ => KeyOfStores::File(source.absolute(&field, file)?),
        };
        Ok((address, key))
    };
    Ok(StoreKeys::new(raw.into_iter().map(check).collect::<Result<Vec<_>, HostError>>()?))
}

/// `snapshot_stores`: those that other hosts may have this one use, beside the clusters' own and
/// those that `[snapshot_keys]` names, in the clear too.
pub(super) fn check_stores(
    source: &Source<'_>,
    (here, raw): (&HostName, Vec<Spanned<String>>),
    clusters: &BTreeMap<GroupName, ClusterConfig>,
    keys: &StoreKeys,
) -> Result<Stores, HostError> {
    let check = |store: &Spanned<String>| check_store(source, "snapshot_stores", store);
    let named = raw.iter().map(check).collect::<Result<Vec<_>, _>>()?;
    let of_clusters = clusters.values().filter_map(|cluster| cluster.store.clone());
    Ok(Stores::new(here, named.into_iter().chain(of_clusters).chain(keys.stores())))
}

fn check_store(
    source: &Source<'_>,
    field: &str,
    store: &Spanned<String>,
) -> Result<StoreAddress, HostError> {
    let wrong = |error: NoAddress| source.wrong(field, store.span(), &error.to_string());
    store.get_ref().parse().map_err(wrong)
}

impl RawCluster {
    fn check(self, source: &Source<'_>, field: &str) -> Result<ClusterConfig, HostError> {
        let span = self.members.span();
        let members = self.members.into_inner();
        let wrong =
            |message: &str| source.wrong(&format!("{field}.members"), span.clone(), message);
        if !(1..=MOST_MEMBERS).contains(&members.len()) {
            let message = format!("{} members; 1 to {MOST_MEMBERS} are possible", members.len());
            return Err(wrong(&message));
        }
        let store = self.store.as_ref();
        let store = store.map(|store| check_store(source, &format!("{field}.store"), store));
        let store = store.transpose()?;
        let number = |name: &str, raw: &Option<Spanned<i64>>, least: i64| match raw {
            None => Ok(None),
            Some(raw) if (least..=MOST_MINUTES).contains(raw.get_ref()) => {
                Ok(Some(*raw.get_ref() as u64))
            }
            Some(raw) => {
                let message = format!(
                    "{} is out of range; allowed is {least} to {MOST_MINUTES}",
                    raw.get_ref()
                );
                Err(source.wrong(&format!("{field}.{name}"), raw.span(), &message))
            }
        };
        let keep = number("keep", &self.keep, 1)?;
        let hours = number("keep_hours", &self.keep_hours, 0)?;
        let every = number("every_minutes", &self.every_minutes, 1)?;
        let schedule = match (every, &self.every_minutes, &self.store) {
            (Some(_), Some(raw), None) => {
                let message = "name the store that the snapshots go to: store = \"/…\"";
                return Err(source.wrong(&format!("{field}.every_minutes"), raw.span(), message));
            }
            (Some(minutes), ..) => Some(Schedule {
                every: Duration::from_secs(minutes * 60),
                retention: Retention {
                    // Without a word about it nothing is deleted.
                    newest: keep.map_or(usize::MAX, |keep| keep as usize),
                    seconds: hours.unwrap_or(0) * 3600,
                },
            }),
            (None, ..) => None,
        };
        Ok(ClusterConfig { members, store, schedule })
    }
}
