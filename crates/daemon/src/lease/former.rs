//! Wait for a VM's silent owner, until that lets nothing out any more.

use super::{Contender, Tenures};
use crate::host::Host;
use crate::recover::ImagesAnswer;
use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_arbiter::{Arbiter, Unreachable};
use understudy_protocol::{
    Generation, HostName, LeaseSight, LeaseWatch, Ownership, Renewal, VmName,
};
use understudy_replication::clock;
use understudy_replication::moments::pass;
use understudy_report::error::{ErrorKind, HostError};

/// Time between two looks at the renewals.
const LOOK: Duration = Duration::from_millis(300);
/// Time for which the arbiter may leave looks unanswered: an etcd whose disk stands still does for seconds.
const UNANSWERED: Duration = Duration::from_secs(10);

/// A former owner that does something with the VM, and what.
pub(crate) struct Busy(pub HostName, pub String);

/// The leases of hosts that do not answer, as they were when they were over: none of a host for which the operator vouches.
#[derive(Default)]
pub(crate) struct FormerLease(Vec<(Generation, Option<Renewal>)>);

impl FormerLease {
    /// Both.
    pub fn and(mut self, other: FormerLease) -> FormerLease {
        self.0.extend(other.0);
        self
    }
}

impl Host {
    /// Waits for all of these; see [`Host::await_lease`].
    pub(crate) fn await_leases(
        &self,
        vm: &VmName,
        contenders: &[Contender],
        is_off: bool,
    ) -> Result<FormerLease, HostError> {
        contenders.iter().try_fold(FormerLease::default(), |ended, contender| {
            Ok(ended.and(self.await_lease(vm, contender, is_off)?))
        })
    }

    /// Sees that nobody who owned the VM before `now` goes on with it: whoever has won it since may not have come to run it,
    /// nor have waited. One that answers, and does something with it, is the result.
    pub(crate) fn await_former_owners(
        &self,
        vm: &VmName,
        now: &Ownership,
    ) -> Result<Result<FormerLease, Busy>, HostError> {
        let ran = self.record(vm)?.and_then(|record| record.image.ran_at());
        let tenures = Tenures::between(ran.unwrap_or_default(), now);
        if tenures.is_empty() {
            return Ok(Ok(FormerLease::default()));
        }
        let mut silent = Vec::new();
        for owner in self.owners_of(vm, tenures)? {
            match self.ask_one(&owner, vm) {
                Some(ImagesAnswer { busy: Some(busy), .. }) => return Ok(Err(Busy(owner, busy))),
                // A copy that it keeps is nothing unless it is the owner.
                Some(_) => {}
                None => silent.push(owner),
            }
        }
        let former = (!silent.is_empty()).then_some(Contender::Former(silent, tenures));
        self.await_leases(vm, former.as_slice(), true).map(Ok)
    }

    /// Waits until a silent host's lease is over; an error if it lives, or if nobody can know.
    /// `is_off`: the operator says that it does not run.
    pub(crate) fn await_lease(
        &self,
        vm: &VmName,
        contender: &Contender,
        is_off: bool,
    ) -> Result<FormerLease, HostError> {
        match (&self.arbiter, contender) {
            (Some(arbiter), Contender::Owner(_, generation)) => {
                let watch = LeaseWatch::default();
                let last = await_end(arbiter, vm, contender, *generation, watch)?;
                if last.is_none() && !is_off {
                    return Err(unknown(vm, contender));
                }
                Ok(FormerLease(vec![(*generation, last)]))
            }
            (Some(arbiter), Contender::Former(_, tenures)) => {
                let mut leases = all(arbiter, vm, *tenures)?;
                leases.retain(|(_, renewal)| contender.may_be(&renewal.host));
                // They are seen at the same time: together they take no longer than one.
                let seen = clock::now();
                let ended = |(of, renewal)| {
                    let mut watch = LeaseWatch::default();
                    watch.look((seen, seen), Some(renewal));
                    Ok((of, await_end(arbiter, vm, contender, of, watch)?))
                };
                leases.into_iter().map(ended).collect::<Result<_, _>>().map(FormerLease)
            }
            _ if is_off => Ok(FormerLease::default()),
            _ => Err(unknown(vm, contender)),
        }
    }

