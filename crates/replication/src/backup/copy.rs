//! What this host holds of a VM that it follows.

use super::apply::Checkpoint;

/// A copy of a VM. It never comes back from [`Copy::Failed`]: what is applied behind a gap makes
/// no copy whole, and mirrors that lost writes once stay without them.
pub(super) enum Copy<M> {
    /// The first synchronisation is under way: mirrors that are none yet.
    Filling(M),
    /// A whole epoch, and where it ends.
    Whole(Checkpoint),
    /// Nothing that a guest could go on from, for this reason.
    Failed(anyhow::Error),
}

impl<M> Copy<M> {
    /// The copy with one more epoch, which `apply` applies; the first one gets the mirrors.
    pub(super) fn extended(
        self,
        apply: impl FnOnce(Option<M>) -> anyhow::Result<Checkpoint>,
    ) -> Copy<M> {
        let applied = match self {
            Copy::Filling(mirrors) => apply(Some(mirrors)),
            Copy::Whole(_) => apply(None),
            Copy::Failed(first) => Err(first),
        };
        applied.map_or_else(Copy::Failed, Copy::Whole)
    }

    /// What to go live from.
    pub(super) fn into_checkpoint(self) -> anyhow::Result<Checkpoint> {
        match self {
            Copy::Filling(_) => Err(anyhow::anyhow!("no epoch was applied")),
            Copy::Whole(checkpoint) => Ok(checkpoint),
            Copy::Failed(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{anyhow, ensure};
    use understudy_protocol::Time;

    fn checkpoint(state: u8) -> Checkpoint {
        Checkpoint { device_state: vec![state], taken: Time(std::time::Duration::ZERO) }
    }

    fn words(copy: Copy<&str>) -> String {
        copy.into_checkpoint().unwrap_err().to_string()
    }

    #[test]
    fn the_first_epoch_gets_the_mirrors_and_the_last_one_counts() {
        assert_eq!(words(Copy::Filling("mirrors")), "no epoch was applied");
        let one = Copy::Filling("mirrors").extended(|mirrors| {
            ensure!(mirrors == Some("mirrors"));
            Ok(checkpoint(1))
        });
        let two = one.extended(|mirrors| {
            ensure!(mirrors.is_none());
            Ok(checkpoint(2))
        });
        assert_eq!(two.into_checkpoint().unwrap().device_state, [2]);
    }

    // Before, epoch 2 was applied behind a failed epoch 1, and completed the mirrors.
    #[test]
    fn after_one_failure_nothing_is_applied_any_more() {
        for before in [Copy::Filling("mirrors"), Copy::Whole(checkpoint(7))] {
            let failed = before.extended(|_| Err(anyhow!("the disk is full")));
            let later = failed.extended(|_| panic!("applied behind a gap"));
            assert_eq!(words(later), "the disk is full");
        }
    }
}
