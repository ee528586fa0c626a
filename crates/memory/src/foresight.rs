//! Which pages are not worth copying before the pause.
//!
//! A page that the guest writes again between its copy in a round of pre-copy and the pause was
//! copied, encoded, sent and applied for nothing. Many are written in every epoch, without rest:
//! stacks, run queues, the ends of logs. What was written again in the last checkpoint is left for
//! the pause in the next one, where it is copied whether it was written again or not.

use crate::DirtySet;

/// Foresees, from one checkpoint to the next.
#[derive(Debug, Default)]
pub struct Foresight {
    /// Written again in the last checkpoint.
    again: DirtySet,
    /// What the rounds of this one have found.
    found: DirtySet,
    /// Of it, what was left for the pause.
    owed: DirtySet,
    /// Room.
    part: DirtySet,
    rest: DirtySet,
}

impl Foresight {
    /// A round has found `dirty`, which is to be copied now: leaves for the pause what the guest will
    /// write again.
    pub fn leave_out(&mut self, dirty: &mut DirtySet) {
        dirty.tidy();
        self.found.append(dirty);
        dirty.divide(&self.again, &mut self.part, &mut self.rest);
        self.owed.append(&self.part);
        std::mem::swap(dirty, &mut self.rest);
    }

    /// The pause has found `dirty`: adds what is owed to it, and learns.
    pub fn settle(&mut self, dirty: &mut DirtySet) {
        self.found.tidy();
        dirty.tidy();
        dirty.divide(&self.found, &mut self.again, &mut self.rest);
        dirty.append(&self.owed);
        dirty.tidy();
        (self.found.clear(), self.owed.clear());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAIN_MEMORY;
    use proptest::prelude::*;
    use understudy_protocol::{PageIndex, PageRun};

    fn set(pages: &[u64]) -> DirtySet {
        let mut set = DirtySet::new();
        let run = |&page: &u64| PageRun { block: MAIN_MEMORY, first: PageIndex(page), count: 1 };
        pages.iter().map(run).for_each(|run| set.push(run));
        set
    }

    fn pages(set: &DirtySet) -> Vec<u64> {
        set.runs().iter().flat_map(|run| run.first.0..run.first.0 + run.count).collect()
    }

    #[test]
    fn what_was_written_again_waits_for_the_pause_the_next_time() {
        let mut foresight = Foresight::default();
        let mut round = |found: &[u64], in_pause: &[u64]| {
            let (mut before, mut pause) = (set(found), set(in_pause));
            foresight.leave_out(&mut before);
            foresight.settle(&mut pause);
            (pages(&before), pages(&pause))
        };
        assert_eq!(round(&[1, 2, 3], &[2, 9]), (vec![1, 2, 3], vec![2, 9]));
        assert_eq!(round(&[1, 2, 3], &[2, 7]), (vec![1, 3], vec![2, 7]), "once");
        assert_eq!(round(&[1, 2, 3], &[7]), (vec![1, 3], vec![2, 7]), "whether it was or not");
        assert_eq!(round(&[1, 2, 3], &[]), (vec![1, 2, 3], vec![]));
    }

    const PAGES: usize = 12;

    proptest! {
        /// No written page is ever missed: behind each pause the copies are the guest's memory.
        #[test]
        fn copies_are_the_memory(
            checkpoints in proptest::collection::vec(
                (proptest::collection::vec(proptest::collection::vec(0..PAGES, 0..10), 0..4),
                 proptest::collection::vec(0..PAGES, 0..10)),
                1..12,
            ),
        ) {
            let (mut memory, mut copy) = ([0; PAGES], [0; PAGES]);
            let mut foresight = Foresight::default();
            let mut version = 0;
            let mut write = |memory: &mut [u64; PAGES], writes: &[usize]| {
                writes.iter().for_each(|&page| {
                    version += 1;
                    memory[page] = version;
                });
                let mut found: Vec<u64> = writes.iter().map(|&page| page as u64).collect();
                found.sort_unstable();
                found.dedup();
                set(&found)
            };
            let take = |memory: &[u64; PAGES], copy: &mut [u64; PAGES], dirty: &DirtySet| {
                pages(dirty).into_iter().for_each(|page| copy[page as usize] = memory[page as usize]);
            };
            for (rounds, last) in checkpoints {
                for writes in rounds {
                    let mut dirty = write(&mut memory, &writes);
                    foresight.leave_out(&mut dirty);
                    take(&memory, &mut copy, &dirty);
                }
                let mut dirty = write(&mut memory, &last);
                foresight.settle(&mut dirty);
                take(&memory, &mut copy, &dirty);
                prop_assert_eq!(memory, copy);
            }
        }
    }
}
