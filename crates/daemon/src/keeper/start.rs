//! How the daemon starts a keeper, and the VM in it.

use crate::host::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;
use understudy_report::error::{ErrorKind, HostError};

/// For a keeper to serve its API.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between two tries.
const LOOK: Duration = Duration::from_millis(10);
/// The subcommand of this program that is a keeper.
pub const SUBCOMMAND: &str = "keep";
/// What a service manager has told the daemon, and means nobody else.
const DAEMONS_OWN: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

impl Host {
    /// Whether a VM that is started here now gets a keeper. Members of a `[cluster]` do not: their
    /// snapshots are the daemon's affair.
    pub fn starts_in_keeper(&self, vm: &VmName) -> bool {
        let is_member = self.config.clusters.values().any(|it| it.members.contains_key(vm));
        self.config.keepers && self.keeps.is_none() && !is_member
    }

    /// Starts a keeper of a VM, and has `start` start the VM through the keeper's socket.
    pub fn start_in_keeper<T>(
        self: &Arc<Self>,
        definition: &VmDefinition,
        start: impl FnOnce(&Path) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        // Names, cards and memory are this host's, which only the daemon sees as a whole.
        let _adding = self.adding.lock();
        self.check_free(definition)?;
        self.check_memory(definition.memory.bytes())?;
        let name = &definition.name;
        let socket = super::socket(&self.config, name);
        let mut keeper = self.spawn_keeper(name)?;
        let started = await_socket(&mut keeper, name, &socket).and_then(|()| start(&socket));
        if started.is_err() {
            // It ends what it may have started, in order.
            let _ = kill(Pid::from_raw(keeper.id() as i32), Signal::SIGTERM);
            reap(keeper, name);
            return started;
        }
        self.vms.lock().remove(name);
        let (vm, waited) = (name.clone(), thread::Builder::new().name(format!("keeper-{name}")));
        // Without it an ended keeper stays in the process table for as long as this daemon lives.
        if let Err(error) = waited.spawn(move || reap(keeper, &vm)) {
            warn!(vm = %name, "nobody waits for the end of its keeper: {error}");
        }
        started
    }

    fn spawn_keeper(&self, vm: &VmName) -> Result<Child, HostError> {
        // Also if the program's file was replaced by another version.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("understudy")
            .arg(SUBCOMMAND)
            .arg("--config")
            .arg(&self.config.file)
            .args(["--vm", vm]);
        for variable in DAEMONS_OWN {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null()).spawn().map_err(|error| {
            let message = format!("cannot start a keeper for {vm}: {error}");
            HostError::new(ErrorKind::Internal, message)
        })
    }
}

fn await_socket(keeper: &mut Child, vm: &VmName, socket: &Path) -> Result<(), HostError> {
    let failed = |message: String| Err(HostError::new(ErrorKind::Internal, message));
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(socket).is_err() {
        if let Ok(Some(status)) = keeper.try_wait() {
            return failed(format!(
                "the keeper of {vm} has ended ({status}): the daemon's log has its words"
            ));
        }
        if Instant::now() > deadline {
            return failed(format!(
                "the keeper of {vm} does not answer on {} after {} s",
                socket.display(),
                PATIENCE.as_secs()
            ));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn reap(mut keeper: Child, vm: &VmName) {
    if let Err(error) = keeper.wait() {
        warn!(%vm, "cannot wait for the end of its keeper: {error}");
    }
}
