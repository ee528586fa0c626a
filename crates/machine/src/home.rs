//! The things that a QEMU finds on its host: a directory of its own, and the host's files that
//! it was handed open. It reaches nothing else.

use crate::Plan;
use anyhow::Context;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use understudy_disk::Disk;
use understudy_memory::agent::{AgentListener, DEVICE};
use understudy_qemu::Accelerator;
use understudy_qemu::VmDefinition;
use understudy_qemu::command::{BootFiles, GUEST_AGENT, VNC};
use understudy_qemu::directory;
use understudy_qemu::user::{self, User, path_in_qemu};

/// The console's socket, in QEMU's directory.
pub const CONSOLE: &str = "console";
/// The agent's.
pub const AGENT: &str = "agent";

/// The console's log, in the VM's directory, where QEMU cannot change it.
pub const CONSOLE_LOG: &str = "console.log";

const DIRECTORY: &str = "qemu";
/// Name of the home of a QEMU that is to go on in another's place.
const NEXT: &str = "qemu.next";
const KVM: &str = "/dev/kvm";

/// The socket of a disk's server, in QEMU's directory.
pub fn disk_socket(disk: &Disk) -> String {
    format!("disk{}", disk.index())
}

/// The directory that QEMU works in, below the VM's, into which it cannot look.
pub struct Home {
    directory: PathBuf,
    user: Option<User>,
}

impl Home {
    /// Makes it QEMU's, without what an earlier one has left.
    pub fn prepare(vm_directory: &Path, user: Option<User>) -> anyhow::Result<Home> {
        let directory = vm_directory.join(DIRECTORY);
        user::give_directory(&directory, user)
            .with_context(|| format!("cannot prepare {}", directory.display()))?;
        Ok(Home { directory, user })
    }

    /// The directory of a QEMU that lives in it already.
    pub fn existing(vm_directory: &Path) -> anyhow::Result<Home> {
        let directory = vm_directory.join(DIRECTORY);
        let user = User::of_directory(&directory)
            .with_context(|| format!("cannot look at {}", directory.display()))?;
        Ok(Home { directory, user })
    }

    /// The directory of a QEMU that is to go on in the place of one that lives.
    pub fn prepare_next(vm_directory: &Path, user: Option<User>) -> anyhow::Result<Home> {
        let directory = vm_directory.join(NEXT);
        let prepare = || -> std::io::Result<()> {
            directory::remove(&directory)?;
            user::give_directory(&directory, user)
        };
        prepare().with_context(|| format!("cannot prepare {}", directory.display()))?;
        Ok(Home { directory, user })
    }

    /// The next QEMU's directory takes the place of the former's, which has ended.
    pub fn replace(vm_directory: &Path) -> std::io::Result<()> {
        let directory = vm_directory.join(DIRECTORY);
        directory::remove(&directory)?;
        std::fs::rename(vm_directory.join(NEXT), directory)
    }

    /// The path at which the daemon finds a file of it once it is the VM's only one.
    pub fn lasting_path(&self, name: &str) -> PathBuf {
        self.directory.with_file_name(DIRECTORY).join(name)
    }

    /// The sockets that the VM has once this directory is its only one.
    pub fn local_sockets(&self, definition: &VmDefinition) -> LocalSockets {
        let path = |there: bool, name: &str| there.then(|| self.lasting_path(name));
        LocalSockets {
            console: path(definition.console, CONSOLE),
            vnc: path(definition.vnc, VNC),
            guest_agent: path(definition.guest_agent, GUEST_AGENT),
        }
    }

    /// The path of it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of a file in it, for the daemon.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Lets QEMU connect to a socket that the daemon has made in it.
    pub fn give_socket(&self, socket: &Path) -> std::io::Result<()> {
        user::give_socket(socket, self.user)
    }
}

/// The unix sockets by which this host's administrators reach a guest.
#[derive(Clone, Debug, Default)]
pub struct LocalSockets {
    /// Its serial console.
    pub console: Option<PathBuf>,
    /// Its display.
    pub vnc: Option<PathBuf>,
    /// Its guest agent.
    pub guest_agent: Option<PathBuf>,
}

/// Files of the host's that QEMU inherits open.
pub struct Lent {
    agent: File,
    firmware: Option<File>,
    kernel: Option<File>,
    initrd: Option<File>,
    /// The userfaultfd device; none if QEMU has the daemon's own rights.
    userfaultfd: Option<File>,
    /// The same, or if it is not to use KVM.
    pub kvm: Option<File>,
}

impl Lent {
    /// Opens what this plan needs, for QEMU's user.
    pub fn open(plan: &Plan<'_>, user: Option<User>) -> anyhow::Result<Lent> {
        let lend = |path: &Path| {
            user::lend(path, user).with_context(|| format!("cannot read {}", path.display()))
        };
        let boot_file = |path: &Option<PathBuf>| path.as_deref().map(lend).transpose();
        let device = |path: &str| File::options().read(true).write(true).open(path);
        let kvm = user.is_some() && plan.accelerator == Accelerator::Kvm;
        let userfaultfd = match user {
            Some(_) => userfaultfd(device(DEVICE))?,
            None => None,
        };
        Ok(Lent {
            agent: lend(plan.agent)?,
            firmware: boot_file(&plan.definition.firmware)?,
            kernel: boot_file(&plan.definition.kernel)?,
            initrd: boot_file(&plan.definition.initrd)?,
            userfaultfd,
            kvm: kvm.then(|| device(KVM)).transpose().context("cannot open /dev/kvm")?,
        })
    }

    /// The boot files as QEMU names them.
    pub fn boot_files(&self) -> BootFiles {
        let inside = |file: &Option<File>| file.as_ref().map(|file| path_in_qemu(file.as_raw_fd()));
        BootFiles {
            firmware: inside(&self.firmware),
            kernel: inside(&self.kernel),
            initrd: inside(&self.initrd),
        }
    }

    /// The variables that the agent must know, and the dynamic linker of the agent.
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        let mut environment: Vec<(OsString, OsString)> = vec![
            ("LD_PRELOAD".into(), path_in_qemu(self.agent.as_raw_fd()).into()),
            (AgentListener::VARIABLE.into(), AGENT.into()),
        ];
        if let Some(device) = &self.userfaultfd {
            let number = device.as_raw_fd().to_string();
            environment.push((AgentListener::DEVICE_VARIABLE.into(), number.into()));
        }
        environment
    }

    /// The descriptors that QEMU inherits.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let boot = [&self.firmware, &self.kernel, &self.initrd];
        let optional = boot.into_iter().chain([&self.userfaultfd, &self.kvm]).flatten();
        std::iter::once(&self.agent).chain(optional).map(AsFd::as_fd)
    }
}

/// The opened device; without it, any user must be allowed to make a userfaultfd.
fn userfaultfd(opened: std::io::Result<File>) -> anyhow::Result<Option<File>> {
    let error = match opened {
        Ok(device) => return Ok(Some(device)),
        Err(error) => error,
    };
    let setting = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if setting.is_ok_and(|value| value.trim() == "1") {
        return Ok(None);
    }
    Err(error).with_context(|| {
        format!(
            "cannot open {DEVICE}, without which a QEMU that is not root cannot have its memory \
             tracked (`understudy doctor` says what to do)"
        )
    })
}
