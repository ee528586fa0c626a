//! Attributes and children of a device that libvirt knows and nobody reads: they are named, so that
//! nothing is passed over.

use crate::draft::Draft;
use crate::xml::Element;

/// Every device may have them.
const OF_ALL: [&str; 2] = ["alias", "address"];

/// Attributes and children of a device that are read elsewhere, or say nothing of the guest; none
/// if it is taken as a whole, or not at all.
fn known(device: &str) -> Option<(&'static [&'static str], &'static [&'static str])> {
    Some(match device {
        "disk" => (
            &["type", "device", "snapshot", "model"],
            &[
                "driver",
                "source",
                "target",
                "serial",
                "backingStore",
                "readonly",
                "iotune",
                "boot",
                "blockio",
            ],
        ),
        "interface" => (
            &["type"],
            &[
                "mac",
                "source",
                "target",
                "guest",
                "model",
                "mtu",
                "vlan",
                "bandwidth",
                "filterref",
                "link",
                "boot",
                "port",
                "acpi",
            ],
        ),
        "serial" | "console" => (&["type", "tty"], &["target", "source"]),
        "channel" => (&["type"], &["target", "source"]),
        "input" => (&["type", "bus", "model"], &[]),
        "video" => (&[], &["model"]),
        "memballoon" => (&["model"], &["stats"]),
        "rng" => (&["model"], &["backend", "rate"]),
        "watchdog" => (&["model", "action"], &[]),
        "panic" => (&["model"], &[]),
        "tpm" => (&["model"], &["backend"]),
        "controller" => (&["type", "index", "model", "ports", "vectors"], &["model", "target"]),
        _ => return None,
    })
}

/// Names what there is of a device beside what is known.
pub(super) fn of_device(draft: &mut Draft<'_>, device: &Element) {
    let Some((attributes, children)) = known(&device.name) else { return };
    let what = match &device.name[..] {
        "disk" => format!("disk {}", device.child_get("target", "dev")),
        "interface" => format!("network card {}", device.child_get("mac", "address")),
        name => format!("<{name}>"),
    };
    draft.rest(device.line, &what, &device.beside(attributes));
    for part in &device.children {
        if !children.contains(&&*part.name) && !OF_ALL.contains(&&*part.name) {
            draft.left_out(part.line, format!("{what}, {}", part.tag()), "it is not carried over");
        }
    }
}

/// Names the attributes of a part beside these.
pub(super) fn of_part(draft: &mut Draft<'_>, part: &Element, what: &str, known: &[&str]) {
    draft.rest(part.line, &format!("{what}, <{}>", part.name), &part.beside(known));
}
