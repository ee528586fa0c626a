use super::*;
use crate::Outcome;
use understudy_qemu::definition::{CardModel, DiskBus, DiskFormat, TpmModel};

const LINE_OF_A_SCRIPT: &str = "qemu-system-x86_64 -name web -enable-kvm -machine q35,vmport=off -m 2G \
    -smp 4,sockets=1,cores=2,threads=2 -cpu Haswell,-tsx \
    -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE_4M.fd \
    -drive if=pflash,format=raw,file=/srv/web_VARS.fd \
    -drive file=/srv/web.qcow2,format=qcow2,if=none,id=d0 -device virtio-blk-pci,drive=d0,serial=w-1 \
    -drive 'file=/srv/my data.raw,format=raw,if=virtio' -device ide-cd \
    -netdev tap,id=n0,br=br0 -device virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07 \
    -chardev socket,id=t,path=/run/tpm -tpmdev emulator,id=tpm0,chardev=t -device tpm-crb,tpmdev=tpm0 \
    -device qemu-xhci -device usb-tablet -object rng-random,id=r,filename=/dev/urandom \
    -device virtio-rng-pci,rng=r -vga std -display gtk -serial mon:stdio -monitor none -daemonize";

fn import(line: &str) -> Import {
    qemu(line, &Surroundings::default())
}

#[test]
fn a_script_becomes_a_definition() {
    let import = import(LINE_OF_A_SCRIPT);
    let vm = import.definition.unwrap_or_else(|| panic!("{:#?}", import.findings));
    assert_eq!((&vm.name[..], vm.vcpus, vm.memory.bytes()), ("web", 4, 2 << 30));
    assert_eq!(vm.topology.map(|it| (it.sockets, it.cores, it.threads)), Some((1, 2, 2)));
    assert_eq!((&vm.machine[..], vm.accel), ("q35", AcceleratorChoice::Auto));
    let disks: Vec<_> = vm.disks.iter().map(|it| (it.path.to_str().unwrap(), it.bus)).collect();
    assert!(disks.contains(&("/srv/web.qcow2", DiskBus::Virtio)));
    assert!(disks.contains(&("/srv/my data.raw", DiskBus::Virtio)));
    assert_eq!(disks.last(), Some(&("/srv/web_VARS.fd", DiskBus::Pflash)));
    let system = vm.disks.iter().find(|disk| disk.serial.as_deref() == Some("w-1")).unwrap();
    assert_eq!(system.format, DiskFormat::Qcow2);
    assert_eq!((vm.cards[0].model, &vm.cards[0].bridge[..]), (CardModel::VirtioNet, "br0"));
    assert_eq!((vm.tpm, vm.empty_cdroms.len()), (Some(TpmModel::Crb), 1));
    assert!(vm.console && vm.vnc);
    assert!(vm.qemu_args.join(" ").contains("-device usb-tablet"));
}

#[test]
fn what_cannot_be_protected_is_refused_by_name() {
    for (part, instead, words) in [
        ("-device ide-cd", "-device vfio-pci,host=1:0.0", "tied to this host"),
        ("-device ide-cd", "-device nvme,drive=d0", "NVMe"),
        ("-device ide-cd", "-virtfs local,path=/srv", "not known to keep the VM"),
        ("-device ide-cd", "-hda /srv/x.img", "format=raw"),
        ("-device ide-cd", "-device usb-storage,drive=d0", "would not be held"),
        ("format=qcow2,", "", "say its format"),
        ("tap,id=n0,br=br0", "user,id=n0", "--bridge user=BRIDGE"),
        (",mac=52:54:00:00:00:07", "", "mac="),
        ("-name web", "-name ../web", "--name"),
        ("-m 2G", "-m much", "-m:"),
        ("-vga std", "-vga", "no option"),
        ("-monitor none", "'-monitor none", "not closed"),
        ("vmport=off", "nvdimm=on", "nvdimm is not known"),
    ] {
        assert!(LINE_OF_A_SCRIPT.contains(part), "{part}");
        let import = import(&LINE_OF_A_SCRIPT.replacen(part, instead, 1));
        assert!(import.definition.is_none(), "{instead} was taken");
        let refused = import.findings.iter().filter(|it| it.outcome == Outcome::Refused);
        let said: Vec<String> = refused.map(ToString::to_string).collect();
        assert!(said.iter().any(|line| line.contains(words)), "{instead}: {said:?}");
    }
}

#[test]
fn hostile_lines_are_refused_and_nothing_else() {
    for line in ["", "-", "--", "-m", "x -name", "-name a -m 0", "-smp 4294967295,cores=4294967295"]
    {
        assert!(import(line).definition.is_none(), "{line}");
    }
}

