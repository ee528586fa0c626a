//! Parts that the programs that talk to a daemon have in common: `understudy` and `understudy-lab`.
//!
//! | module       | is |
//! |--------------|----|
//! | `client`     | a daemon's API from the caller's side |
//! | `failure`    | how a command fails: words and exit code |
//! | `mode`       | replication modes, as the command line names them |
//! | [`output`]   | what goes to stdout, and the log on stderr |
//! | [`progress`] | how far a synchronisation has come |
//! | [`manual`]   | man pages and completions, made from a program's grammar |

mod client;
mod failure;
pub mod manual;
mod mode;
pub mod output;
pub mod progress;

pub use client::{Client, Credentials, HostUrl, LONGEST_WAIT, Subject};
pub use failure::{ErrorBody, Exit, Failure, FailureKind, usage};
pub use mode::ModeKind;
