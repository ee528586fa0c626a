use super::*;
use crate::Outcome;
use understudy_qemu::definition::{CardDefinition, CardModel, DiskBus, DiskFormat};

const WEB: &str = "\
#a comment
agent: 1
balloon: 0
bios: ovmf
boot: order=scsi0;ide2;net0
cores: 2
cpu: x86-64-v2-AES
efidisk0: local:100/vm-100-disk-1.raw,efitype=4m,pre-enrolled-keys=1,size=528K
ide2: none,media=cdrom
machine: q35
memory: 2048
meta: creation-qemu=8.1.5,ctime=1712345678
name: web
net0: virtio=BC:24:11:2F:5A:7C,bridge=vmbr0,firewall=1
numa: 0
ostype: l26
sata1: local:iso/debian-13.iso,media=cdrom,size=700M
scsi0: local-lvm:vm-100-disk-0,iothread=1,size=32G
scsihw: virtio-scsi-single
serial0: socket
smbios1: uuid=8d2a9d0e-5c9b-4a56-9a36-0cf1a2b0b5a1
sockets: 2
vmgenid: 1c5a9b1e-0000-0000-0000-000000000000

[snapshot]
memory: 1
";

fn import(text: &str) -> Import {
    proxmox(text, &Surroundings::default())
}

#[test]
fn a_vm_is_taken_over() {
    let import = import(WEB);
    let vm = import.definition.unwrap_or_else(|| panic!("{:#?}", import.findings));
    assert_eq!((&vm.name[..], vm.vcpus, vm.memory.bytes()), ("web", 4, 2 << 30));
    assert_eq!(vm.disks[0].path.to_str(), Some("/dev/pve/vm-100-disk-0"), "the boot disk is first");
    assert_eq!((vm.disks[0].bus, vm.disks[0].format), (DiskBus::Scsi, DiskFormat::Raw));
    let store = vm.disks.iter().find(|disk| disk.bus == DiskBus::Pflash).unwrap();
    assert_eq!(store.path.to_str(), Some("/var/lib/vz/images/100/vm-100-disk-1.raw"));
    let medium = vm.disks.iter().find(|disk| disk.cdrom).unwrap();
    assert_eq!(medium.path.to_str(), Some("/var/lib/vz/template/iso/debian-13.iso"));
    assert_eq!(vm.empty_cdroms.len(), 1);
    assert_eq!((vm.cards[0].model, &vm.cards[0].bridge[..]), (CardModel::VirtioNet, "vmbr0"));
    assert_eq!(vm.cards[0].pci.as_ref().unwrap().to_string(), "pci.0:12.0", "the guest's ens18");
    assert!(vm.cpu.unwrap().starts_with("qemu64,aes=on"));
    assert!(vm.secure_boot && vm.guest_agent && vm.console);
}

// Before, the guest found other virtio devices than it had.
#[test]
fn a_guests_virtio_devices_stay_what_they_are() {
    for machine in ["machine: q35\n", "machine: pc\n", ""] {
        let vm = import(&WEB.replacen("machine: q35\n", machine, 1)).definition.unwrap();
        assert_eq!(vm.virtio_interface(), VirtioInterface::Transitional, "{machine}");
    }
}

// Before, it got the place of the first, and the VM did not start.
#[test]
fn a_card_that_is_added_later_is_told_a_free_place() {
    let second =
        "net0: virtio=BC:24:11:2F:5A:7C,bridge=vmbr0\nnet1: virtio=BC:24:11:2F:5A:7D,bridge=vmbr0";
    let pc = WEB.replacen("machine: q35", "machine: pc", 1);
    let text = pc.replacen("net0: virtio=BC:24:11:2F:5A:7C,bridge=vmbr0,firewall=1", second, 1);
    // Its seventh is behind a bridge there.
    let seventh = format!("{second}\nnet6: virtio=BC:24:11:2F:5A:7E,bridge=vmbr0");
    let imported = import(&text.replacen(second, &seventh, 1)).definition.unwrap();
    assert_eq!(imported.cards[2].pci.as_ref().unwrap().to_string(), "pci.0:03.0");
    let mut vm = import(&text).definition.unwrap();
    let third = CardDefinition {
        pci: None,
        mac: "52:54:00:00:00:03".parse().unwrap(),
        ..vm.cards[0].clone()
    };
    vm.cards.push(third);
    let problem = vm.validate().remove(0);
    assert_eq!(problem.field, "card[2].pci");
    assert!(problem.message.contains("pci.0:12.0, the place of card[0]"), "{problem}");
    assert!(problem.message.contains("\"pci.0:03.0\" is free"), "{problem}");
}

