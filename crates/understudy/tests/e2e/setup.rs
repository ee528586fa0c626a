//! `understudy init`, `invite` and `join`: hosts that nobody has written a configuration for protect
//! VMs to each other, and a running daemon learns of a new one.

use crate::stage::{LIMIT, options, refused, run};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use understudy_lab::{Lab, wait_for};

const BINARY: &str = env!("CARGO_BIN_EXE_understudy");

/// A busy machine is silent for longer than the shipped detector waits.
const PATIENT: &str = "detection = { timeout_ms = 3000, qemu_timeout_ms = 10000 }\n";

/// A host of the laboratory on which nothing is set up yet.
struct Site<'a> {
    lab: &'a Lab,
    name: &'static str,
}

/// A process that is ended with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It has ended already if the test went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Site<'_> {
    fn directory(&self) -> Result<PathBuf> {
        Ok(self.lab.host_directory(self.name)?.join("etc"))
    }

    fn socket(&self) -> Result<PathBuf> {
        Ok(self.lab.host_directory(self.name)?.join("api.sock"))
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = self.lab.host(self.name)?.command(BINARY);
        command.arg("--socket").arg(self.socket()?).args(arguments).stdin(Stdio::null());
        Ok(command)
    }

    /// A command about this host's own configuration.
    fn about(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = self.command(arguments)?;
        command.arg("--dir").arg(self.directory()?);
        Ok(command)
    }

    fn call(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments)?.output()?;
        ensure!(output.status.success(), "{}: {arguments:?}: {output:?}", self.name);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn join(&self, token: &str) -> Result<Output> {
        let address = self.lab.host_address(self.name)?.to_string();
        Ok(self.about(&["join", token, "--name", self.name, "--address", &address])?.output()?)
    }

    /// Starts a command that invites; returns it with the token that it prints.
    fn invite(&self, arguments: &[&str]) -> Result<(Process, String)> {
        let mut child = self.about(arguments)?.stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("no output")?;
        let child = Process(child);
        let mut said = String::new();
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            if let Some(token) = line.trim().strip_prefix("understudy join ") {
                return Ok((child, token.to_owned()));
            }
            said += &line;
        }
        anyhow::bail!("no command to join was printed: {said}")
    }

    /// Starts the daemon, with what a laboratory on one machine needs beside what was written.
    fn start(&self) -> Result<Process> {
        let (file, state) = (self.directory()?.join("host.toml"), self.directory()?.join("state"));
        let written = fs::read_to_string(&file)?;
        let own = format!("state_dir = {state:?}\nsocket = {:?}\n{PATIENT}", self.socket()?);
        fs::write(&file, own + &written)?;
        let log = fs::File::create(self.lab.host_directory(self.name)?.join("daemon.log"))?;
        let mut command = self.lab.host(self.name)?.command(BINARY);
        command.args(["host", "--config", &file.to_string_lossy()]);
        let daemon = Process(command.stdin(Stdio::null()).stderr(log).spawn()?);
        wait_for(&format!("{}'s daemon", self.name), LIMIT, || {
            Ok(self.command(&["status"])?.output()?.status.success().then_some(()))
        })?;
        Ok(daemon)
    }

    /// Starts a VM that needs nothing, and protects it.
    fn protect(&self, vm: &str, to: &str) -> Result<()> {
        let directory = self.directory()?;
        fs::copy(options().guest_files.join("boot-sector.img"), directory.join("disk.img"))?;
        let definition = directory.join("vm.toml");
        let text = format!(
            "name = \"{vm}\"\nmemory = \"64M\"\nvcpus = 1\n[[disk]]\npath = \"disk.img\"\n\
             format = \"raw\"\n"
        );
        fs::write(&definition, text)?;
        self.call(&["vm", "start", &definition.to_string_lossy()])?;
        self.call(&["protect", vm, "--to", to, "--no-wait"])?;
        wait_for(&format!("{vm} to be protected"), LIMIT, || {
            // Its exit code tells, too, whether it is.
            let output = self.command(&["status", vm, "--json"])?.output()?;
            let status: Value = serde_json::from_slice(&output.stdout)?;
            Ok((status["protection"]["state"] == "protected").then_some(()))
        })?;
        // A host that is set up this way has its VMs outlive its daemon.
        let status: Value = serde_json::from_str(&self.call(&["status", vm, "--json"])?)?;
        ensure!(status["keeper_pid"].is_u64(), "{vm} has no keeper: {status}");
        self.call(&["unprotect", vm])?;
        self.call(&["vm", "stop", vm, "--force"]).map(drop)
    }

    fn terminate(&self, mut daemon: Process) -> Result<()> {
        run("kill", &["-TERM", &daemon.0.id().to_string()])?;
        wait_for("the daemon to end", LIMIT, || Ok(daemon.0.try_wait()?)).map(drop)
    }
}

