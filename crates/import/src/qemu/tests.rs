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
