//! A host: the daemon in its namespace, what is asked of it, and its deaths.

mod config;

pub use config::{LONGEST_QEMU_TIMEOUT_MS, LONGEST_TIMEOUT_MS};

use crate::command::run;
use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::{booted, control_groups};
use crate::{processes, wait_for};
use anyhow::{Context, Result, anyhow, bail, ensure};
use config::write_config;
use nix::sys::signal::Signal;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use understudy_client::{Client, Failure};

/// Time for a daemon to answer after its start.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Time for a daemon to end its VMs and itself after SIGTERM.
const TERMINATE_LIMIT: Duration = Duration::from_secs(120);
/// Time for one call of the command line; a call that hangs must not hang a test.
const CALL_SECONDS: &str = "300";
const LOG: &str = "daemon.log";
/// Executes the daemon in its own place: the process id is the daemon's.
const SHELL: &str = "/bin/sh";
/// `ip netns exec` hides the control groups behind a /sys of the namespace's own. A controller is
/// in version 1 or in version 2, never in both, and new kernels have that of memory in version 2 alone.
const MOUNT_CONTROL_GROUPS: &str = "{ at=/sys/fs/cgroup; mount -t tmpfs none $at && mkdir $at/memory && \
     if mount -t cgroup -o memory none $at/memory; \
     then for it in cpu pids; do mkdir $at/$it && mount -t cgroup -o $it none $at/$it || rmdir $at/$it; done; \
     else mount -t cgroup2 none $at; fi; } >/dev/null 2>&1;";
/// The daemon's own directory, with one directory for each VM.
const STATE: &str = "state";
const MACHINE_LOGS: [&str; 2] = ["qemu.log", "console.log"];
/// Lines of a log that are worth showing.
const LOG_TAIL_LINES: usize = 60;

/// The arbiter that a daemon's configuration names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArbiterKind {
    /// The laboratory's directory.
    #[default]
    File,
    /// The laboratory's [`Etcd`](crate::Etcd), which must have been started.
    Etcd,
    /// No addresses.
    None,
}

/// Options that a daemon gets beyond the laboratory's own configuration.
#[derive(Clone, Debug, Default)]
pub struct HostOptions {
    /// Environment variables of the daemon.
    pub environment: Vec<(String, String)>,
    /// Further lines of `host.toml`: `qemu = "…"`, `[detection]` and the like.
    pub settings: String,
    /// Its arbiter.
    pub arbiter: ArbiterKind,
    /// Whether its configuration names no peers.
    pub without_peers: bool,
    /// Whether hosts talk in the clear, for tests that read along: one such
    /// host makes its whole [`Scene`](crate::Scene) so.
    pub insecure: bool,
    /// Whether it finds no control groups.
    pub without_control_groups: bool,
    /// The size of the file system that its state directory is, in MiB; the machine's own without.
    /// Nobody else sees what is in it.
    pub state_mib: Option<u64>,
}

/// One daemon that runs, or ran, as one host of a laboratory.
///
/// Dropping it kills everything on the host.
pub struct HostProcess {
    name: String,
    binary: PathBuf,
    directory: PathBuf,
    socket: PathBuf,
    namespace: Namespace,
    daemon: Child,
}

impl HostProcess {
    /// Starts `BINARY host` as a host of `lab`, every other host its peer, and
    /// waits until its API answers. A host that was killed starts again on the
    /// state that it left.
    pub fn start(lab: &Lab, name: &str, binary: &Path) -> Result<HostProcess> {
        HostProcess::start_with(lab, name, binary, &HostOptions::default())
    }

    /// [`start`](HostProcess::start) with options.
    pub fn start_with(
        lab: &Lab,
        name: &str,
        binary: &Path,
        options: &HostOptions,
    ) -> Result<HostProcess> {
        let mut host = HostProcess::spawn(lab, name, binary, options)?;
        wait_for(&format!("host {name}'s API"), START_LIMIT, || host.answers())
            .with_context(|| host.diagnostics())?;
        Ok(host)
    }

    fn spawn(lab: &Lab, name: &str, binary: &Path, options: &HostOptions) -> Result<HostProcess> {
        // The daemon starts in its own directory.
        let binary =
            binary.canonicalize().with_context(|| format!("no program {}", binary.display()))?;
        let directory = lab.host_directory(name)?;
        let namespace = lab.host(name)?;
        let daemon = spawn_daemon(lab, name, &binary, options)?;
        let socket = socket(&directory);
        Ok(HostProcess { name: name.to_owned(), binary, directory, socket, namespace, daemon })
    }

