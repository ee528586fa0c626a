//! Whether this backup could take over now: its disks and its QEMU answer, and the arbiter would
//! give it the VM. One that could not contests nothing, and its primary hears why.

use super::words::Awaited;
use std::time::Duration;
use understudy_protocol::{Time, planted};

/// A disk or a QEMU that has not answered for so long hangs. Twice what the settling of an epoch
/// takes on a disk that is merely busy, and far less than what a primary waits for a proof.
pub const HANG: Duration = Duration::from_secs(3);

/// The fitness of a backup, as far as it is known.
#[derive(Clone, Debug)]
pub struct Fitness {
    patience: Duration,
    /// The part of this host that does not answer.
    ailment: Option<String>,
    /// The reason why the arbiter would not give it the VM, as it last found.
    unproven: Option<String>,
}

impl Fitness {
    /// The fitness of a backup which nothing is known against; what does not answer for `patience`
    /// hangs.
    pub fn new(patience: Duration) -> Fitness {
        Fitness { patience, ailment: None, unproven: None }
    }

    /// Looks at what the members await; the ailment, if there is one now and was none, or the other
    /// way round.
    pub fn look(&mut self, now: Time, awaited: &[Awaited]) -> Option<Option<String>> {
        let found = awaited.iter().find_map(|member| self.ailment_of(now, member));
        let found = found.filter(|_| !planted!(NothingHangs));
        let before = std::mem::replace(&mut self.ailment, found);
        (before.is_some() != self.ailment.is_some()).then(|| self.ailment.clone())
    }

    fn ailment_of(&self, now: Time, member: &Awaited) -> Option<String> {
        let overdue = |what: &str, since: Option<Time>| {
            let silence = now - since?;
            let hangs = silence > self.patience;
            hangs.then(|| format!("{what} has not answered for {} s", silence.as_secs()))
        };
        overdue("its disk", member.disk).or_else(|| overdue("its QEMU", member.qemu))
    }

    /// Notes what came of a proof; the reason, if there is one now and was none, or the other way
    /// round.
    pub fn proven(&mut self, proof: Result<(), String>) -> Option<Option<String>> {
        let before = std::mem::replace(&mut self.unproven, proof.err());
        (before.is_some() != self.unproven.is_some()).then(|| self.unproven.clone())
    }

    /// The reason why this host could not take over, as it last found.
    pub fn obstacle(&self) -> Option<String> {
        self.ailment.clone().or_else(|| self.unproven.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_awaited_for_too_long_is_an_ailment_until_it_comes() {
        let mut fitness = Fitness::new(HANG);
        let at = |seconds| Time(Duration::from_secs(seconds));
        let since = |disk: Option<u64>, qemu: Option<u64>| {
            [Awaited::default(), Awaited { disk: disk.map(at), qemu: qemu.map(at) }]
        };
        assert_eq!(fitness.look(at(60), &since(None, None)), None, "nothing is awaited");
        assert_eq!(fitness.look(at(62), &since(Some(60), Some(60))), None);
        let words = "its disk has not answered for 9 s".to_owned();
        assert_eq!(fitness.look(at(69), &since(Some(60), Some(60))), Some(Some(words.clone())));
        assert_eq!(fitness.look(at(70), &since(Some(60), Some(60))), None, "it is known");
        assert_eq!(fitness.proven(Ok(())), None);
        let silent = "no arbiter".to_owned();
        assert_eq!(fitness.proven(Err(silent.clone())), Some(Some(silent)));
        assert_eq!(fitness.obstacle().unwrap(), "its disk has not answered for 10 s");
        assert_eq!(fitness.look(at(70), &since(None, None)), Some(None));
        assert_eq!(fitness.obstacle().unwrap(), "no arbiter");
        assert_eq!(fitness.proven(Ok(())), Some(None));
        assert_eq!(fitness.obstacle(), None);
    }
}
