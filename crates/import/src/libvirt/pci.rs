//! Places on PCI buses: a guest calls its cards after them.

use crate::draft::Draft;
use crate::xml::Element;
use understudy_qemu::definition::PciPlace;

/// The place that a device's `<address>` gives; none if libvirt has not chosen one yet.
pub(super) fn place(draft: &mut Draft<'_>, device: &Element) -> Option<PciPlace> {
    let address = device.child("address").filter(|address| address.get("type") == "pci")?;
    let number = |name: &str| match address.get(name) {
        "" => Some(0),
        text => u8::from_str_radix(text.trim_start_matches("0x"), 16).ok(),
    };
    let place = || {
        let bus = match number("bus")? {
            0 if draft.vm.is_q35() => "pcie.0".to_owned(),
            bus => format!("pci.{bus}"),
        };
        PciPlace::new(&bus, number("slot")?, number("function")?)
    };
    let found = place();
    if found.is_none() {
        draft.refused(address.line, address.tag(), "it is no place on a PCI bus");
    }
    found
}

/// The same as options that follow a device's own.
pub(super) fn options(draft: &mut Draft<'_>, device: &Element) -> String {
    place(draft, device).map_or_else(String::new, |place| {
        let multifunction = match device.child_get("address", "multifunction") {
            "on" => ",multifunction=on",
            _ => "",
        };
        format!(",{}{multifunction}", place.options())
    })
}

/// `<controller type='pci'>`: the machine has the root; a bridge is made where libvirt has put it.
pub(super) fn bridge(draft: &mut Draft<'_>, controller: &Element) {
    let options = options(draft, controller);
    let index = controller.get("index");
    let target = |name: &str| match controller.child_get("target", name) {
        "" => String::new(),
        value => format!(",{}={value}", if name == "chassisNr" { "chassis_nr" } else { name }),
    };
    match controller.get("model") {
        "pcie-root" | "pci-root" => {}
        // Without places there is nothing behind it.
        _ if options.is_empty() => {}
        "pcie-root-port" => {
            let (chassis, port) = (target("chassis"), target("port"));
            draft.device(format!("pcie-root-port,id=pci.{index}{chassis}{port}{options}"));
        }
        "pcie-to-pci-bridge" => draft.device(format!("pcie-pci-bridge,id=pci.{index}{options}")),
        "pci-bridge" => {
            let chassis = target("chassisNr");
            draft.device(format!("pci-bridge,id=pci.{index}{chassis}{options}"));
        }
        _ => draft.refused(controller.line, controller.tag(), "this bridge is not known"),
    }
}
