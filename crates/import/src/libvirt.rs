//! libvirt's domain XML, as `virsh dumpxml` and `virt-install --print-xml` write it.

mod devices;
mod disks;
mod pci;
mod processor;
mod rest;

use crate::draft::Draft;
use crate::xml::{self, Element};
use crate::{Import, Surroundings};
use std::path::PathBuf;
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{AcceleratorChoice, MemorySize, VirtioInterface};

/// Makes a definition of a domain.
pub fn libvirt(text: &str, surroundings: &Surroundings) -> Import {
    read(text, surroundings).unwrap_or_else(|(line, why)| Import::refused(line, "the domain", why))
}

/// Reads a definition; if something is missing that it cannot be begun without, that is an error,
/// with its line.
fn read(text: &str, surroundings: &Surroundings) -> Result<Import, (usize, String)> {
    let domain = xml::parse(text)?;
    if domain.name != "domain" {
        return Err((domain.line, format!("{} is no domain of libvirt's", domain.tag())));
    }
    let required =
        |name: &str| domain.child(name).ok_or_else(|| (domain.line, format!("it has no <{name}>")));
    let (name, memory, vcpu) = (required("name")?, required("memory")?, required("vcpu")?);
    let named = surroundings.name(&name.text).map_err(|error| (name.line, error))?;
    let size = memory_size(memory).map_err(|error| (memory.line, error))?;
    let vcpus =
        vcpu.text.parse().map_err(|error| (vcpu.line, format!("{:?}: {error}", vcpu.text)))?;
    let mut draft = Draft::new(VmDefinition::new(named, size, vcpus), surroundings);
    draft.named(name.line, &name.text);
    draft.taken(memory.line, format!("{size} of memory, {vcpus} vCPUs"));
    draft.vm.accel = accelerator(&domain)?;
    rest::of_part(&mut draft, vcpu, "vCPUs", &["placement"]);
    if domain.child("features").is_none_or(|features| features.child("acpi").is_none()) {
        draft.changed(domain.line, "no <acpi> in <features>", "it has ACPI");
    }
    // Only what is asked for.
    draft.vm.console = false;
    machine(&mut draft, &domain)?;
    for part in &domain.children {
        domain_part(&mut draft, &domain, part);
    }
    Ok(draft.finish())
}

fn memory_size(memory: &Element) -> Result<MemorySize, String> {
    let unit: u64 = match memory.get("unit") {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "" | "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        unit => return Err(format!("the unit {unit:?} is not known")),
    };
    let bytes = memory.text.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
    let bytes = bytes.filter(|bytes| bytes % (1 << 20) == 0);
    let bytes = bytes.ok_or_else(|| format!("{:?} is no whole number of MiB", memory.text))?;
    format!("{}M", bytes >> 20).parse().map_err(|error| format!("{error}"))
}

/// The machine comes first: much depends on its family.
fn machine(draft: &mut Draft<'_>, domain: &Element) -> Result<(), (usize, String)> {
    let os = domain.child("os").ok_or((domain.line, "it has no <os>".to_owned()))?;
    let kind = os.child("type").ok_or((os.line, "<os> has no <type>".to_owned()))?;
    if kind.text != "hvm" || !matches!(kind.get("arch"), "x86_64" | "") {
        return Err((kind.line, format!("{}: only x86-64 machines are protected", kind.tag())));
    }
    if !kind.get("machine").is_empty() {
        draft.vm.machine = kind.get("machine").to_owned();
    }
    draft.taken(kind.line, format!("machine {}", draft.vm.machine));
    // On a port of PCIe, where libvirt puts them on q35, QEMU's have no other.
    draft.vm.virtio = Some(match draft.vm.is_q35() {
        true => VirtioInterface::Modern,
        false => VirtioInterface::Transitional,
    });
    Ok(())
}

