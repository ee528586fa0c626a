//! A command line of QEMU's own.

mod devices;

use crate::draft::Draft;
use crate::{Import, Surroundings};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{AcceleratorChoice, MemorySize, Topology, Vga};

/// Line that a report gives for a command line.
const LINE: usize = 1;

/// An option, and its value like `virtio-blk-pci,drive=d0,serial=x`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Argument {
    option: String,
    value: String,
    /// Parts of the value, as QEMU takes them.
    parts: Vec<Part>,
}

/// A part of a value: a property, or one that says nothing but its name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    name: String,
    value: Option<String>,
}

impl Part {
    fn of(text: &str) -> Part {
        match text.split_once('=') {
            Some((name, value)) => Part { name: name.to_owned(), value: Some(value.to_owned()) },
            None => Part { name: text.to_owned(), value: None },
        }
    }

    /// Text as it stands on the command line.
    fn text(&self) -> String {
        let value = self.value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
        format!("{}{value}", self.name).replace(',', ",,")
    }
}

/// The parts of a value. A comma divides them, and two are one that is part of a name, of a file say.
fn parts(value: &str) -> Vec<Part> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut rest = value.chars().peekable();
    while let Some(char) = rest.next() {
        if char == ',' && rest.next_if_eq(&',').is_none() {
            parts.push(Part::of(&std::mem::take(&mut part)));
        } else {
            part.push(char);
        }
    }
    parts.push(Part::of(&part));
    parts
}

impl Argument {
    fn new(option: String, value: String) -> Argument {
        Argument { option, parts: parts(&value), value }
    }

    /// Text as it stands on the command line.
    fn text(&self) -> String {
        format!("{} {}", self.option, self.value).trim_end().to_owned()
    }

    /// Part that the value begins with, if that has no name.
    fn subject(&self) -> &str {
        self.parts.first().filter(|first| first.value.is_none()).map_or("", |first| &first.name)
    }

    /// Its properties: QEMU takes one that says nothing, behind the first, to be on.
    fn properties(&self) -> impl DoubleEndedIterator<Item = (&Part, &str)> + '_ {
        self.parts.iter().enumerate().filter_map(|(at, part)| match &part.value {
            Some(value) => Some((part, &**value)),
            None => (at > 0 && !part.name.is_empty()).then_some((part, "on")),
        })
    }

    /// The value of a property; empty if there is none.
    fn get(&self, name: &str) -> &str {
        self.properties().rfind(|(part, _)| part.name == name).map_or("", |(_, value)| value)
    }

    /// Its properties that are none of these, as they stand on the command line.
    fn beside(&self, known: &[&str]) -> Vec<String> {
        let others = self.properties().filter(|(part, _)| !known.contains(&&*part.name));
        others.map(|(part, _)| part.text()).collect()
    }

    /// The first of these properties that there is; else what the value begins with.
    fn named(&self, names: &[&str]) -> &str {
        let found = names.iter().map(|name| self.get(name)).find(|value| !value.is_empty());
        found.unwrap_or_else(|| self.subject())
    }
}

/// Options that have no value.
const ALONE: [&str; 12] = [
    "-enable-kvm",
    "-nographic",
    "-daemonize",
    "-S",
    "-nodefaults",
    "-no-user-config",
    "-usb",
    "-no-shutdown",
    "-no-reboot",
    "-snapshot",
    "-no-acpi",
    "-no-hpet",
];

/// Makes a definition of the VM that a command line of QEMU's starts.
pub fn qemu(line: &str, surroundings: &Surroundings) -> Import {
    read(line, surroundings).unwrap_or_else(|why| Import::refused(LINE, "the command line", why))
}

fn read(line: &str, surroundings: &Surroundings) -> Result<Import, String> {
    let arguments = arguments(line)?;
    let mut draft = Draft::new(begin(&arguments, surroundings)?, surroundings);
    draft.vm.console = false;
    let found = format!("VM {}", draft.vm.name);
    draft.taken(LINE, found);
    for argument in &arguments {
        apply(&mut draft, argument);
    }
    devices::devices(&mut draft, &arguments);
    Ok(draft.finish())
}

