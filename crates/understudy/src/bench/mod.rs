//! `understudy bench`: measures this machine, on real parts.
//!
//! | module    | is |
//! |-----------|----|
//! | [`pause`] | how long a checkpoint stops the guest, against the pages it wrote |
//! | `report`  | the result: medians, JSON, the table |
//! | `memory`  | how much memory the daemons hold |
//! | `machine` | what it was measured on |

mod machine;
mod memory;
pub mod pause;
mod report;
