use super::*;

fn definition(toml: &str) -> VmDefinition {
    toml::from_str(toml).unwrap()
}

fn resources() -> Resources {
    Resources {
        machine_type: "pc-q35-10.0".to_owned(),
        accelerator: Accelerator::Tcg,
        kvm: None,
        boot: BootFiles::default(),
        ram: 20,
        monitors: [21, 22, 23],
        disks: Vec::new(),
        cards: Vec::new(),
        console: None,
        tpm: None,
        awaits_disks: false,
        role: Role::Fresh,
        lockstep: None,
    }
}

/// The arguments as one text, an option and its value per line.
fn lines(vm: &VmDefinition, resources: &Resources) -> String {
    let mut text = String::new();
    for arg in command_line(vm, resources) {
        let arg = arg.into_string().unwrap();
        let separator = if arg.starts_with('-') { "\n" } else { " " };
        text = text + separator + &arg;
    }
    text.trim().to_owned()
}

const TWO_OF_EACH: &str = r#"
    name = "db"
    memory = "512M"
    vcpus = 2
    kernel = "/boot/vmlinuz"
    initrd = "/boot/initrd"
    append = "console=ttyS0 quiet"
    qemu_args = ["-device", "virtio-rng-pci"]
    [[disk]]
    path = "/var/a.raw"
    format = "raw"
    [[disk]]
    path = "/var/b.qcow2"
    format = "qcow2"
    [[card]]
    mac = "52:54:00:00:00:01"
    bridge = "br0"
    [[card]]
    mac = "52:54:00:00:00:02"
    bridge = "br0"
    model = "e1000"
"#;

fn two_of_each() -> (VmDefinition, Resources) {
    let resources = Resources {
        disks: vec!["/run/d0".into(), "/run/d,1".into()],
        cards: vec![20, 21],
        console: Some(Console {
            socket: ConsoleSocket::Listen("/run/con".into()),
            log: Some("/run/con.log".into()),
        }),
        boot: BootFiles {
            firmware: None,
            kernel: Some("/proc/self/fd/30".into()),
            initrd: Some("/proc/self/fd/31".into()),
        },
        ..resources()
    };
    (definition(TWO_OF_EACH), resources)
}

#[test]
fn everything_is_on_the_command_line() {
    let (vm, resources) = two_of_each();
    let expected = "\
-name guest=db,debug-threads=on
-no-user-config
-nodefaults
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-display none
-machine pc-q35-10.0,suppress-vmdesc=on,dump-guest-core=off,vmport=off,memory-backend=ram
-accel tcg
-object memory-backend-file,id=ram,size=536870912,mem-path=/proc/self/fd/20,share=on,prealloc=off
-m size=536870912B
-smp 2
-global PIIX4_PM.disable_s3=1
-rtc base=utc
-vga none
-msg timestamp=on
-action shutdown=pause
-S
-chardev socket,id=qmp0,fd=21
-mon chardev=qmp0,mode=control
-chardev socket,id=qmp1,fd=22
-mon chardev=qmp1,mode=control
-chardev socket,id=qmp2,fd=23
-mon chardev=qmp2,mode=control
-chardev socket,id=console,server=on,wait=off,path=/run/con,logappend=on,logfile=/run/con.log
-serial chardev:console
-kernel /proc/self/fd/30
-initrd /proc/self/fd/31
-append console=ttyS0 quiet
-blockdev driver=nbd,node-name=disk0,discard=unmap,detect-zeroes=off,server.type=unix,server.path=/run/d0
-device virtio-blk-pci,disable-modern=on,disable-legacy=off,ioeventfd=off,addr=0x03,drive=disk0,id=disk0,werror=stop,rerror=stop
-blockdev driver=nbd,node-name=disk1-nbd,discard=unmap,detect-zeroes=off,server.type=unix,server.path=/run/d,,1
-blockdev driver=qcow2,node-name=disk1,file=disk1-nbd,discard=unmap,detect-zeroes=off
-device virtio-blk-pci,disable-modern=on,disable-legacy=off,ioeventfd=off,addr=0x04,drive=disk1,id=disk1,werror=stop,rerror=stop
-netdev tap,id=card0,fd=20
-device virtio-net-pci,disable-modern=on,disable-legacy=off,ioeventfd=off,addr=0x10,netdev=card0,id=nic0,mac=52:54:00:00:00:01,romfile=
-netdev tap,id=card1,fd=21
-device e1000,addr=0x11,netdev=card1,id=nic1,mac=52:54:00:00:00:02,romfile=
-device virtio-rng-pci";
    assert_eq!(lines(&vm, &resources), expected);
}