fn domain_part(draft: &mut Draft<'_>, domain: &Element, part: &Element) {
    let tag = part.tag();
    match &part.name[..] {
        // Read before, what people wrote for each other, or what says nothing of the guest.
        "name" | "memory" | "vcpu" | "metadata" | "title" | "description" | "seclabel"
        | "resource" => {}
        "uuid" => {
            draft.argument("-uuid", part.text.clone());
            draft.uuid = Some(part.text.clone());
        }
        "currentMemory" => {
            let less =
                domain.child("memory").is_some_and(|all| memory_size(all) != memory_size(part));
            if less {
                draft.changed(part.line, tag, "the guest has all of its memory");
            }
        }
        "maxMemory" | "vcpus" => draft.left_out(part.line, tag, "nothing is added while it runs"),
        "cpu" => processor::processor(draft, part),
        "os" => os(draft, part),
        "features" => processor::features(draft, part),
        "clock" => clock(draft, part),
        "pm" => power(draft, part),
        "on_poweroff" | "on_reboot" | "on_crash" => {
            if !matches!(&part.text[..], "destroy" | "restart") {
                draft.changed(part.line, tag, "powers off, reboots and stands still as others do");
            }
        }
        "devices" => {
            let boots = domain.child("os").map(boots).unwrap_or_default();
            devices::devices(draft, part, &boots);
        }
        "memoryBacking" | "memtune" | "numatune" | "cputune" | "blkiotune" | "iothreads"
        | "iothreadids" | "perf" | "keywrap" => {
            draft.left_out(part.line, tag, "the daemon places memory and threads itself");
        }
        "genid" => draft.left_out(part.line, tag, "the guest is never copied by a fail-over"),
        "sysinfo" => {
            draft.left_out(part.line, tag, "add `-smbios` to qemu_args, if the guest reads it")
        }
        _ => draft.refused(part.line, tag, "it is not known to keep the VM protectable"),
    }
}

fn os(draft: &mut Draft<'_>, os: &Element) {
    let is_on = |value: &str| value == "yes";
    let loader = os.child("loader");
    let wanted = os.child("firmware").is_some_and(|firmware| {
        let secure = |feature: &Element| {
            feature.get("name") == "secure-boot" && is_on(feature.get("enabled"))
        };
        firmware.children.iter().any(secure)
    });
    let secure = wanted || loader.is_some_and(|loader| is_on(loader.get("secure")));
    if os.get("firmware") == "efi" || loader.is_some_and(|loader| loader.get("type") == "pflash") {
        let code = loader.filter(|loader| !loader.text.is_empty());
        let line = loader.unwrap_or(os).line;
        let path = |element: &Element| PathBuf::from(&element.text);
        let store = os.child("nvram").and_then(|store| variables(draft, store));
        let is_new = store.is_none();
        let variables = draft.uefi(code.map(path), store, secure);
        if let Some(code) = code.filter(|code| code.get("format") == "qcow2") {
            let why = "the firmware's code must be raw: `qemu-img convert -O raw` makes it";
            draft.refused(code.line, code.tag(), why);
        }
        if let Some(code) = loader.filter(|code| code.get("stateless") == "yes") {
            draft.changed(code.line, code.tag(), "it has variables of its own, which stay");
        }
        let template = os.child_get("nvram", "template");
        let is_raw = os.child_get("nvram", "templateFormat") != "qcow2";
        if is_new && is_raw && !template.is_empty() {
            draft.variables_from(template.into());
        }
        let boot = if secure { "UEFI with secure boot" } else { "UEFI" };
        draft.taken(line, format!("{boot}, its variables in {}", variables.display()));
    } else if let Some(loader) = loader.filter(|loader| !loader.text.is_empty()) {
        // Without a type it is one.
        draft.argument("-bios", loader.text.clone());
        draft.taken(loader.line, format!("firmware {}", loader.text));
    }
    for part in &os.children {
        match &part.name[..] {
            "type" | "loader" | "nvram" | "firmware" | "boot" => {}
            "kernel" => draft.vm.kernel = Some(part.text.clone().into()),
            "initrd" => draft.vm.initrd = Some(part.text.clone().into()),
            "cmdline" => draft.vm.append = Some(part.text.clone()),
            "bootmenu" | "bios" => {
                draft.left_out(part.line, part.tag(), "the guest boots from its first disk");
            }
            "smbios" => draft.left_out(part.line, part.tag(), "add `-smbios` to qemu_args"),
            _ => draft.refused(part.line, part.tag(), "it is not known"),
        }
    }
    for boot in os.children.iter().filter(|part| part.name == "boot") {
        if !matches!(boot.get("dev"), "hd" | "cdrom" | "") {
            draft.changed(boot.line, boot.tag(), "it boots from its disks, in their order");
        }
    }
}