#[test]
fn what_is_not_carried_over_is_named() {
    let outcome = |part: &str, instead: &str, what: &str| {
        assert!(LINE_OF_A_SCRIPT.contains(part), "{part}");
        let import = import(&LINE_OF_A_SCRIPT.replacen(part, instead, 1));
        let found = import.findings.iter().find(|finding| finding.to_string().contains(what));
        found
            .unwrap_or_else(|| panic!("{instead}: nothing of {what}: {:#?}", import.findings))
            .outcome
    };
    for (part, instead, what) in [
        ("-m 2G", "-m 2G,slots=2,maxmem=4G", "-m, slots=2 maxmem=4G"),
        ("threads=2", "threads=2,maxcpus=8", "-smp, maxcpus=8"),
        ("if=none,id=d0", "if=none,id=d0,cache=none", "-drive, cache=none"),
        ("serial=w-1", "serial=w-1,num-queues=2", "-device, num-queues=2"),
        ("id=n0,br=br0", "id=n0,br=br0,vhost=on", "-netdev, vhost=on"),
        ("netdev=n0,", "netdev=n0,mq=on,", "-device, mq=on"),
        ("-monitor none", "-monitor none", "-monitor none"),
        (
            "-netdev tap,id=n0,br=br0 -device virtio-net-pci,netdev=n0,mac=52:54:00:00:00:07",
            "",
            "-nodefaults",
        ),
    ] {
        assert_eq!(outcome(part, instead, what), Outcome::LeftOut, "{instead}");
    }
    for (part, instead, what) in [
        ("tpm-crb,tpmdev=tpm0", "tpm-crb,tpmdev=tpm0", "a TPM 2.0 that begins anew"),
        ("q35,vmport=off", "q35,vmport=off", "-machine vmport=off"),
        ("netdev=n0,", "netdev=n0,bootindex=1,", "it boots from its disks"),
        ("drive=d0,", "drive=d0,addr=x,", "another place on the PCI bus"),
    ] {
        assert_eq!(outcome(part, instead, what), Outcome::Changed, "{instead}");
    }
    for (part, instead, what) in [
        ("-tpmdev emulator", "-tpmdev passthrough", "only an emulated TPM 2.0"),
        ("if=none,id=d0", "if=none,id=d0,readonly=on", "only reads"),
        ("file=/srv/web.qcow2", "file=nbd://b/web", "only files and block devices"),
        ("drive=d0,", "drive=d0,logical_block_size=4096,", "would not find its partitions"),
        ("if=none,id=d0", "if=none,id=d0,readonly", "only reads"),
    ] {
        assert_eq!(outcome(part, instead, what), Outcome::Refused, "{instead}");
    }
}

/// The file's name was cut at the comma, and nothing was said of the rest.
#[test]
fn two_commas_are_one_of_a_files_name() {
    let line =
        LINE_OF_A_SCRIPT.replacen("/srv/web.qcow2", "/srv/web,,old,,,format=raw,serial=a,,b", 1);
    let import = import(&line);
    let vm = import.definition.as_ref().unwrap();
    assert!(vm.disks.iter().any(|disk| disk.path.to_str() == Some("/srv/web,old,")), "{vm:?}");
    assert!(format!("{import:?}").contains("serial=a,,b"), "{import:?}");
}

#[test]
fn disks_and_cards_keep_their_places_and_their_order() {
    let line = LINE_OF_A_SCRIPT
        .replacen("drive=d0,", "drive=d0,bus=pcie.0,addr=0x5,", 1)
        .replacen("netdev=n0,", "netdev=n0,addr=6.1,host_mtu=9000,", 1)
        .replacen(
            "-device ide-cd",
            "-drive file=/b,format=raw,if=none,id=d1 -device virtio-blk-pci,drive=d1,bootindex=0",
            1,
        );
    let vm = import(&line).definition.unwrap();
    let disk =
        |path: &str| vm.disks.iter().position(|disk| disk.path.to_str() == Some(path)).unwrap();
    assert!(disk("/b") < disk("/srv/web.qcow2"));
    let place =
        |place: &Option<understudy_qemu::definition::PciPlace>| place.as_ref().unwrap().to_string();
    assert_eq!(place(&vm.disks[disk("/srv/web.qcow2")].pci), "pcie.0:05.0");
    assert_eq!((place(&vm.cards[0].pci), vm.cards[0].mtu), ("pcie.0:06.1".to_owned(), Some(9000)));
}

