//! Seeds become schedules of failures for the protocol core.
//!
//! The code that decides about output commit and ownership (`understudy-protocol`,
//! the same that the daemon runs) is driven through a world of virtual time: two
//! or three hosts, an arbiter, connections between them. One seed decides what
//! fails, and when; the same seed gives the same story, to be read with its
//! trace.
//!
//! | module | is |
//! |---|---|
//! | [`schedule`] | a seed becomes a list of faults |
//! | [`world`], [`queue`], [`settle`] | virtual time and events; what must hold in the end |
//! | [`faults`], [`lasting`], [`operator`] | what fails; what operators and hosts do about it |
//! | [`primary`], [`capture`], [`outbox`], [`backup`], [`errands`], [`repair`] | the drivers: what the daemon does around the core |
//! | [`messages`] | what arrives finds the part that it is for |
//! | [`network`], [`paths`], [`arbiter`], [`host`], [`guest`], [`running`] | the parts of the world |
//! | [`oracle`], [`checks`], [`records`], [`loss`] | the truth, and the invariants against it |
//! | [`groups`] | another world beside this one: a group of several VMs |
//! | [`snapshots`] | and another world beside this one: a cluster that is snapshotted and restored |
//! | [`mutant`] | planted bugs, which the checks must find |
//! | [`coverage`], [`trace`] | what was reached, and the story of one seed |

mod arbiter;
mod backup;
mod capture;
mod checks;
mod coverage;
mod errands;
mod faults;
mod groups;
mod guest;
mod hand_back;
mod host;
mod lasting;
mod lease;
mod lockstep;
mod loss;
mod messages;
mod mutant;
mod network;
mod operator;
mod oracle;
mod outbox;
mod paths;
mod primary;
mod queue;
mod random;
mod records;
mod repair;
mod running;
mod schedule;
mod settle;
mod shrink;
mod snapshots;
mod sweep;
mod trace;
mod turn;
mod world;

pub use coverage::Coverage;
pub use mutant::{CoreMutant, DriverMutant, Mutant};
pub use schedule::TENTH_APART;
pub use shrink::{Shrunk, shrink};
pub use sweep::{
    Failure, Found, Mutants, Report, Story, force_with_clocks, replay, simulate,
    simulate_with_timeout,
};
