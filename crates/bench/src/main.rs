//! Understudy's laboratory: tries the product out on one machine.
//!
//! A program of its own (`docs/decisions/016-laboratory.md`): it starts daemons of the program
//! `understudy`, kills, cuts off and measures them, and asks them by their API.
//!
//! | module       | is |
//! |--------------|----|
//! | [`cli`]      | the grammar of the command line |
//! | [`parts`]    | where the product and the test guest are found |
//! | [`demo`]     | a host dies, and its guest's connection lives on |
//! | [`chaos`]    | failures at random, every promise checked |
//! | [`simulate`] | schedules of simulated failures |
//! | [`bench`]    | measurements |

mod bench;
mod chaos;
mod cli;
mod demo;
mod parts;
mod simulate;

use clap::{CommandFactory, Parser};
use cli::{Cli, Command};
use std::process::ExitCode;
use understudy_client::{Exit, Failure, manual, output, usage};

/// Filter for what is logged unless the user says otherwise.
const DEFAULT_LOG: &str = "warn";

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    output::start_log(cli.output.log.as_deref(), DEFAULT_LOG);
    match run(&cli) {
        Ok(exit) => exit.into(),
        Err(failure) => failure.report(env!("CARGO_BIN_NAME"), cli.output.json),
    }
}

/// Does what the command line says.
fn run(cli: &Cli) -> Result<Exit, Failure> {
    let json = cli.output.json;
    match &cli.command {
        Command::Demo(args) => demo::run(args, json),
        Command::Chaos(args) => chaos::run(args, json),
        Command::Simulate(args) => simulate::run(args, json),
        Command::Bench(args) => bench::run(args, json),
        Command::Manual(command) => manual::run(Cli::command(), command),
    }
}
