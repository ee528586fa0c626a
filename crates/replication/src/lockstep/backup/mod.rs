//! The backup's side: what came is acknowledged, then executed.
//!
//! | thread | does | in |
//! |---|---|---|
//! | `receive` | takes batches in; they are acknowledged before they are executed | [`following`] |
//! | `feed` | gives QEMU the log, as it takes it | [`feed`](mod@feed) |
//! | `follow` | sees how far QEMU is, tells the primary, notices one that has diverged | [`watch`](mod@watch) |
//! | `reads` | answers disk reads that wait for their data | [`reads`] |
//! | `apply` | loads the machine, lets it follow; at the end of the log, goes live | [`replay`] |

mod feed;
mod following;
mod reads;
mod replay;
mod watch;

pub use feed::feed;
pub use following::Following;
pub use replay::{NoEnd, await_end, begin, start, stop};
pub use watch::watch;

use std::time::Duration;

/// Time between two looks at QEMU's progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