const INSTALLED: &str = r#"
    name = "shop"
    memory = "512M"
    vcpus = 4
    topology = { sockets = 1, cores = 2, threads = 2 }
    machine = "q35"
    virtio = "modern"
    firmware = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd"
    secure_boot = true
    vnc = true
    guest_agent = true
    qemu_args = ["-device", "usb-tablet,bus=usb.0", "-device", "pcie-root-port,id=pci.1"]
    [[disk]]
    path = "/a"
    format = "raw"
    pci = "pci.1:00.0"
    [[disk]]
    path = "/vars"
    format = "raw"
    bus = "pflash"
    [[disk]]
    path = "/b"
    format = "raw"
    bus = "scsi"
    serial = "b-1"
    [[disk]]
    path = "/iso"
    format = "raw"
    bus = "sata"
    cdrom = true
    [[empty_cdrom]]
    bus = "sata"
    [[card]]
    mac = "52:54:00:00:00:01"
    bridge = "br0"
    mtu = 9000
    pci = "pcie.0:05.0"
"#;

fn installed() -> (VmDefinition, Resources) {
    let resources = Resources {
        disks: (0..4).map(|n| format!("/run/d{n}").into()).collect(),
        cards: vec![20],
        boot: BootFiles { firmware: Some("/proc/self/fd/29".into()), ..BootFiles::default() },
        ..resources()
    };
    (definition(INSTALLED), resources)
}

#[test]
fn a_guest_as_it_was_installed_has_its_firmware_and_its_places() {
    let (vm, resources) = installed();
    assert_eq!(vm.validate(), []);
    let lines = lines(&vm, &resources);
    for line in [
        "-machine pc-q35-10.0,suppress-vmdesc=on,dump-guest-core=off,vmport=off,memory-backend=ram,pflash0=firmware,\
         pflash1=disk1,smm=on",
        "-smp 4,sockets=1,dies=1,cores=2,threads=2",
        "-global ICH9-LPC.disable_s3=1",
        "-blockdev driver=file,node-name=firmware,read-only=on,filename=/proc/self/fd/29",
        "-global driver=cfi.pflash01,property=secure,value=on",
        "-device virtio-blk-pci,disable-modern=off,disable-legacy=on,ioeventfd=off,bus=pci.1,\
         addr=0x00.0x0,drive=disk0,id=disk0,werror=stop,rerror=stop,bootindex=0",
        "-device virtio-scsi-pci,disable-modern=off,disable-legacy=on,ioeventfd=off,id=scsi,addr=0x1e",
        "-device scsi-hd,bus=scsi.0,scsi-id=0,drive=disk2,id=disk2,werror=stop,rerror=stop,\
         serial=b-1,bootindex=2",
        "-blockdev driver=nbd,node-name=disk3,read-only=on,discard=unmap,detect-zeroes=off,\
         server.type=unix,server.path=/run/d3",
        "-device ide-cd,bus=ide.0,drive=disk3,id=disk3,werror=stop,rerror=stop,bootindex=3",
        "-device ide-cd,bus=ide.1,id=cdrom0",
        "-device virtio-net-pci,disable-modern=off,disable-legacy=on,ioeventfd=off,host_mtu=9000,\
         bus=pcie.0,addr=0x05.0x0,netdev=card0,id=nic0,mac=52:54:00:00:00:01,romfile=",
        "-vnc unix:vnc",
        "-chardev socket,id=guest-agent,path=guest-agent,server=on,wait=off",
    ] {
        assert!(lines.lines().any(|found| found == line), "no {line} in\n{lines}");
    }
    assert!(!lines.contains("drive=disk1"), "flash memory is no device of its own");
    let place = |word: &str| lines.find(word).unwrap();
    assert!(place("pcie-root-port") < place("bus=pci.1"), "a bridge comes before what it holds");
}

#[test]
fn sata_disks_on_pc_have_a_controller() {
    let (mut vm, resources) = installed();
    (vm.machine, vm.firmware, vm.secure_boot) = ("pc".to_owned(), None, false);
    let lines = lines(&vm, &resources);
    assert!(lines.contains("-device ahci,id=sata,addr=0x1f\n"), "{lines}");
    assert!(lines.contains("-global PIIX4_PM.disable_s3=1\n"), "{lines}");
    assert!(lines.contains("-device ide-cd,bus=sata.1,id=cdrom0\n"), "{lines}");
}

#[test]
fn a_standby_differs_only_in_waiting_for_state() {
    let (vm, fresh) = two_of_each();
    let standby = Resources { role: Role::Standby, ..fresh.clone() };
    let waiting = "-incoming defer\n-global migration.send-configuration=off\n";
    assert_eq!(lines(&vm, &standby).replace(waiting, ""), lines(&vm, &fresh));
    assert!(lines(&vm, &standby).contains(waiting));
}

