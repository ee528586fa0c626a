//! The benchmark suite as a user runs it, on the guest of `make bench-guest`.

mod fixture;

use fixture::{laboratory, patient};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Output that it printed: the report, and what it said meanwhile.
fn latency(output: &Path) -> (Value, String) {
    let done = patient(&["bench", "--json", "--quick", "--only", "latency", "--runs", "1"])
        .args(["--variants", "unprotected,adaptive", "--output"])
        .arg(output)
        .output()
        .unwrap();
    let story = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{story}");
    (serde_json::from_slice(&done.stdout).unwrap(), story)
}

/// Regression: it began, and then failed each of its measurements by itself, two for each workload.
#[test]
fn without_its_guest_it_fails_once_and_says_how_to_build_it() {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let built = std::env::var_os("UNDERSTUDY_GUEST").map_or(built, Into::into);
    let folder = tempfile::tempdir().unwrap();
    for file in ["vmlinuz", "initrd.gz", "disk.img", "disk2.img", "boot-sector.img"] {
        std::os::unix::fs::symlink(built.join(file), folder.path().join(file)).unwrap();
    }
    for command in [&["bench"][..], &["bench", "lockstep"]] {
        let done = laboratory(command)
            .arg("--guest")
            .arg(folder.path())
            .current_dir(folder.path())
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(4), "{command:?}: {words}");
        assert_eq!(words.lines().count(), 1, "{command:?}: {words}");
        assert!(words.contains("`make bench-guest`"), "{command:?}: {words}");
    }
}

#[test]
#[ignore = "long: `make test-long`, which builds the bench guest"]
fn latency_is_measured_in_two_variants_and_not_again() {
    let folder = tempfile::tempdir().unwrap();
    let (report, story) = latency(folder.path());
    let cells = &report["workloads"]["latency"];
    let field = |variant: &str, field: &str| cells[variant][field].as_f64();
    for variant in ["unprotected", "adaptive"] {
        assert_eq!(cells[variant]["runs"], 1, "{report}\n{story}");
        assert!(field(variant, "median").unwrap() > 0.0, "{report}");
        assert_eq!(cells[variant]["unit"], "ms");
    }
    assert_eq!(field("unprotected", "ratio"), Some(1.0));
    assert!(field("adaptive", "ratio").is_some(), "{report}");
    // It was protected, and the other one was not.
    assert!(field("adaptive", "checkpoints_per_s").unwrap() > 0.0, "{report}");
    assert!(field("adaptive", "replication_mbit_s").unwrap() > 0.0, "{report}");
    assert_eq!(field("unprotected", "checkpoints_per_s"), None);
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("<tr><td>latency<td>") && page.contains("<svg"));

    let (again, story) = latency(folder.path());
    assert_eq!(again, report, "everything was there already:\n{story}");
    assert!(story.contains("2 measurements"), "{story}");
}

#[test]
#[ignore = "long: `make test-long`, which builds the bench guest"]
fn lockstep_is_measured_beside_counted_instructions() {
    let done = patient(&["bench", "lockstep", "--json", "--quick", "--only", "cpu,disk_reads"])
        .args(["--variants", "icount,lockstep,lockstep-log"])
        .output()
        .unwrap();
    let story = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{story}");
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["errors"].as_array().map(Vec::len), Some(0), "{report}");
    let cpu = &report["workloads"]["cpu"];
    for field in ["ratio", "log_mbit_s", "lag_ms_p50", "lag_ms_p99"] {
        assert!(cpu[field].is_number(), "{field}: {report}\n{story}");
    }
    for variant in ["icount", "lockstep"] {
        assert!(cpu["variants"][variant]["median"].as_f64() > Some(0.0), "{report}");
    }
    // What was read is in the log, or it is not.
    let reads = &report["disk_reads"]["variants"];
    let log = |variant: &str| reads[variant]["log_mbit_s"].as_f64().unwrap();
    assert!(log("lockstep-log") > 10.0 * log("lockstep"), "{report}");
    assert!(reads["icount"]["log_mbit_s"].is_null(), "{report}");
}
