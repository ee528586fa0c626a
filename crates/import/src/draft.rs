//! A definition in the making, and what was found on the way.

use crate::{Finding, Import, Outcome, Surroundings, Template};
use std::path::PathBuf;
use understudy_network::Vlans;
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{CardDefinition, DiskBus, DiskDefinition, DiskFormat, Vga};
use understudy_qemu::processor::KVM_BASELINE;

/// Files of Debian's and Ubuntu's package ovmf.
const UEFI: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];
/// The same for secure boot, with Microsoft's keys.
const SECURE: [&str; 2] =
    ["/usr/share/OVMF/OVMF_CODE_4M.secboot.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"];

pub(crate) struct Draft<'a> {
    pub(crate) vm: VmDefinition,
    pub(crate) surroundings: &'a Surroundings,
    findings: Vec<Finding>,
    copies: Vec<Template>,
    /// Disks, each with its place in the order of booting.
    disks: Vec<(u32, DiskDefinition)>,
    /// The firmware's: the last of all disks.
    variables: Option<DiskDefinition>,
    /// Name by which the manager calls it, if not by its name.
    pub(crate) uuid: Option<String>,
    /// Flags of the processor, beside its model.
    pub(crate) flags: Vec<String>,
}

/// The format of an image, by QEMU's name; else why it is none that is replicated.
pub(crate) fn image_format(name: &str) -> Result<DiskFormat, String> {
    match name {
        "raw" => Ok(DiskFormat::Raw),
        "qcow2" => Ok(DiskFormat::Qcow2),
        other => Err(format!(
            "{other} images are not replicated: `qemu-img convert -O qcow2` makes one that is"
        )),
    }
}

/// The reason why a disk on another SCSI controller is not taken.
pub(crate) fn other_controller(name: &str) -> String {
    format!("the controller {name} is not known; the guest may need virtio-scsi's driver first")
}

