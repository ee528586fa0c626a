//! The sans-I/O core: epochs, output commit, ownership, policies and the wire format.
//!
//! Nothing in this crate reads a clock, a file or a socket: the daemon and the
//! simulator drive the same code.

mod policy;
mod units;

pub use policy::Policy;
pub use units::*;
