//! What each subcommand does: one module per group.

mod cluster;
mod console;
mod doctor;
mod events;
mod host;
mod import;
mod lockstep;
mod pki;
mod protect;
mod questions;
mod recover;
mod relay;
mod setup;
mod status;
mod top;
mod vm;
mod watchdog;

use crate::cli::{Cli, Command};
use clap::CommandFactory;
use understudy_client::{Client, Exit, Failure, manual};

/// Does what the command line says.
pub fn run(cli: &Cli) -> Result<Exit, Failure> {
    let (client, json) = (|| Client::new(&cli.socket), cli.output.json);
    match &cli.command {
        Command::Host { config } => host::run(config),
        Command::Init(args) => setup::init(args, json),
        Command::Invite(args) => setup::invite(args, json),
        Command::Join(args) => setup::join(args, json),
        Command::Custodian => understudy_daemon::custody::run()
            .map(|()| Exit::Ok)
            .map_err(|error| Failure::internal(format!("the custodian: {error:#}"))),
        Command::Manual(command) => manual::run(Cli::command(), command),
        Command::Vm(command) => vm::run(&client()?, command, json),
        Command::Protect(args) => protect::protect(&client()?, args, json),
        Command::Unprotect { vm } => protect::unprotect(&client()?, vm, json),
        Command::Failover { vm } => protect::failover(&client()?, vm, json),
        Command::Lockstep(command) => lockstep::run(&client()?, command, json),
        Command::Recover(args) => recover::run(&client()?, args, json),
        Command::Status { vm } => status::run(&client()?, vm.as_deref(), json),
        Command::Top => top::run(&client()?, json),
        Command::Events(args) => events::run(&client()?, args, json),
        Command::Cluster(command) => cluster::run(&client()?, command, json),
        Command::Pki(command) => pki::run(command, json),
        Command::SnapshotKey { file } => pki::snapshot_key(file, json),
        Command::Doctor { config } => doctor::run(config.as_deref(), json),
    }
}
