//! Problems of this host, as those have found who look after it.

use std::collections::{BTreeMap, BTreeSet};
use understudy_protocol::VmName;

/// All of it, but what is asked for at the moment of the question.
#[derive(Default)]
pub(crate) struct Troubles {
    /// Reason why the arbiter cannot be used.
    pub arbiter: Option<String>,
    /// VMs that ran here, and that nothing brings up again.
    pub lost: BTreeSet<VmName>,
    /// Reasons why cards of VMs that run here are on no bridge, by VM and address.
    pub cards: BTreeMap<(VmName, String), String>,
}
