//! The NBD server under QEMU's own client: qemu-io and qemu-img over the socket.

mod common;

use common::{MIB, Numbers, Served, qemu_img, qemu_io};
use std::fs;
use std::process::Command;
use std::sync::Arc;
use understudy_disk::{
    ChangeMap, Disk, DiskError, GRANULE_BYTES, ImageFormat, NbdServer, export_bytes,
    export_bytes_as_listed,
};
use understudy_protocol::DiskIndex;

#[test]
fn every_command_does_what_it_says() {
    let served = Served::empty(64 * MIB);
    served.io(&[
        "write -P 0x11 0 1M",
        "write -P 0x22 -f 1M 64k", // FUA
        "aio_write -P 0x33 2M 8M", // several requests under way
        "aio_flush",
        "flush",
        "discard 64k 64k",
        "write -z 256k 64k",
        "write -z -u 384k 64k",
        "read -P 0x11 0 64k",
        "read -P 0 64k 64k",
        "read -P 0x11 128k 128k",
        "read -P 0 256k 64k",
        "read -P 0x11 320k 64k",
        "read -P 0 384k 64k",
        "read -P 0x22 1M 64k",
        "read -P 0x33 2M 8M",
        "read -P 0 10M 54M",
        "write -P 0x44 63M 1M",
        "read -P 0x44 63M 1M",
    ]);
    let traffic = served.server().traffic();
    assert!(traffic.written_bytes >= 10 * MIB + 64 * 1024, "{traffic:?}");
    assert!(traffic.read_bytes >= 64 * MIB - MIB, "{traffic:?}");
    assert!(traffic.zeroes >= 3 && traffic.flushes >= 2, "{traffic:?}");

    let (_dir, path) = served.close();
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len() as u64, 64 * MIB);
    assert!(bytes[..65536].iter().all(|byte| *byte == 0x11));
    assert!(bytes[65536..131_072].iter().all(|byte| *byte == 0));
    assert!(bytes[2 << 20..10 << 20].iter().all(|byte| *byte == 0x33));
}

#[test]
fn several_clients_read_and_write_at_once() {
    let served = Served::empty(64 * MIB);
    std::thread::scope(|scope| {
        for client in 0..4_u64 {
            let served = &served;
            scope.spawn(move || {
                let mut commands = Vec::new();
                for round in 0..30_u64 {
                    let at = client * 16 * MIB + round * 512 * 1024;
                    let pattern = 1 + client * 40 + round;
                    commands.push(format!("aio_write -q -P {pattern} {at} 300k"));
                    commands.push("aio_flush".into());
                    commands.push(format!("aio_read -q -P {pattern} {at} 300k"));
                    if round % 10 == 0 {
                        commands.push("flush".into());
                    }
                }
                commands.push("aio_flush".into());
                served.io(&commands.iter().map(String::as_str).collect::<Vec<_>>());
            });
        }
    });
    for client in 0..4_u64 {
        let mut block = vec![0; 300 * 1024];
        for round in 0..30_u64 {
            served.disk.read(client * 16 * MIB + round * 512 * 1024, &mut block).unwrap();
            let pattern = (1 + client * 40 + round) as u8;
            assert!(block.iter().all(|byte| *byte == pattern), "client {client} round {round}");
        }
    }
}

#[test]
fn an_image_copied_in_is_the_image_read_back() {
    let served = Served::empty(48 * MIB);
    let source = served.dir.path().join("source");
    let mut content = Numbers(7).bytes(20 * MIB as usize);
    content[MIB as usize..3 * MIB as usize].fill(0);
    content.resize(48 * MIB as usize, 0);
    fs::write(&source, &content).unwrap();
    let source = source.to_str().unwrap().to_owned();

    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &source, &served.uri()]);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &source, &served.uri()]);
    drop_page_cache(&served.disk);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &source, &served.uri()]);
    let (_dir, path) = served.close();
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &source, path.to_str().unwrap()]);
}

