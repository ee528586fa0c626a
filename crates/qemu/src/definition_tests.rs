use super::*;
use std::path::Path;
use tempfile::TempDir;

/// A folder with the files that the definitions here name.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["vmlinuz", "a.raw", "b.qcow2"] {
        std::fs::write(folder.path().join(name), name).unwrap();
    }
    folder
}

fn read(folder: &TempDir, text: &str) -> Result<VmDefinition, DefinitionError> {
    VmDefinition::from_toml(text, &folder.path().join("vm.toml"))
}

const FULL: &str = r#"name = "db"
memory = "512M"
vcpus = 2
accel = "tcg"
kernel = "vmlinuz"
append = "console=ttyS0"
qemu_args = ["-device", "virtio-rng-pci"]

[[disk]]
path = "a.raw"
format = "raw"

[[disk]]
path = "b.qcow2"
format = "qcow2"
bus = "ide"

[[card]]
mac = "52:54:00:00:00:01"
bridge = "br0"

[policy]
kind = "interval"
hz = 40
"#;

/// `FULL` with one line replaced; the first line of the error, without the path.
fn complaint(line: &str, instead: &str) -> String {
    let folder = folder();
    assert!(FULL.contains(line), "{line}");
    let error = read(&folder, &FULL.replacen(line, instead, 1)).expect_err(instead).to_string();
    let path = format!("{}:", folder.path().join("vm.toml").display());
    assert!(error.starts_with(&path), "{error}");
    error[path.len()..].to_owned()
}

/// The BIOS cannot read the other one's disks in every QEMU.
#[test]
fn a_guest_that_the_firmware_boots_has_modern_virtio_unless_it_says_otherwise() {
    let name = "db".parse().unwrap();
    let mut vm = VmDefinition::new(name, "64M".parse().unwrap(), 1);
    assert_eq!(vm.virtio_interface(), VirtioInterface::Modern);
    vm.virtio = Some(VirtioInterface::Legacy);
    assert_eq!(vm.virtio_interface(), VirtioInterface::Legacy);
    vm.virtio = None;
    vm.kernel = Some("/boot/vmlinuz".into());
    assert_eq!(vm.virtio_interface(), VirtioInterface::Legacy);
}

#[test]
fn a_full_definition_is_read() {
    let folder = folder();
    let vm = read(&folder, FULL).unwrap();
    assert_eq!(vm.memory.bytes(), 512 << 20);
    assert_eq!(vm.machine, "pc");
    assert_eq!(vm.virtio_interface(), VirtioInterface::Legacy);
    assert_eq!(vm.kernel, Some(folder.path().join("vmlinuz")), "paths count from the folder");
    assert_eq!(vm.disks[1].path, folder.path().join("b.qcow2"));
    assert_eq!((vm.disks[0].bus, vm.disks[1].bus), (DiskBus::Virtio, DiskBus::Ide));
    assert_eq!(vm.cards[0].model, CardModel::VirtioNet);
    assert!(vm.console);
    assert_eq!(vm.policy, Some(Policy::Interval { hz: 40 }));
}

#[test]
fn it_travels_as_json() {
    let vm = read(&folder(), FULL).unwrap();
    let json = serde_json::to_string(&vm).unwrap();
    assert_eq!(serde_json::from_str::<VmDefinition>(&json).unwrap(), vm);
}

#[test]
fn syntax_types_and_unknown_fields_have_a_line() {
    for (line, instead, wanted) in [
        ("vcpus = 2", "vcpus = ", "3: "),
        ("vcpus = 2", "vcpus = \"two\"", "3: vcpus: invalid type: string \"two\""),
        ("vcpus = 2", "vcpus = -1", "3: vcpus: invalid value"),
        (
            "vcpus = 2",
            "vcpu = 2",
            "3: vcpu: unknown field `vcpu`, expected one of `name`, `memory`",
        ),
        (
            "accel = \"tcg\"",
            "accel = \"xen\"",
            "4: accel: unknown variant `xen`, expected one of `auto`, `tcg`, `kvm`",
        ),
        (
            "memory = \"512M\"",
            "memory = \"513M\"",
            "2: memory: \"513M\" is no memory size: it is not a multiple of 2M",
        ),
        ("bus = \"ide\"", "buss = \"ide\"", "16: disk[1].buss: unknown field"),
        (
            "format = \"qcow2\"",
            "format = \"vmdk\"",
            "15: disk[1].format: unknown variant `vmdk`, expected `raw` or `qcow2`",
        ),
        (
            "52:54:00:00:00:01",
            "01:54:00:00:00:01",
            "19: card[0].mac: \"01:54:00:00:00:01\" is no MAC address for a card: it is a multicast address",
        ),
        ("format = \"raw\"\n", "", "9: disk[0]: missing field `format`"),
        ("name = \"db\"\n", "", "1: missing field `name`"),
        (
            "kind = \"interval\"",
            "kind = \"never\"",
            "23: policy.kind: unknown variant `never`, expected `interval` or `adaptive`",
        ),
    ] {
        let found = complaint(line, instead);
        assert!(found.starts_with(wanted), "{instead}: {found}");
    }
}

