//! Whether the members of a restore stay, once they run: decided once, at the arbiter. The record
//! `restore.GROUP` is of the generation that is the group's incarnation; it names the coordinator's host if
//! they stay, and nobody if the restore was given up. Without an arbiter all is in one daemon.

use crate::host::Host;
use understudy_arbiter::{Arbiter, Key, Unreachable};
use understudy_protocol::GroupName;
use understudy_protocol::{Generation, Verdict};
use understudy_snapshot::{Decision, Incarnation};

impl Host {
    /// All members run: they stay, unless it was given up. Only the coordinator may ask.
    pub(super) fn settle_restore(
        &self,
        group: &GroupName,
        incarnation: Incarnation,
    ) -> Result<Decision, Unreachable> {
        match &self.arbiter {
            Some(arbiter) => settle(arbiter, group, incarnation),
            None => Ok(Decision::Settled),
        }
    }

    /// The coordinator is silent: it is given up, unless the members stay. None if there is nobody
    /// to ask.
    pub(super) fn give_up_restore(
        &self,
        group: &GroupName,
        incarnation: Incarnation,
    ) -> Result<Option<Decision>, Unreachable> {
        self.arbiter.as_ref().map(|arbiter| give_up(arbiter, group, incarnation)).transpose()
    }
}

fn settle(
    arbiter: &Arbiter,
    group: &GroupName,
    incarnation: Incarnation,
) -> Result<Decision, Unreachable> {
    match arbiter.claim(Key::Restore(group), before(incarnation)) {
        Verdict::Granted(_) => Ok(Decision::Settled),
        Verdict::Taken(_) | Verdict::Returned(_) => Ok(Decision::GivenUp),
        Verdict::Unreachable(why) => Err(Unreachable(why)),
    }
}

pub(super) fn give_up(
    arbiter: &Arbiter,
    group: &GroupName,
    incarnation: Incarnation,
) -> Result<Decision, Unreachable> {
    arbiter.release(Key::Restore(group), before(incarnation))?;
    let decided = arbiter.current(Key::Restore(group))?;
    // A record of a later incarnation: nobody waits for this one any more.
    let of_this = decided.filter(|record| record.generation == generation(incarnation));
    match of_this.is_some_and(|record| record.host.is_some()) {
        true => Ok(Decision::Settled),
        false => Ok(Decision::GivenUp),
    }
}

fn generation(incarnation: Incarnation) -> Generation {
    Generation(incarnation.0.into())
}

fn before(incarnation: Incarnation) -> Generation {
    Generation(u64::from(incarnation.0).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ArbiterConfig;
    use std::path::Path;
    use understudy_protocol::literal;

    fn arbiter(path: &Path, host: &str) -> Arbiter {
        Arbiter::new(&ArbiterConfig::File { path: path.to_owned() }, &host.parse().unwrap())
            .unwrap()
    }

    #[test]
    fn the_first_who_asks_decides_for_all_of_a_life() {
        let directory = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|host| arbiter(directory.path(), host));
        // After three restores of which nobody asked.
        let incarnation = Incarnation(4);
        assert_eq!(settle(&a, &literal("shop"), incarnation), Ok(Decision::Settled));
        for host in [&a, &b] {
            assert_eq!(give_up(host, &literal("shop"), incarnation), Ok(Decision::Settled));
        }
        assert_eq!(
            settle(&a, &literal("shop"), incarnation),
            Ok(Decision::Settled),
            "an answer was lost"
        );

        let incarnation = Incarnation(5);
        assert_eq!(give_up(&b, &literal("shop"), incarnation), Ok(Decision::GivenUp));
        for host in [&a, &b] {
            assert_eq!(give_up(host, &literal("shop"), incarnation), Ok(Decision::GivenUp));
            assert_eq!(settle(host, &literal("shop"), incarnation), Ok(Decision::GivenUp));
        }
        assert_eq!(
            settle(&a, &literal("bank"), incarnation),
            Ok(Decision::Settled),
            "another group"
        );
    }

    #[test]
    fn the_coordinators_own_host_may_give_up_too() {
        let directory = tempfile::tempdir().unwrap();
        let a = arbiter(directory.path(), "a");
        assert_eq!(give_up(&a, &literal("shop"), Incarnation(1)), Ok(Decision::GivenUp));
        assert_eq!(settle(&a, &literal("shop"), Incarnation(1)), Ok(Decision::GivenUp));
    }

    #[test]
    fn what_is_long_over_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|host| arbiter(directory.path(), host));
        assert_eq!(settle(&a, &literal("shop"), Incarnation(7)), Ok(Decision::Settled));
        assert_eq!(give_up(&b, &literal("shop"), Incarnation(6)), Ok(Decision::GivenUp));
    }

    #[test]
    fn an_arbiter_that_is_away_decides_nothing() {
        let away = arbiter(Path::new("/nonexistent/arbiter"), "a");
        assert!(settle(&away, &literal("shop"), Incarnation(1)).is_err());
        assert!(give_up(&away, &literal("shop"), Incarnation(1)).is_err());
    }
}
