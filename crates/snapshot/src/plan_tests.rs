use super::*;
use crate::graph::Crossing;
use proptest::prelude::*;

const GAP: Duration = Duration::from_millis(50);

/// 10 000 pages a second.
fn load(wanted: u64) -> Load {
    Load {
        wanted,
        least: 0,
        most: 4 * wanted.max(1),
        bytes_per_second: 10_000 * UNIT_BYTES as u64,
        beside: Duration::ZERO,
    }
}

/// Data in flight from the first to the second of each pair.
fn order(members: usize, data: &[(u16, u16)]) -> StartOrder {
    let crossing = |&(from, to): &(u16, u16)| Crossing {
        from: Member(from),
        to: Member(to),
        data: 1,
        acknowledgements: 0,
        others: 0,
    };
    StartOrder::new(members, &data.iter().map(crossing).collect::<Vec<_>>())
}

#[test]
fn sizes_stay_as_wanted_where_nothing_is_in_flight() {
    let loads = [load(1000), load(5000), load(0)];
    let plan = Plan::moved(&order(3, &[]), &loads, GAP).unwrap();
    assert_eq!(plan.pages, [1000, 5000, 0]);
    assert_eq!(plan.start, plan.loaded);
    assert_eq!(plan.start[1], Duration::from_millis(500));
}

#[test]
fn a_ring_is_loaded_at_the_same_time() {
    let loads = [load(1000), load(3000), load(2000)];
    let plan = Plan::moved(&order(3, &[(0, 1), (1, 2), (2, 0)]), &loads, GAP).unwrap();
    // The median moves the sum least.
    assert_eq!(plan.pages, [2000, 2000, 2000]);
    assert_eq!(plan.start, plan.loaded);
}

#[test]
fn who_starts_later_loads_more_and_not_much_more() {
    // 1 gets 0's data: it starts first. As wanted it would be loaded 300 ms too late.
    let plan = Plan::moved(&order(2, &[(0, 1)]), &[load(2000), load(5000)], GAP).unwrap();
    let moved = plan.pages[0].abs_diff(2000) + plan.pages[1].abs_diff(5000);
    assert_eq!(moved, 3000, "{plan:?}");
    assert_eq!(plan.start[0], plan.start[1]);
    // The other way round they would start 300 ms apart; 50 are allowed.
    let plan = Plan::moved(&order(2, &[(1, 0)]), &[load(2000), load(5000)], GAP).unwrap();
    let moved = plan.pages[0].abs_diff(2000) + plan.pages[1].abs_diff(5000);
    assert_eq!((moved, plan.start[1] - plan.start[0]), (2500, GAP), "{plan:?}");
}

#[test]
fn what_the_bounds_forbid_is_waited_for() {
    let fixed = Load { least: 2000, most: 2000, ..load(2000) };
    let late = Load { least: 5000, ..load(5000) };
    let order = order(2, &[(0, 1)]);
    let plan = Plan::moved(&order, &[fixed, late], GAP).unwrap();
    assert_eq!(plan.pages, [2000, 5000]);
    assert_eq!(plan.start, [500, 500].map(Duration::from_millis));
    assert_eq!(plan, Plan::unmoved(&order, &[fixed, late]));
}

#[test]
fn impossible_figures_are_named() {
    let wrong = Load { least: 9, most: 3, ..load(5) };
    let told = Plan::moved(&order(2, &[]), &[load(1), wrong], GAP).unwrap_err().to_string();
    assert!(told.starts_with("member 1 should load between 9 and 3 pages"), "{told}");
    let stuck = Load { bytes_per_second: 0, ..load(5) };
    assert!(Plan::moved(&order(1, &[]), &[stuck], GAP).is_err());
}

proptest! {
    #[test]
    fn the_order_holds_the_bounds_hold_and_no_wait_is_longer_than_without_a_plan(
        sizes in proptest::collection::vec((0..40_000u64, 1..20u64, 0..300u64), 2..17),
        data in proptest::collection::vec((0..16u16, 0..16u16), 0..24),
    ) {
        let members = sizes.len();
        let inside = |&(from, to): &(u16, u16)| (from.max(to) as usize) < members;
        let order = order(members, &data.into_iter().filter(inside).collect::<Vec<_>>());
        let loads: Vec<Load> = sizes.iter().map(|&(wanted, rate, beside)| Load {
            wanted,
            least: wanted / 4,
            most: wanted * 4,
            bytes_per_second: rate * 10_000_000,
            beside: Duration::from_millis(beside),
        }).collect();
        let plan = Plan::moved(&order, &loads, GAP).unwrap();
        for (load, &pages) in loads.iter().zip(&plan.pages) {
            prop_assert!((load.least..=load.most).contains(&pages));
        }
        for (first, then) in order.pairs() {
            prop_assert!(plan.start[first.index()] <= plan.start[then.index()]);
        }
        let cost = |plan: &Plan| -> f64 {
            let wait = |at: usize| (plan.start[at] - plan.loaded[at]).as_secs_f64();
            let moved = |at: usize| plan.pages[at].abs_diff(loads[at].wanted) as f64;
            let of = |at: usize| moved(at) + WAITING * wait(at) * loads[at].pages_per_second();
            (0..members).map(of).sum()
        };
        let slowest = loads.iter().map(Load::pages_per_second).fold(f64::INFINITY, f64::min);
        let apart = |plan: &Plan| -> f64 {
            let rings = order.rings().iter();
            let pairs = rings.flat_map(|ring| ring.after.iter().map(move |&first| (first, ring)));
            pairs.map(|(first, ring)| {
                let start = |ring: &crate::graph::Ring| plan.start[ring.members[0].index()];
                let gap = start(ring) - start(&order.rings()[first]);
                WAITING * slowest * gap.saturating_sub(GAP).as_secs_f64()
            }).sum()
        };
        let unmoved = Plan::unmoved(&order, &loads);
        let (with, without) = (cost(&plan) + apart(&plan), cost(&unmoved) + apart(&unmoved));
        // Sizes are rounded to pages.
        prop_assert!(with <= without + 10.0 * members as f64 * WAITING, "{} {}", with, without);
    }
}
