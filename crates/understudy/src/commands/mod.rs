//! The work of each subcommand: one module per group.

mod cluster;
mod console;
mod doctor;
mod events;
mod host;
mod import;
mod keep;
pub mod lapse;
mod lockstep;
mod pki;
mod protect;
mod questions;
mod recover;
mod relay;
mod setup;
mod status;
mod top;
mod upgrade;
mod vm;
mod watchdog;

use crate::cli::{Cli, Command, VmCommand};
use clap::CommandFactory;
use understudy_client::{Client, Credentials, Exit, Failure, FailureKind, manual};
use understudy_daemon::keeper::view::Files;

/// A command that another host's API does not offer, but that means this one.
fn works_here_alone(command: &Command) -> Option<&'static str> {
    match command {
        Command::Host { .. } => Some("host"),
        Command::Init(_) => Some("init"),
        Command::Invite(_) => Some("invite"),
        Command::Join(_) => Some("join"),
        Command::Doctor { .. } => Some("doctor"),
        Command::Vm(VmCommand::Console { .. }) => Some("vm console"),
        _ => None,
    }
}

fn credentials(cli: &Cli) -> Result<Credentials, Failure> {
    let identity = match (&cli.cert, &cli.key) {
        (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
        (None, None) => None,
        _ => {
            let message = "--cert and --key belong together: a certificate, and its key";
            return Err(Failure::new(FailureKind::Usage, message));
        }
    };
    Ok(Credentials { ca: cli.ca.clone(), token_file: cli.token_file.clone(), identity })
}

/// Does what the command line says.
pub fn run(cli: &Cli) -> Result<Exit, Failure> {
    if let (Some(_), Some(what)) = (&cli.host, works_here_alone(&cli.command)) {
        let message = format!(
            "`understudy {what}` works on the host itself: run it there, without --host and \
             UNDERSTUDY_HOST"
        );
        return Err(Failure::new(FailureKind::Usage, message));
    }
    let json = cli.output.json;
    let client = || match &cli.host {
        None => Client::new(&cli.socket),
        Some(host) => Client::remote(host.clone(), &credentials(cli)?),
    };
    match &cli.command {
        Command::Host { config } => host::run(config),
        Command::Init(args) => setup::init(args, json),
        Command::Invite(args) => setup::invite(args, json),
        Command::Join(args) => setup::join(args, json),
        Command::Custodian => understudy_daemon::custody::run()
            .map(|()| Exit::Ok)
            .map_err(|error| Failure::internal(format!("the custodian: {error:#}"))),
        Command::Keep { config, agent, vm, group, order, disk, read } => {
            let files = Files { disks: disk.clone(), read: read.clone() };
            keep::run(config, agent, (vm, group.clone()), *order, &files)
        }
        Command::EndKeepers { config } => keep::end_all(config),
        Command::Manual(command) => manual::run(Cli::command(), command),
        Command::Vm(command) => vm::run(&client()?, command, json),
        Command::Protect(args) => protect::protect(&client()?, args, json),
        Command::Unprotect { vm } => protect::unprotect(&client()?, vm, json),
        Command::Failover { vm } => protect::failover(&client()?, vm, json),
        Command::Lockstep(command) => lockstep::run(&client()?, command, json),
        Command::Recover(args) => recover::run(&client()?, args, json),
        Command::Upgrade(args) => upgrade::run(&client()?, args, json),
        Command::Status { vm } => status::run(&client()?, vm.as_deref(), json),
        Command::Top => top::run(&client()?, json),
        Command::Events(args) => events::run(&client()?, args, json),
        Command::Cluster(command) => cluster::run(&client()?, command, json),
        Command::Pki(command) => pki::run(command, json),
        Command::SnapshotKey { file } => pki::snapshot_key(file, json),
        Command::Doctor { config } => doctor::run(config.as_deref(), json),
    }
}