#[test]
fn what_cannot_be_protected_is_refused_with_its_line() {
    for (line, instead, number, words) in [
        ("numa: 0", "tpmstate0: local:100/x.raw,size=4M,version=v2.0", 15, "only Proxmox reads"),
        ("numa: 0", "hostpci0: 0000:01:00.0", 15, "hardware of this host"),
        // It ended the import: the first letter is more than one byte.
        ("cpu: x86-64-v2-AES", "cpu: x86-64-v2-AES,flags=é", 7, "the flag \"é\""),
        ("numa: 0", "args: -device x", 15, "qemu_args"),
        ("numa: 0", "virtiofs0: share", 15, "not known"),
        ("bridge=vmbr0", "bridge=vmbr0,tag=5000", 14, "5000 is no VLAN"),
        ("bridge=vmbr0", "bridge=vmbr0,trunks=1-x", 14, "no list of VLANs"),
        ("scsihw: virtio-scsi-single", "scsihw: lsi", 18, "virtio-scsi's driver"),
        ("local-lvm:vm", "ceph:vm", 18, "--volume ceph:vm-100-disk-0=PATH"),
        ("memory: 2048", "memory: lots", 11, "no number"),
        ("name: web", "name: ../web", 13, "--name"),
        ("ostype: l26", "nonsense", 16, "key: value"),
        ("efitype=4m", "efitype=2m", 8, "no more shipped"),
    ] {
        assert!(WEB.contains(line), "{line}");
        let import = import(&WEB.replacen(line, instead, 1));
        assert!(import.definition.is_none(), "{instead} was taken");
        let refused = import.findings.iter().find(|it| it.outcome == Outcome::Refused).unwrap();
        assert_eq!(refused.line, number, "{refused}");
        assert!(refused.why.contains(words), "{instead}: {refused}");
    }
}

#[test]
fn a_volume_lies_where_somebody_says() {
    let text = WEB.replace("local-lvm:vm", "ceph:vm");
    let volumes = [("ceph:vm-100-disk-0".to_owned(), "/dev/rbd0".into())].into();
    let import = proxmox(&text, &Surroundings { volumes, ..Surroundings::default() });
    assert_eq!(import.definition.unwrap().disks[0].path.to_str(), Some("/dev/rbd0"));
}

#[test]
fn cards_are_in_their_vlans() {
    for (text, access, trunk) in [
        ("bridge=vmbr0,tag=7", Some(7), ""),
        ("bridge=vmbr0,tag=7,trunks=10;20-22", Some(7), "10,20-22"),
        // Without a tag a card is in the bridge's own VLAN.
        ("bridge=vmbr0,trunks=10", Some(1), "10"),
        ("bridge=vmbr0", None, ""),
    ] {
        let import = import(&WEB.replacen("bridge=vmbr0", text, 1));
        let vlans = import.definition.unwrap().cards[0].vlans();
        assert_eq!((vlans.access, &vlans.trunk.to_string()[..]), (access, trunk), "{text}");
        let told = import.findings.iter().any(|finding| finding.why.contains("vlan_filtering 1"));
        assert_eq!(told, access.is_some(), "{text}");
    }
}

#[test]
fn a_guest_keeps_the_tablet_that_nobody_wrote_down() {
    let has = |text: &str, tablet: &str| {
        let vm = import(text).definition.unwrap();
        vm.qemu_args.iter().any(|argument| argument.contains(tablet))
    };
    assert!(has(WEB, "usb-tablet,id=tablet,bus=ehci.0,port=1"), "on q35");
    let pc = WEB.replace("machine: q35", "machine: pc");
    assert!(has(&pc, "usb-tablet,id=tablet,bus=uhci.0,port=1"));
    assert!(has(&pc, "piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2"));
    for other in ["tablet: 0", "vga: serial0", "vga: qxl"] {
        assert!(!has(&WEB.replace("numa: 0", other), "usb-tablet"), "{other}");
    }
    assert!(has(&WEB.replace("numa: 0", "tablet: 1"), "usb-tablet"));
}