// Before, the guest booted the CD-ROM.
#[test]
fn a_cdrom_comes_before_a_disk_only_if_it_is_to_boot_first() {
    let cdrom = "-drive file=/cd.iso,format=raw,if=ide,media=cdrom";
    let first = |line: &str| import(line).definition.unwrap().disks[0].path.clone();
    let line = LINE_OF_A_SCRIPT.replacen("-device ide-cd", "", 1);
    let before = line.replacen("-drive 'file", &format!("{cdrom} -drive 'file"), 1);
    assert_eq!(first(&before).to_str(), Some("/srv/my data.raw"));
    let before = line.replacen("-name web", "-cdrom /cd.iso -name web", 1);
    assert_eq!(first(&before).to_str(), Some("/srv/my data.raw"));
    let ordered = format!(
        "{line} -drive file=/cd.iso,format=raw,if=none,id=c -device ide-cd,drive=c,bootindex=0"
    );
    assert_eq!(first(&ordered).to_str(), Some("/cd.iso"));
}

// Before, a guest found its disks on a controller that it has no driver for.
#[test]
fn a_disk_on_another_controller_is_refused() {
    let with = |more: &str| import(&LINE_OF_A_SCRIPT.replacen("-device ide-cd", more, 1));
    let drive = "-drive file=/s,format=raw,if=none,id=s0";
    for (controller, disk, name) in [
        ("-device megasas,id=s", "scsi-hd,bus=s.0,drive=s0", "megasas"),
        ("-device pvscsi", "scsi-hd,drive=s0", "pvscsi"),
        ("-device virtio-scsi-pci,id=v -device lsi,id=s", "scsi-cd,bus=s.0", "lsi"),
        ("-device ahci,id=a", "ide-hd,bus=a.1,drive=s0", "ahci"),
        ("-drive file=/t,format=raw,if=scsi", "ide-cd", "lsi53c895a"),
    ] {
        let import = with(&format!("{controller} {drive} -device {disk}"));
        let why = format!("the controller {name} is not known");
        assert!(import.definition.is_none(), "{disk} on {controller} was taken");
        let refused = import.findings.iter().filter(|it| it.outcome == Outcome::Refused);
        assert!(refused.clone().any(|it| it.why.contains(&why)), "{:?}", import.findings);
    }
    for (controller, disk, bus) in [
        ("-device virtio-scsi-pci,id=v", "scsi-hd,bus=v.0,drive=s0", DiskBus::Scsi),
        ("-device virtio-scsi-pci", "scsi-hd,bus=scsi.0,drive=s0", DiskBus::Scsi),
        ("", "ide-hd,bus=ide.1,drive=s0", DiskBus::Ide),
    ] {
        let import = with(&format!("{controller} {drive} -device {disk}"));
        let vm = import.definition.unwrap_or_else(|| panic!("{:#?}", import.findings));
        assert!(vm.disks.iter().any(|disk| disk.bus == bus && disk.path.to_str() == Some("/s")));
    }
}

// Before, what libvirt's users write into scripts was refused.
#[test]
fn the_channel_of_the_guests_agent_is_taken_and_no_other() {
    let with = |name: &str| {
        let more = format!(
            "-device virtio-serial-pci,id=vs -chardev socket,path=/run/qga,server=on,wait=off,id=qga0 \
             -device virtserialport,bus=vs.0,chardev=qga0,name={name}"
        );
        import(&LINE_OF_A_SCRIPT.replacen("-device ide-cd", &more, 1))
    };
    let agent = with("org.qemu.guest_agent.0");
    assert!(agent.definition.unwrap_or_else(|| panic!("{:#?}", agent.findings)).guest_agent);
    let other = with("com.redhat.spice.0");
    assert!(other.definition.is_none());
    assert!(format!("{:?}", other.findings).contains("would not be held"), "{:?}", other.findings);
}

// Before, devices on the root bus of q35 became others than they were.
#[test]
fn virtio_devices_are_modern_behind_a_port_of_pcie() {
    use understudy_qemu::definition::VirtioInterface;
    let port = "-device pcie-root-port,id=p1,chassis=1";
    let of = |line: &str| {
        let import = import(line);
        let changed = format!("{:?}", import.findings).matches("the VM has one interface").count();
        (import.definition.unwrap().virtio, changed)
    };
    assert_eq!(of(LINE_OF_A_SCRIPT), (Some(VirtioInterface::Transitional), 0));
    let behind = |parts: &[&str]| {
        let all = LINE_OF_A_SCRIPT.replacen("-device ide-cd", port, 1);
        parts
            .iter()
            .fold(all, |line, part| line.replacen(part, &format!("{part}bus=p1,addr=0,"), 1))
    };
    assert_eq!(of(&behind(&["drive=d0,"])), (Some(VirtioInterface::Modern), 1), "the card is not");
    let other = behind(&["drive=d0,"]).replacen("netdev=n0,", "netdev=n0,bus=p2,addr=0,", 1);
    let both = other.replacen(port, &format!("{port} -device pcie-root-port,id=p2,chassis=2"), 1);
    assert_eq!(of(&both), (Some(VirtioInterface::Modern), 0));
}
