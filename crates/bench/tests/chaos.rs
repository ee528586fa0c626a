//! Chaos as a user runs it, on a real guest (`make guests`).

mod fixture;

use fixture::{laboratory, patient};
use serde_json::Value;
use std::process::Command;

/// Plays so many runs; every promise must have been kept in each.
fn chaos(begin: fn(&[&str]) -> Command, runs: u64, seed: u64) -> Value {
    let (runs_wanted, seed) = (runs.to_string(), seed.to_string());
    let mut command = begin(&["chaos", "--json", "--runs", &runs_wanted, "--seed", &seed]);
    let output = command.output().unwrap();
    let story = String::from_utf8_lossy(&output.stderr);
    let result = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{result}\n{story}");
    let report: Value = serde_json::from_str(&result).unwrap();
    assert_eq!(report["runs"], runs, "{report}");
    for count in ["missed", "lost", "inconsistent_fs", "double_live", "broken", "false_alarms"] {
        assert_eq!(report[count], 0, "{count}: {report}");
    }
    // A short absence may end in one, too.
    let count = |name: &str| report[name].as_u64().unwrap();
    assert!(count("takeovers") >= count("called_for"), "{report}");
    report
}

#[test]
fn a_few_failures_break_no_promise() {
    // Among them the death of a primary, so that there is an outage to report.
    let report = chaos(patient, 4, 3);
    assert!(report["called_for"].as_u64().unwrap() >= 2, "{report}");
    assert!(report["outage_ms"]["p50"].as_f64().unwrap() > 0.0, "{report}");
}

#[test]
#[ignore = "long: `make test-long`"]
fn two_hundred_failures_break_no_promise() {
    let report = chaos(laboratory, 200, 1000);
    assert!(report["called_for"].as_u64().unwrap() >= 50, "{report}");
}