    /// Starts the daemon again after its death; what else is on the host stays as it is.
    pub fn revive(&mut self, lab: &Lab, options: &HostOptions) -> Result<()> {
        ensure!(!self.is_running(), "host {}'s daemon runs", self.name);
        self.daemon = spawn_daemon(lab, &self.name, &self.binary, options)?;
        wait_for(&format!("host {}'s API", self.name), START_LIMIT, || self.answers())
            .with_context(|| self.diagnostics())
    }

    /// Whether the API answers; an error if the daemon has ended.
    fn answers(&mut self) -> Result<Option<()>> {
        if let Some(status) = self.daemon.try_wait()? {
            bail!("host {}'s daemon ended: {status}", self.name);
        }
        Ok(self.ask().is_ok().then_some(()))
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The host's directory: configuration, state, log.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The directory of a VM's own on this host, with its logs.
    pub(crate) fn machine_directory(&self, vm: &str) -> PathBuf {
        self.directory.join(STATE).join(vm)
    }

    /// The unix socket of the daemon's API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The host's namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The daemon's process id.
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// Whether the daemon runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.daemon.try_wait(), Ok(None))
    }

    /// Runs `BINARY --socket SOCKET ARGUMENTS…` to its end.
    pub fn cli<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Output> {
        let mut command = self.command(arguments);
        command.output().with_context(|| format!("cannot run {command:?}"))
    }

    /// [`cli`](HostProcess::cli) that goes on while the host is watched, or killed; its output
    /// is the child's.
    pub fn begin<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Child> {
        let mut command = self.command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().with_context(|| format!("cannot run {command:?}"))
    }

    fn command<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", CALL_SECONDS]).arg(&self.binary);
        command.arg("--socket").arg(&self.socket).args(arguments).stdin(Stdio::null());
        command
    }

    /// [`cli`](HostProcess::cli) that must succeed; returns its stdout.
    pub fn call<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<String> {
        let arguments: Vec<S> = arguments.into_iter().collect();
        let output = self.cli(&arguments)?;
        let words: Vec<_> = arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        ensure!(
            output.status.success(),
            "host {}: `{}` failed ({}): {}",
            self.name,
            words.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The status of a VM that this host runs or backs up: as `understudy status --json` prints it,
    /// without a process for each of the many times that a story asks.
    pub fn status(&self, vm: &str) -> Result<Value> {
        self.known(vm)?.with_context(|| format!("host {} has no VM `{vm}`", self.name))
    }

    /// The same, if this host has the VM at this moment.
    pub fn known(&self, vm: &str) -> Result<Option<Value>> {
        let status = self.ask().map_err(|failure| {
            let end = processes::end_of(self.pid());
            let end = end.map(|end| format!("; its daemon has ended, {end}")).unwrap_or_default();
            anyhow!("host {} does not tell its status: {}{end}", self.name, failure.message)
        })?;
        let mut vms = status["vms"].as_array().into_iter().flatten();
        Ok(vms.find(|entry| entry["name"] == vm).cloned())
    }

    /// Its page of metrics.
    pub fn metrics(&self) -> Result<String> {
        let page = Client::new(&self.socket).and_then(|client| client.metrics());
        page.map_err(|failure| anyhow!("host {} has no metrics: {}", self.name, failure.message))
    }

    fn ask(&self) -> Result<Value, Failure> {
        Client::new(&self.socket)?.status_json()
    }

    /// The host dies: all on it stand still (SIGSTOP), so that nobody lives to see
    /// another's death, and then are killed. Returns the instant just before the first
    /// signal.
    ///
    /// The host's kernel lives on and closes the connections, so the peer sees
    /// resets. Cut it off first for the silence of a power failure.
    pub fn kill_everything(&mut self) -> Result<Instant> {
        let everything = self.everything()?;
        let instant = Instant::now();
        processes::signal_all(&everything, Signal::SIGSTOP)?;
        processes::signal_all(&everything, Signal::SIGKILL)?;
        // Needed only if it has not entered the namespace yet.
        self.daemon.kill().context("cannot kill the daemon")?;
        self.daemon.wait().context("cannot wait for the killed daemon")?;
        processes::wait_until_gone(&everything)?;
        Ok(instant)
    }

    /// Kills the daemon alone.
    pub fn kill_daemon(&mut self) -> Result<Instant> {
        let instant = Instant::now();
        self.daemon.kill().context("cannot kill the daemon")?;
        self.daemon.wait().context("cannot wait for the killed daemon")?;
        Ok(instant)
    }

    /// Asks the daemon to end (SIGTERM) and waits until it has.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.daemon.try_wait()? {
            return Ok(status);
        }
        processes::signal_all(&[self.pid()], Signal::SIGTERM)?;
        wait_for(&format!("host {}'s daemon to end", self.name), TERMINATE_LIMIT, || {
            Ok(self.daemon.try_wait()?)
        })
        .with_context(|| self.diagnostics())
    }

    /// The end of the daemon's log.
    pub fn diagnostics(&self) -> String {
        log_tail(&self.directory)
    }

    /// Every process on the host: the daemon first, its subtree, and whatever
    /// else is in the namespace (a QEMU that outlived its daemon).
    pub(crate) fn everything(&self) -> Result<Vec<u32>> {
        let inside = self.namespace.processes()?;
        // A daemon that ended has left its process id to others.
        let daemon = inside.contains(&self.pid()).then(|| processes::subtree(self.pid()));
        let mut pids = daemon.transpose()?.unwrap_or_default();
        let others: Vec<u32> = inside.into_iter().filter(|pid| !pids.contains(pid)).collect();
        pids.extend(others);
        Ok(pids)
    }
}