#[test]
fn wrong_values_have_a_line() {
    for (line, instead, wanted) in [
        ("name = \"db\"", "name = \"../db\"", "1: name: \"../db\" is no name for a VM"),
        ("name = \"db\"", "name = \"\"", "1: name: "),
        ("vcpus = 2", "vcpus = 0", "3: vcpus: 0 is out of range; allowed are 1 to 255"),
        ("vcpus = 2", "vcpus = 256", "3: vcpus: "),
        ("accel = \"tcg\"", "machine = \"microvm\"", "4: machine: \"microvm\" is not supported"),
        ("accel = \"tcg\"", "machine = \"pc-q35-10.0,usb=on\"", "4: machine: "),
        (
            "accel = \"tcg\"",
            "cpu = \"host\"",
            "4: cpu: \"host\" means something else on every host",
        ),
        ("kernel = \"vmlinuz\"\n", "", "5: append: it needs \"kernel\""),
        ("\"vmlinuz\"", "\"vmlinux\"", "5: kernel: "),
        ("\"a.raw\"", "\"c.raw\"", "10: disk[0].path: "),
        ("\"b.qcow2\"", "\"a.raw\"", "14: disk[1].path: "),
        ("\"a.raw\"", "\".\"", "10: disk[0].path: "),
        ("\"br0\"", "\"a bridge\"", "20: card[0].bridge: \"a bridge\" is no name of a bridge"),
        ("-device", "-incoming", "7: qemu_args: \"-incoming\" is refused"),
        ("hz = 40", "hz = 0", "24: policy.hz: is 0; it must be 1 to 1000"),
    ] {
        let found = complaint(line, instead);
        assert!(found.starts_with(wanted), "{instead}: {found}");
    }
    assert!(complaint("\"a.raw\"", "\"c.raw\"").contains("no such file"));
    assert!(complaint("\"a.raw\"", "\".\"").contains("is a folder"));
}

#[test]
fn every_wrong_value_is_reported_at_once() {
    let second = "bridge = \"br0\"\n[[card]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"br/1\"\n";
    let text = FULL.replace("vcpus = 2", "vcpus = 300").replace("bridge = \"br0\"\n", second);
    let problems = read(&folder(), &text).unwrap_err().problems;
    let places: Vec<_> = problems.iter().map(|p| (p.line, p.problem.field.as_str())).collect();
    assert_eq!(
        places,
        [(Some(3), "vcpus"), (Some(22), "card[1].mac"), (Some(23), "card[1].bridge")]
    );
}

#[test]
fn there_must_be_something_to_boot() {
    let text = "name = \"a\"\nmemory = \"64M\"\nvcpus = 1\n";
    let error = read(&folder(), text).unwrap_err();
    assert_eq!(error.problems[0].line, None);
    assert!(error.to_string().contains("vm.toml: nothing to boot from"), "{error}");
}

/// The problems of `FULL` after a change.
fn problems(change: impl FnOnce(&mut VmDefinition)) -> Vec<String> {
    let mut vm = read(&folder(), FULL).unwrap();
    vm.machine = "q35".to_owned();
    change(&mut vm);
    vm.validate().into_iter().map(|problem| problem.to_string()).collect()
}

#[test]
fn a_firmware_and_its_variables_need_each_other() {
    let store = || DiskDefinition::new("/vars", DiskFormat::Raw, DiskBus::Pflash);
    let firmware = |vm: &mut VmDefinition| vm.firmware = Some("/code".into());
    assert_eq!(problems(|vm| (firmware(vm), vm.disks.push(store())).1), [""; 0]);
    for (found, words) in [
        (problems(firmware), "firmware: its variables need a [[disk]]"),
        (problems(|vm| vm.disks.push(store())), "firmware: a disk is on \"pflash\""),
        (problems(|vm| vm.secure_boot = true), "secure_boot: it needs"),
        (
            problems(|vm| {
                firmware(vm);
                vm.disks.push(DiskDefinition { format: DiskFormat::Qcow2, ..store() });
            }),
            "disk[2].format: the firmware's variables are",
        ),
    ] {
        assert!(found.len() == 1 && found[0].starts_with(words), "{words}: {found:?}");
    }
}

