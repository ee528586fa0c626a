//! The capabilities of the installed QEMU and this machine.

use crate::definition::AcceleratorChoice;
use crate::kvm::{Kvm, Obstacle};
use crate::process::{Launch, LaunchError, Qemu};
use crate::processor::{CpuNeeds, KvmProcessor, Vendor, nesting, of_the_host};
use crate::qmp::{Connection, QemuVersion, QmpError};
use crate::release::{Release, StateLayout};
use crate::tsc::{HostTsc, TscRate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use qapi::qmp::{
    qom_list_types, query_commands, query_cpu_definitions, query_kvm, query_machines,
    query_qmp_schema,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The oldest QEMU whose `migrate-incoming` reads device state from a file.
const OLDEST: QemuVersion = QemuVersion { major: 8, minor: 2, micro: 0 };

/// Time that QEMU may take to start and answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The commands that checkpoints are made of.
const COMMANDS: &[&str] =
    &["stop", "cont", "xen-save-devices-state", "migrate-incoming", "x-query-ramblock"];

/// An accelerator, which executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// QEMU's own translator.
    Tcg,
    /// The kernel's hypervisor.
    Kvm,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accelerator::Tcg => "tcg",
            Accelerator::Kvm => "kvm",
        })
    }
}

/// The capabilities of an installed QEMU. Probing starts it twice: keep the answer
/// ([`cache`](crate::cache)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// The program.
    pub binary: PathBuf,
    /// Its version.
    pub version: QemuVersion,
    /// The layout in which its devices write their state, if it says so.
    pub layout: Option<StateLayout>,
    /// Its machine types.
    pub machines: Vec<Machine>,
    /// Its CPU models.
    pub cpus: Vec<String>,
    /// Its accelerators, whether or not they work here.
    pub accelerators: Vec<Accelerator>,
    /// The features that KVM offers of this host's processor, where it runs guests.
    pub processor: Option<KvmProcessor>,
}

/// A machine type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name, with version: `pc-q35-10.0`.
    pub name: String,
    /// A short name for the newest version: `q35`.
    pub alias: Option<String>,
}

/// The installed QEMU will not do.
#[derive(Debug, thiserror::Error)]
pub enum CapabilityError {
    /// The program cannot be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The program starts but does not answer as it should.
    #[error("{} does not answer: {source}; {said}", binary.display())]
    NoAnswer {
        /// The program.
        binary: PathBuf,
        /// The error.
        source: QmpError,
        /// The words that it wrote, or how it ended.
        said: String,
    },
    /// The program is too old.
    #[error("{} is QEMU {version}; {OLDEST} or later is needed", binary.display())]
    TooOld {
        /// The program.
        binary: PathBuf,
        /// Its version.
        version: QemuVersion,
    },
    /// The program was built without something.
    #[error("{} (QEMU {version}) lacks {what}; install the distribution's full build", binary.display())]
    Lacks {
        /// The program.
        binary: PathBuf,
        /// Its version.
        version: QemuVersion,
        /// The missing part.
        what: String,
    },
    /// The wanted machine type is unknown to it.
    #[error("QEMU {version} has no machine type \"{wanted}\"; it has {has}")]
    NoSuchMachine {
        /// The machine type that was asked for.
        wanted: String,
        /// Its version.
        version: QemuVersion,
        /// The machine types of the same family.
        has: String,
    },
    /// The wanted CPU model is unknown to it.
    #[error("cpu: QEMU {version} has no model \"{wanted}\"; it has {has}")]
    NoSuchCpu {
        /// The CPU model that was asked for.
        wanted: String,
        /// Its version.
        version: QemuVersion,
        /// The models.
        has: String,
    },
    /// This host's processor is not what the guest needs.
    #[error(
        "cpu: this host's processor lacks what \"{model}\" has: {missing}; choose a model that all \
         hosts of the VM can run, or switch these off (\"{model},{example}=off\")"
    )]
    LackingProcessor {
        /// The guest's model.
        model: String,
        /// The missing features.
        missing: String,
        /// The first of it.
        example: String,
    },
    /// The guest could run guests of its own.
    #[error(
        "cpu: {flag} lets the guest run guests of its own, whose state is not proven to survive a \
         checkpoint: remove it from \"{model}\""
    )]
    Nesting {
        /// The guest's model.
        model: String,
        /// The flag that lets it.
        flag: String,
    },
    /// The guest would be given what each host has otherwise.
    #[error(
        "cpu: {property} takes what each host's own processor has, and the backup must have the same: \
         remove it from \"{model}\""
    )]
    OfTheHost {
        /// The guest's model.
        model: String,
        /// The property.
        property: &'static str,
    },
    /// The guest would see a processor of another maker.
    #[error(
        "cpu: the guest runs on a processor of {wanted}, and would see one of {own} here: take a host \
         with a processor of the same maker"
    )]
    OtherVendor {
        /// The maker that it has seen.
        wanted: Vendor,
        /// The maker of this host's processor.
        own: String,
    },
    /// The guest's clocks would go wrong here.
    #[error(
        "cpu: the guest's time stamp counter runs at {wanted}, this host's at {own}, and its processor \
         cannot scale it: its clocks would go wrong here; take a host whose processor has the same rate, or can"
    )]
    OtherTsc {
        /// The guest's rate.
        wanted: TscRate,
        /// The host's.
        own: TscRate,
    },
    /// The kernel does not say what KVM does for the guest's counter.
    #[error("cpu: KVM does not say at which rate this host's time stamp counter runs: {0}")]
    UnknownTsc(io::Error),
    /// KVM was asked for and cannot be used at all.
    #[error("accel = \"kvm\": {0}, or use \"auto\" or \"tcg\"")]
    NoKvm(String),
    /// The system refused something.
    #[error("cannot probe QEMU: {0}")]
    Io(#[from] io::Error),
}

