use super::*;
use proptest::prelude::*;

fn crossing(from: u16, to: u16, data: u32, acknowledgements: u32, others: u32) -> Crossing {
    Crossing { from: Member(from), to: Member(to), data, acknowledgements, others }
}

fn members(ring: &Ring) -> Vec<u16> {
    ring.members.iter().map(|member| member.0).collect()
}

#[test]
fn who_gets_data_starts_before_who_sends_it() {
    // Data 0 -> 1; data 1 -> 2 whose acknowledgement is under way.
    let order = StartOrder::new(4, &[crossing(0, 1, 1, 0, 0), crossing(2, 1, 0, 3, 0)]);
    let starts: Vec<_> = order.rings().iter().map(members).collect();
    let at = |member: u16| starts.iter().position(|ring| *ring == [member]).unwrap();
    assert!(at(2) < at(1) && at(1) < at(0), "{starts:?}");
    assert_eq!(order.pairs().count(), 2);
}

#[test]
fn members_with_data_both_ways_or_around_start_together() {
    let around = [(0, 1), (1, 2), (2, 0), (2, 3)];
    let order = StartOrder::new(5, &around.map(|(from, to)| crossing(from, to, 1, 0, 0)));
    let ring = &order.rings()[order.ring(Member(0))];
    assert_eq!(members(ring), [0, 1, 2]);
    assert_eq!(ring.after, BTreeSet::from([order.ring(Member(3))]));
    assert_eq!(members(&order.rings()[order.ring(Member(4))]), [4]);
}

#[test]
fn what_has_no_timer_asks_for_no_order() {
    let order = StartOrder::new(2, &[crossing(0, 1, 0, 0, 9), crossing(1, 1, 4, 4, 0)]);
    assert_eq!(order.pairs().count(), 0);
    assert_eq!(order, StartOrder::none(2));
}

/// Reachability, by brute force.
fn reach(count: usize, edges: &[(usize, usize)]) -> Vec<Vec<bool>> {
    let mut reach = vec![vec![false; count]; count];
    edges.iter().for_each(|&(from, to)| reach[from][to] = true);
    for middle in 0..count {
        for from in 0..count {
            for to in 0..count {
                reach[from][to] |= reach[from][middle] && reach[middle][to];
            }
        }
    }
    reach
}

proptest! {
    #[test]
    fn rings_are_what_reaches_each_other_and_come_in_order(
        edges in proptest::collection::vec((0..9usize, 0..9usize, any::<bool>()), 0..20),
    ) {
        let crossings: Vec<_> = edges.iter().map(|&(from, to, data)| {
            crossing(from as u16, to as u16, u32::from(data), u32::from(!data), 1)
        }).collect();
        let order = StartOrder::new(9, &crossings);
        // First starts no later than second.
        let first_then: Vec<_> = edges.iter()
            .map(|&(from, to, data)| if data { (to, from) } else { (from, to) }).collect();
        let reach = reach(9, &first_then);
        for (a, reached) in reach.iter().enumerate() {
            for (b, &earlier) in reached.iter().enumerate() {
                let (ring_a, ring_b) = (order.ring(Member(a as u16)), order.ring(Member(b as u16)));
                prop_assert_eq!(ring_a == ring_b, a == b || (earlier && reach[b][a]));
                prop_assert!(!earlier || ring_a <= ring_b);
            }
        }
        for (at, ring) in order.rings().iter().enumerate() {
            prop_assert!(ring.after.iter().all(|&earlier| earlier < at));
        }
    }
}
