//! `understudy vm`: start, stop, list.

use super::{cluster, console, import};
use crate::cli::{Startable, VmCommand};
use crate::{output, table};
use serde_json::json;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use understudy_client::{Client, Exit, Failure, FailureKind, Subject};
use understudy_qemu::VmDefinition;
use understudy_report::ErrorKind;
use understudy_report::{MediumRequest, StartRequest};

/// Does one of them.
pub fn run(client: &Client, command: &VmCommand, json: bool) -> Result<Exit, Failure> {
    match command {
        VmCommand::Start { what, force, other_host_is_off } => {
            let request = StartRequest { force: *force, other_host_is_off: *other_host_is_off };
            start(client, what, request, json)
        }
        VmCommand::Import(args) => import::run(args, json),
        VmCommand::Show { name } => show(client, name, json),
        VmCommand::Medium { name, drive, file, eject: _, force } => {
            let medium = file.as_deref().map(absolute).transpose()?;
            let request = MediumRequest { drive: *drive, medium, force: *force };
            change_medium(client, name, &request, json)
        }
        VmCommand::Stop { name, force } => stop(client, name, *force, json),
        VmCommand::Snapshot { name, args } => {
            cluster::snapshot(client, &Subject::Vm(name.clone()), args, json)
        }
        VmCommand::Restore { which, args } => {
            let request = args.request(which.number, &[]);
            cluster::restore(client, &Subject::Vm(which.name.clone()), &request, json)
        }
        VmCommand::List => list(client, json),
        VmCommand::Console { name } => console::run(client, name),
    }
}

fn start(
    client: &Client,
    what: &Startable,
    request: StartRequest,
    json: bool,
) -> Result<Exit, Failure> {
    let status = match what {
        Startable::File(file) => {
            client.vm_start(&read_definition(file, client.is_local())?, request)?
        }
        Startable::Name(name) if request.force => {
            let message = format!(
                "--force is for the images of a definition's file; `understudy recover {name} --force` \
                 is for those that this host has on record"
            );
            return Err(Failure::new(FailureKind::Usage, message));
        }
        Startable::Name(name) => client.vm_start_recorded(name)?,
    };
    output::show(json, &status, |vm| {
        let slow = vm.slow.as_ref().map(|why| format!("slower than it could: {why}\n"));
        let before = vm.former_command.as_ref();
        let before = before.map(|command| format!("it was protected before: `{command}`\n"));
        let name = &vm.name;
        format!(
            "{name} runs, unprotected\n{}{}",
            before.unwrap_or_default(),
            slow.unwrap_or_default()
        )
    })?;
    Ok(Exit::Ok)
}

/// Files that it names are looked for only if they are this machine's.
fn read_definition(file: &Path, here: bool) -> Result<VmDefinition, Failure> {
    let text = fs::read_to_string(file).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Invalid,
        };
        Failure::new(FailureKind::Host(kind), format!("{}: {error}", file.display()))
    })?;
    let parse = if here { VmDefinition::from_toml } else { VmDefinition::from_toml_elsewhere };
    parse(&text, file)
        .map_err(|error| Failure::new(FailureKind::Host(ErrorKind::Invalid), error.to_string()))
}

fn show(client: &Client, name: &str, json: bool) -> Result<Exit, Failure> {
    let definition = client.definition(name)?;
    let text = toml::to_string(&definition)
        .map_err(|error| Failure::internal(format!("cannot write TOML: {error}")))?;
    output::show(json, &definition, |_| text)?;
    Ok(Exit::Ok)
}

fn change_medium(
    client: &Client,
    name: &str,
    request: &MediumRequest,
    json: bool,
) -> Result<Exit, Failure> {
    let status = client.change_medium(name, request)?;
    output::show(json, &status, |_| match &request.medium {
        Some(medium) => format!("disk{} of {name} has {} in it\n", request.drive, medium.display()),
        None => format!("disk{} of {name} is empty\n", request.drive),
    })?;
    Ok(Exit::Ok)
}

/// The daemon has another working directory.
fn absolute(file: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(file)
        .map_err(|error| Failure::internal(format!("{}: {error}", file.display())))
}

fn stop(client: &Client, name: &str, force: bool, json: bool) -> Result<Exit, Failure> {
    client.vm_stop(name, force)?;
    output::show(json, &json!({"name": name, "stopped": true}), |_| {
        format!("{name} is stopped\n")
    })?;
    Ok(Exit::Ok)
}

fn list(client: &Client, json: bool) -> Result<Exit, Failure> {
    output::show(json, &client.status()?.vms, |vms| table::vms(vms))?;
    Ok(Exit::Ok)
}
