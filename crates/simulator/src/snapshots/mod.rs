//! Snapshots of a running cluster and their restores, through schedules of failures.
//!
//! The product's own code decides (`understudy_snapshot`: [`Taker`](understudy_snapshot::Taker),
//! [`TakeCohort`](understudy_snapshot::TakeCohort), [`Gate`](understudy_snapshot::Gate),
//! [`Cut`](understudy_snapshot::Cut), [`Restorer`](understudy_snapshot::Restorer),
//! [`Cohort`](understudy_snapshot::Cohort), [`Former`](understudy_snapshot::Former),
//! [`Decision`](understudy_snapshot::Decision)); what is here does around it what the daemon does. A
//! seed plays one of these schedules beside one of a protected VM.
//!
//! | module | is |
//! |---|---|
//! | [`schedule`] | a seed becomes a list of faults |
//! | [`world`] | virtual time and events; hosts, VMs, store, arbiter |
//! | [`operator`] | who orders snapshots and restores, and stops and starts VMs meanwhile |
//! | [`wires`] | frames between members, orders and reports: late, lost, in order |
//! | [`take`], [`restore`], [`decided`] | a member's host and the coordinator: what the daemon does around the core |
//! | [`faults`] | what fails, and comes back |
//! | [`checks`] | the truth, and what must hold against it |

mod checks;
mod decided;
mod faults;
mod operator;
mod restore;
mod schedule;
mod take;
mod wires;
mod world;

pub(crate) use schedule::Schedule;
pub(crate) use world::World;
