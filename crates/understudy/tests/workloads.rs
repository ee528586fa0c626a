//! Workloads of the suite on the bench guest (`make bench-guest`), while it is protected.

use serde_json::Value;
use std::process::{Command, Stdio};

/// One that only the console sees, one that goes through the network both ways.
const WORKLOADS: [&str; 2] = ["postmark", "upload"];

#[test]
fn workloads_run_on_a_protected_guest() {
    let output = Command::new(env!("CARGO_BIN_EXE_understudy"))
        .args(["bench", "workload", "--quick", "--protected", "--json"])
        .args(WORKLOADS)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (entry, name) in measured.as_array().unwrap().iter().zip(WORKLOADS) {
        assert_eq!((&entry["workload"], &entry["unit"]), (&name.into(), &"s".into()), "{entry}");
        assert!(entry["samples"][0]["value"].as_f64().unwrap() > 0.0, "{entry}");
    }
}
