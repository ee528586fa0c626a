use super::*;
use crate::Outcome;
use understudy_qemu::definition::{CardModel, DiskBus, DiskDefinition, DiskFormat, TpmModel, Vga};

/// Domain that virt-install 5.0 printed for a guest, or `virsh dumpxml` after it was defined.
macro_rules! domain {
    ($name:literal) => {
        include_str!(concat!("../../tests/domains/", $name, ".xml"))
    };
}

const DEFINED: &str = domain!("debian13_default-defined");
const SECURE: &str = domain!("debian13_secure-boot-defined");
const WINDOWS: &str = domain!("win11_no-tpm");

fn import(text: &str) -> Import {
    libvirt(text, &Surroundings::default())
}

fn definition(text: &str) -> VmDefinition {
    let import = import(text);
    import.definition.unwrap_or_else(|| panic!("{:#?}", import.findings))
}

/// `text` with one part of it replaced: the line and the words of what is refused.
fn refusal(text: &str, part: &str, instead: &str) -> (usize, String) {
    assert!(text.contains(part), "{part}");
    let import = import(&text.replacen(part, instead, 1));
    assert!(import.definition.is_none(), "{instead} was taken");
    let refused = import.findings.iter().find(|finding| finding.outcome == Outcome::Refused);
    refused.map(|finding| (finding.line, finding.to_string())).unwrap()
}

#[test]
fn a_defined_guest_keeps_its_places() {
    let vm = definition(DEFINED);
    assert_eq!((&vm.machine[..], vm.virtio), ("pc-q35-10.0", Some(VirtioInterface::Modern)));
    assert_eq!((vm.vcpus, vm.memory.bytes(), vm.accel), (2, 2 << 30, AcceleratorChoice::Tcg));
    let disk = &vm.disks[0];
    assert_eq!((disk.format, disk.bus), (DiskFormat::Qcow2, DiskBus::Virtio));
    assert_eq!(disk.pci.as_ref().unwrap().to_string(), "pci.4:00.0");
    let card = &vm.cards[0];
    assert_eq!((&card.bridge[..], card.model), ("br0", CardModel::VirtioNet));
    assert_eq!(card.pci.as_ref().unwrap().to_string(), "pci.1:00.0");
    let arguments = vm.qemu_args.join(" ");
    for expected in [
        "pcie-root-port,id=pci.1,chassis=1,port=0x10,bus=pcie.0,addr=0x02.0x0,multifunction=on",
        "qemu-xhci,id=usb,bus=pci.2,addr=0x00.0x0",
        "usb-tablet,bus=usb.0",
        "virtio-balloon-pci,id=balloon0,ioeventfd=off,bus=pci.5,addr=0x00.0x0",
        "-uuid bfea2fb7",
        "ICH9-LPC.disable_s4=1",
    ] {
        assert!(arguments.contains(expected), "no {expected} in {arguments}");
    }
    assert!(vm.console && vm.guest_agent && vm.vnc);
    assert_eq!(vm.vga, Vga::Virtio);
}

// Before, a guest of `pc` lost its virtio devices to others: a Windows has a new card then, and no disk to boot from.
#[test]
fn a_guests_virtio_devices_stay_what_they_are() {
    for (text, interface) in [
        (domain!("debian12_pc-defined"), VirtioInterface::Transitional),
        (domain!("debian12_pc"), VirtioInterface::Transitional),
        (DEFINED, VirtioInterface::Modern),
    ] {
        assert_eq!(definition(text).virtio_interface(), interface);
    }
    for (part, instead) in [
        ("<model type='virtio'/>", "<model type='virtio-transitional'/>"),
        (
            "<disk type='file' device='disk'",
            "<disk type='file' device='disk' model='virtio-transitional'",
        ),
    ] {
        assert_eq!(outcome(part, instead, "the VM has one interface"), Outcome::Changed);
    }
    let same =
        DEFINED.replacen("<model type='virtio'/>", "<model type='virtio-non-transitional'/>", 1);
    let findings = format!("{:?}", import(&same).findings);
    assert!(!findings.contains("the VM has one interface"), "{findings}");
}

#[test]
fn uefi_is_taken_with_its_variables() {
    let vm = definition(SECURE);
    assert_eq!(vm.firmware.unwrap().to_str(), Some("/usr/share/OVMF/OVMF_CODE_4M.ms.fd"));
    assert!(vm.secure_boot);
    let store = vm.disks.iter().find(|disk| disk.bus == DiskBus::Pflash).unwrap();
    assert!(store.path.ends_with("debian13_VARS.fd"));
    assert_eq!(import(SECURE).copies, []);
    assert_eq!(vm.tpm, Some(TpmModel::Crb));
    let state = vm.tpm_state.unwrap();
    assert!(state.starts_with("/var/lib/libvirt/swtpm") && state.ends_with("tpm2"), "{state:?}");
}

