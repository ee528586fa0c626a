//! A group of several VMs in checkpoint mode, under one [`Lead`](understudy_session::primary::Lead) and one
//! [`Standby`](understudy_session::backup::Standby), through schedules of failures: from its first epoch until
//! its protection has ended. A seed plays one of these schedules beside that of a VM that is protected by itself,
//! whose world has everything that does not depend on the number of members.
//!
//! | module | is |
//! |---|---|
//! | [`schedule`] | a seed becomes a list of faults |
//! | [`world`] | virtual time and events, connections, the arbiter, what fails |
//! | [`primary`], [`backup`] | what the daemon does around the reducers: a rendezvous, errands |
//! | [`checks`] | what must hold: all members or none, and nothing is let out too soon |

mod backup;
mod checks;
mod primary;
mod schedule;
mod world;

pub(crate) use schedule::Schedule;
pub(crate) use world::World;
