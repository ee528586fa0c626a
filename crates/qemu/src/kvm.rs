//! The worth of KVM on this machine, and what to do where it is worth less than it could be.

use crate::capabilities::Accelerator;
use crate::definition::AcceleratorChoice;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// The device.
const DEVICE: &str = "/dev/kvm";

/// The worth of KVM here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// KVM runs guests at the processor's speed.
    Works,
    /// KVM runs guests, and more slowly than it could.
    Slow(Obstacle),
    /// KVM runs no ordinary guest.
    Useless(Obstacle),
    /// KVM is not there, or cannot be opened.
    Absent(Obstacle),
}

/// An obstacle in the way, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The thing that was found.
    pub what: String,
    /// The thing to do.
    pub remedy: String,
}

impl Obstacle {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Obstacle {
        Obstacle { what: what.into(), remedy: remedy.into() }
    }
}

/// The processor's help for hypervisors, by the kernel's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extension {
    flag: &'static str,
    module: &'static str,
    /// The module's parameter that says whether the processor walks a guest's page tables.
    nested_paging: &'static str,
}

const EXTENSIONS: [Extension; 2] = [
    Extension { flag: "vmx", module: "kvm_intel", nested_paging: "ept" },
    Extension { flag: "svm", module: "kvm_amd", nested_paging: "npt" },
];

/// The facts that the verdict is made of.
struct Facts<'a> {
    /// Opening the device.
    device: Result<(), io::Error>,
    /// The flags of the first processor.
    flags: Vec<&'a str>,
    /// A parameter of the loaded module.
    parameter: &'a dyn Fn(Extension) -> Option<String>,
}

impl Kvm {
    /// Looks at this machine. An answer of today: modules come and go.
    pub fn of_this_machine() -> Kvm {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let device = File::options().read(true).write(true).open(DEVICE).map(drop);
        let parameter = |extension: Extension| {
            let Extension { module, nested_paging, .. } = extension;
            let path = format!("/sys/module/{module}/parameters/{nested_paging}");
            fs::read_to_string(Path::new(&path)).ok()
        };
        Kvm::judge(Facts { device, flags: flags(&cpuinfo), parameter: &parameter })
    }

    fn judge(facts: Facts<'_>) -> Kvm {
        let has = |flag: &str| facts.flags.contains(&flag);
        let extension = EXTENSIONS.into_iter().find(|extension| has(extension.flag));
        match (facts.device, extension) {
            (Ok(()), None) => Kvm::Useless(Obstacle::new(
                "/dev/kvm is there, but the processor offers no virtualization (no vmx or svm flag \
                 in /proc/cpuinfo): such a KVM boots no ordinary kernel",
                no_extension(has("hypervisor")),
            )),
            (Ok(()), Some(extension)) => nested_paging(extension, (facts.parameter)(extension)),
            (Err(error), Some(Extension { module, flag, .. }))
                if error.kind() == io::ErrorKind::NotFound =>
            {
                Kvm::Absent(Obstacle::new(
                    format!(
                        "there is no {DEVICE}, although the processor has {flag}: the module {module} is not loaded"
                    ),
                    format!(
                        "`modprobe {module}`; if the kernel's log then says that it is disabled, \
                         enable virtualization in the firmware's settings"
                    ),
                ))
            }
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
                let what = format!(
                    "there is no {DEVICE}, and the processor offers no virtualization (no vmx or svm flag in /proc/cpuinfo)"
                );
                Kvm::Absent(Obstacle::new(what, no_extension(has("hypervisor"))))
            }
            (Err(error), _) => Kvm::Absent(Obstacle::new(
                format!("{DEVICE} cannot be opened: {error}"),
                "run the daemon as root, or give its user the device",
            )),
        }
    }

    /// Whether ordinary guests run on it.
    pub fn runs_guests(&self) -> bool {
        matches!(self, Kvm::Works | Kvm::Slow(_))
    }

    /// The obstacle in the way, if there is one.
    pub fn obstacle(&self) -> Option<&Obstacle> {
        match self {
            Kvm::Works => None,
            Kvm::Slow(obstacle) | Kvm::Useless(obstacle) | Kvm::Absent(obstacle) => Some(obstacle),
        }
    }

    /// The reason why a guest that runs on `accelerator` is slower than its definition's `choice`
    /// let hope; none if it is as fast as was asked for.
    pub fn slowness(&self, choice: AcceleratorChoice, accelerator: Accelerator) -> Option<String> {
        let Some(Obstacle { what, remedy }) = self.obstacle() else {
            let chosen = choice == AcceleratorChoice::Tcg || accelerator == Accelerator::Kvm;
            return (!chosen).then(|| {
                "QEMU emulates the processor, many times slower than KVM: this QEMU was built \
                 without KVM; install the distribution's full build"
                    .to_owned()
            });
        };
        match (choice, accelerator) {
            (AcceleratorChoice::Tcg, _) => None,
            (_, Accelerator::Tcg) => Some(format!(
                "QEMU emulates the processor, many times slower than KVM: {what}; {remedy}, or \
                 write accel = \"tcg\" if it is meant"
            )),
            (_, Accelerator::Kvm) => Some(format!("{what}; {remedy}")),
        }
    }
}