/// Makes reads wait for the device, so that the reader threads serve them.
fn drop_page_cache(disk: &Disk) {
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
    disk.sync().unwrap();
    let file = fs::File::open(disk.path()).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

#[test]
fn qcow2_runs_on_top_of_the_raw_export() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image.qcow2");
    let name = image.to_str().unwrap().to_owned();
    qemu_img(&["create", "-q", "-f", "qcow2", &name, "64M"]);
    let export = export_bytes(&image, ImageFormat::Qcow2).unwrap();
    assert!(export > 64 * MIB, "{export}: room for the tables too");
    let source = dir.path().join("source").to_str().unwrap().to_owned();
    // All 64 MiB, so that the image grows as far as it can.
    fs::write(&source, Numbers(11).bytes(64 * MIB as usize)).unwrap();

    let served = Served::image(dir, &image, export);
    let top = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"nbd","server":{{"type":"unix","path":"{}"}}}}}}"#,
        served.server().socket().display()
    );
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "qcow2", "--target-is-zero", &source, &top]);
    qemu_img(&["check", "-q", &top]);
    qemu_img(&["compare", "-f", "raw", &source, &top]);

    let (_dir, _) = served.close();
    qemu_img(&["check", "-q", "-f", "qcow2", &name]);
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", &source, &name]);
    assert!(export_bytes(&name, ImageFormat::Qcow2).unwrap() >= export);
}

/// What a qcow2 image is shown with changes with what it holds, and its list of changes was thrown away for that.
#[test]
fn a_qcow2_images_list_of_changes_is_gone_on_with_at_each_start() {
    let dir = tempfile::tempdir().unwrap();
    let (image, list) = (dir.path().join("image.qcow2"), dir.path().join("disk0.changes"));
    let name = image.to_str().unwrap().to_owned();
    qemu_img(&["create", "-q", "-f", "qcow2", &name, "64M"]);
    let as_listed = || export_bytes_as_listed(&image, ImageFormat::Qcow2, &list).unwrap();
    let measured = || export_bytes(&image, ImageFormat::Qcow2).unwrap();
    let first = as_listed();
    assert_eq!(first, measured(), "there is no list");
    let map = ChangeMap::create(&list, first, &image).unwrap();
    map.unseal().unwrap();
    map.merge(&[3..5]).unwrap();
    drop(map);
    let in_guest = |command: &str| {
        let mut qemu_io = Command::new("qemu-io");
        let status = qemu_io.args(["-f", "qcow2", "-d", "unmap", "-c", command, &name]).status();
        assert!(status.unwrap().success(), "{command}");
    };
    in_guest("write -q -P 1 0 8M");
    let second = as_listed();
    assert!(second >= first + 8 * MIB, "{first}, then {second}");
    let map = ChangeMap::open(&list, second, &image).unwrap().unwrap();
    assert_eq!(map.runs(), [3..5]);
    drop(map);
    // Holes are as good as what they read as.
    in_guest("discard -q 0 8M");
    assert!(measured() < second, "it holds as much as before");
    let third = as_listed();
    assert_eq!(third, second);
    let map = ChangeMap::open(&list, third, &image).unwrap().unwrap();
    assert_eq!(map.runs(), [3..5]);
    map.merge(&[third / GRANULE_BYTES - 1..third / GRANULE_BYTES]).unwrap();
}

#[test]
fn a_read_only_disk_refuses_qemu_until_it_goes_live() {
    let served = Served::empty(MIB);
    served.disk.write(0, b"an epoch").unwrap();
    served.disk.set_read_only(true);
    for command in ["write -P 1 0 4k", "write -z 0 4k", "discard 0 4k", "write -f -P 1 0 4k"] {
        let output = qemu_io(&served.uri(), &[command]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("Operation not permitted"), "{command}: {said}");
    }
    let mut kept = [0; 8];
    served.disk.read(0, &mut kept).unwrap();
    assert_eq!(&kept, b"an epoch");
    assert_eq!(served.server().traffic().written_bytes, 0);
    let failures = served.disk.failures();
    assert!(failures >= 4, "{failures} of 4 failed");
    served.io(&["flush", "read 0 4k"]);
    assert_eq!(served.disk.failures(), failures);

    served.disk.set_read_only(false);
    served.io(&["write -P 1 0 4k", "read -P 1 0 4k"]);
}

