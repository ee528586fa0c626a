//! The stance of a group's protection, for whoever keeps the leases of all VMs: to be had without
//! the state machine's lock, under which one VM's disk or QEMU could hold that up for all.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use understudy_protocol::{Generation, Primary, PrimaryPhase};

const ALONE: u8 = 1;
const GUARDS: u8 = 2;
const CONTESTS: u8 = 4;

/// The stance as of the last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stance {
    /// The leader's generation.
    pub generation: Generation,
    /// Whether this host is the sole owner.
    pub is_alone: bool,
    /// Whether the state machine's word decides about what the guests send.
    pub guards_output: bool,
    /// Whether it asks the arbiter for the group.
    pub contests: bool,
}

impl Stance {
    fn of(core: &Primary) -> Stance {
        Stance {
            generation: core.generation(),
            is_alone: matches!(core.phase(), PrimaryPhase::Alone(_)),
            guards_output: core.guards_output(),
            contests: core.contests(),
        }
    }
}

/// The last one, for all to read.
#[derive(Debug)]
pub struct Published {
    generation: AtomicU64,
    flags: AtomicU8,
}

impl Published {
    /// The stance of a state machine which has just begun.
    pub fn new(core: &Primary) -> Published {
        let published = Published { generation: AtomicU64::new(0), flags: AtomicU8::new(0) };
        published.publish(core);
        published
    }

    /// Publishes the stance, under the state machine's lock, after each event.
    pub fn publish(&self, core: &Primary) {
        let Stance { generation, is_alone, guards_output, contests } = Stance::of(core);
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let flags = flag(is_alone, ALONE) | flag(guards_output, GUARDS) | flag(contests, CONTESTS);
        // In this order: who sees that a contest is over sees the generation that it brought.
        self.generation.store(generation.0, Ordering::Release);
        self.flags.store(flags, Ordering::Release);
    }

    /// The stance; waits for nobody.
    pub fn get(&self) -> Stance {
        let flags = self.flags.load(Ordering::Acquire);
        Stance {
            generation: Generation(self.generation.load(Ordering::Acquire)),
            is_alone: flags & ALONE != 0,
            guards_output: flags & GUARDS != 0,
            contests: flags & CONTESTS != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use understudy_protocol::{Epoch, PrimaryEvent, Time, Verdict};

    #[test]
    fn what_is_published_is_the_state_machines() {
        let mut core = Primary::new(Generation(7), Duration::from_millis(100), Time::default());
        let published = Published::new(&core);
        let mut after = |event| {
            core.handle(Time::default(), event, &mut Vec::new());
            published.publish(&core);
            published.get()
        };
        let syncing = Stance {
            generation: Generation(7),
            is_alone: false,
            guards_output: false,
            contests: false,
        };
        assert_eq!(after(PrimaryEvent::Heard), syncing);
        assert_eq!(after(PrimaryEvent::Captured), Stance { guards_output: true, ..syncing });
        after(PrimaryEvent::Acknowledged(Epoch(1)));
        let contesting = Stance { guards_output: true, contests: true, ..syncing };
        assert_eq!(after(PrimaryEvent::PeerGone("it hung up".into())), contesting);
        let alone = Stance { generation: Generation(8), is_alone: true, ..syncing };
        let granted = PrimaryEvent::Verdict(Verdict::Granted(Generation(8)));
        assert_eq!(after(granted), alone);
    }
}
