//! Hosts and their deaths, with a stand-in for the daemon: a program of the
//! same command line that has one child, as the daemon has a QEMU.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use understudy_lab::{HostProcess, Lab, wait_for};

const LIMIT: Duration = Duration::from_secs(120);

/// Names the configuration file to the test's program when it is the daemon.
const CONFIG: &str = "LAB_TEST_CONFIG";

/// Work of the stand-in as `host --config FILE`.
fn daemon(config: &Path) {
    let config: toml::Table = fs::read_to_string(config).unwrap().parse().unwrap();
    let socket = Path::new(config["socket"].as_str().unwrap()).to_owned();
    let _ = fs::remove_file(&socket);
    let mut qemu = Command::new("sleep").arg("1000").spawn().unwrap();
    let vm = serde_json::json!({ "name": "vm", "qemu_pid": qemu.id(), "config": config });
    let status = serde_json::json!({ "vms": [vm, { "name": "no-qemu" }] });
    let status = status.to_string();
    eprintln!("the stand-in listens");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || qemu.wait());
    for connection in listener.incoming() {
        // Who only looks whether it listens has gone.
        let _ = answer(connection.unwrap(), &status);
    }
}

/// Answers one request, whatever it is, with the status.
fn answer(connection: UnixStream, status: &str) -> io::Result<()> {
    let mut request = BufReader::new(&connection).lines();
    while request.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let length = status.len();
    write!(&connection, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{status}")
}

/// The stand-in's program, in the laboratory's directory.
fn binary(lab: &Lab) -> PathBuf {
    let path = lab.directory().join("stand-in");
    let test = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\ncase $1 in\nhost) {CONFIG}=$3 exec '{}' --exact --nocapture {AS_DAEMON};;\n\
         *) echo \"unknown: $3\" >&2; exit 2;;\nesac\n",
        test.display()
    );
    write_program(&path, &script);
    path
}

/// Another process writes it: a program that is open for writing, even in the child that another
/// test's thread is about to start, cannot be executed.
fn write_program(path: &Path, script: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "755", "/dev/stdin"]).arg(path).stdin(Stdio::piped());
    let mut child = install.spawn().unwrap();
    child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "cannot write {}", path.display());
}

fn runs(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

fn qemu(host: &HostProcess) -> u64 {
    host.status("vm").unwrap()["qemu_pid"].as_u64().unwrap()
}

/// The test whose name the daemon's process is started with.
const AS_DAEMON: &str = "a_host_gets_its_configuration_and_answers";

#[test]
fn a_host_gets_its_configuration_and_answers() {
    if let Some(config) = std::env::var_os(CONFIG) {
        return daemon(Path::new(&config));
    }
    let lab = Lab::new(&["a", "b", "c"]).unwrap();
    let host = HostProcess::start(&lab, "b", &binary(&lab)).unwrap();
    let config = &host.status("vm").unwrap()["config"];
    assert_eq!(config["name"], "b");
    assert_eq!(config["listen"], "10.77.0.2:7700");
    assert_eq!(config["peers"]["a"], "10.77.0.1:7700");
    assert_eq!(config["peers"]["c"], "10.77.0.3:7700");
    assert_eq!(config["arbiter"]["kind"], "file");
    assert_eq!(config["arbiter"]["path"], lab.arbiter_directory().to_str().unwrap());
    assert!(host.namespace().processes().unwrap().contains(&host.pid()));
    assert!(host.diagnostics().contains("the stand-in listens"));
    assert!(lab.diagnostics().contains("the stand-in listens"));
    assert!(host.status("other").unwrap_err().to_string().contains("no VM `other`"));
    assert!(host.kill_qemu("no-qemu").unwrap_err().to_string().contains("no QEMU"));
    let error = host.call(["protect"]).unwrap_err().to_string();
    assert!(error.contains("`protect`") && error.contains("unknown: protect"), "{error}");
}

#[test]
fn a_host_dies_whole_and_starts_again() {
    let lab = Lab::new(&["a"]).unwrap();
    let binary = binary(&lab);
    let mut host = HostProcess::start(&lab, "a", &binary).unwrap();
    let qemu_pid = qemu(&host);
    assert!(runs(qemu_pid) && host.is_running());
    host.kill_everything().unwrap();
    assert!(!runs(qemu_pid) && !host.is_running());
    assert!(lab.leftovers().unwrap().is_empty(), "{}", lab.leftovers().unwrap());
    let again = HostProcess::start(&lab, "a", &binary).unwrap();
    assert!(runs(qemu(&again)));
    drop(again);
    assert!(lab.leftovers().unwrap().is_empty(), "{}", lab.leftovers().unwrap());
}

#[test]
fn parts_of_a_host_die_alone() {
    let lab = Lab::new(&["a", "b"]).unwrap();
    let binary = binary(&lab);
    let mut one = HostProcess::start(&lab, "a", &binary).unwrap();
    let one_qemu = qemu(&one);
    one.kill_qemu("vm").unwrap();
    assert!(!runs(one_qemu) && one.is_running());

    let mut other = HostProcess::start(&lab, "b", &binary).unwrap();
    let other_qemu = qemu(&other);
    other.kill_daemon().unwrap();
    assert!(!other.is_running() && runs(other_qemu));
    let left = lab.leftovers().unwrap().processes;
    assert!(left.iter().any(|process| process.starts_with(&format!("{other_qemu} "))), "{left:?}");
    other.kill_everything().unwrap();
    assert!(!runs(other_qemu));
}

#[test]
fn a_host_can_be_paused_resumed_and_asked_to_end() {
    let lab = Lab::new(&["a"]).unwrap();
    let mut host = HostProcess::start(&lab, "a", &binary(&lab)).unwrap();
    let stopped =
        |pid: u64| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ");
    let pids = [u64::from(host.pid()), qemu(&host)];
    host.pause().unwrap();
    let all = |expected: bool| Ok(pids.iter().all(|&pid| stopped(pid) == expected).then_some(()));
    wait_for("the host to stand still", LIMIT, || all(true)).unwrap();
    host.resume().unwrap();
    wait_for("the host to go on", LIMIT, || all(false)).unwrap();
    assert!(!host.terminate().unwrap().success(), "the stand-in dies of the signal");
    assert!(!host.is_running());
}

#[test]
fn a_daemon_that_ends_at_once_is_told_with_its_log() {
    let lab = Lab::new(&["a"]).unwrap();
    let path = lab.directory().join("broken");
    write_program(&path, "#!/bin/sh\necho 'no such bridge' >&2; exit 3\n");
    let error = HostProcess::start(&lab, "a", &path).err().expect("an error");
    let error = format!("{error:#}");
    assert!(error.contains("no such bridge") && error.contains("exit status: 3"), "{error}");
}
