//! The plan of how much of each member's working set to load before its start, so that the members
//! are ready in the order in which they start (HotRestore, restore line).
//!
//! A member that is loaded and must wait for another one wastes the wait; one that is late
//! makes the others speak into the void. Both are avoided by loading a little more of one and a
//! little less of the other: a linear program finds the sizes that move the wanted ones least.

use crate::graph::StartOrder;
use crate::{Member, UNIT_BYTES};
use good_lp::{
    Constraint, Expression, ProblemVariables, Solution, SolverModel, Variable, constraint, microlp,
    variable,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The cost of waiting, where that of a page moved is one: a second in which a loaded member waits
/// costs what could have been loaded in it, so many times: rather move than wait.
const WAITING: f64 = 8.0;

/// The load of a member, as it is known before its restore.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Pages that should be loaded before its start: half of its working set, say.
    pub wanted: u64,
    /// The fewest that it may be started with.
    pub least: u64,
    /// The most that may be loaded before its start.
    pub most: u64,
    /// Bytes a second that its host loads for it from the store.
    pub bytes_per_second: u64,
    /// Time that its start takes beside: the QEMU, the device state.
    pub beside: Duration,
}

/// The plan of what to load before each start, and when that is expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The pages of each member's queue to load before it starts.
    pub pages: Vec<u64>,
    /// The time at which each member is expected to be loaded.
    pub loaded: Vec<Duration>,
    /// The time at which each member is expected to start: members of a ring at the same time, and
    /// none before those that it starts after.
    pub start: Vec<Duration>,
}

/// The reason why there is no plan. The wanted sizes will do then: the order of starts is kept by
/// the protocol of the restore, only with longer waits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlan {
    /// A member's figures contradict each other.
    #[error("member {0} should load between {1} and {2} pages at {3} bytes a second: impossible")]
    Figures(u16, u64, u64, u64),
    /// The solver failed.
    #[error("the linear program could not be solved: {0}")]
    Solver(String),
}

impl Plan {
    /// Pages as wanted, starts as the order allows: what is done without a linear program.
    pub fn unmoved(order: &StartOrder, loads: &[Load]) -> Plan {
        let pages = loads.iter().map(|load| load.wanted.clamp(load.least, load.most)).collect();
        Plan::timed(order, loads, pages)
    }

    /// The plan that moves the wanted sizes least. A member starts at most `gap` after one that
    /// it starts after, where the bounds allow it: so long the other one may speak to it in vain.
    ///
    /// # Panics
    /// If there is not one load for each member of the order.
    pub fn moved(order: &StartOrder, loads: &[Load], gap: Duration) -> Result<Plan, NoPlan> {
        assert_eq!(loads.len(), order.members(), "a load for each member");
        for (member, load) in loads.iter().enumerate() {
            if load.least > load.most || load.bytes_per_second == 0 {
                let (least, most) = (load.least, load.most);
                return Err(NoPlan::Figures(member as u16, least, most, load.bytes_per_second));
            }
        }
        let pages = Program::new(order, loads, gap).solve()?;
        Ok(Plan::timed(order, loads, pages))
    }

    fn timed(order: &StartOrder, loads: &[Load], pages: Vec<u64>) -> Plan {
        let loaded: Vec<Duration> =
            loads.iter().zip(&pages).map(|(load, &pages)| load.time(pages)).collect();
        let mut starts = Vec::<Duration>::new();
        for ring in order.rings() {
            let own = ring.members.iter().map(|member| loaded[member.index()]);
            let earlier = ring.after.iter().map(|&earlier| starts[earlier]);
            starts.push(own.chain(earlier).max().unwrap_or_default());
        }
        let start = (0..loads.len()).map(|at| starts[order.ring(Member(at as u16))]).collect();
        Plan { pages, loaded, start }
    }
}

impl Load {
    /// The time that it takes to load so many pages.
    fn time(&self, pages: u64) -> Duration {
        let bytes = pages as f64 * UNIT_BYTES as f64;
        self.beside + Duration::from_secs_f64(bytes / self.bytes_per_second.max(1) as f64)
    }

    fn pages_per_second(&self) -> f64 {
        self.bytes_per_second as f64 / UNIT_BYTES as f64
    }
}

/// The linear program. Times are in seconds, sizes in thousands of pages, so that the
/// solver's numbers are of one order.
struct Program {
    variables: ProblemVariables,
    cost: Expression,
    constraints: Vec<Constraint>,
    sizes: Vec<Variable>,
    bounds: Vec<(u64, u64)>,
}

const PAGES: f64 = 1000.0;

impl Program {
    fn new(order: &StartOrder, loads: &[Load], gap: Duration) -> Program {
        let mut program = Program {
            variables: ProblemVariables::new(),
            cost: Expression::from(0.0),
            constraints: Vec::new(),
            sizes: Vec::new(),
            bounds: loads.iter().map(|load| (load.least, load.most)).collect(),
        };
        let starts: Vec<Variable> =
            order.rings().iter().map(|_| program.variables.add(variable().min(0.0))).collect();
        for (member, load) in loads.iter().enumerate() {
            program.member(load, starts[order.ring(Member(member as u16))]);
        }
        let slowest = loads.iter().map(Load::pages_per_second).fold(f64::INFINITY, f64::min);
        let mut pairs = BTreeMap::new();
        for (then, ring) in order.rings().iter().enumerate() {
            pairs.extend(ring.after.iter().map(|&first| ((first, then), ())));
        }
        for (first, then) in pairs.into_keys() {
            program.pair(starts[first], starts[then], gap, WAITING * slowest / PAGES);
        }
        program
    }

    /// A member is loaded before its ring starts; to wait for the ring costs.
    fn member(&mut self, load: &Load, start: Variable) {
        let thousands = |pages: u64| pages as f64 / PAGES;
        let size = variable().min(thousands(load.least)).max(thousands(load.most));
        let size = self.variables.add(size);
        let [more, less, wait] = [(); 3].map(|()| self.variables.add(variable().min(0.0)));
        let rate = load.pages_per_second() / PAGES;
        self.constraints.push(constraint!(size - more + less == thousands(load.wanted)));
        let loaded = Expression::from(size) / rate + load.beside.as_secs_f64();
        self.constraints.push(constraint!(start - wait == loaded));
        self.cost += Expression::from(more) + less + WAITING * rate * wait;
        self.sizes.push(size);
    }

    /// Has one ring start no later than another, and not much earlier.
    fn pair(&mut self, first: Variable, then: Variable, gap: Duration, cost: f64) {
        let excess = self.variables.add(variable().min(0.0));
        self.constraints.push(constraint!(first <= then));
        self.constraints.push(constraint!(then - first - excess <= gap.as_secs_f64()));
        self.cost += cost * excess;
    }

    fn solve(self) -> Result<Vec<u64>, NoPlan> {
        let model = self.variables.minimise(self.cost).using(microlp);
        let solution = model.with_all(self.constraints).solve();
        let solution = solution.map_err(|error| NoPlan::Solver(error.to_string()))?;
        let rounded = |(size, (least, most)): (Variable, (u64, u64))| {
            let pages = (solution.value(size) * PAGES).round();
            (pages.max(0.0) as u64).clamp(least, most)
        };
        Ok(self.sizes.into_iter().zip(self.bounds).map(rounded).collect())
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