/// Waits for a command that invites; what it said, and whether it was content.
fn ended(mut child: Process) -> Result<bool> {
    wait_for("the invitation to end", LIMIT, || Ok(child.0.try_wait()?))
        .map(|status| status.success())
}

#[test]
fn hosts_join_by_one_command_and_protect_vms() -> Result<()> {
    let lab = Lab::new(&["a", "b", "c"])?;
    let [a, b, c] = ["a", "b", "c"].map(|name| Site { lab: &lab, name });
    let arbiter = lab.arbiter_directory().join("vms");
    let address = lab.host_address("a")?.to_string();
    let arguments =
        ["init", "--name", "a", "--address", &address, "--arbiter", &arbiter.to_string_lossy()];
    let (inviting, token) = a.invite(&arguments)?;
    let garbled = token.replacen('A', "B", 1) + "x";
    let (code, words) = refused(&b.join(&garbled)?, "join")?;
    ensure!(code == 2 && words.contains("copy the whole command"), "{code}: {words}");
    ensure!(!b.directory()?.exists(), "a refused token has left something");
    let joined = b.join(&token)?;
    ensure!(joined.status.success(), "{joined:?}");
    ensure!(ended(inviting)?, "the invitation has failed");
    let (code, words) = refused(&c.join(&token)?, "join")?;
    ensure!(code == 1 && words.contains("it was used"), "{code}: {words}");
    let daemons = [a.start()?, b.start()?];
    a.protect("first", "b")?;
    // A third one, while the daemons run.
    let (inviting, token) = a.invite(&["invite", "--minutes", "5"])?;
    let joined = c.join(&token)?;
    ensure!(joined.status.success(), "{joined:?}");
    ensure!(ended(inviting)?, "the invitation has failed");
    let third = c.start()?;
    wait_for("the running daemon to know its new peer", LIMIT, || {
        let log = fs::read_to_string(lab.host_directory("a")?.join("daemon.log"))?;
        Ok(log.contains("[peers] has changed and is in use").then_some(()))
    })?;
    a.protect("second", "c")?;
    for (site, daemon) in [&a, &b, &c].into_iter().zip(daemons.into_iter().chain([third])) {
        site.terminate(daemon)?;
    }
    let left = lab.leftovers()?;
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// `init --start` started nothing if nobody joined in time.
#[test]
fn a_host_is_ready_before_it_waits_for_another() -> Result<()> {
    let lab = Lab::new(&["a"])?;
    let a = Site { lab: &lab, name: "a" };
    let address = lab.host_address("a")?.to_string();
    let arbiter = lab.arbiter_directory().join("vms");
    let arbiter = arbiter.to_string_lossy();
    let init = ["--json", "init", "--name", "a", "--address", &address, "--arbiter", &arbiter];
    let mut child = a.about(&init)?.stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("no output")?;
    let _inviting = Process(child);
    let read = |line: io::Result<String>| -> Result<Value> { Ok(serde_json::from_str(&line?)?) };
    let said: Vec<Value> =
        BufReader::new(stdout).lines().take(3).map(read).collect::<Result<_>>()?;
    ensure!(said[0]["name"] == "a" && said[1]["next"].is_string(), "{said:?}");
    ensure!(said[2]["join"].is_string(), "{said:?}");
    Ok(())
}

/// Programs get a line of JSON for each thing that has happened.
#[test]
fn an_invitation_that_nobody_takes_ends_and_says_so() -> Result<()> {
    let lab = Lab::new(&["a"])?;
    let a = Site { lab: &lab, name: "a" };
    let address = lab.host_address("a")?.to_string();
    let arbiter = lab.arbiter_directory().join("vms");
    let arbiter = arbiter.to_string_lossy();
    let unnamed = a.about(&["init", "--name", "a", "--address", &address])?.output()?;
    let (code, words) = refused(&unnamed, "init")?;
    ensure!(code == 2 && words.contains("--arbiter"), "{code}: {words}");
    let init = ["--json", "init", "--alone", "--name", "a", "--address", &address];
    let output = a.about(&[&init[..], &["--arbiter", &arbiter]].concat())?.output()?;
    ensure!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout)?;
    let lines: Vec<Value> = lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(lines[0]["name"] == "a" && lines.len() == 2, "{lines:?}");
    let again =
        a.about(&["init", "--alone", "--arbiter", &arbiter, "--address", &address])?.output()?;
    let (code, words) = refused(&again, "init")?;
    ensure!(code == 1 && words.contains("set up already"), "{code}: {words}");
    // Ended by hand, it lets nobody in.
    let (mut inviting, token) = a.invite(&["invite"])?;
    inviting.0.kill()?;
    inviting.0.wait()?;
    let mut join = a.command(&["join", &token, "--name", "b", "--address", &address])?;
    join.arg("--dir").arg(lab.directory().join("elsewhere"));
    let (code, words) = refused(&join.output()?, "join")?;
    ensure!(code == 1 && words.contains("nobody waits for this token"), "{code}: {words}");
    Ok(())
}