fn spawn_daemon(lab: &Lab, name: &str, binary: &Path, options: &HostOptions) -> Result<Child> {
    let directory = lab.host_directory(name)?;
    let config = write_config(lab, name, options)?;
    let log = File::options().create(true).append(true).open(directory.join(LOG))?;
    let namespace = lab.host(name)?;
    let mut command = namespace.command(SHELL);
    let mounts = if options.without_control_groups { "" } else { MOUNT_CONTROL_GROUPS };
    let state = options.state_mib.map(|mib| mount_state(&directory.join(STATE), mib));
    let state = state.unwrap_or_default();
    command
        .args(["-c", &format!("{mounts} {state} exec \"$0\" \"$@\"")])
        .arg(binary)
        .arg("host")
        .arg("--config")
        .arg(config)
        .env(booted::VARIABLE, lab.directory().join(booted::DIRECTORY))
        .envs(options.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {} in {}", binary.display(), namespace.name()))
}

/// The state directory becomes a small file system, in the daemon's mount namespace.
fn mount_state(state: &Path, mib: u64) -> String {
    let state = state.display();
    format!("mkdir -p '{state}' && mount -t tmpfs -o size={mib}m none '{state}' || exit 1;")
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        if let Err(error) = self.kill_everything() {
            tracing::error!("cannot end host {}: {error:#}", self.name);
        }
        control_groups::remove_dead();
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("api.sock")
}

/// Makes an authority in the laboratory and a certificate for each of its hosts,
/// as a user would. Hosts that are started before do without.
pub fn issue_certificates(lab: &Lab, binary: &Path) -> Result<()> {
    let directory = pki_directory(lab);
    let directory = directory.to_string_lossy();
    let program = binary.to_string_lossy();
    run(&program, &["pki", "init", "--dir", &directory])?;
    for host in lab.hosts() {
        run(&program, &["pki", "issue", host, "--dir", &directory])?;
    }
    Ok(())
}

fn pki_directory(lab: &Lab) -> PathBuf {
    lab.directory().join("pki")
}

/// The ends of the logs in a host's directory, each with a heading.
pub(crate) fn log_tail(directory: &Path) -> String {
    logs(directory).iter().map(|log| tail(log)).collect()
}

/// The logs in a host's directory: the daemon's, and those of its VMs (QEMU, console).
pub(crate) fn logs(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory.join(STATE)).into_iter().flatten().flatten();
    let mut machines: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    machines.sort();
    let of_machine = |machine: &PathBuf| MACHINE_LOGS.map(|name| machine.join(name));
    let logs = machines.iter().flat_map(of_machine).filter(|log| log.is_file());
    std::iter::once(directory.join(LOG)).chain(logs).collect()
}

fn tail(path: &Path) -> String {
    let log = fs::read(path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let tail = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
    format!("--- {} (last {} lines)\n{}\n", path.display(), tail.len(), tail.join("\n"))
}