impl Capabilities {
    /// Starts QEMU without a machine and asks it.
    pub fn probe(binary: &Path) -> Result<Capabilities, CapabilityError> {
        let (ours, qemus) = UnixStream::pair()?;
        let log: File =
            memfd_create(c"qemu-probe", MFdFlags::MFD_CLOEXEC).map_err(io::Error::from)?.into();
        let qemu = Qemu::launch_for_thread(&Launch {
            binary,
            args: &probe_arguments(qemus.as_raw_fd(), Kvm::of_this_machine().runs_guests()),
            env: &[],
            inherit: &[qemus.as_fd()],
            log: Path::new(&format!("/proc/self/fd/{}", log.as_raw_fd())),
            directory: None,
            user: None,
            descriptors: None,
        })?;
        drop(qemus);
        let answers = Connection::open(ours, PROBE_TIMEOUT)
            .and_then(|(mut connection, version)| Answers::get(&mut connection, version));
        match answers {
            Ok(answers) => {
                let judged = answers.judge(binary)?;
                Ok(Capabilities { layout: StateLayout::of(binary)?, ..judged })
            }
            Err(source) => {
                // When QEMU ended by itself, its last words are the reason.
                let exit = qemu.wait(Duration::from_secs(1))?;
                let said = exit.map_or_else(|| qemu.last_words(), |exit| exit.to_string());
                Err(CapabilityError::NoAnswer { binary: binary.to_owned(), source, said })
            }
        }
    }

    /// The release that it is to other QEMUs.
    pub fn release(&self) -> Release {
        Release { version: self.version, layout: self.layout.clone() }
    }

    /// The versioned machine type for a definition's `machine`.
    pub fn machine_type(&self, wanted: &str) -> Result<&str, CapabilityError> {
        let fits = |m: &&Machine| m.name == wanted || m.alias.as_deref() == Some(wanted);
        if let Some(machine) = self.machines.iter().find(fits) {
            return Ok(&machine.name);
        }
        let names = self.machines.iter().map(|m| m.name.as_str());
        let family: Vec<_> = names.filter(|n| n.starts_with("pc-")).collect();
        Err(CapabilityError::NoSuchMachine {
            wanted: wanted.to_owned(),
            version: self.version,
            has: family.join(", "),
        })
    }

