//! Tests against the installed QEMU, under TCG, with a boot sector for a guest.

mod common;

use common::{CAPABILITIES, LONG, NbdServer, Vm, definition};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use understudy_qemu::cache;
use understudy_qemu::command::{MAX_CARDS, MAX_VIRTIO_DISKS, Role};
use understudy_qemu::definition::{
    CardDefinition, CardModel, DiskBus, DiskDefinition, DiskFormat, EmptyCdrom, Vga,
    VirtioInterface,
};
use understudy_qemu::programs::find_qemu;
use understudy_qemu::qmp::{MonitorSockets, QmpError, RunState, VmEvent};
use understudy_qemu::{Accelerator, Capabilities, Monitor, VmDefinition};

#[test]
fn the_installed_qemu_is_known() {
    assert!(CAPABILITIES.accelerators.contains(&Accelerator::Tcg));
    let versioned = CAPABILITIES.machine_type("q35").unwrap();
    assert!(versioned.starts_with("pc-q35-"), "{versioned}");
}

#[test]
fn a_program_that_is_no_qemu_is_named() {
    let error = Capabilities::probe(Path::new("false")).unwrap_err().to_string();
    assert!(error.starts_with("false does not answer"), "{error}");
    assert!(error.contains("exit status: 1"), "{error}");
}

#[test]
fn a_qemu_is_asked_once_until_something_changes() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    fs::create_dir(&kept).unwrap();
    let (qemu, installed) = (folder.path().join("qemu"), find_qemu().unwrap());
    fs::copy(&installed, &qemu).unwrap();
    let files = || fs::read_dir(&kept).unwrap().map(|file| file.unwrap().path());
    // What it says anew is another file.
    let inodes = || files().map(|file| fs::metadata(file).unwrap().ino()).collect::<Vec<_>>();
    let ask = |directory: Option<&Path>| {
        let before = inodes();
        let found = cache::capabilities(&qemu, directory).unwrap();
        assert_eq!(found, Capabilities { binary: qemu.clone(), ..CAPABILITIES.clone() });
        inodes() != before
    };
    assert!(ask(Some(&kept)), "the first time");
    assert!(!ask(Some(&kept)) && !ask(Some(&kept)), "it is known");
    assert!(!ask(None), "nothing is kept without a directory");
    assert!(!ask(Some(&folder.path().join("elsewhere"))), "there is no such directory");

    let file = files().next().unwrap();
    // The next file is not to have the same inode.
    fs::hard_link(&file, folder.path().join("former")).unwrap();
    fs::write(&file, "{\"of\":").unwrap();
    assert!(ask(Some(&kept)) && !ask(Some(&kept)), "half a file");

    // The same content, the same length: as a package that is installed again.
    fs::hard_link(&file, folder.path().join("second")).unwrap();
    fs::remove_file(&qemu).unwrap();
    fs::copy(&installed, &qemu).unwrap();
    assert!(ask(Some(&kept)) && !ask(Some(&kept)), "another program");

    // Behind which there may be any QEMU.
    fs::write(&qemu, format!("#!/bin/sh\nexec {} \"$@\"\n", installed.display())).unwrap();
    assert!(!ask(Some(&kept)), "a script is asked each time, and nothing of it is kept");
}

/// The letter that comes next: after 'A' comes 'B', after 'P' comes 'A'.
fn successor(letter: u8) -> u8 {
    b'A' + (letter - b'A' + 1) % 16
}

