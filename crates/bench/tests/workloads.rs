//! Workloads of the suite on the bench guest (`make bench-guest`), while it is protected.

mod fixture;

use fixture::patient;
use serde_json::Value;

/// One that only the console sees, one that goes through the network both ways, and a database with
/// network clients.
#[test]
fn workloads_run_on_a_protected_guest() {
    measure(&[("postmark", "s"), ("upload", "s"), ("redis", "requests/s")]);
}

#[test]
#[ignore = "long: half a minute to make the tables under emulation; `make test-long`"]
fn a_database_with_tables_runs_on_a_protected_guest() {
    measure(&[("pgbench1", "transactions/s")]);
}

/// Measures workloads, each with its unit.
fn measure(workloads: &[(&str, &str)]) {
    let output = patient(&["bench", "workload", "--quick", "--protected", "--json"])
        .args(workloads.iter().map(|(name, _)| name))
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let measured: Value = serde_json::from_slice(&output.stdout).unwrap();
    let measured = measured.as_array().unwrap();
    assert_eq!(measured.len(), workloads.len());
    for (entry, (name, unit)) in measured.iter().zip(workloads) {
        assert_eq!(
            (entry["workload"].as_str(), entry["unit"].as_str()),
            (Some(*name), Some(*unit)),
            "{entry}"
        );
        let sample = &entry["samples"][0];
        assert!(sample["value"].as_f64().unwrap() > 0.0, "{entry}");
        let figures = sample["more"].as_array().unwrap();
        let figure = |name| figures.iter().find(|figure| figure["name"] == name).unwrap();
        // Both sides worked.
        for side in ["cpu_primary", "cpu_backup"] {
            assert!(figure(side)["value"].as_f64().unwrap() > 0.0, "{entry}");
        }
        if *unit != "s" {
            let [p50, p99] = ["p50", "p99"].map(|name| figure(name)["value"].as_f64().unwrap());
            assert!(0.0 < p50 && p50 <= p99, "{entry}");
        }
    }
}