    /// Refuses a definition's `cpu` whose model this QEMU does not have; flags may follow it.
    pub fn check_cpu(&self, wanted: Option<&str>) -> Result<(), CapabilityError> {
        let Some(model) = wanted.and_then(|wanted| wanted.split(',').next()) else { return Ok(()) };
        if self.cpus.iter().any(|cpu| cpu == model) {
            return Ok(());
        }
        let mut has: Vec<&str> = self.cpus.iter().map(String::as_str).collect();
        has.sort_unstable();
        Err(CapabilityError::NoSuchCpu {
            wanted: model.to_owned(),
            version: self.version,
            has: has.join(", "),
        })
    }

    /// Refuses a guest to which another host's processor would look different, whatever that host is.
    pub fn check_portable(needs: &CpuNeeds) -> Result<(), CapabilityError> {
        let (Accelerator::Kvm, Some(model)) = (needs.accelerator, &needs.model) else {
            return Ok(());
        };
        match of_the_host(model) {
            None => Ok(()),
            Some(property) => Err(CapabilityError::OfTheHost { model: model.clone(), property }),
        }
    }

    /// Refuses a guest that this host's processor cannot run as the guest needs it.
    pub fn check_processor(&self, needs: &CpuNeeds) -> Result<(), CapabilityError> {
        let (Accelerator::Kvm, Some(model)) = (needs.accelerator, &needs.model) else {
            return Ok(());
        };
        if let Some(flag) = nesting(model) {
            return Err(CapabilityError::Nesting { model: model.clone(), flag: flag.to_owned() });
        }
        let own = Vendor::of_this_machine();
        if let Some(wanted) = needs.other_vendor(model, own.as_ref()).cloned() {
            let own = own.map_or_else(|| "an unknown maker".to_owned(), String::from);
            return Err(CapabilityError::OtherVendor { wanted, own });
        }
        let missing = self.processor.as_ref().map(|processor| processor.missing(needs));
        match missing.unwrap_or_default() {
            missing if missing.is_empty() => Ok(()),
            missing => Err(CapabilityError::LackingProcessor {
                model: model.clone(),
                example: missing[0].clone(),
                missing: missing.join(", "),
            }),
        }
    }

    /// Refuses a guest whose time stamp counter would run at another rate here.
    pub fn check_tsc(needs: &CpuNeeds) -> Result<(), CapabilityError> {
        let Some(wanted) = needs.tsc.filter(|_| needs.accelerator == Accelerator::Kvm) else {
            return Ok(());
        };
        let host = HostTsc::of_this_machine().map_err(CapabilityError::UnknownTsc)?;
        match host.gives(wanted) {
            true => Ok(()),
            false => Err(CapabilityError::OtherTsc { wanted, own: host.rate }),
        }
    }

    /// The accelerator for a definition's `accel`, on this host.
    pub fn accelerator(&self, choice: AcceleratorChoice) -> Result<Accelerator, CapabilityError> {
        let built_in = self.accelerators.contains(&Accelerator::Kvm);
        match choice {
            AcceleratorChoice::Tcg => Ok(Accelerator::Tcg),
            AcceleratorChoice::Auto if built_in && Kvm::of_this_machine().runs_guests() => {
                Ok(Accelerator::Kvm)
            }
            AcceleratorChoice::Auto => Ok(Accelerator::Tcg),
            AcceleratorChoice::Kvm => {
                self.check_accelerator(Accelerator::Kvm).map(|()| Accelerator::Kvm)
            }
        }
    }

    /// Refuses an accelerator that was asked for by name, here or on the primary, and cannot be
    /// used at all. A KVM without the processor's help will do.
    pub fn check_accelerator(&self, wanted: Accelerator) -> Result<(), CapabilityError> {
        if wanted == Accelerator::Tcg {
            return Ok(());
        }
        if !self.accelerators.contains(&Accelerator::Kvm) {
            return Err(CapabilityError::NoKvm("this QEMU was built without KVM".to_owned()));
        }
        match Kvm::of_this_machine() {
            Kvm::Absent(Obstacle { what, remedy }) => {
                Err(CapabilityError::NoKvm(format!("{what}; {remedy}")))
            }
            Kvm::Works | Kvm::Slow(_) | Kvm::Useless(_) => Ok(()),
        }
    }
}