/// Kinds of devices that the guest boots from, in this order.
fn boots(os: &Element) -> Vec<&str> {
    let boots = os.children.iter().filter(|part| part.name == "boot");
    boots.map(|boot| boot.get("dev")).collect()
}

/// Path of a firmware's variables; none if they are to be made.
fn variables(draft: &mut Draft<'_>, store: &Element) -> Option<PathBuf> {
    let why = match (store.get("type"), store.get("format")) {
        ("" | "file", "qcow2") => {
            "the firmware's variables must be raw: `qemu-img convert -O raw` makes them"
        }
        ("" | "file", _) => {
            let named = [&*store.text, store.child_get("source", "file")];
            let named = named.into_iter().find(|path| !path.is_empty());
            return named.map(PathBuf::from);
        }
        _ => "the firmware's variables must be in a file: copy them to one of their own size",
    };
    draft.refused(store.line, store.tag(), why);
    None
}

fn clock(draft: &mut Draft<'_>, clock: &Element) {
    match clock.get("offset") {
        "utc" | "" => {}
        "localtime" => {
            draft.argument("-rtc", "base=localtime");
            draft.taken(clock.line, "a clock in local time: give the hosts the same time zone");
        }
        _ => {
            draft.changed(clock.line, clock.tag(), "its clock begins with the host's time, in UTC")
        }
    }
    for timer in &clock.children {
        let (name, present) = (timer.get("name"), timer.get("present"));
        match (name, timer.get("tickpolicy"), present) {
            ("rtc", "catchup", _) => draft.argument("-global", "mc146818rtc.lost_tick_policy=slew"),
            ("hypervclock", _, "yes") => draft.flags.push("hv-time=on".to_owned()),
            ("tsc", ..) => draft.left_out(timer.line, timer.tag(), "it counts as the host's does"),
            ("pit", "delay" | "", _) | ("rtc", "delay" | "", _) | (_, _, "yes") => {}
            ("hpet", _, "no") => {
                draft.changed(timer.line, timer.tag(), "it has one, and seldom takes it");
            }
            _ => draft.changed(timer.line, timer.tag(), "it has the machine's own"),
        }
    }
}

/// Whether the guest is told that it can sleep: in memory it never is.
fn power(draft: &mut Draft<'_>, power: &Element) {
    if let Some(sleep) = power.child("suspend-to-mem").filter(|it| it.get("enabled") == "yes") {
        draft.changed(sleep.line, sleep.tag(), "suspend to memory is not offered to the guest");
    }
    if power.child_get("suspend-to-disk", "enabled") == "no" {
        let chipset = if draft.vm.is_q35() { "ICH9-LPC" } else { "PIIX4_PM" };
        draft.argument("-global", format!("{chipset}.disable_s4=1"));
    }
}

/// Accelerator of the domain.
fn accelerator(domain: &Element) -> Result<AcceleratorChoice, (usize, String)> {
    match domain.get("type") {
        "qemu" => Ok(AcceleratorChoice::Tcg),
        "kvm" | "" => Ok(AcceleratorChoice::Auto),
        other => Err((domain.line, format!("it is of {other}: only QEMU's are protected"))),
    }
}

#[cfg(test)]
mod tests;
