//! `understudy cluster`, `vm snapshot` and `vm restore`.

use crate::cli::{ClusterCommand, SnapshotArgs};
use std::fmt::Write;
use understudy_client::{Client, Exit, Failure, FailureKind, Subject, output};
use understudy_report::cluster::{RestoreReport, RestoreRequest, SnapshotReport, VerifyReport};

/// Does one of them.
pub fn run(client: &Client, command: &ClusterCommand, json: bool) -> Result<Exit, Failure> {
    match command {
        ClusterCommand::Snapshot { name, args } => {
            snapshot(client, &Subject::Cluster(name.clone()), args, json)
        }
        ClusterCommand::Restore { which, onto, args } => {
            let request = args.request(which.number, onto);
            restore(client, &Subject::Cluster(which.name.clone()), &request, json)
        }
        ClusterCommand::Snapshots { name, store } => {
            let all = client.snapshots(name.as_deref(), store.as_deref())?;
            output::show(json, &all, |all| list(all))?;
            Ok(Exit::Ok)
        }
        ClusterCommand::Delete { which, store, force } => {
            let Some(number) = which.number else {
                let words = format!("which snapshot of {0}? Write for example {0}@3", which.name);
                return Err(Failure::new(FailureKind::Usage, words));
            };
            let report = client.delete_snapshot(&which.name, number, store.as_deref(), *force)?;
            output::show(json, &report, |report| {
                format!("snapshot {number} of {} is deleted; {}\n", report.group, report.chunks)
            })?;
            Ok(Exit::Ok)
        }
        ClusterCommand::Verify { which, store } => {
            let report = client.verify_snapshot(&which.name, which.number, store.as_deref())?;
            output::show(json, &report, verified)?;
            Ok(if report.problems.is_empty() { Exit::Ok } else { Exit::Error })
        }
    }
}

/// Takes a snapshot.
pub fn snapshot(
    client: &Client,
    what: &Subject,
    args: &SnapshotArgs,
    json: bool,
) -> Result<Exit, Failure> {
    let report = client.snapshot(what, &args.request())?;
    output::show(json, &report, |report| {
        format!("snapshot {} of {} is in {}\n", report.number, report.group, report.store)
    })?;
    Ok(Exit::Ok)
}

/// Restores one.
pub fn restore(
    client: &Client,
    what: &Subject,
    request: &RestoreRequest,
    json: bool,
) -> Result<Exit, Failure> {
    let report = client.restore(what, request)?;
    output::show(json, &report, restored)?;
    Ok(Exit::Ok)
}

fn list(all: &[SnapshotReport]) -> String {
    if all.is_empty() {
        return "no snapshots\n".to_owned();
    }
    let mut text = String::new();
    for one in all {
        let members: Vec<&str> = one.members.iter().map(|member| &*member.vm).collect();
        let what = match (&one.damage, &one.label) {
            (Some(damage), _) => format!("cannot be restored: {damage}"),
            (None, Some(label)) => format!("{}  {label}", members.join(" ")),
            (None, None) => members.join(" "),
        };
        let age = age(one.taken_at);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}@{:<5} {age:<14} {what}", one.group, one.number);
    }
    text
}

/// The age in words.
fn age(taken_at: u64) -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seconds = since.map_or(0, |now| now.as_secs()).saturating_sub(taken_at);
    match seconds {
        _ if taken_at == 0 => "?".to_owned(),
        0..60 => format!("{seconds} s ago"),
        60..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn restored(report: &RestoreReport) -> String {
    let mut text = format!("snapshot {} of {} is restored\n", report.number, report.group);
    for member in &report.members {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {} runs on host {}: loaded after {:.0} ms, started after {:.0} ms",
            member.vm, member.host, member.loaded_ms, member.started_ms
        );
    }
    if report.members.len() > 1 {
        let backoff = report.backoff_ms;
        let _ = writeln!(
            text,
            "  between starts: {:.0} ms on average, {:.0} ms at most",
            backoff.mean, backoff.max
        );
    }
    for warning in &report.warnings {
        let _ = writeln!(text, "  warning: {warning}");
    }
    text
}

fn verified(report: &VerifyReport) -> String {
    let VerifyReport { group, number, chunks, bytes, problems } = report;
    if problems.is_empty() {
        return format!(
            "snapshot {number} of {group} is whole: {chunks} chunks, {} MiB\n",
            bytes >> 20
        );
    }
    let mut text = format!("snapshot {number} of {group} cannot be restored:\n");
    for problem in problems {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {problem}");
    }
    text
}
