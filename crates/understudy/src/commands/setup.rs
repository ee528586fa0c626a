//! `understudy init`, `invite` and `join`.

use super::questions::Questions;
use crate::cli::{HostArgs, InitArgs, InvitationArgs, InviteArgs, JoinArgs, PeerAddress};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use understudy_client::{Exit, Failure, FailureKind, output};
use understudy_daemon::setup::{self, DIRECTORY, HOST_FILE, Invitation, Joined, Made, Plan};
use understudy_protocol::HostName;
use understudy_report::ErrorKind;

const SERVICE: &str = "understudy.service";

/// Sets the first host up, and invites the other one.
pub fn init(args: &InitArgs, json: bool) -> Result<Exit, Failure> {
    refuse_start_elsewhere(&args.host)?;
    let questions = Questions::of_terminal(json);
    let plan = plan(&args.host, &questions)?;
    let arbiter = match &args.arbiter {
        Some(arbiter) => arbiter.clone(),
        None => questions.ask(
            "arbiter: a directory that all hosts reach, or etcd's endpoints",
            None,
            "--arbiter",
        )?,
    };
    let made = setup::init(&plan, arbiter)?;
    say(json, &made, || describe(&made))?;
    // Whoever joins late, or never, keeps this host from nothing; its daemon hears of a new peer.
    let finished = finish(&args.host, json)?;
    if !args.alone {
        invite_from(&args.host.dir, &args.invitation, args.host.start, json)?;
    }
    Ok(finished)
}

/// Invites a host.
pub fn invite(args: &InviteArgs, json: bool) -> Result<Exit, Failure> {
    invite_from(&args.dir, &args.invitation, false, json)?;
    Ok(Exit::Ok)
}

/// Joins by a token.
pub fn join(args: &JoinArgs, json: bool) -> Result<Exit, Failure> {
    refuse_start_elsewhere(&args.host)?;
    let plan = plan(&args.host, &Questions::of_terminal(json))?;
    let membership = setup::join(&plan, &args.token)?;
    let words = || format!("{}peer  {}\n", describe(&membership.made), membership.invited_by);
    say(json, &membership, words)?;
    finish(&args.host, json)
}

fn invite_from(
    directory: &Path,
    args: &InvitationArgs,
    start: bool,
    json: bool,
) -> Result<(), Failure> {
    let invitation = Invitation::open(directory, args.listen, args.lifetime())?;
    let start = if start { " --start" } else { "" };
    let command = format!("understudy join{start} {}", invitation.token());
    let told = json!({ "join": command, "minutes": args.minutes });
    say(json, &told, || {
        format!(
            "\non the other host, within {} minutes (the token is a secret, and good once):\n\n  \
             {command}\n\n",
            args.minutes
        )
    })?;
    let joined = invitation.wait()?;
    say(json, &joined, || welcome(&joined))
}

fn welcome(joined: &Joined) -> String {
    let mut text = format!("{} has joined, and is in [peers] here\n", joined.name);
    if !joined.unknown_to.is_empty() {
        let names: Vec<&str> = joined.unknown_to.iter().map(HostName::as_str).collect();
        let (names, line) = (names.join(", "), &joined.line);
        text += &format!(
            "add it on {names}, too, to [peers] of their host.toml, in place of an older line:\n\n  {line}\n\n"
        );
    }
    text
}

fn plan(args: &HostArgs, questions: &Questions) -> Result<Plan, Failure> {
    let name = match &args.name {
        Some(name) => name.clone(),
        None => questions.ask("name of this host", setup::default_name(), "--name")?,
    };
    let address = match args.address {
        Some(address) => address,
        None => {
            let found = setup::default_address().map(PeerAddress::from);
            questions.ask("address for the other hosts", found, "--address")?
        }
    };
    let address = address.0;
    let directory = std::path::absolute(&args.dir)
        .map_err(|error| invalid(format!("{}: {error}", args.dir.display())))?;
    Ok(Plan { directory, name, address })
}

fn describe(made: &Made) -> String {
    let notes: String = made.notes.iter().map(|note| format!("note  {note}\n")).collect();
    let (name, address, config) = (&made.name, made.address, made.config.display());
    format!("host  {name}, at {address}\nconfiguration  {config}\n{notes}")
}

/// The service has one configuration.
fn refuse_start_elsewhere(args: &HostArgs) -> Result<(), Failure> {
    if !args.start || args.dir == Path::new(DIRECTORY) {
        return Ok(());
    }
    let message = format!(
        "--start goes with {DIRECTORY}, where {SERVICE} has its configuration: without it, start \
         `understudy host --config {}` yourself",
        args.dir.join(HOST_FILE).display()
    );
    Err(invalid(message))
}

fn finish(args: &HostArgs, json: bool) -> Result<Exit, Failure> {
    if !args.start {
        let next = match args.dir == Path::new(DIRECTORY) {
            true => format!("systemctl enable --now {SERVICE}"),
            false => format!("understudy host --config {}", args.dir.join(HOST_FILE).display()),
        };
        say(json, &json!({ "next": next }), || format!("now start the daemon:\n\n  {next}\n"))?;
        return Ok(Exit::Ok);
    }
    let started = Command::new("systemctl").args(["enable", "--now", "--quiet", SERVICE]).output();
    match started {
        Ok(output) if output.status.success() => {
            say(json, &json!({ "started": SERVICE }), || format!("{SERVICE} runs\n"))?;
            Ok(Exit::Ok)
        }
        Ok(output) => Err(invalid(format!(
            "this host is set up, but {SERVICE} does not start: {}; `journalctl -u {SERVICE}` says \
             why",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
        Err(error) => Err(invalid(format!(
            "this host is set up, but systemctl cannot be run ({error}): start `understudy host \
             --config {DIRECTORY}/{HOST_FILE}` yourself"
        ))),
    }
}

/// Says, with --json, a line for each thing that has happened: a reader need not wait for the last.
fn say(
    json: bool,
    value: &impl serde::Serialize,
    words: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if !json {
        return output::print(&words());
    }
    let line = serde_json::to_string(value)
        .map_err(|error| Failure::internal(format!("cannot write JSON: {error}")))?;
    output::print(&(line + "\n"))
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureKind::Host(ErrorKind::Invalid), message)
}