/// The options and their values; the program's own name may come first.
fn arguments(line: &str) -> Result<Vec<Argument>, String> {
    let words = shlex::split(line).ok_or("a quotation mark is not closed")?;
    let mut words = words.into_iter().peekable();
    words.next_if(|first| !first.starts_with('-'));
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        // QEMU takes two dashes for one.
        let option = word.strip_prefix('-').filter(|rest| rest.starts_with('-')).unwrap_or(&word);
        if !option.starts_with('-') {
            return Err(format!("{word:?} is no option; a disk is -drive file={word},format=…"));
        }
        let option = option.to_owned();
        let value = match ALONE.contains(&&*option) {
            true => String::new(),
            false => words.next().ok_or_else(|| format!("{option} needs a value after it"))?,
        };
        found.push(Argument::new(option, value));
    }
    Ok(found)
}

/// Begins the definition with what every VM has; what is not said is QEMU's default.
fn begin(arguments: &[Argument], surroundings: &Surroundings) -> Result<VmDefinition, String> {
    let find = |option: &str| arguments.iter().rfind(|argument| argument.option == option);
    let name = surroundings.name(find("-name").map_or("", |it| it.named(&["guest"])))?;
    let memory = find("-m").map_or("128", |it| it.named(&["size"]));
    let memory: MemorySize = match memory.parse::<u64>() {
        Ok(mebibytes) => format!("{mebibytes}M").parse(),
        Err(_) => memory.parse(),
    }
    .map_err(|error| format!("-m: {error}"))?;
    let mut vm = VmDefinition::new(name, memory, 1);
    if let Some(smp) = find("-smp") {
        processors(&mut vm, smp)?;
    }
    // QEMU's own.
    vm.vga = Vga::Std;
    vm.accel = AcceleratorChoice::Tcg;
    Ok(vm)
}

fn processors(vm: &mut VmDefinition, smp: &Argument) -> Result<(), String> {
    let count = |name: &str| match smp.get(name) {
        "" => Ok(None),
        text => text.parse::<u32>().map(Some).map_err(|_| format!("`{}`: {name}", smp.text())),
    };
    let (sockets, dies, cores, threads) =
        (count("sockets")?, count("dies")?, count("cores")?, count("threads")?);
    let all = smp.named(&["cpus"]).parse::<u32>().ok();
    let topology = Topology {
        sockets: sockets.unwrap_or(1),
        dies: dies.unwrap_or(1),
        cores: cores.unwrap_or(1),
        threads: threads.unwrap_or(1),
    };
    let described = topology.vcpus().ok_or("too many processors")?;
    vm.vcpus = all.unwrap_or(described);
    // With a part of it unsaid QEMU's versions differ.
    vm.topology = Some(topology).filter(|_| described == vm.vcpus && described > 1);
    Ok(())
}