#[test]
fn firmware_that_libvirt_would_choose_is_chosen() {
    let import = import(WINDOWS);
    let vm = import.definition.unwrap();
    assert_eq!(import.copies[0].to.to_str(), Some("win11_VARS.fd"));
    assert!(vm.firmware.is_some() && !vm.secure_boot);
    assert!(vm.cpu.unwrap().contains("hv-spinlocks="), "Windows is offered what it knows");
    assert!(vm.qemu_args.contains(&"base=localtime".to_owned()));
}

#[test]
fn what_is_not_known_is_refused_with_its_line() {
    for (part, instead, line, words) in [
        ("<memballoon", "<shmem name='x'/><memballoon", 0, "not known to keep the VM"),
        ("<memballoon", "<tpm model='tpm-crb'/><memballoon", 0, "only an emulated TPM 2.0"),
        ("<memballoon", "<hostdev mode='subsystem'/><memballoon", 0, "hardware of this host"),
        ("bus='virtio'/>", "bus='nvme'/>", 37, "cannot save the state of an NVMe disk"),
        ("type='bridge'", "type='direct'", 0, "macvtap cannot hold output"),
        ("<target dev='vda'", "<shareable/><target dev='vda'", 37, "other VMs write it"),
        ("type='qcow2'/>", "type='vmdk'/>", 37, "qemu-img convert"),
        ("arch='x86_64'", "arch='aarch64'", 13, "only x86-64"),
        ("unit='KiB'>2097152</memory>", "unit='KiB'>12345</memory>", 9, "no whole number of MiB"),
        ("<name>debian13<", "<name>../etc<", 2, "--name"),
        (
            "slot='0x00' function='0x0'/>",
            "slot='0x99' function='0x0'/>",
            0,
            "no place on a PCI bus",
        ),
        ("<features>", "<launchSecurity type='sev'/><features>", 16, "not known to keep"),
        ("<source file='/images/d.qcow2'/>", "", 37, "only files and block devices"),
    ] {
        let (found, message) = refusal(DEFINED, part, instead);
        assert!(message.contains(words), "{instead}: {message}");
        assert!(line == 0 || found == line, "{instead} is on line {line}, not {found}");
    }
    for text in ["", "<domain/>", "<network/>", "<domain><name>a</name></domain>", "<domain>"] {
        assert!(import(text).definition.is_none(), "{text}");
    }
}

#[test]
fn networks_are_bridges_that_somebody_names() {
    let other = DEFINED
        .replace("type='bridge'", "type='network'")
        .replace("<source bridge='br0'/>", "<source network='lan'/>");
    let import = import(&other);
    assert!(import.findings.iter().any(|finding| finding.why.contains("--bridge lan=BRIDGE")));
    let bridges = [("lan".to_owned(), "br7".to_owned())].into();
    let named = libvirt(&other, &Surroundings { bridges, ..Surroundings::default() });
    assert_eq!(named.definition.unwrap().cards[0].bridge, "br7");
}