    /// Who owned a VM at one of these generations, and kept a lease: other hosts than this one.
    pub(crate) fn owners_of(
        &self,
        vm: &VmName,
        tenures: Tenures,
    ) -> Result<BTreeSet<HostName>, HostError> {
        let of_arbiter = |arbiter| all(arbiter, vm, tenures);
        let leases = self.arbiter.as_ref().map_or(Ok(Vec::new()), of_arbiter)?;
        let hosts = leases.into_iter().map(|(_, renewal)| renewal.host);
        Ok(hosts.filter(|host| *host != self.config.name).collect())
    }

    /// Claims a VM whose former owners were found to let nothing out, unless one has done anything since. That may be long
    /// ago, and whoever lives and loses the VM ends its copy. Who claims it has to [look once more](Host::check_former).
    pub(crate) fn claim_after(
        &self,
        vm: &VmName,
        newest: Generation,
        former: &FormerLease,
    ) -> Result<Generation, HostError> {
        pass("before-claim");
        if self.has_changed(vm, former)? {
            let message = format!(
                "the former owner of {vm} has renewed its lease, or withdrawn it, since this host waited for its \
                 end: it lives, and nothing was changed. `understudy failover {vm}` there moves the VM, \
                 `understudy vm stop {vm}` there ends it"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        self.take_ownership(vm, newest)
    }

    /// Sees, once the VM is this host's, that nothing has changed since its former owners were found
    /// to let nothing out.
    pub(crate) fn check_former(&self, vm: &VmName, former: &FormerLease) -> Result<(), HostError> {
        if !self.has_changed(vm, former)? {
            return Ok(());
        }
        let message = format!(
            "the former owner of {vm} renewed its lease, or withdrew it, while this host took the \
             VM: it lives, and ends its copy as soon as it reads the arbiter; then ask again"
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }

    /// Whether a former owner has done anything since it was found to let nothing out.
    fn has_changed(&self, vm: &VmName, former: &FormerLease) -> Result<bool, HostError> {
        let Some(arbiter) = &self.arbiter else { return Ok(false) };
        for (generation, last) in &former.0 {
            if read(arbiter, vm, *generation)? != *last {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Waits until the lease of that generation is over; none if there is none.
fn await_end(
    arbiter: &Arbiter,
    vm: &VmName,
    contender: &Contender,
    generation: Generation,
    mut watch: LeaseWatch,
) -> Result<Option<Renewal>, HostError> {
    let mut unanswered: Option<Instant> = None;
    loop {
        let asked = clock::now();
        let found = match read(arbiter, vm, generation) {
            Ok(found) => found.filter(|found| contender.may_be(&found.host)),
            // A look that is left out proves nothing: what is unchanged at the next one was so meanwhile.
            Err(_) if unanswered.get_or_insert_with(Instant::now).elapsed() < UNANSWERED => {
                thread::sleep(LOOK);
                continue;
            }
            Err(error) => return Err(error),
        };
        unanswered = None;
        match watch.look((asked, clock::now()), found) {
            LeaseSight::None => return Ok(None),
            LeaseSight::Wait(left) => {
                info!(%vm, "waiting until the lease of {contender} is over: {left:?}");
                thread::sleep(left.min(LOOK));
            }
            LeaseSight::Over(last) => return Ok(Some(last)),
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

fn all(
    arbiter: &Arbiter,
    vm: &VmName,
    tenures: Tenures,
) -> Result<Vec<(Generation, Renewal)>, HostError> {
    arbiter
        .renewals(vm, |of| tenures.have(of))
        .map_err(|Unreachable(reason)| HostError::new(ErrorKind::Unreachable, reason))
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