impl<'a> Draft<'a> {
    pub(crate) fn new(vm: VmDefinition, surroundings: &'a Surroundings) -> Draft<'a> {
        Draft {
            vm,
            surroundings,
            findings: Vec::new(),
            copies: Vec::new(),
            disks: Vec::new(),
            variables: None,
            uuid: None,
            flags: Vec::new(),
        }
    }

    pub(crate) fn taken(&mut self, line: usize, what: impl Into<String>) {
        self.note(Outcome::Taken, line, what, "");
    }

    pub(crate) fn changed(&mut self, line: usize, what: impl Into<String>, why: impl Into<String>) {
        self.note(Outcome::Changed, line, what, why);
    }

    pub(crate) fn left_out(
        &mut self,
        line: usize,
        what: impl Into<String>,
        why: impl Into<String>,
    ) {
        self.note(Outcome::LeftOut, line, what, why);
    }

    pub(crate) fn refused(&mut self, line: usize, what: impl Into<String>, why: impl Into<String>) {
        self.note(Outcome::Refused, line, what, why);
    }

    /// Names what there is of a part that is read nowhere.
    pub(crate) fn rest(&mut self, line: usize, what: &str, rest: &[String]) {
        if !rest.is_empty() {
            let what = format!("{what}, {}", rest.join(" "));
            self.left_out(line, what, "it is not carried over");
        }
    }

    /// Says what the VM is called.
    pub(crate) fn named(&mut self, line: usize, there: &str) {
        let here = self.vm.name.to_string();
        if here == there {
            self.taken(line, format!("VM {here}"));
        } else {
            self.changed(line, format!("VM {there}"), format!("it is called {here} here"));
        }
    }

    fn note(
        &mut self,
        outcome: Outcome,
        line: usize,
        what: impl Into<String>,
        why: impl Into<String>,
    ) {
        self.findings.push(Finding { outcome, line, what: what.into(), why: why.into() });
    }

    /// Adds a device that QEMU makes by itself.
    pub(crate) fn device(&mut self, arguments: impl Into<String>) {
        self.argument("-device", arguments);
    }

    pub(crate) fn argument(&mut self, option: &str, value: impl Into<String>) {
        self.vm.qemu_args.extend([option.to_owned(), value.into()]);
    }

    /// Gives it UEFI with the variables in `store`, which need not exist yet: by default the code
    /// and the variables of this system's package. Returns where the variables are.
    pub(crate) fn uefi(
        &mut self,
        code: Option<PathBuf>,
        store: Option<PathBuf>,
        secure: bool,
    ) -> PathBuf {
        let [packaged, template] = if secure { SECURE } else { UEFI };
        self.vm.firmware = Some(code.unwrap_or_else(|| packaged.into()));
        self.vm.secure_boot = secure;
        let path = store.unwrap_or_else(|| {
            let to = PathBuf::from(format!("{}_VARS.fd", self.vm.name));
            self.copies.push(Template { from: template.into(), to: to.clone() });
            to
        });
        let disk = DiskDefinition::new(path.clone(), DiskFormat::Raw, DiskBus::Pflash);
        self.variables = Some(disk);
        path
    }

    /// The variables, if they are to be made first, are made of this file.
    pub(crate) fn variables_from(&mut self, template: PathBuf) {
        if let Some(copy) = self.copies.last_mut() {
            copy.from = template;
        }
    }

    /// A processor that is the host's own becomes what every guest without a model has.
    pub(crate) fn processor_of_host(&mut self, line: usize, what: impl Into<String>) {
        self.vm.cpu = None;
        let why = "it means something else on every host; without `cpu` the guest has what every \
                   server since 2011 has: write a model there that both hosts have";
        self.changed(line, what, why);
    }

    /// A screen, however it was seen, is seen through VNC.
    pub(crate) fn screen(&mut self, line: usize, what: impl Into<String>) {
        self.vm.vnc = true;
        let why = "VNC on the unix socket that `status` names; `ssh -L` brings it to you";
        self.changed(line, what, why);
    }

    /// A video card that there is no more.
    pub(crate) fn other_video(&mut self, line: usize, what: impl Into<String>) {
        self.vm.vga = Vga::Std;
        self.changed(line, what, "a VGA card, which every guest has a driver for");
    }

    /// A source of random numbers, fed by a file of the host; `place` follows its options.
    pub(crate) fn random_numbers(&mut self, line: usize, file: &str, place: &str) {
        let n = self.vm.qemu_args.iter().filter(|arg| arg.starts_with("rng-random")).count();
        let file = file.replace(',', ",,");
        self.argument("-object", format!("rng-random,id=entropy{n},filename={file}"));
        self.device(format!("virtio-rng-pci,rng=entropy{n},id=rng{n},ioeventfd=off{place}"));
        self.taken(line, "a source of random numbers");
    }

    /// Adds a disk or a CD-ROM drive. The guest boots from the first of the definition: without an `order` from a disk,
    /// wherever a CD-ROM stands beside it.
    pub(crate) fn disk(&mut self, order: Option<u32>, disk: DiskDefinition) {
        self.disks.push((order.unwrap_or(u32::MAX), disk));
    }

    /// Adds a card that is in these VLANs.
    pub(crate) fn in_vlans(&mut self, line: usize, card: CardDefinition, vlans: Vlans) {
        let Vlans { access, trunk } = vlans;
        let mut parts = Vec::new();
        parts.extend(access.map(|id| format!("VLAN {id}")));
        parts.extend((!trunk.runs().is_empty()).then(|| format!("VLANs {trunk} with their tags")));
        if !parts.is_empty() {
            let what = format!("{} on {}", parts.join(" and "), card.bridge);
            let why = "the bridge must filter VLANs on every host: `vlan_filtering 1`";
            self.note(Outcome::Taken, line, what, why);
        }
        let vlans = (!trunk.runs().is_empty()).then_some(trunk);
        self.vm.cards.push(CardDefinition { vlan: access, vlans, ..card });
    }

    /// Flags need a model: of a guest that has none, the one that it would have.
    fn add_flags(&mut self) {
        if self.flags.is_empty() {
            return;
        }
        let model = self.vm.cpu.take().unwrap_or_else(|| KVM_BASELINE.to_owned());
        self.vm.cpu = Some(format!("{model},{}", self.flags.join(",")));
    }

    /// The result. What the definition itself finds wrong is refused, if nothing was before.
    pub(crate) fn finish(mut self) -> Import {
        self.add_flags();
        self.disks.sort_by_key(|(order, disk)| (*order, disk.cdrom));
        self.vm.disks.extend(self.disks.drain(..).map(|(_, disk)| disk));
        self.vm.disks.extend(self.variables.take());
        self.vm.choose_places();
        let is_refused = |findings: &[Finding]| {
            findings.iter().any(|finding| finding.outcome == Outcome::Refused)
        };
        if !is_refused(&self.findings) {
            for problem in self.vm.validate() {
                self.refused(1, problem.field, problem.message);
            }
        }
        self.findings.sort_by_key(|finding| finding.line);
        let definition = (!is_refused(&self.findings)).then_some(self.vm);
        Import { definition, findings: self.findings, copies: self.copies }
    }
}