#[test]
fn devices_are_what_they_can_be() {
    let first = |change: fn(&mut DiskDefinition)| problems(|vm| change(&mut vm.disks[0]));
    for (found, words) in [
        (first(|disk| disk.cdrom = true), "disk[0].bus: a CD-ROM is on"),
        (first(|disk| disk.serial = Some("a,b".into())), "disk[0].serial: allowed are"),
        (
            first(|disk| (disk.bus, disk.pci) = (DiskBus::Scsi, PciPlace::new("pcie.0", 5, 0))),
            "disk[0].pci: only a virtio disk",
        ),
        (problems(|vm| vm.cards[0].mtu = Some(60)), "card[0].mtu: allowed are 68"),
        (
            problems(|vm| (vm.cards[0].mtu, vm.cards[0].model) = (Some(1500), CardModel::E1000)),
            "card[0].mtu: only a virtio-net-pci card",
        ),
        (
            problems(|vm| {
                vm.topology = Some(Topology { sockets: 2, dies: 1, cores: 2, threads: 1 });
            }),
            "topology: 2 sockets of 1 dies of 2 cores of 1 threads are not the 2",
        ),
        (
            problems(|vm| vm.empty_cdroms.push(EmptyCdrom { bus: DiskBus::Virtio })),
            "empty_cdrom[0].bus: a CD-ROM drive",
        ),
    ] {
        assert!(found.len() == 1 && found[0].starts_with(words), "{words}: {found:?}");
    }
}

// Before, QEMU refused it when the VM was started, in words of its own.
#[test]
fn two_devices_have_never_the_same_place() {
    let place = |slot, function| PciPlace::new("pcie.0", slot, function);
    let device = |vm: &mut VmDefinition, options: &str| {
        vm.qemu_args.extend(["-device".to_owned(), options.to_owned()]);
    };
    for (found, words) in [
        (
            problems(|vm| vm.cards[0].pci = place(3, 0)),
            "card[0].pci: card[0] is at pcie.0:03.0, the place of disk[0]; \"pcie.0:04.0\" is free",
        ),
        (
            problems(|vm| device(vm, "qemu-xhci,id=usb,addr=0x3")),
            "disk[0].pci: disk[0] is at pcie.0:03.0, the place of `-device qemu-xhci,id=usb,addr=0x3`",
        ),
        (
            problems(|vm| (vm.guest_agent = true, device(vm, "edu,bus=pcie.0,addr=f.0")).0),
            "qemu_args: `-device edu,bus=pcie.0,addr=f.0` is at pcie.0:0f.0, the place of the channel",
        ),
        (problems(|vm| vm.disks[0].pci = place(0x1f, 2)), "disk[0].pci: disk[0] is at pcie.0:1f.2"),
    ] {
        assert!(found.len() == 1 && found[0].starts_with(words), "{words}: {found:?}");
    }
    let apart = problems(|vm| {
        device(vm, "pcie-root-port,id=pci.1,bus=pcie.0,addr=0x4.0x1,multifunction=on");
        device(vm, "edu,bus=pci.1,addr=0x3");
        device(vm, "edu,id=addr");
        vm.cards[0].pci = PciPlace::new("pci.1", 0, 0);
    });
    assert_eq!(apart, [""; 0]);
}

#[test]
fn too_many_devices_are_refused() {
    let mut vm = read(&folder(), FULL).unwrap();
    let disk = |n: usize, bus| {
        DiskDefinition::new(Path::new("/d").join(n.to_string()), DiskFormat::Raw, bus)
    };
    vm.disks = (0..5).map(|n| disk(n, DiskBus::Ide)).collect();
    assert!(vm.validate()[0].message.contains("room for 4"));
    vm.machine = "q35".to_owned();
    assert_eq!(vm.validate(), []);
    vm.disks = (0..12).map(|n| disk(n, DiskBus::Virtio)).collect();
    assert_eq!(vm.validate(), []);
    vm.disks.push(disk(12, DiskBus::Virtio));
    assert!(vm.validate()[0].message.contains("room for 12"));
}

#[test]
fn drives_on_ahci_are_those_of_q35_and_of_a_controller_of_their_own() {
    let of = |machine: &str, bus: &str, list: &str| -> VmDefinition {
        let drive = match list {
            "disk" => format!("[[disk]]\npath = 'a.raw'\nformat = 'raw'\nbus = '{bus}'"),
            _ => format!("[[empty_cdrom]]\nbus = '{bus}'"),
        };
        let machine =
            format!("name = 'a'\nmemory = '64M'\nvcpus = 1\nmachine = '{machine}'\n{drive}");
        toml::from_str(&machine).unwrap()
    };
    for list in ["disk", "empty_cdrom"] {
        for (machine, bus, ahci) in [
            ("q35", "ide", true),
            ("pc-q35-10.0", "sata", true),
            ("pc", "ide", false),
            ("pc", "sata", true),
            ("q35", "scsi", false),
        ] {
            assert_eq!(of(machine, bus, list).has_ahci_drives(), ahci, "{list}: {machine}, {bus}");
        }
    }
}