/// Table of what virt-install writes for common guests with its defaults and the usual options, and
/// whether that is protected. The same table, for people, is in docs/import.md.
#[test]
fn nine_in_ten_of_what_virt_install_writes_are_imported() {
    let all = [
        ("debian12, defaults", domain!("debian12_default"), ""),
        ("debian13, defaults", domain!("debian13_default"), ""),
        ("ubuntu24.04, defaults", domain!("ubuntu24.04_default"), ""),
        ("fedora42, defaults", domain!("fedora42_default"), ""),
        ("rocky9, defaults", domain!("rocky9_default"), ""),
        ("win11, defaults", domain!("win11_default"), ""),
        ("win11, --tpm none", WINDOWS, ""),
        ("debian12, --boot uefi", domain!("debian12_uefi"), ""),
        ("debian13, secure boot", domain!("debian13_secure-boot"), ""),
        ("debian13, --cdrom", domain!("debian13_cdrom"), ""),
        ("debian12, --machine pc", domain!("debian12_pc"), ""),
        ("debian12, --graphics none", domain!("debian12_no-graphics"), ""),
        ("debian13, SPICE and QXL", domain!("debian13_spice"), ""),
        ("debian13, --network default", domain!("debian13_network"), ""),
        ("debian13, block device", domain!("debian13_block"), ""),
        ("ubuntu24.04, two disks, two cards", domain!("ubuntu24.04_two-disks-raw"), ""),
        ("ubuntu24.04, SATA", domain!("ubuntu24.04_sata"), ""),
        ("ubuntu24.04, MTU", domain!("ubuntu24.04_mtu-vlan"), ""),
        ("fedora42, virtio-scsi", domain!("fedora42_scsi"), ""),
        ("fedora42, NVMe", domain!("fedora42_nvme"), "NVMe"),
        ("rocky9, topology and CPU model", domain!("rocky9_topology"), ""),
        ("rocky9, --cpu host-model", domain!("rocky9_host-model"), ""),
        ("debian13, defined", DEFINED, ""),
        ("debian13, secure boot, defined", SECURE, ""),
        ("debian12, pc, defined", domain!("debian12_pc-defined"), ""),
        ("win11, no TPM, defined", domain!("win11_no-tpm-defined"), ""),
        ("debian13, virtiofs", domain!("debian13_virtiofs"), "put them on a disk"),
        ("debian13, PCI passthrough", domain!("debian13_hostdev"), "hardware of this host"),
    ];
    let mut imported = 0;
    for (name, text, why) in all {
        let import = import(text);
        let refused: Vec<_> =
            import.findings.iter().filter(|it| it.outcome == Outcome::Refused).collect();
        if why.is_empty() {
            assert!(import.definition.is_some(), "{name}: {refused:#?}");
            imported += 1;
        } else {
            assert_eq!(refused.len(), 1, "{name}: {refused:#?}");
            assert!(refused[0].why.contains(why) && refused[0].line > 1, "{name}: {refused:?}");
        }
    }
    // Without the two that are refused in every such product: a host's files, and its hardware.
    assert!(imported * 10 >= (all.len() - 2) * 9, "{imported} of {}", all.len() - 2);
}

#[test]
fn cards_are_in_their_vlans() {
    for (vlan, access, trunk) in [
        ("<vlan><tag id='42'/></vlan>", Some(42), ""),
        ("<vlan trunk='yes'><tag id='42'/></vlan>", None, "42"),
        ("<vlan><tag id='4'/><tag id='9'/><tag id='5'/></vlan>", None, "4-5,9"),
        ("<vlan><tag id='4' nativeMode='untagged'/><tag id='9'/></vlan>", Some(4), "4,9"),
    ] {
        let text =
            DEFINED.replacen("<source bridge='br0'/>", &format!("<source bridge='br0'/>{vlan}"), 1);
        let import = import(&text);
        let vm = import.definition.unwrap_or_else(|| panic!("{vlan}: {:#?}", import.findings));
        let vlans = vm.cards[0].vlans();
        assert_eq!((vlans.access, &vlans.trunk.to_string()[..]), (access, trunk), "{vlan}");
        assert!(import.findings.iter().any(|it| it.why.contains("vlan_filtering 1")), "{vlan}");
    }
    for (vlan, words) in [
        ("<vlan><tag id='4095'/></vlan>", "<tag id='4095'> is no VLAN"),
        ("<vlan/>", "<vlan> has no tag"),
        ("<vlan><tag id='4' nativeMode='tagged'/></vlan>", "Open vSwitch's"),
    ] {
        let with = format!("<source bridge='br0'/>{vlan}");
        let (_, message) = refusal(DEFINED, "<source bridge='br0'/>", &with);
        assert!(message.contains(words), "{vlan}: {message}");
    }
}

/// Outcome for `part` in the place of another, by the words for it.
fn outcome(part: &str, instead: &str, what: &str) -> Outcome {
    assert!(DEFINED.contains(part), "{part}");
    let import = import(&DEFINED.replacen(part, instead, 1));
    let found = import.findings.iter().find(|finding| finding.to_string().contains(what));
    found.unwrap_or_else(|| panic!("{instead}: nothing of {what}: {:#?}", import.findings)).outcome
}

