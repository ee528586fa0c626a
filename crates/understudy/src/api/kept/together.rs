//! Whether VMs that are to be protected as a group are in one place, and where.

use super::Routed;
use understudy_daemon::keeper::Keeper;
use understudy_protocol::{GroupName, VmName};
use understudy_report::{ErrorKind, HostError, Role};

/// Place of a VM that is named as a member of a group.
pub enum Place {
    /// The daemon's own process.
    Daemon,
    /// A keeper that this daemon can speak with.
    Keeper(Keeper),
    /// None where it could be protected from, and why.
    Absent(HostError),
}

/// Place of all members of a group.
#[derive(Debug)]
pub enum Together {
    /// The daemon's own process.
    InDaemon,
    /// A keeper that they share.
    In(Keeper),
    /// None: they are not together.
    Not(HostError),
}

impl Routed {
    /// Place of a VM that is named as a member of this group.
    pub fn place_of_member(&self, group: &GroupName, vm: &VmName) -> Place {
        let Some(keeper) = self.0.keeper_of(vm) else {
            return match self.0.check_member(group, vm) {
                Ok(()) => Place::Daemon,
                Err(error) => Place::Absent(error),
            };
        };
        match keeper.reachable() {
            Err(error) => Place::Absent(error),
            Ok(_) if self.0.kept_role(&keeper) == Role::Backup => {
                Place::Absent(elsewhere(group, vm))
            }
            Ok(_) => Place::Keeper(keeper),
        }
    }
}

/// Place of all members. A name that is wrong comes first: nobody is to stop a VM for that.
pub fn together<'a>(
    group: &GroupName,
    members: impl Iterator<Item = (&'a VmName, Place)>,
) -> Together {
    let mut found: Vec<(&VmName, Option<Keeper>)> = Vec::new();
    for (vm, place) in members {
        match place {
            Place::Absent(error) => return Together::Not(error),
            Place::Daemon => found.push((vm, None)),
            Place::Keeper(keeper) => found.push((vm, Some(keeper))),
        }
    }
    let process = |keeper: &Option<Keeper>| keeper.as_ref().and_then(|keeper| keeper.pid);
    let first = found.first().and_then(|(_, keeper)| keeper.clone());
    match first {
        _ if !found.iter().all(|(_, keeper)| process(keeper) == process(&first)) => {
            Together::Not(apart(group, &found))
        }
        Some(keeper) => Together::In(keeper),
        None => Together::InDaemon,
    }
}

fn elsewhere(group: &GroupName, vm: &VmName) -> HostError {
    let message = format!(
        "group {group}: {vm} is backed up here and runs on another host; all VMs of a group must run on the host that \
         protects it"
    );
    HostError::new(ErrorKind::Conflict, message)
}

fn apart(group: &GroupName, found: &[(&VmName, Option<Keeper>)]) -> HostError {
    let place = |(vm, keeper): &(&VmName, Option<Keeper>)| match keeper {
        Some(Keeper { pid: Some(pid), .. }) => format!("{vm} is in process {pid}"),
        Some(_) => format!("{vm} is in a process that is not known"),
        None => format!("{vm} has none"),
    };
    let places: Vec<String> = found.iter().map(place).collect();
    let message = format!(
        "group {group}: its VMs do not share a keeper ({}): name them under [groups] in the host's configuration, restart \
         the daemon, stop them and start them again (they are down meanwhile)",
        places.join(", ")
    );
    HostError::new(ErrorKind::Conflict, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    fn kept(pid: u32) -> Place {
        Place::Keeper(Keeper {
            vm: literal("db"),
            pid: Some(pid),
            socket: "/none".into(),
            group: None,
            problem: None,
            program: None,
        })
    }

    fn absent() -> Place {
        Place::Absent(HostError::new(ErrorKind::NotFound, "there is no VM \"wbe\""))
    }

    fn decided(places: Vec<Place>) -> Together {
        let vms: [VmName; 3] = ["db", "web", "wbe"].map(literal);
        together(&literal("shop"), vms.iter().zip(places))
    }

    /// Who named one that is not there was told to stop the others.
    #[test]
    fn a_wrong_name_is_found_before_vms_that_do_not_share_a_keeper() {
        for places in [
            vec![kept(1), absent()],
            vec![kept(1), kept(1), absent()],
            vec![kept(1), kept(2), absent()],
            vec![absent(), Place::Daemon],
        ] {
            match decided(places) {
                Together::Not(error) => assert_eq!(error.kind, ErrorKind::NotFound, "{error}"),
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(decided(vec![Place::Daemon, Place::Daemon]), Together::InDaemon));
        let shared = decided(vec![kept(1), kept(1)]);
        assert!(matches!(shared, Together::In(Keeper { pid: Some(1), .. })), "{shared:?}");
    }

    #[test]
    fn vms_that_do_not_share_a_keeper_are_named_with_their_processes() {
        for (places, words) in [
            (vec![kept(1), kept(2)], "db is in process 1, web is in process 2"),
            (vec![kept(1), Place::Daemon], "db is in process 1, web has none"),
            (vec![Place::Daemon, kept(2)], "db has none, web is in process 2"),
        ] {
            match decided(places) {
                Together::Not(error) => assert!(error.message.contains(words), "{error}"),
                other => panic!("{other:?}"),
            }
        }
    }
}
