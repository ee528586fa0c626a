//! Whether the members of a restore stay, once they run: decided once, at the arbiter, by the record
//! `restore.GROUP` ([`Decision`]). Without an arbiter all is in one daemon.

use crate::host::Host;
use understudy_arbiter::{Arbiter, Key, Unreachable};
use understudy_protocol::GroupName;
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
    let verdict = arbiter.claim(Key::Restore(group), Decision::before(incarnation));
    Decision::of_claim(verdict).map_err(Unreachable)
}

pub(super) fn give_up(
    arbiter: &Arbiter,
    group: &GroupName,
    incarnation: Incarnation,
) -> Result<Decision, Unreachable> {
    arbiter.release(Key::Restore(group), Decision::before(incarnation))?;
    let record = arbiter.current(Key::Restore(group))?;
    Ok(Decision::of_record(record.as_ref(), incarnation))
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
