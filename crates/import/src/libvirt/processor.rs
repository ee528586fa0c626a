//! The processor that the guest sees, and what the hypervisor offers it.

use super::rest;
use crate::draft::Draft;
use crate::xml::Element;
use understudy_qemu::definition::Topology;

/// `<cpu>`.
pub(super) fn processor(draft: &mut Draft<'_>, cpu: &Element) {
    match cpu.get("mode") {
        "custom" | "" => custom(draft, cpu),
        _ => {
            draft.processor_of_host(cpu.line, cpu.tag());
            for feature in cpu.children.iter().filter(|part| part.name == "feature") {
                draft.left_out(feature.line, feature.tag(), "it is one of the host's processor");
            }
        }
    }
    if cpu.get("match") == "minimum" {
        draft.changed(cpu.line, cpu.tag(), "it has what its model has, and no more");
    }
    for part in &cpu.children {
        match &part.name[..] {
            "model" => rest::of_part(draft, part, "processor", &["fallback"]),
            "feature" | "vendor" => {}
            "cache" => draft.left_out(part.line, part.tag(), "the model says it"),
            "topology" => topology(draft, part),
            "maxphysaddr" => draft.left_out(part.line, part.tag(), "the model says it"),
            _ => draft.refused(part.line, part.tag(), "it is not known"),
        }
    }
}

fn custom(draft: &mut Draft<'_>, cpu: &Element) {
    let model = cpu.child_text("model");
    if model.is_empty() {
        return;
    }
    let mut text = model.to_owned();
    for feature in cpu.children.iter().filter(|part| part.name == "feature") {
        match feature.get("policy") {
            "require" | "force" | "" => text += &format!(",{}=on", feature.get("name")),
            "disable" | "forbid" => text += &format!(",{}=off", feature.get("name")),
            _ => draft.left_out(feature.line, feature.tag(), "only what is certain is promised"),
        }
    }
    draft.taken(cpu.line, format!("processor {text}"));
    draft.vm.cpu = Some(text);
}

fn topology(draft: &mut Draft<'_>, part: &Element) {
    let count = |name: &str| match part.get(name) {
        "" => Ok(1),
        text => text.parse::<u32>(),
    };
    let counts = ["sockets", "dies", "clusters", "cores", "threads"].map(count);
    let [Ok(sockets), Ok(dies), Ok(1), Ok(cores), Ok(threads)] = counts else {
        return draft.refused(part.line, part.tag(), "it has counts that a machine cannot have");
    };
    draft.vm.topology = Some(Topology { sockets, dies, cores, threads });
}

/// `<features>`.
pub(super) fn features(draft: &mut Draft<'_>, features: &Element) {
    for part in &features.children {
        let off = part.get("state") == "off";
        match &part.name[..] {
            // The machine has them, or they say how the host does its work.
            "acpi" | "apic" | "pae" | "smm" | "ioapic" => {}
            "vmport" if off => {
                draft.changed(part.line, part.tag(), "it has one, which only VMware's tools ask");
            }
            "vmport" => {}
            "vmcoreinfo" if off => {}
            "vmcoreinfo" => {
                draft.left_out(part.line, part.tag(), "only dumps of the host's read it")
            }
            "hyperv" => hyperv(draft, part),
            "kvm" => kvm(draft, part),
            "pvspinlock" if off => flag(draft, "kvm-pv-unhalt=off"),
            "pvspinlock" => {}
            _ => draft.refused(part.line, part.tag(), "it is not known"),
        }
    }
}

/// Features that Windows is offered, by QEMU's names.
const HYPERV: [(&str, &str); 14] = [
    ("relaxed", "hv-relaxed"),
    ("vapic", "hv-vapic"),
    ("vpindex", "hv-vpindex"),
    ("runtime", "hv-runtime"),
    ("synic", "hv-synic"),
    ("stimer", "hv-stimer"),
    ("reset", "hv-reset"),
    ("frequencies", "hv-frequencies"),
    ("reenlightenment", "hv-reenlightenment"),
    ("tlbflush", "hv-tlbflush"),
    ("ipi", "hv-ipi"),
    ("avic", "hv-avic"),
    ("spinlocks", "hv-spinlocks"),
    ("emsr_bitmap", "hv-emsr-bitmap"),
];

fn hyperv(draft: &mut Draft<'_>, hyperv: &Element) {
    if hyperv.get("mode") == "passthrough" {
        let why = "it means something else on every host; Windows is offered what is named";
        draft.changed(hyperv.line, hyperv.tag(), why);
    }
    for part in hyperv.children.iter().filter(|part| part.get("state") == "on") {
        let known = HYPERV.iter().find(|(name, _)| *name == part.name);
        match (known, part.get("retries")) {
            (None, _) => draft.left_out(part.line, part.tag(), "Windows does without"),
            (Some((_, flag_name)), "") => flag(draft, &format!("{flag_name}=on")),
            (Some((_, flag_name)), retries) => flag(draft, &format!("{flag_name}={retries}")),
        }
        for finer in &part.children {
            let what = format!("{}, {}", part.tag(), finer.tag());
            draft.left_out(finer.line, what, "Windows does without");
        }
    }
}

fn kvm(draft: &mut Draft<'_>, kvm: &Element) {
    for part in kvm.children.iter().filter(|part| part.get("state") == "on") {
        match &part.name[..] {
            "hidden" => flag(draft, "kvm=off"),
            "poll-control" => flag(draft, "kvm-poll-control=on"),
            _ => draft.left_out(part.line, part.tag(), "the guest does without"),
        }
    }
}

/// Adds a flag to the processor, which then needs a model.
fn flag(draft: &mut Draft<'_>, flag: &str) {
    draft.flags.push(flag.to_owned());
}
