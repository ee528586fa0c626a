//! `[groups]`: VMs that share a keeper from their start, since they are to be protected as one.
//!
//! ```toml
//! [groups]
//! shop = ["db", "web"]
//! ```

use super::ClusterConfig;
use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};
use toml::Spanned;
use understudy_protocol::{GroupName, VmName};
use understudy_replication::membership::MOST_MEMBERS;
use understudy_report::error::HostError;

/// The groups of a host, each with its VMs.
pub type Groups = BTreeMap<GroupName, BTreeSet<VmName>>;

/// Groups as a file has them.
pub(super) type RawGroups = BTreeMap<Spanned<String>, Spanned<Vec<VmName>>>;

pub(super) fn check(
    source: &Source<'_>,
    raw: RawGroups,
    keepers: bool,
    clusters: &BTreeMap<GroupName, ClusterConfig>,
) -> Result<Groups, HostError> {
    let mut groups = Groups::new();
    for (name, listed) in raw {
        let field = format!("groups.{}", name.get_ref());
        let group: GroupName = source.name(&field, &name)?;
        let span = listed.span();
        let vms: BTreeSet<VmName> = listed.get_ref().iter().cloned().collect();
        let wrong = |message: &str| Err(source.wrong(&field, span.clone(), message));
        if !keepers {
            return wrong(
                "these VMs would share a keeper, and there are none without `keepers = true`",
            );
        }
        if vms.len() != listed.get_ref().len() || !(2..=MOST_MEMBERS).contains(&vms.len()) {
            return wrong(&format!(
                "a group has at least two VMs, at most {MOST_MEMBERS}, each once"
            ));
        }
        for vm in &vms {
            if let Some(other) = groups.iter().find(|(_, vms)| vms.contains(vm)) {
                return wrong(&format!("{vm} is in {} already; a VM is in one group", other.0));
            }
            if let Some(cluster) = clusters.iter().find(|(_, it)| it.members.contains_key(vm)) {
                return wrong(&format!(
                    "{vm} is in [cluster.{}], whose VMs have no keeper",
                    cluster.0
                ));
            }
        }
        groups.insert(group, vms);
    }
    Ok(groups)
}
