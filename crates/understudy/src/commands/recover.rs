//! `understudy recover`.

use crate::cli::RecoverArgs;
use std::fmt::Write;
use understudy_client::{Client, Exit, Failure, output};
use understudy_report::{RecoverReport, RecoverRequest};

/// Names a VM's valid images; starts it on them, unless told not to.
pub fn run(client: &Client, args: &RecoverArgs, json: bool) -> Result<Exit, Failure> {
    let request = RecoverRequest {
        dry_run: args.dry_run,
        force: args.force,
        other_host_is_off: args.other_host_is_off,
    };
    let report = client.recover(&args.vm, request)?;
    output::show(json, &report, describe)?;
    Ok(Exit::Ok)
}

fn describe(report: &RecoverReport) -> String {
    let vm = &report.vm;
    let mut text = match &report.valid {
        Some(valid) => {
            format!("the valid images of {vm} are host {}'s: {}\n", valid.host, report.reason)
        }
        None => format!("the valid images of {vm} cannot be told: {}\n", report.reason),
    };
    for image in report.valid.iter().flat_map(|valid| &valid.images) {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}", image.display());
    }
    text.push_str("what was found:\n");
    for line in &report.evidence {
        let _ = writeln!(text, "  {line}");
    }
    if report.status.is_some() {
        let _ = writeln!(text, "{vm} runs, unprotected");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::Generation;
    use understudy_protocol::literal;
    use understudy_report::ValidImages;

    #[test]
    fn the_valid_images_and_the_reason_are_told() {
        let valid = ValidImages {
            host: literal("b"),
            generation: Generation(2),
            images: vec!["/var/lib/understudy/db/disk0.img".into()],
        };
        let mut report = RecoverReport {
            vm: literal("db"),
            valid: Some(valid),
            reason: "host b ran it last".into(),
            evidence: vec!["host a: ran it at generation 1".into()],
            status: None,
        };
        let text = describe(&report);
        for words in ["host b's: host b ran it last", "  /var/lib/", "  host a: ran it"] {
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
        assert!(!text.contains("runs, unprotected"));
        report.valid = None;
        assert!(describe(&report).contains("cannot be told"));
    }
}
