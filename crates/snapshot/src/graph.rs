//! The order in which members start (HotRestore, section 4: the restore dependency graph).
//!
//! If a member starts while a peer of its does not run yet, what it sends is lost: TCP doubles
//! its time-out with each segment that is not answered. The frames in flight across the cut say
//! who sends to whom at that moment, and on which side TCP's timer runs. The rules:
//!
//! 1. TCP data, or the beginning or end of a connection, in flight from *a* to *b*: *a*'s
//!    timer runs, so **b starts no later than a**. *b* finds the segment delivered, its answer
//!    waits for *a* and stops the timer at once.
//! 2. A bare acknowledgement in flight from *a* to *b*: *b* has sent data to *a*, its timer
//!    runs until it starts, then it sends more. So **a starts no later than b**: rule 1 from
//!    the view of the data.
//! 3. Frames in flight without a timer (UDP, ARP, …) ask for no order.
//! 4. Members that must each start no later than the other, directly or around a **ring**,
//!    start together.
//! 5. The order holds along chains: a ring starts when all rings before it have.
//! 6. Members between which nothing is in flight, in neither direction and over no chain, ask
//!    for no order.
//!
//! The paper's own six are these: a member that depends on nobody and is depended on comes
//! first (its rule 1); who depends on a member starts after it (2), and after all that it
//! depends on (3); members without a dependency between them are independent (4); a ring starts
//! at once (5); an orphan is free (6). Two things differ here. The paper takes every frame in
//! flight for a dependency of its sender, UDP included; here UDP asks for no order, and a bare
//! acknowledgement for the opposite one. And "after" is "no later than" here.
//!
//! When they start, as far as the order leaves that open: [`Line`](crate::Line).

use crate::Member;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Frames in flight from one member to another at the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossing {
    /// Sender.
    pub from: Member,
    /// Receiver after the restore.
    pub to: Member,
    /// TCP segments that wait for an acknowledgement.
    pub data: u32,
    /// TCP segments that only acknowledge.
    pub acknowledgements: u32,
    /// All others.
    pub others: u32,
}

/// The order in which the members of a group start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartOrder {
    rings: Vec<Ring>,
    /// The ring of each member.
    ring_of: Vec<usize>,
}

/// Members that start together; most rings have one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// The members.
    pub members: Vec<Member>,
    /// Rings that start before this one and that it is in direct touch with; each has a lower
    /// index.
    pub after: BTreeSet<usize>,
}

impl StartOrder {
    /// The order for so many members.
    ///
    /// # Panics
    /// If a crossing names a member that there is not.
    pub fn new(members: usize, crossings: &[Crossing]) -> StartOrder {
        let mut after = vec![BTreeSet::new(); members];
        for crossing in crossings.iter().filter(|crossing| crossing.from != crossing.to) {
            let (from, to) = (crossing.from.index(), crossing.to.index());
            if crossing.data > 0 {
                after[from].insert(to);
            }
            if crossing.acknowledgements > 0 {
                after[to].insert(from);
            }
        }
        let ring_of = Search::rings(&after);
        let count = ring_of.iter().max().map_or(0, |last| last + 1);
        let mut rings = vec![Ring::default(); count];
        for (member, earlier) in after.iter().enumerate() {
            let ring = ring_of[member];
            rings[ring].members.push(Member(member as u16));
            let others = earlier.iter().map(|&other| ring_of[other]);
            rings[ring].after.extend(others.filter(|&other| other != ring));
        }
        StartOrder { rings, ring_of }
    }

    /// No order at all: each member starts by itself.
    pub fn none(members: usize) -> StartOrder {
        StartOrder::new(members, &[])
    }

    /// The rings; what a ring starts after comes before it in this list.
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// The ring of a member.
    pub fn ring(&self, member: Member) -> usize {
        self.ring_of[member.index()]
    }

    /// The number of members.
    pub fn members(&self) -> usize {
        self.ring_of.len()
    }

    /// Pairs of members in direct touch: the first starts no later than the second.
    pub fn pairs(&self) -> impl Iterator<Item = (Member, Member)> + '_ {
        self.rings.iter().flat_map(move |ring| {
            let earlier = ring.after.iter().flat_map(|&other| &self.rings[other].members);
            earlier.flat_map(|&first| ring.members.iter().map(move |&then| (first, then)))
        })
    }
}

/// Tarjan's search for strongly connected components. They come out such that whatever a
/// component has edges to came before it.
struct Search<'a> {
    edges: &'a [BTreeSet<usize>],
    /// Order of discovery.
    found: Vec<Option<usize>>,
    stack: Vec<usize>,
    ring_of: Vec<Option<usize>>,
    discovered: usize,
    rings: usize,
}

impl Search<'_> {
    /// The index of the ring of each node.
    fn rings(edges: &[BTreeSet<usize>]) -> Vec<usize> {
        let nodes = edges.len();
        let mut search = Search {
            edges,
            found: vec![None; nodes],
            stack: Vec::new(),
            ring_of: vec![None; nodes],
            discovered: 0,
            rings: 0,
        };
        (0..nodes).for_each(|node| {
            if search.found[node].is_none() {
                search.visit(node);
            }
        });
        search.ring_of.into_iter().map(|ring| ring.expect("each node was visited")).collect()
    }

    /// Returns the earliest node that can be reached from here.
    fn visit(&mut self, node: usize) -> usize {
        let own = self.discovered;
        self.discovered += 1;
        let mut earliest = own;
        self.found[node] = Some(own);
        self.stack.push(node);
        for &next in &self.edges[node] {
            earliest = match self.found[next] {
                None => earliest.min(self.visit(next)),
                Some(order) if self.ring_of[next].is_none() => earliest.min(order),
                Some(_) => earliest,
            };
        }
        if earliest == own {
            while let Some(member) = self.stack.pop() {
                self.ring_of[member] = Some(self.rings);
                if member == node {
                    break;
                }
            }
            self.rings += 1;
        }
        earliest
    }
}

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
