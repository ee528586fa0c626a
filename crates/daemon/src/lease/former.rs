//! Wait for a VM's silent owner, until that lets nothing out any more.

use super::Contender;
use crate::host::Host;
use std::thread;
use std::time::Duration;
use tracing::info;
use understudy_arbiter::{Arbiter, Unreachable};
use understudy_protocol::{Generation, LeaseSight, LeaseWatch, Renewal, VmName};
use understudy_replication::clock;
use understudy_report::error::{ErrorKind, HostError};

/// Time between two looks at the renewals.
const LOOK: Duration = Duration::from_millis(300);

/// The lease of a host that does not answer, as it was when it was over.
pub(crate) struct FormerLease {
    generation: Generation,
    /// None if the operator vouches for that host.
    last: Option<Renewal>,
}

impl Host {
    /// Waits until a silent host's lease is over; an error if it lives, or if nobody can know.
    /// `is_off`: the operator says that it does not run.
    pub(crate) fn await_lease(
        &self,
        vm: &VmName,
        contender: &Contender,
        is_off: bool,
    ) -> Result<Option<FormerLease>, HostError> {
        let (arbiter, generation) = match (&self.arbiter, contender.generation()) {
            (Some(arbiter), Some(generation)) => (arbiter, generation),
            _ if is_off => return Ok(None),
            _ => return Err(unknown(vm, contender)),
        };
        let mut watch = LeaseWatch::default();
        loop {
            let found =
                read(arbiter, vm, generation)?.filter(|found| contender.may_be(&found.host));
            match watch.look(clock::now(), found) {
                LeaseSight::None if is_off => {
                    return Ok(Some(FormerLease { generation, last: None }));
                }
                LeaseSight::None if contender.is_owner() => return Err(unknown(vm, contender)),
                LeaseSight::None => return Ok(None),
                LeaseSight::Wait(left) => {
                    info!(%vm, "waiting until the lease of {contender} is over: {left:?}");
                    thread::sleep(left.min(LOOK));
                }
                LeaseSight::Over(last) => {
                    return Ok(Some(FormerLease { generation, last: Some(last) }));
                }
                LeaseSight::Alive => {
                    return Err(HostError::new(
                        ErrorKind::Conflict,
                        format!(
                            "{contender} runs {vm}: it showed the arbiter just now that it lives, \
                             and does not answer this host only. `understudy failover {vm}` there \
                             moves it, `understudy vm stop {vm}` there ends it"
                        ),
                    ));
                }
            }
        }
    }

    /// Checks, once the VM is this host's, that nothing has changed since its former owner was
    /// found to let nothing out.
    pub(crate) fn check_former(&self, vm: &VmName, former: &FormerLease) -> Result<(), HostError> {
        let Some(arbiter) = &self.arbiter else { return Ok(()) };
        if read(arbiter, vm, former.generation)? == former.last {
            return Ok(());
        }
        let message = format!(
            "the former owner of {vm} renewed its lease, or withdrew it, while this host took the \
             VM: it lives, and ends its copy as soon as it reads the arbiter; then ask again"
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }
}

fn read(
    arbiter: &Arbiter,
    vm: &VmName,
    generation: Generation,
) -> Result<Option<Renewal>, HostError> {
    arbiter
        .renewal(vm, generation)
        .map_err(|Unreachable(reason)| HostError::new(ErrorKind::Unreachable, reason))
}

fn unknown(vm: &VmName, contender: &Contender) -> HostError {
    let message = format!(
        "{contender} does not answer, keeps no lease of {vm}, and may run it at this moment, by \
         itself or with another backup: two copies would answer. Make sure that it is off, then \
         add --other-host-is-off"
    );
    HostError::new(ErrorKind::Conflict, message)
}