#[test]
fn what_is_not_carried_over_is_named() {
    let disk = "<target dev='vda' bus='virtio'/>";
    let card = "<source bridge='br0'/>";
    for (part, more, what) in [
        (disk, "<blockio physical_block_size='4096'/>", "physical_block_size='4096'"),
        (disk, "<wwn>5000c50015ea71aa</wwn>", "disk vda, <wwn>"),
        (disk, "<geometry cyls='1' heads='2' secs='3'/>", "<geometry cyls='1'"),
        (card, "<port isolated='yes'/>", "other guests on the bridge reach it"),
        (card, "<driver name='vhost' queues='4'/>", "<driver name='vhost' queues='4'>"),
        (card, "<coalesce/>", "<coalesce>"),
        (card, "<rom bar='off'/>", "<rom bar='off'>"),
        (
            "<backend model='random'>",
            "<rate bytes='1'/><backend model='random'>",
            "<rate bytes='1'>",
        ),
        (
            "<model type='virtio' heads='1' primary='yes'/>",
            "<driver iommu='on'/>",
            "<driver iommu='on'>",
        ),
        ("<memballoon", "<video><model type='vga'/></video><memballoon", "one screen"),
        (
            "<memballoon",
            "<console type='pty'><target type='virtio'/></console><memballoon",
            "one serial port",
        ),
    ] {
        let instead = if more.contains(part) { more.to_owned() } else { format!("{part}{more}") };
        assert_eq!(outcome(part, &instead, what), Outcome::LeftOut, "{more}");
    }
    for (part, instead, what) in [
        (
            "name='qemu' type='qcow2'",
            "name='qemu' type='qcow2' cache='none'",
            "<driver>, cache='none'",
        ),
        ("placement='static'", "placement='static' current='1'", "<vcpu>, current='1'"),
        ("bridge='br0'/>", "bridge='br0' portgroup='lan'/>", "its VLAN is `vlan`"),
    ] {
        assert_eq!(outcome(part, instead, what), Outcome::LeftOut, "{instead}");
    }
    for (part, instead, what) in [
        (card, "<source bridge='br0'/><boot order='1'/>", "it boots from its disks"),
        (card, "<source bridge='br0'/><acpi index='3'/>", "call the card otherwise"),
        ("<acpi/>", "", "it has ACPI"),
        ("<boot dev='hd'/>", "<boot dev='hd'/><boot dev='network'/>", "it boots from its disks"),
        ("<serial type='pty'>", "<serial type='file'>", "<serial type='file'>"),
    ] {
        assert_eq!(outcome(part, instead, what), Outcome::Changed, "{instead}");
    }
    let blocks = format!("{disk}<blockio logical_block_size='4096'/>");
    assert!(refusal(DEFINED, disk, &blocks).1.contains("would not find its partitions"));
    for (part, instead, words) in [
        ("d.qcow2'/>", "d.qcow2'><encryption format='luks'/></source>", "decrypt it"),
        ("d.qcow2'/>", "d.qcow2'><slices/></source>", "a part of its image"),
        (card, "<source bridge='br0'/><virtualport type='openvswitch'/>", "bridge of Linux's own"),
        ("<domain type='qemu'", "<domain type='xen'", "only QEMU's"),
    ] {
        assert!(refusal(DEFINED, part, instead).1.contains(words), "{instead}");
    }
}

#[test]
fn disks_are_in_the_order_in_which_they_boot() {
    let second = "<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='/b'/>\
        <target dev='vdb' bus='virtio'/><boot order='1'/></disk><controller type='usb'";
    let text = DEFINED.replacen("<controller type='usb'", second, 1);
    let text = text.replacen(
        "<target dev='vda' bus='virtio'/>",
        "<target dev='vda' bus='virtio'/><boot order='2'/>",
        1,
    );
    let vm = definition(&text);
    assert_eq!(vm.disks[0].path.to_str(), Some("/b"));
    let place = vm.disks[0].pci.as_ref().map(ToString::to_string);
    assert_eq!(
        place.as_deref(),
        Some("pcie.0:04.0"),
        "a port of the domain's is where it would be"
    );
}

// Before, a guest booted its installer again, whatever <os> said.
#[test]
fn a_cdrom_comes_before_a_disk_only_if_it_is_to_boot_first() {
    let cdrom = domain!("debian13_cdrom");
    // The installer's domain, and the one that stays.
    let (installs, stays) = cdrom.split_at(cdrom.rfind("<domain").unwrap());
    let boots = "<boot dev=\"cdrom\"/>\n    <boot dev=\"hd\"/>";
    assert!(installs.contains(boots) && !stays.contains(boots), "{cdrom}");
    let medium = &installs[installs.find("<disk type=\"file\" device=\"cdrom\">").unwrap()..];
    let medium = &medium[..medium.find("</disk>").unwrap() + "</disk>".len()];
    let swapped = installs.replacen(medium, "", 1).replacen("<disk", &format!("{medium}<disk"), 1);
    let first = |text: &str| {
        let vm = definition(text);
        assert_eq!(vm.disks.len(), 2, "{text}");
        vm.disks[0].cdrom
    };
    for (order, is_first) in [
        (boots, true),
        ("<boot dev='hd'/>", false),
        ("<boot dev='hd'/><boot dev='cdrom'/>", false),
        ("<boot dev='cdrom'/>", true),
        ("", false),
    ] {
        let (plain, swapped) =
            (installs.replacen(boots, order, 1), swapped.replacen(boots, order, 1));
        assert_eq!((first(&plain), first(&swapped)), (is_first, is_first), "{order}");
    }
    let named =
        swapped.replacen(boots, "", 1).replacen("<readonly/>", "<readonly/><boot order=\"1\"/>", 1);
    assert!(first(&named));
}