/// The remedy where the processor offers nothing.
fn no_extension(in_vm: bool) -> String {
    if in_vm {
        "this machine is a VM itself: have its host pass virtualization on (nested=1 for the \
         host's kvm_intel or kvm_amd, and a CPU model with vmx or svm)"
            .to_owned()
    } else {
        "enable virtualization (VT-x, SVM) in the firmware's settings".to_owned()
    }
}

/// The verdict by nested paging: without it KVM shadows the guest's page tables, and each of the
/// guest's own changes of them costs an exit.
fn nested_paging(extension: Extension, parameter: Option<String>) -> Kvm {
    let Extension { module, nested_paging, .. } = extension;
    match parameter.as_deref().map(str::trim) {
        Some("N" | "0") => Kvm::Slow(Obstacle::new(
            format!(
                "{module} runs without nested paging ({nested_paging}=0): KVM shadows every guest's page tables, which makes guests slow and checkpoints dear"
            ),
            format!(
                "`modprobe -r {module} && modprobe {module} {nested_paging}=1`; if it stays off, \
                 the processor, or the host of this VM, does not offer it"
            ),
        )),
        // A module built in, or another name of the parameter: nothing to complain of.
        _ => Kvm::Works,
    }
}

/// The flags of the first processor of a `/proc/cpuinfo`.
fn flags(cpuinfo: &str) -> Vec<&str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("flags"));
    line.and_then(|line| line.split_once(':'))
        .map_or_else(Vec::new, |(_, flags)| flags.split_whitespace().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(device: Result<(), io::ErrorKind>, line: &str, parameter: Option<&str>) -> Kvm {
        let parameter = |_| parameter.map(str::to_owned);
        let device = device.map_err(io::Error::from);
        Kvm::judge(Facts { device, flags: flags(line), parameter: &parameter })
    }

    fn words(kvm: &Kvm) -> String {
        kvm.obstacle().map(|o| format!("{}; {}", o.what, o.remedy)).unwrap_or_default()
    }

    const MISSING: Result<(), io::ErrorKind> = Err(io::ErrorKind::NotFound);

    #[test]
    fn a_flag_is_a_whole_word() {
        assert_eq!(flags("model name : svm\nflags\t\t: fpu vmx sse\n"), ["fpu", "vmx", "sse"]);
        let software = judge(Ok(()), "model name : vmx\nflags : fpu svm_lock\n", None);
        assert!(matches!(software, Kvm::Useless(_)), "{software:?}");
    }

    #[test]
    fn a_good_machine_has_nothing_to_say() {
        for parameter in [None, Some("Y\n"), Some("1\n")] {
            assert_eq!(judge(Ok(()), "flags : svm npt", parameter), Kvm::Works);
        }
        assert_eq!(Kvm::Works.slowness(AcceleratorChoice::Auto, Accelerator::Kvm), None);
    }

    #[test]
    fn each_obstacle_is_named_with_its_remedy() {
        for (kvm, expected) in [
            (judge(MISSING, "flags : svm", None), "modprobe kvm_amd"),
            (judge(MISSING, "flags : vmx", None), "modprobe kvm_intel"),
            (judge(MISSING, "flags : fpu", None), "firmware"),
            (judge(MISSING, "flags : fpu hypervisor", None), "nested=1"),
            (judge(Ok(()), "flags : fpu hypervisor", None), "boots no ordinary kernel"),
            (judge(Ok(()), "flags : svm", Some("N\n")), "npt=1"),
            (judge(Ok(()), "flags : vmx", Some("0\n")), "ept=1"),
            (judge(Err(io::ErrorKind::PermissionDenied), "flags : vmx", None), "as root"),
        ] {
            assert!(words(&kvm).contains(expected), "{expected}: {kvm:?}");
            assert_eq!(kvm.runs_guests(), matches!(kvm, Kvm::Slow(_)), "{kvm:?}");
        }
    }

    #[test]
    fn a_guest_that_is_slower_than_asked_for_says_so() {
        use {Accelerator as A, AcceleratorChoice as C};
        let absent = judge(MISSING, "flags : svm", None);
        assert_eq!(absent.slowness(C::Tcg, A::Tcg), None);
        let why = absent.slowness(C::Auto, A::Tcg).unwrap();
        assert!(why.contains("emulates") && why.contains("modprobe kvm_amd"), "{why}");
        // Asked for by name, and taken although it will not boot much.
        let software = judge(Ok(()), "flags : fpu hypervisor", None);
        assert!(software.slowness(C::Kvm, A::Kvm).unwrap().contains("boots no ordinary kernel"));
        assert!(software.slowness(C::Auto, A::Tcg).unwrap().contains("boots no ordinary kernel"));
        let why = Kvm::Works.slowness(C::Auto, A::Tcg).unwrap();
        assert!(why.contains("built without KVM"), "{why}");
    }
}
