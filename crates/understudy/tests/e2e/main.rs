//! End to end: real daemons, real QEMUs, real guests, one failure after the
//! other, on the laboratory of `understudy-lab`.
//!
//! Needs root, the agent library beside the binary, and the guests of
//! `make guests`; `make test` sees to all of it. One test runs at a time, since
//! each has two hosts' worth of work.
//!
//! | module      | shows |
//! |-------------|-------|
//! | [`stage`]   | how a test begins and ends, and what it always checks |
//! | [`deaths`]  | every way in which a host, a daemon or a QEMU can die |

mod deaths;
mod stage;
