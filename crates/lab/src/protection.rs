//! A VM's protection, as its host's status says.

use crate::host::HostProcess;
use crate::wait_for;
use anyhow::{Result, bail};
use serde_json::Value;
use std::time::Duration;

/// Time for a first synchronisation.
const SYNC_LIMIT: Duration = Duration::from_secs(300);

/// Whether a backup follows that could not take over at this moment, or is slow: its proof or an epoch is
/// late, on a machine whose disk stands still for seconds. Nothing of it is lost, and it is a backup again by itself.
/// So is one of which its daemon does not know at the moment, since a keeper took longer for an answer than it waits.
pub fn is_followed(status: &Value) -> bool {
    status["protection"]["reason"].as_str().is_some_and(tells_of_a_follower)
}

/// Whether the reason why a VM is not protected is just that ([`is_followed`]).
pub fn tells_of_a_follower(reason: &str) -> bool {
    let lapses = ["could not take over now", "output has waited for it"];
    let lapsed = lapses.iter().any(|lapse| reason.contains(&format!("follows, and {lapse}")));
    lapsed || reason.contains("what becomes of it is not known")
}

impl HostProcess {
    /// Waits until a VM of this host is protected, which it is already, or is about to be; `watch`
    /// sees every status on the way.
    pub fn await_protected(&self, vm: &str, mut watch: impl FnMut(&Value)) -> Result<Value> {
        wait_for(&format!("host {}'s {vm} to be protected", self.name()), SYNC_LIMIT, || {
            let status = self.status(vm)?;
            watch(&status);
            match status["protection"]["state"].as_str() {
                Some("syncing") => Ok(None),
                Some("protected") => Ok(Some(status)),
                _ if is_followed(&status) => Ok(None),
                _ => bail!("protection ended: {}", status["protection"]),
            }
        })
    }
}