#[test]
fn a_guest_survives_a_hundred_checkpoints_and_the_death_of_its_qemu() {
    for (format, machine, virtio) in [
        ("raw", "pc", VirtioInterface::Legacy),
        ("raw", "pc", VirtioInterface::Transitional),
        ("qcow2", "q35", VirtioInterface::Modern),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut vm = definition(folder.path(), format);
        vm.machine = machine.to_owned();
        vm.virtio = Some(virtio);
        let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
        let mirror_image = folder.path().join("mirror");
        std::fs::copy(&vm.disks[0].path, &mirror_image).unwrap();
        let mirror = NbdServer::start(folder.path(), &mirror_image, "mirror.nbd");
        let mut standby = Vm::start(&vm, &mirror, Role::Standby);
        assert_eq!(standby.monitor.status().unwrap(), RunState::inmigrate);

        // As a release before this one starts it: what a core dump has changes nothing of the machine.
        let dumped = ["-machine", "dump-guest-core=on"].map(str::to_owned).to_vec();
        let mut primary =
            Vm::start(&VmDefinition { qemu_args: dumped, ..vm.clone() }, &disk, Role::Fresh);
        assert!(!is_in_core_dumps(&standby) && is_in_core_dumps(&primary));
        assert_eq!(primary.monitor.status().unwrap(), RunState::prelaunch);
        let rate = primary.monitor.tsc_rate().unwrap();
        assert_eq!(rate, None, "an emulated processor has none of its own");
        primary.monitor.cont().unwrap();
        primary.await_boot();
        let mut last = primary.checkpoint();
        for _ in 1..100 {
            let next = primary.checkpoint();
            assert!(next.counter() >= last.counter(), "the guest does not go back");
            last = next;
        }
        let mut letter = primary.next_output();
        for _ in 0..64 {
            let next = primary.next_output();
            assert_eq!(next, successor(letter), "no output is lost or doubled");
            letter = next;
        }
        let exit = primary.qemu.kill().unwrap();
        assert!(!exit.status.unwrap().success());
        primary.await_event(|event| *event == VmEvent::Disconnected);
        assert!(matches!(primary.monitor.status(), Err(QmpError::Closed)));

        standby.become_machine(&last);
        assert_eq!(standby.monitor.status().unwrap(), RunState::running);
        goes_on_from(&mut standby, last.counter());
        reboots(&mut standby);
        // The survivor is a full primary.
        assert!(!standby.checkpoint().state.is_empty());
        standby.monitor.quit().unwrap();
        let exit = standby.qemu.wait(LONG).unwrap().expect("it quits");
        assert!(exit.status.unwrap().success());
    }
}

/// Whether a core dump of its QEMU has the guest's memory.
fn is_in_core_dumps(vm: &Vm) -> bool {
    let maps = fs::read_to_string(format!("/proc/{}/smaps", vm.qemu.pid())).unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.contains("memfd:guest-ram"));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    !flags.split_whitespace().any(|flag| flag == "dd")
}

/// The first letter may be the one of the counter itself, or the next.
fn goes_on_from(vm: &mut Vm, counter: u32) {
    let mut letter = vm.next_output();
    let expected = b'A' + (counter % 16) as u8;
    assert!(letter == expected || letter == successor(expected), "{letter} after {counter}");
    for _ in 0..32 {
        let next = vm.next_output();
        assert_eq!(next, successor(letter));
        letter = next;
    }
}

/// Needs the firmware, which is in a RAM block of its own, and the disk.
fn reboots(vm: &mut Vm) {
    vm.monitor.system_reset().unwrap();
    vm.await_event(|event| *event == VmEvent::Reset { guest: false });
    vm.await_boot();
}

