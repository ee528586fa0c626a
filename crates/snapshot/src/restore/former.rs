//! Whether a restore may take the place of another one of the same VM.

use super::CohortPhase;
use crate::Incarnation;
use understudy_protocol::GroupName;

/// The last restore of a VM that its host knows of.
#[derive(Clone, Debug)]
pub struct Former<'a> {
    /// Its group.
    pub group: &'a GroupName,
    /// The group's incarnation from it on.
    pub incarnation: Incarnation,
    /// The phase of its cohort.
    pub phase: &'a CohortPhase,
    /// Whether the VM that it started is there.
    pub has_vm: bool,
}

impl Former<'_> {
    /// Refuses another restore, of this group and incarnation, whose coordinator says that it is to load.
    pub fn check_replaceable(
        &self,
        group: &GroupName,
        incarnation: Incarnation,
    ) -> Result<(), &'static str> {
        match self.phase {
            CohortPhase::Running | CohortPhase::Restored if self.has_vm => {
                Err("it runs on this host, restored from a snapshot: stop it there first")
            }
            // What came of it, or of its VM, cannot be taken back any more.
            CohortPhase::Running | CohortPhase::Restored => Ok(()),
            CohortPhase::Aborted | CohortPhase::Failed(_) => Ok(()),
            CohortPhase::Starting => Err("another restore of it is just starting it"),
            CohortPhase::Idle
            | CohortPhase::Loading(_)
            | CohortPhase::Loaded
            | CohortPhase::Ending(_) => match group == self.group && incarnation > self.incarnation
            {
                true => Ok(()),
                false => Err("another restore of it is under way, which is as new, or of another \
                              group: try again once that has ended"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    #[test]
    fn no_restore_ends_a_guest_that_runs_nor_a_newer_one() {
        use CohortPhase::{
            Aborted, Ending, Failed, Idle, Loaded, Loading, Restored, Running, Starting,
        };
        let (shop, db): (GroupName, GroupName) = (literal("shop"), literal("db"));
        let check = |phase: &CohortPhase, has_vm, group: &GroupName, incarnation| {
            let former = Former { group: &shop, incarnation: Incarnation(7), phase, has_vm };
            former.check_replaceable(group, Incarnation(incarnation)).is_ok()
        };
        for phase in [Running, Restored] {
            assert!(!check(&phase, true, &shop, 8) && !check(&phase, true, &db, 8), "{phase:?}");
            assert!(check(&phase, false, &shop, 8) && check(&phase, false, &db, 1), "{phase:?}");
        }
        assert!(!check(&Starting, false, &shop, 8), "it is about to run");
        for phase in [Idle, Loading(3), Loaded, Ending(None)] {
            assert!(check(&phase, false, &shop, 8), "{phase:?}");
            assert!(!check(&phase, false, &shop, 7) && !check(&phase, false, &shop, 6));
            assert!(!check(&phase, false, &db, 8), "{phase:?}: numbers are a group's own");
        }
        // Whoever named a number that nobody had won has failed, and bars nobody.
        for phase in [Aborted, Failed("it is to be restored in incarnation 7".into())] {
            assert!(check(&phase, false, &shop, 2) && check(&phase, false, &db, 1), "{phase:?}");
        }
    }
}