/// Applies an argument that is no device.
fn apply(draft: &mut Draft<'_>, argument: &Argument) {
    let (text, value) = (argument.text(), argument.value.clone());
    match &argument.option[..] {
        // Read before, or with the devices.
        "-drive" | "-cdrom" | "-device" | "-netdev" | "-nic" | "-nodefaults"
        | "-no-user-config" => {}
        "-name" => draft.rest(LINE, "-name", &argument.beside(&["guest"])),
        "-m" => draft.rest(LINE, "-m", &argument.beside(&["size"])),
        "-smp" => {
            let known = ["cpus", "sockets", "dies", "cores", "threads"];
            draft.rest(LINE, "-smp", &argument.beside(&known));
        }
        "-S" | "-no-shutdown" | "-daemonize" | "-pidfile" | "-monitor" | "-qmp" | "-mon"
        | "-chardev" | "-tpmdev" | "-sandbox" | "-runas" | "-msg" | "-D" | "-L" | "-action" => {
            draft.left_out(LINE, text, "Understudy itself starts and controls QEMU");
        }
        "-machine" | "-M" => machine(draft, argument),
        "-accel" => {
            accelerator(draft, argument.named(&["accel"]), &text);
            draft.rest(LINE, "-accel", &argument.beside(&["accel"]));
        }
        "-enable-kvm" => accelerator(draft, "kvm", &text),
        "-cpu" if matches!(argument.subject(), "host" | "max") => {
            draft.processor_of_host(LINE, text);
        }
        "-cpu" => {
            draft.taken(LINE, text);
            draft.vm.cpu = Some(value);
        }
        "-kernel" => draft.vm.kernel = Some(value.into()),
        "-initrd" => draft.vm.initrd = Some(value.into()),
        "-append" => draft.vm.append = Some(value),
        "-vga" => video(draft, argument),
        "-vnc" | "-spice" | "-display" if !matches!(argument.subject(), "none") => {
            draft.screen(LINE, text);
        }
        "-vnc" | "-display" => {}
        "-nographic" | "-serial" if value != "none" => {
            draft.vm.console = true;
            draft.changed(LINE, text, "a serial port: `understudy vm console`");
        }
        "-serial" => {}
        "-boot" => draft.changed(LINE, text, "it boots from its disks, in their order"),
        "-bios" | "-uuid" | "-rtc" | "-global" | "-smbios" | "-object" | "-fw_cfg" => {
            draft.argument(&argument.option, value);
            draft.taken(LINE, text);
        }
        "-usb" => draft.vm.qemu_args.push("-usb".to_owned()),
        "-no-reboot" => draft.changed(LINE, text, "a guest that reboots goes on"),
        "-no-hpet" => draft.changed(LINE, text, "it has one, and seldom takes it"),
        "-hda" | "-hdb" | "-hdc" | "-hdd" => {
            draft.refused(
                LINE,
                text,
                format!("say its format: -drive file={value},format=raw,if=ide"),
            );
        }
        "-net" => draft.refused(LINE, text, "write it as -nic bridge,br=BRIDGE,mac=…"),
        "-fda" | "-fdb" => draft.refused(LINE, text, "floppies are not replicated"),
        _ => draft.refused(LINE, text, "it is not known to keep the VM protectable"),
    }
}

fn machine(draft: &mut Draft<'_>, argument: &Argument) {
    let kind = argument.named(&["type"]);
    if !kind.is_empty() {
        draft.vm.machine = kind.to_owned();
    }
    draft.taken(LINE, format!("machine {}", draft.vm.machine));
    for (part, value) in argument.properties() {
        match (&*part.name, value) {
            ("accel", kind) => accelerator(draft, kind, &argument.text()),
            ("usb", "on") => draft.vm.qemu_args.push("-usb".to_owned()),
            ("hpet" | "vmport" | "graphics", "off") => {
                draft.changed(LINE, format!("-machine {}", part.text()), "it has one");
            }
            ("smm" | "vmport" | "usb" | "type" | "hpet" | "graphics", _)
            // How the host does its work.
            | ("dump-guest-core" | "mem-merge", _)
            // What libvirt and scripts name for what the definition has fields for.
            | ("memory-backend" | "pflash0" | "pflash1", _) => {}
            (name, _) => draft.refused(LINE, argument.text(), format!("its property {name} is not known")),
        }
    }
}

fn accelerator(draft: &mut Draft<'_>, kind: &str, text: &str) {
    match kind.split(':').next().unwrap_or_default() {
        // It falls back, and so does the definition; `vm start` says if KVM is not to be had.
        "kvm" => draft.vm.accel = AcceleratorChoice::Auto,
        "tcg" => draft.vm.accel = AcceleratorChoice::Tcg,
        _ => draft.refused(LINE, text, "only KVM and TCG are protected"),
    }
}

fn video(draft: &mut Draft<'_>, argument: &Argument) {
    draft.vm.vga = match argument.subject() {
        "none" => Vga::None,
        "std" => Vga::Std,
        "virtio" => Vga::Virtio,
        _ => return draft.other_video(LINE, argument.text()),
    };
}

#[cfg(test)]
mod tests;
