//! Network namespaces by name, as `ip netns` keeps them.

use crate::command::run;
use crate::{processes, processors};
use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(crate) const DIRECTORY: &str = "/run/netns";

/// A named network namespace. A value is only the name: it may outlive it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Namespace {
    name: String,
    /// Processor that what is started inside runs on; without, any.
    processor: Option<usize>,
}

impl Namespace {
    /// The namespace of that name, whether or not it exists.
    pub fn named(name: impl Into<String>) -> Namespace {
        Namespace { name: name.into(), processor: None }
    }

    /// The same, for what is to be started on that processor only.
    pub(crate) fn on(self, processor: Option<usize>) -> Namespace {
        Namespace { processor, ..self }
    }

    /// Its name, as in `ip netns exec NAME`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes it: loopback up, no IPv6.
    pub(crate) fn create(&self) -> Result<()> {
        run("ip", &["netns", "add", &self.name])?;
        // Before any interface comes: no address, no router solicitation.
        in_namespace(self, || {
            for scope in ["all", "default"] {
                let switch = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
                // Absent where the kernel has no IPv6: nothing to switch off.
                if Path::new(&switch).exists() {
                    fs::write(&switch, "1").with_context(|| format!("cannot write {switch}"))?;
                }
            }
            anyhow::Ok(())
        })??;
        self.ip(&["link", "set", "lo", "up"])?;
        Ok(())
    }

    /// Removes the name; sockets still open in it keep the namespace itself.
    pub(crate) fn remove(&self) -> Result<()> {
        match run("ip", &["netns", "del", &self.name]) {
            Err(error) if self.exists() => Err(error),
            _ => Ok(()),
        }
    }

    /// Whether the name exists.
    pub fn exists(&self) -> bool {
        self.path().exists()
    }

    /// Runs `ip` inside.
    pub fn ip(&self, arguments: &[&str]) -> Result<String> {
        run("ip", &[&["-n", &self.name], arguments].concat())
    }

    /// A command that will run inside, with `/sys/class/net` showing this
    /// namespace. `taskset` and `ip netns exec` execute the program in their own
    /// place: the process id is the program's.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = match self.processor {
            Some(processor) => {
                let mut command = Command::new("taskset");
                command.args(["--cpu-list", &processor.to_string(), "ip"]);
                command
            }
            None => Command::new("ip"),
        };
        command.args(["netns", "exec", &self.name]).arg(program.as_ref());
        command
    }

    /// The interfaces inside, loopback included.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        let list: Vec<serde_json::Value> = serde_json::from_str(&self.ip(&["-j", "link"])?)
            .context("`ip -j link` printed no JSON")?;
        Ok(list.iter().filter_map(|link| Some(link["ifname"].as_str()?.to_owned())).collect())
    }

    /// The processes whose main thread is inside; zombies are not.
    pub fn processes(&self) -> Result<Vec<u32>> {
        let Ok(own) = fs::metadata(self.path()) else { return Ok(Vec::new()) };
        let inside = |pid: &u32| {
            fs::metadata(format!("/proc/{pid}/ns/net"))
                .is_ok_and(|other| (other.dev(), other.ino()) == (own.dev(), own.ino()))
        };
        Ok(processes::all()?.into_iter().filter(inside).collect())
    }

    /// The processor time that the processes inside have had, and those that they started and
    /// saw end.
    pub fn processor_time(&self) -> Result<Duration> {
        Ok(self.processes()?.into_iter().filter_map(processes::processor_time).sum())
    }

    fn path(&self) -> PathBuf {
        Path::new(DIRECTORY).join(&self.name)
    }
}

/// Runs `work` inside `namespace`, on a fresh thread, and returns its result.
///
/// A socket belongs for good to the namespace that it was made in, so sockets
/// returned from here go on living there.
pub fn in_namespace<T: Send>(namespace: &Namespace, work: impl FnOnce() -> T + Send) -> Result<T> {
    let path = namespace.path();
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            setns(&file, CloneFlags::CLONE_NEWNET)
                .with_context(|| format!("cannot enter the namespace {}", namespace.name))?;
            namespace.processor.map_or(Ok(()), processors::pin)?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