#[test]
fn clients_reconnect_to_a_new_server_on_the_same_socket() {
    let mut served = Served::empty(MIB);
    served.io(&["write -P 5 0 4k"]);
    let socket = served.server().socket().to_owned();
    drop(served.server.take());
    assert!(!socket.exists(), "the socket is removed");

    // As left behind by a daemon that was killed.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    served.server = Some(NbdServer::serve(served.disk.clone(), &socket).unwrap());
    served.io(&["read -P 5 0 4k"]);
    served.io(&["read -P 5 0 4k"]);

    let second = NbdServer::serve(served.disk.clone(), &socket);
    assert!(matches!(second, Err(DiskError::SocketInUse { .. })));
    served.io(&["read -P 5 0 4k"]);
}

#[test]
fn a_file_in_the_place_of_the_socket_stays() {
    let served = Served::empty(MIB);
    let file = served.dir.path().join("precious");
    fs::write(&file, b"data").unwrap();
    assert!(NbdServer::serve(served.disk.clone(), &file).is_err());
    assert_eq!(fs::read(&file).unwrap(), b"data");
}

#[test]
fn qemu_is_kept_off_the_image_but_may_look_on() {
    let served = Served::empty(MIB);
    served.disk.write(0, &[9; 4096]).unwrap();
    let path = served.disk.path();
    let path = path.to_str().unwrap();
    let output = qemu_io(path, &["write 0 4k"]);
    assert!(!output.status.success(), "a second writer must be refused");
    assert!(String::from_utf8_lossy(&output.stderr).contains("lock"), "{output:?}");
    qemu_img(&["compare", "-U", "-f", "raw", "-F", "raw", path, path]);
}

#[test]
fn an_image_that_qemu_uses_is_refused() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; 4096]).unwrap();
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw", image.to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = qemu.stdin.take().unwrap();
    let mut output = BufReader::new(qemu.stdout.take().unwrap());
    // It has opened the image once it answers.
    writeln!(input, "length\n").unwrap();
    output.read_line(&mut String::new()).unwrap();
    let refused = Disk::open(DiskIndex(0), &image, 4096);
    drop(input);
    qemu.wait().unwrap();
    assert!(matches!(refused, Err(DiskError::InUse { .. })), "{refused:?}");
    Disk::open(DiskIndex(0), &image, 4096).unwrap();
}

#[test]
fn exports_are_sized_by_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("raw"), vec![0; 1000]).unwrap();
    assert_eq!(export_bytes(path("raw"), ImageFormat::Raw).unwrap(), 1024);

    let refused = export_bytes(path("raw"), ImageFormat::Qcow2).unwrap_err();
    assert!(matches!(refused, DiskError::QemuImg { .. }), "{refused}");
    let missing = export_bytes(path("missing"), ImageFormat::Qcow2).unwrap_err();
    assert!(matches!(missing, DiskError::Missing { .. }), "{missing}");

    qemu_img(&["create", "-q", "-f", "qcow2", &path("base"), "8M"]);
    let base = path("base");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &path("overlay")]);
    let refused = export_bytes(path("overlay"), ImageFormat::Qcow2).unwrap_err();
    assert!(matches!(refused, DiskError::NotStandalone { .. }), "{refused}");
    assert!(refused.to_string().contains(&base), "{refused}");

    // Small clusters need far larger tables.
    let options = "cluster_size=512,refcount_bits=64";
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &path("small"), "64M"]);
    let small = export_bytes(path("small"), ImageFormat::Qcow2).unwrap();
    assert!(small > export_bytes(path("base"), ImageFormat::Qcow2).unwrap() + 57 * MIB, "{small}");
}

#[test]
fn checkpoints_do_not_disturb_clients() {
    let served = Served::empty(16 * MIB);
    let disk = served.disk.clone();
    disk.set_backup(true);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let checkpoints = std::thread::spawn({
        let stop = stop.clone();
        move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                disk.begin_checkpoint();
                std::thread::yield_now();
                disk.end_checkpoint();
            }
        }
    });
    let commands: Vec<String> = (0..200)
        .flat_map(|round| [format!("write -f -q -P {} 0 4k", 1 + round % 255), "flush".into()])
        .chain(["read -P 200 0 4k".into()])
        .collect();
    served.io(&commands.iter().map(String::as_str).collect::<Vec<_>>());
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    checkpoints.join().unwrap();
    assert!(served.server().traffic().flushes >= 400);
}