/// The monitors are as a daemon finds them that goes on for one that died: half a command is
/// written, and an answer unread.
#[test]
fn monitors_of_another_process_are_taken_over_in_the_midst_of_a_command() {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    let folder = tempfile::tempdir().unwrap();
    let vm = definition(folder.path(), "raw");
    let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
    let mut former = Vm::start(&vm, &disk, Role::Fresh);
    former.monitor.cont().unwrap();
    former.await_boot();
    let [commands, saver, events] = former.monitor.duplicate().unwrap();
    let commands = UnixStream::from(commands);
    (&commands).write_all(br#"{"execute":"query-name"}{"execute":"stop","argum"#).unwrap();
    let sockets = MonitorSockets::adopt([commands.into(), saver, events]);
    let version = former.monitor.version();
    let (mut monitor, _events) = Monitor::adopt(sockets, version, LONG).unwrap();
    monitor.catch_up().unwrap();
    assert_eq!(monitor.status().unwrap(), RunState::running, "half a command is none");
    monitor.stop().unwrap();
    assert_eq!(monitor.status().unwrap(), RunState::paused);
}

#[test]
fn the_largest_machine_starts_on_either_chipset() {
    for (machine, ide) in [("pc", 4), ("q35", 6)] {
        let folder = tempfile::tempdir().unwrap();
        let mut vm = definition(folder.path(), "raw");
        let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
        vm.machine = machine.to_owned();
        vm.vga = Vga::Std;
        vm.qemu_args = ["-vnc", "none"].map(str::to_owned).into();
        let image = |bus, n: usize| {
            DiskDefinition::new(folder.path().join(format!("{bus:?}{n}")), DiskFormat::Raw, bus)
        };
        vm.disks = (0..MAX_VIRTIO_DISKS).map(|n| image(DiskBus::Virtio, n)).collect();
        vm.disks.extend((0..ide).map(|n| image(DiskBus::Ide, n)));
        vm.disks.push(image(DiskBus::Scsi, 0));
        vm.empty_cdroms.push(EmptyCdrom { bus: DiskBus::Scsi });
        if machine == "pc" {
            vm.disks.push(image(DiskBus::Sata, 0));
        }
        vm.guest_agent = true;
        let model = |n| if n % 2 == 0 { CardModel::VirtioNet } else { CardModel::E1000 };
        vm.cards = (0..MAX_CARDS)
            .map(|n| {
                let mac = format!("52:54:00:00:00:{n:02x}").parse().unwrap();
                CardDefinition::new(mac, "br0", model(n))
            })
            .collect();
        assert_eq!(vm.validate(), []);
        let mut primary = Vm::start(&vm, &disk, Role::Fresh);
        primary.monitor.cont().unwrap();
        primary.await_boot();
        let blocks = primary.checkpoint().others;
        assert!(blocks.iter().any(|(_, block)| block.name.ends_with("vga.vram")), "{machine}");
    }
}

#[test]
fn an_abandoned_checkpoint_leaves_the_guest_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let vm = definition(folder.path(), "raw");
    let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
    let mut primary = Vm::start(&vm, &disk, Role::Fresh);
    primary.monitor.cont().unwrap();
    primary.await_boot();
    for calls in 0..3 {
        let mut checkpoint = primary.monitor.begin_checkpoint(&primary.state).unwrap();
        if calls > 0 {
            checkpoint.stopped().unwrap();
        }
        if calls > 1 {
            checkpoint.saved().unwrap();
        }
        drop(checkpoint);
        assert_eq!(primary.monitor.status().unwrap(), RunState::paused);
        // Another checkpoint may follow, and may end the pause.
        let before = primary.checkpoint();
        assert_eq!(primary.monitor.status().unwrap(), RunState::running);
        let after = common::eventually("the guest goes on", || {
            Some(primary.checkpoint().counter()).filter(|after| *after > before.counter())
        });
        assert!(after > before.counter());
    }
}

#[test]
fn a_guest_that_powers_off_leaves_a_machine_to_commit() {
    let folder = tempfile::tempdir().unwrap();
    let vm = common::power_off_definition(folder.path());
    let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
    let mut primary = Vm::start(&vm, &disk, Role::Fresh);
    primary.monitor.cont().unwrap();
    let event = primary.await_event(|event| matches!(event, VmEvent::Shutdown { .. }));
    let reason = "guest-shutdown".to_owned();
    assert_eq!(event, VmEvent::Shutdown { guest: true, reason });
    common::eventually("it stands still", || {
        (primary.monitor.status().unwrap() == RunState::shutdown).then_some(())
    });
    let mut checkpoint = primary.monitor.begin_checkpoint(&primary.state).unwrap();
    checkpoint.stopped().unwrap();
    checkpoint.saved().unwrap();
    let error = checkpoint.resume().unwrap_err();
    assert!(matches!(error, QmpError::Refused { command: "cont", .. }), "{error}");
    assert_eq!(primary.monitor.status().unwrap(), RunState::shutdown);
}

#[test]
fn a_bad_device_state_ends_the_standby_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let vm = definition(folder.path(), "raw");
    let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
    let mut standby = Vm::start(&vm, &disk, Role::Standby);
    standby.monitor.prepare_standby(&standby.state).unwrap();
    standby.state.fill(b"this is not what QEMU saved").unwrap();
    let error = standby.monitor.go_live(&standby.state).unwrap_err();
    assert!(matches!(error, QmpError::Closed), "{error}");
    let exit = standby.qemu.wait(LONG).unwrap().expect("it ends");
    assert!(!exit.status.unwrap().success() && !exit.last_words.is_empty(), "{exit}");
}

#[test]
fn a_guest_that_does_not_use_its_disk_outlives_the_disk_server() {
    let folder = tempfile::tempdir().unwrap();
    let vm = definition(folder.path(), "raw");
    let disk = NbdServer::start(folder.path(), &vm.disks[0].path, "nbd");
    let mut primary = Vm::start(&vm, &disk, Role::Fresh);
    primary.monitor.cont().unwrap();
    primary.await_boot();
    drop(disk);
    // The guest's memory and devices go on; only its disk is gone.
    assert!(!primary.checkpoint().state.is_empty());
    primary.await_event(|event| *event == VmEvent::Resumed);
}
