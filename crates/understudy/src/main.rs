//! Understudy: a virtual machine survives the death of its host.
//!
//! One binary: the daemon (`understudy host`) and the command line that talks
//! to it.
//!
//! | module       | is |
//! |--------------|----|
//! | [`cli`]      | the grammar of the command line |
//! | [`commands`] | what each subcommand does |
//! | [`api`]      | the daemon's HTTP API |
//! | [`door`]     | how it is reached over the network |
//! | [`socket`]   | the unix socket it listens on |
//! | [`service_manager`] | what systemd is told |
//! | [`doctor`]   | checks of this machine |
//! | [`table`]    | what the user sees |

mod api;
mod cli;
mod commands;
mod doctor;
mod door;
mod metrics;
mod service_manager;
mod socket;
mod table;

use clap::Parser;
use cli::Cli;
use std::process::ExitCode;
use understudy_client::{output, usage};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    output::start_log(cli.output.log.as_deref(), cli.default_log());
    match commands::run(&cli) {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report(env!("CARGO_BIN_NAME"), cli.output.json),
    }
}
