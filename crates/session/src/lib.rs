//! One protected group, seen from either side: what its session decides beside the state machines
//! of `understudy_protocol`, which it owns. A reducer takes events and gives effects; it has no I/O,
//! clock, thread or lock. `understudy_replication` carries the effects out and says what happened;
//! the simulator does the same, with the same reducer.
//!
//! | module | is |
//! |---|---|
//! | [`backup`] | commit, apply, settle, go live, hand back, forget; whether it could take over |
//! | [`primary`] | whose word counts; who goes on with a sick guest; what is due |
//! | [`hand_back`] | what a winner says to the one that lost, and returns to it |

pub mod backup;
pub mod hand_back;
pub mod primary;

/// A member of a group, by its place in it.
pub type Place = usize;