/// Outcome for `line` in the place of another, by the words for it.
fn outcome(line: &str, instead: &str, what: &str) -> Outcome {
    assert!(WEB.contains(line), "{line}");
    let import = import(&WEB.replacen(line, instead, 1));
    let found = import.findings.iter().find(|finding| finding.to_string().contains(what));
    found.unwrap_or_else(|| panic!("{instead}: nothing of {what}: {:#?}", import.findings)).outcome
}

#[test]
fn what_is_not_carried_over_is_named() {
    let disk = "iothread=1,size=32G";
    for (line, instead, what) in [
        (disk, "cache=writeback,ssd=1", "scsi0, cache=writeback ssd=1"),
        (disk, "mbps_rd=10,size=32G", "scsi0, mbps_rd=10"),
        ("firewall=1", "queues=4", "net0, queues=4"),
        ("numa: 0", "unused0: local-lvm:vm-100-disk-9", "it stays where it is"),
        ("numa: 0", "ipconfig0: ip=dhcp", "what cloud-init has done"),
        ("numa: 0", "startup: order=1", "orders starts"),
        ("numa: 0", "vga: std,memory=32", "vga, memory=32"),
        ("numa: 0", "rng0: source=/dev/urandom,max_bytes=1", "rng0, max_bytes=1"),
        ("machine: q35", "machine: q35,enable-s3=1", "machine, enable-s3=1"),
        ("cpu: x86-64-v2-AES", "cpu: x86-64-v2-AES,phys-bits=40", "cpu, phys-bits=40"),
        ("smbios1: uuid=", "smbios1: product=eA==,base64=1,uuid=", "smbios1, product=eA=="),
        ("agent: 1", "agent: 1,fstrim_cloned_disks=1", "agent, fstrim_cloned_disks=1"),
        ("ostype: l26", "ostype: wxp", "ostype: wxp"),
        ("balloon: 0", "balloon: 1024", "the memory balloon"),
    ] {
        assert_eq!(outcome(line, instead, what), Outcome::LeftOut, "{instead}");
    }
    for (line, instead, what) in [
        ("firewall=1", "link_down=1", "its link is up"),
        ("net0:", "net6:", "net6, its place"),
        ("numa: 0", "virtio6: local-lvm:vm-100-disk-6", "virtio6, its place"),
        ("numa: 0", "acpi: 0", "it has ACPI"),
        ("order=scsi0;ide2;net0", "order=net0;scsi0", "it boots from its disks"),
        ("order=scsi0;ide2;net0", "nc", "it boots from its disks"),
    ] {
        assert_eq!(outcome(line, instead, what), Outcome::Changed, "{instead}");
    }
    for (line, instead, what) in [
        (disk, "ro=1", "only reads"),
        (disk, "snapshot=1", "dropped at power-off"),
        // The guest would have written over the container.
        (disk, "format=qed", "qed images are not replicated"),
        ("numa: 0", "virtio1: local:100/disk.vdi", "vdi images are not replicated"),
        ("agent: 1", "agent: 1,type=isa", "type=virtio"),
        ("numa: 0", "template: 1", "import a clone"),
    ] {
        assert_eq!(outcome(line, instead, what), Outcome::Refused, "{instead}");
    }
}

#[test]
fn a_windows_has_what_proxmox_gives_it() {
    let vm = import(&WEB.replacen("ostype: l26", "ostype: win11", 1)).definition.unwrap();
    assert!(vm.qemu_args.contains(&"base=localtime".to_owned()), "{:?}", vm.qemu_args);
    assert!(vm.cpu.unwrap().contains("hv-relaxed=on"));
    let utc = WEB.replacen("ostype: l26", "ostype: win11\nlocaltime: 0", 1);
    let vm = import(&utc).definition.unwrap();
    assert!(!vm.qemu_args.contains(&"base=localtime".to_owned()), "{:?}", vm.qemu_args);
}

#[test]
fn what_was_written_once_counts_still() {
    let second = "numa: 0\nvirtio1: local-lvm:vm-100-disk-2,format=raw\nbootdisk: virtio1\nkvm: 0";
    let text = WEB.replacen("numa: 0", second, 1).replacen("order=scsi0;ide2;net0", "cdn", 1);
    let vm = import(&text).definition.unwrap();
    assert_eq!(vm.disks[0].path.to_str(), Some("/dev/pve/vm-100-disk-2"));
    assert_eq!(vm.accel, AcceleratorChoice::Tcg);
}