#[test]
fn disks_boot_in_their_order_on_either_machine() {
    let toml = r#"
        name = "a"
        memory = "64M"
        vcpus = 1
        console = false
        vga = "std"
        cpu = "Haswell,-avx"
        [[disk]]
        path = "/a"
        format = "raw"
        bus = "ide"
        [[disk]]
        path = "/b"
        format = "raw"
        bus = "ide"
    "#;
    let two = Resources { disks: vec!["/x".into(), "/y".into()], ..resources() };
    let q35 = lines(&definition(&format!("machine = \"q35\"\n{toml}")), &two);
    assert!(q35.contains(
        "-device ide-hd,bus=ide.1,drive=disk1,id=disk1,werror=stop,rerror=stop,bootindex=1"
    ));
    assert!(q35.contains("-vga std") && q35.contains("-cpu Haswell,-avx"));
    assert!(!q35.contains("-serial"));
    let pc = lines(&definition(toml), &two);
    assert!(pc.contains("-device ide-hd,bus=ide.0,unit=1,drive=disk1"));
}

#[test]
fn guests_get_the_interface_of_their_drivers() {
    let (vm, resources) = two_of_each();
    for (interface, legacy) in
        [(VirtioInterface::Modern, "on"), (VirtioInterface::Transitional, "off")]
    {
        let line = lines(&VmDefinition { virtio: Some(interface), ..vm.clone() }, &resources);
        let options = format!("virtio-blk-pci,disable-modern=off,disable-legacy={legacy},");
        assert!(line.contains(&options), "{line}");
    }
}

#[test]
fn in_lockstep_everything_undetermined_passes_through_the_log() {
    let vm = definition(
        "name = \"a\"\nmemory = \"64M\"\nvcpus = 1\n[[disk]]\npath = \"a\"\nformat = \"raw\"\n\
         [[card]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"br0\"",
    );
    let of = |role| {
        let clock = "2026-11-21T00:00:00".to_owned().try_into().unwrap();
        let lockstep = Some(Lockstep { role, clock });
        let (disks, cards) = (vec!["/run/d0".into()], vec![20]);
        lines(&vm, &Resources { disks, cards, lockstep, ..resources() })
    };
    let primary = of(LogRole::Record);
    for expected in [
        "-machine pc-q35-10.0,suppress-vmdesc=on,dump-guest-core=off,vmport=off,memory-backend=ram,hpet=off",
        "-rtc base=2026-11-21T00:00:00,clock=vm",
        "-icount shift=1,rr=record,rrfile=understudy-log",
        "-blockdev driver=blkreplay,node-name=disk0,image=disk0-image",
        "-object filter-replay,id=replay0,netdev=card0",
        "ioeventfd=off,guest_announce=off,addr=0x10",
    ] {
        assert!(primary.contains(expected), "{expected} is not in:\n{primary}");
    }
    assert_eq!(of(LogRole::Replay), primary.replace("rr=record", "rr=replay"));
}

#[test]
fn a_console_may_be_a_socket_that_is_connected() {
    let (vm, mut resources) = two_of_each();
    resources.console = Some(Console { socket: ConsoleSocket::Connected(27), log: None });
    let wanted = "-chardev socket,id=console,fd=27\n";
    let lines = lines(&vm, &resources);
    assert!(lines.contains(wanted), "{lines}");
}

#[test]
fn a_qemu_that_outlives_its_daemon_waits_for_its_disks() {
    let (vm, resources) = two_of_each();
    assert!(!lines(&vm, &resources).contains("reconnect-delay"));
    let text = lines(&vm, &Resources { awaits_disks: true, ..resources });
    for path in ["/run/d0", "/run/d,,1"] {
        let line = text.lines().find(|line| line.contains(&format!("server.path={path}")));
        assert!(line.unwrap().ends_with(",reconnect-delay=1073741824"), "{text}");
    }
}

/// A drive plugged in by `device_add` is what the command line makes.
#[test]
fn a_scsi_drive_is_the_same_when_it_is_plugged_in() {
    let text = "name = 'db'\nmemory = '64M'\nvcpus = 1\n\
                [[disk]]\npath = '/a'\nformat = 'raw'\nbus = 'scsi'\n\
                [[disk]]\npath = '/b'\nformat = 'raw'\nbus = 'ide'\ncdrom = true\n\
                [[disk]]\npath = '/c'\nformat = 'raw'\nbus = 'scsi'\ncdrom = true\nserial = 's-1'";
    let vm: VmDefinition = toml::from_str(text).unwrap();
    let mut plugged: Vec<String> = scsi_drive(&vm, 2)
        .unwrap()
        .iter()
        .map(|(key, value)| format!("{key}={}", value.to_string().trim_matches('"')))
        .collect();
    plugged.sort();
    let disks = ["disk0", "disk1", "disk2"].map(PathBuf::from).to_vec();
    let args = command_line(&vm, &Resources { disks, ..resources() });
    let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let on_line = args.iter().find(|arg| arg.contains("id=disk2,")).unwrap();
    let mut on_line: Vec<String> =
        format!("driver={on_line}").split(',').map(str::to_owned).collect();
    on_line.sort();
    assert_eq!(plugged, on_line);
    assert!(scsi_drive(&vm, 1).is_none(), "on another bus");
}