/// Arguments of a probe: with `kvm`, it answers for KVM what depends on the accelerator.
fn probe_arguments(monitor: i32, kvm: bool) -> Vec<OsString> {
    let chardev = format!("socket,id=qmp,fd={monitor}");
    // A QEMU without KVM takes the other one.
    let accelerators = if kvm { &["-accel", "kvm", "-accel", "tcg"][..] } else { &[] };
    let common = [
        "-machine",
        "none",
        "-S",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-chardev",
        &chardev,
        "-mon",
        "chardev=qmp,mode=control",
    ];
    common.iter().chain(accelerators).map(OsString::from).collect()
}

/// The answers of QEMU.
struct Answers {
    version: QemuVersion,
    machines: Vec<Machine>,
    cpus: Vec<Named>,
    accelerators: Vec<Named>,
    commands: Vec<Named>,
    loads_from_file: bool,
    processor: Option<KvmProcessor>,
}

#[derive(Deserialize)]
struct KvmInfo {
    enabled: bool,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

impl Answers {
    fn get(connection: &mut Connection, version: QemuVersion) -> Result<Answers, QmpError> {
        let accel = qom_list_types { implements: Some("accel".to_owned()), abstract_: None };
        let schema: Vec<Value> = connection.execute(&query_qmp_schema {})?;
        Ok(Answers {
            version,
            machines: connection.execute(&query_machines { compat_props: None })?,
            cpus: connection.execute(&query_cpu_definitions {})?,
            accelerators: connection.execute(&accel)?,
            commands: connection.execute(&query_commands {})?,
            loads_from_file: loads_from_file(&schema),
            processor: match connection.execute::<_, KvmInfo>(&query_kvm {})? {
                KvmInfo { enabled: true } => Some(KvmProcessor::ask(connection)?),
                KvmInfo { enabled: false } => None,
            },
        })
    }

    fn judge(self, binary: &Path) -> Result<Capabilities, CapabilityError> {
        let Answers { version, machines, .. } = self;
        let binary = binary.to_owned();
        if version < OLDEST {
            return Err(CapabilityError::TooOld { binary, version });
        }
        let has = |name: &str| self.commands.iter().any(|command| command.name == name);
        if let Some(missing) = COMMANDS.iter().find(|name| !has(name)) {
            let what = format!("the command {missing}");
            return Err(CapabilityError::Lacks { binary, version, what });
        }
        if !self.loads_from_file {
            let what = "migration from a file".to_owned();
            return Err(CapabilityError::Lacks { binary, version, what });
        }
        let known = [(Accelerator::Tcg, "tcg-accel"), (Accelerator::Kvm, "kvm-accel")];
        let present = known.iter().filter(|(_, n)| self.accelerators.iter().any(|a| a.name == *n));
        let accelerators = present.map(|(accelerator, _)| *accelerator).collect();
        let cpus = self.cpus.into_iter().map(|cpu| cpu.name).collect();
        let processor = self.processor;
        let layout = None;
        Ok(Capabilities { binary, version, layout, machines, cpus, accelerators, processor })
    }
}

/// Whether the enumeration of migration's transports has `file`. The schema
/// hides its name, so it is known by its other members.
fn loads_from_file(schema: &[Value]) -> bool {
    let members = |entity: &Value| -> Vec<String> {
        let members = entity["members"].as_array().into_iter().flatten();
        members.filter_map(|m| m["name"].as_str().map(str::to_owned)).collect()
    };
    let enums = schema.iter().filter(|entity| entity["meta-type"] == "enum");
    enums.map(members).any(|m| ["socket", "exec", "file"].iter().all(|n| m.iter().any(|x| x == n)))
}

#[cfg(test)]
#[path = "capabilities_tests.rs"]
mod tests;