// Before, a CD-ROM in a pool was said to be an empty drive.
#[test]
fn an_image_that_is_no_file_is_looked_up_or_refused() {
    let disk = "<source file='/images/d.qcow2'/>";
    let with = |device: &str, kind: &str, source: &str| {
        let (device, kind) = (format!("device='{device}'"), format!("<disk type='{kind}'"));
        let text = DEFINED.replacen("<disk type='file'", &kind, 1).replacen(disk, source, 1);
        text.replacen("device='disk'", &device, 1)
            .replacen("'vda' bus='virtio'", "'sda' bus='sata'", 1)
            .replacen("type='qcow2'", "type='raw'", 1)
    };
    let volume = "<source pool='isos' volume='debian.iso'/>";
    for device in ["disk", "cdrom"] {
        let text = with(device, "volume", volume);
        let refused = import(&text);
        let said = format!("{:?}", refused.findings);
        assert!(refused.definition.is_none(), "{said}");
        assert!(said.contains("virsh vol-path debian.iso --pool isos"), "{said}");
        let volumes = [("isos/debian.iso".to_owned(), "/isos/debian.iso".into())].into();
        let named = libvirt(&text, &Surroundings { volumes, ..Surroundings::default() });
        let vm = named.definition.unwrap_or_else(|| panic!("{:#?}", named.findings));
        assert_eq!(vm.disks[0].path.to_str(), Some("/isos/debian.iso"));
        assert_eq!(vm.disks[0].cdrom, device == "cdrom");
        let network = import(&with(device, "network", "<source protocol='http' name='d.iso'/>"));
        assert!(network.definition.is_none());
        assert!(format!("{:?}", network.findings).contains("its image is on network"));
    }
    let drive = with("cdrom", "file", "").replace(
        "</devices>",
        "<disk type='file' device='disk'>\
        <driver type='raw'/><source file='/d'/><target dev='vdb' bus='virtio'/></disk></devices>",
    );
    assert_eq!(definition(&drive).empty_cdroms.len(), 1);
}

// Before, the next device got the place of one that the guest has, and the VM did not start.
#[test]
fn a_device_that_is_added_later_is_told_a_free_place() {
    for (text, taken, free) in [
        (
            domain!("debian12_pc-defined"),
            "pci.0:04.0, the place of `-device qemu-xhci",
            "pci.0:05.0",
        ),
        (
            domain!("win11_no-tpm-defined"),
            "pcie.0:03.0, the place of `-device pcie-root-port",
            "pcie.0:04.0",
        ),
    ] {
        let mut vm = definition(text);
        let disk = DiskDefinition::new("/new", DiskFormat::Raw, DiskBus::Virtio);
        vm.disks.push(disk.clone());
        let problem = vm.validate().remove(0);
        let field = format!("disk[{}].pci", vm.disks.len() - 1);
        assert_eq!(problem.field, field);
        assert!(problem.message.contains(taken), "{problem}");
        assert!(problem.message.ends_with(&format!("\"{free}\" is free")), "{problem}");
        *vm.disks.last_mut().unwrap() = DiskDefinition { pci: free.parse().ok(), ..disk };
        assert_eq!(vm.validate(), []);
    }
}

#[test]
fn a_firmwares_variables_are_where_libvirt_says() {
    let end = "</nvram>";
    let begin = SECURE.find("<nvram").unwrap();
    let length = SECURE[begin..].find(end).unwrap() + end.len();
    let with = |nvram: &str| SECURE.replacen(&SECURE[begin..begin + length], nvram, 1);
    let vm = definition(&with("<nvram type='file'><source file='/srv/vars.fd'/></nvram>"));
    let store = vm.disks.iter().find(|disk| disk.bus == DiskBus::Pflash).unwrap();
    assert_eq!(store.path.to_str(), Some("/srv/vars.fd"));
    let made = import(&with("<nvram template='/srv/template.fd'/>"));
    assert_eq!(made.copies[0].from.to_str(), Some("/srv/template.fd"));
    let block = with("<nvram type='block'><source dev='/dev/vars'/></nvram>");
    assert!(import(&block).definition.is_none());
    let code = SECURE.replacen("type='pflash' format='raw'", "type='pflash' format='qcow2'", 1);
    assert!(import(&code).definition.is_none());
}
