//! The demo as a user runs it, on a real guest (`make guests`).

mod fixture;

use fixture::{PROGRAM, patient};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One at a time: each has two emulated guests.
fn alone() -> MutexGuard<'static, ()> {
    static DEMO: Mutex<()> = Mutex::new(());
    DEMO.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the demo to its end; nothing of it may be left.
fn demo(arguments: &[&str]) -> Output {
    let _alone = alone();
    let child = patient(&["demo", "--json", "--seconds", "1"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mark = format!("us{}-", child.id());
    let output = child.wait_with_output().unwrap();
    for directory in [Path::new("/run/netns"), &std::env::temp_dir()] {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let left: Vec<String> = names.filter(|name| name.starts_with(&mark)).collect();
        assert!(left.is_empty(), "left in {}: {left:?}", directory.display());
    }
    output
}

/// The result of a demo that must succeed.
fn outcome(arguments: &[&str]) -> Value {
    let output = demo(arguments);
    let story = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{story}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks what must be so however the host was lost.
fn check(outcome: &Value) {
    assert_eq!(outcome["connection_survived"], true, "{outcome}");
    assert_eq!(outcome["lost"], 0, "{outcome}");
    assert!(outcome["acked"].as_u64().unwrap() > 20, "{outcome}");
    assert!(outcome["checkpoints"].as_u64().unwrap() > 0, "{outcome}");
    assert!(outcome["bytes_sent"].as_u64().unwrap() > 0, "{outcome}");
    assert!(outcome["outage_ms"].as_f64().unwrap() > 0.0, "{outcome}");
    let pause = &outcome["pause_ms"];
    let [p50, p99, max] = ["p50", "p99", "max"].map(|name| pause[name].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p99 && p99 <= max, "{outcome}");
}

#[test]
fn a_guest_outlives_its_killed_host() {
    let outcome = outcome(&[]);
    check(&outcome);
    assert_eq!(outcome.as_object().unwrap().len(), 7, "{outcome}");
}

#[test]
fn a_host_that_was_cut_off_never_answers_beside_its_successor() {
    let outcome = outcome(&["--cut", "network"]);
    check(&outcome);
    assert_eq!(outcome["cut"], "network");
    assert_eq!(outcome["both_answered"], false);
}

#[test]
fn a_host_in_lockstep_that_was_cut_off_never_answers_beside_its_successor() {
    let outcome = outcome(&["--mode", "lockstep", "--cut", "network"]);
    check(&outcome);
    assert_eq!(outcome.as_object().unwrap().len(), 10, "{outcome}");
    let lockstep = &outcome["lockstep"];
    assert!(lockstep["lag_ms"].as_f64().unwrap() >= 0.0, "{outcome}");
    assert!(lockstep["log_mbit_s"].as_f64().unwrap() > 0.0, "{outcome}");
    assert_eq!(outcome["cut"], "network");
    assert_eq!(outcome["both_answered"], false);
}

#[test]
fn a_missing_guest_is_told_before_anything_is_built() {
    let output = demo(&["--guest", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(4));
    let error: Value = serde_json::from_slice(&output.stdout).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("/nonexistent") && message.contains("make guests"), "{message}");
}

/// Words of `demo` on what is missing where only this is installed, with this on the PATH.
fn refusal(program: &Path, path: &Path) -> String {
    let mut demo = Command::new(program);
    demo.arg("demo").current_dir(path).env("PATH", path).env_remove("UNDERSTUDY_GUEST");
    let output = demo.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_laboratory_outside_of_the_source_tree_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let [bin, elsewhere] = ["bin", "elsewhere"].map(|name| folder.path().join(name));
    for folder in [&bin, &elsewhere] {
        fs::create_dir(folder).unwrap();
    }
    let (program, product) = (bin.join("understudy-lab"), Path::new(PROGRAM));
    fs::copy(product, &program).unwrap();
    let words = refusal(&program, &elsewhere);
    let looked_at = bin.join("understudy");
    for word in [looked_at.to_str().unwrap(), "PATH", "package understudy"] {
        assert!(words.contains(word), "{word}: {words}");
    }
    assert_eq!(words.lines().count(), 1, "{words}");
    // The one of the PATH is taken, and named: it is not of this build.
    let product = elsewhere.join("understudy");
    symlink(Path::new(PROGRAM).with_file_name("understudy"), &product).unwrap();
    let words = refusal(&program, &elsewhere);
    for word in [product.to_str().unwrap(), "target/guest/vmlinuz", "`make guests`", "--guest DIR"]
    {
        assert!(words.contains(word), "{word}: {words}");
    }
    // The one beside it needs no word.
    fs::rename(&product, bin.join("understudy")).unwrap();
    let words = refusal(&program, &elsewhere);
    assert!(words.contains("`make guests`"), "{words}");
    assert_eq!(words.lines().count(), 1, "{words}");
}
