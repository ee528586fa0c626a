use super::*;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::os::unix::fs::symlink;
use std::slice;
use std::sync::mpsc;

/// A host with a VM of a keeper, `db`, and another one.
fn host(directory: &Path) -> HostConfig {
    let place = |path: &str| directory.join(path);
    prepare_directory(&place("state/begun")).unwrap();
    for (file, text) in [
        ("state/db/record.json", "own"),
        ("state/shop/record.json", "another's"),
        ("state/shop/disk0.img", "another's"),
        ("state/begun/disk0.img", "another's"),
        ("state/images/cd.iso", "nobody's"),
        ("state/arbiter.id", "id"),
        ("state/db.raw", "its image"),
        ("arbiter/db/1", "own"),
        ("arbiter/shop/1", "another's"),
        ("pki/ca.pem", "public"),
        ("pki/ca.key", "the authority's"),
        ("pki/a.key", "own"),
        ("pki/B.key", "another host's"),
    ] {
        fs::create_dir_all(place(file).parent().unwrap()).unwrap();
        fs::write(place(file), text).unwrap();
    }
    let text = format!(
        "name = \"a\"\nlisten = \"10.0.0.1:7700\"\nstate_dir = {:?}\n\
             [peers]\nb = \"10.0.0.2:7700\"\n[arbiter]\nkind = \"file\"\npath = {:?}\n\
             [tls]\nca = {:?}\ncert = {:?}\nkey = {:?}\n",
        place("state"),
        place("arbiter"),
        place("pki/ca.pem"),
        place("pki/a.pem"),
        place("pki/a.key"),
    );
    HostConfig::from_toml(&text, &place("host.toml")).unwrap()
}

fn name(vm: &str) -> VmName {
    vm.parse().unwrap()
}

/// What comes of reading a file.
fn read(path: &Path) -> Result<String, IoErrorKind> {
    fs::read_to_string(path).map_err(|error| error.kind())
}

fn write(path: &Path) -> Result<(), IoErrorKind> {
    fs::write(path, "new").map_err(|error| error.kind())
}

/// In a thread, which has the view of the keeper of `db`.
fn in_keeper<T: Send>(config: &HostConfig, act: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let keeper = scope.spawn(|| {
            env::set_current_dir("/").unwrap();
            assert_eq!(
                enter(config, &name("db"), &Files::default()).unwrap(),
                View::Own,
                "this test takes root"
            );
            act()
        });
        keeper.join().unwrap()
    })
}

#[test]
fn a_keeper_sees_nothing_that_is_another_vms_or_another_hosts() {
    let directory = tempfile::tempdir().unwrap();
    let (config, place) = (host(directory.path()), |path: &str| directory.path().join(path));
    in_keeper(&config, || {
        let shown = ["state/db/record.json", "state/arbiter.id", "state/images/cd.iso"];
        let further = ["arbiter/db/1", "arbiter/shop/1", "pki/ca.pem", "pki/a.key", "state/db.raw"];
        for path in shown.iter().chain(&further) {
            assert!(read(&place(path)).is_ok(), "{path}");
        }
        let hidden = ["state/shop/record.json", "state/begun/disk0.img"];
        for path in hidden {
            assert_eq!(read(&place(path)), Err(IoErrorKind::NotFound), "{path}");
        }
        for path in ["pki/ca.key", "pki/B.key"] {
            assert_eq!(read(&place(path)), Err(IoErrorKind::PermissionDenied), "{path}");
        }
        for path in ["state/further", "state/arbiter.id"] {
            assert_eq!(write(&place(path)), Err(IoErrorKind::ReadOnlyFilesystem), "{path}");
        }
        for path in ["/dev/null", "/dev/urandom"] {
            assert!(File::open(path).is_ok(), "{path}");
        }
        for path in
            ["/dev/tty0", "/dev/ptmx", "/dev/kmsg"].iter().filter(|it| Path::new(it).exists())
        {
            let opened = File::open(path).map_err(|error| error.kind());
            assert_eq!(opened.map(drop), Err(IoErrorKind::PermissionDenied), "{path}");
        }
        assert_eq!(write(&place("state/db/written")), Ok(()));
        assert_eq!(write(&place("arbiter/db/2")), Ok(()));
        assert_eq!(write(&place("state/db.raw")), Ok(()));
    });
    // The host sees what the keeper has done, and all else as before.
    for path in ["state/db/written", "arbiter/db/2", "state/shop/disk0.img"] {
        assert!(read(&place(path)).is_ok(), "{path}");
    }
    assert_eq!(read(&place("pki/ca.key")).as_deref(), Ok("the authority's"));
}

/// "No such file" was said of an image that is there.
#[test]
fn a_start_on_an_image_that_is_hidden_is_refused_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let (config, place) = (host(directory.path()), |path: &str| directory.path().join(path));
    prepare_directory(&place("state/closed")).unwrap();
    fs::write(place("state/closed/disk.raw"), "nobody's").unwrap();
    let seen = |image: &str| {
        let disk = format!("[[disk]]\npath = {:?}\nformat = 'raw'", place(image));
        let text = format!("name = 'db'\nmemory = '64M'\nvcpus = 1\n{disk}");
        check_seen(&config, &toml::from_str(&text).unwrap())
    };
    for image in ["state/db/record.json", "state/images/cd.iso", "state/db.raw", "elsewhere"] {
        assert!(seen(image).is_ok(), "{image}");
    }
    // Whoever opens it finds out.
    assert!(seen("state/shop/nothing").is_ok());
    for image in ["state/shop/disk0.img", "state/begun/disk0.img", "state/closed/disk.raw"] {
        let error = seen(image).unwrap_err();
        assert!(error.message.contains("would not see"), "{image}: {error}");
    }
}

#[test]
fn what_it_works_in_leads_to_nothing_that_is_hidden() {
    let directory = tempfile::tempdir().unwrap();
    let (config, state) = (host(directory.path()), directory.path().join("state"));
    let found = thread::scope(|scope| {
        let keeper = scope.spawn(|| {
            // As a daemon that was started there.
            unshare(CloneFlags::CLONE_FS).unwrap();
            env::set_current_dir(&state).unwrap();
            assert_eq!(enter(&config, &name("db"), &Files::default()).unwrap(), View::Own);
            (read(Path::new("db/record.json")), read(Path::new("shop/record.json")))
        });
        keeper.join().unwrap()
    });
    assert_eq!(found, (Ok("own".to_owned()), Err(IoErrorKind::NotFound)));
}

#[test]
fn a_further_vm_of_its_group_is_admitted_also_once_more() {
    let directory = tempfile::tempdir().unwrap();
    let (config, place) = (host(directory.path()), |path: &str| directory.path().join(path));
    let (tell, told) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let config = &config;
        let keeper = scope.spawn(move || {
            in_keeper(config, move || {
                tell.send(nix::unistd::gettid().as_raw()).unwrap();
                let mut seen = Vec::new();
                for () in goes {
                    seen.push(read(&place("state/shop/record.json")));
                    tell.send(0).unwrap();
                }
                let written = (write(&place("state/shop/new")), write(&place("state/further")));
                (seen, written)
            })
        });
        let its = u32::try_from(told.recv().unwrap()).unwrap();
        let look = || {
            go.send(()).unwrap();
            told.recv().unwrap();
        };
        look();
        admit(config, &name("shop"), &Files::default(), its).unwrap();
        look();
        // The VM is made anew.
        let shop = config.state_dir.join("shop");
        fs::remove_dir_all(&shop).unwrap();
        fs::create_dir(&shop).unwrap();
        fs::write(shop.join("record.json"), "again").unwrap();
        admit(config, &name("shop"), &Files::default(), its).unwrap();
        look();
        drop(go);
        let (seen, written) = keeper.join().unwrap();
        let hidden = Err(IoErrorKind::NotFound);
        assert_eq!(seen, [hidden, Ok("another's".to_owned()), Ok("again".to_owned())]);
        assert_eq!(written, (Ok(()), Err(IoErrorKind::ReadOnlyFilesystem)));
    });
    assert!(directory.path().join("state/shop/new").exists(), "it was written elsewhere");
}

fn that_reads(read: &[PathBuf]) -> Files {
    Files { read: read.to_vec(), ..Files::default() }
}

// A peer names what a QEMU reads: it gets no disk by that, and no terminal.
#[test]
fn what_a_qemu_reads_is_a_device_that_everybody_may_read() {
    let named = |read: &str| {
        let files = that_reads(&[read.into()]);
        files.that_are_devices(&RunAs::OwnNumber).devices().count()
    };
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    mknod(&disk, SFlag::S_IFBLK, Mode::all(), makedev(7, 0)).expect("this test takes root");
    assert_eq!(named("/dev/urandom"), 1);
    for other in [disk.to_str().unwrap(), "/dev/console", "/etc/passwd", "/dev/nothing"] {
        assert_eq!(named(other), 0, "{other}");
    }
    let has = |disk: PathBuf| {
        let files = Files { disks: vec![disk], ..Files::default() };
        files.that_are_devices(&RunAs::OwnNumber).devices().count()
    };
    assert_eq!((has(disk), has("/dev/urandom".into())), (1, 0));
}

/// Nodes of a device, which are nobody's.
fn make_nodes<const N: usize>(directory: &Path, names: [&str; N]) -> [PathBuf; N] {
    names.map(|name| {
        let (path, null) = (directory.join(name), makedev(1, 3));
        mknod(&path, SFlag::S_IFCHR, Mode::all(), null).expect("this test takes root");
        path
    })
}

#[test]
fn it_opens_its_own_devices_wherever_they_lie_and_no_others_until_they_are_admitted() {
    let directory = tempfile::tempdir().unwrap();
    let config = &host(directory.path());
    let nodes = &make_nodes(directory.path(), ["own", "medium", "others"]);
    let [own, medium, _] = nodes;
    let link = directory.path().join("link");
    symlink(own, &link).unwrap();
    let (tell, told) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let keeper = scope.spawn(move || {
            env::set_current_dir("/").unwrap();
            assert_eq!(enter(config, &name("db"), &that_reads(&[link])).unwrap(), View::Own);
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            let look = |()| nodes.each_ref().map(|node| read(node).is_ok());
            goes.into_iter().map(look).inspect(|_| tell.send(0).unwrap()).collect::<Vec<_>>()
        });
        let its = u32::try_from(told.recv().unwrap()).unwrap();
        for read in [&[][..], slice::from_ref(medium), &[own.clone(), medium.clone()]] {
            admit(config, &name("db"), &that_reads(read), its).unwrap();
            go.send(()).unwrap();
            told.recv().unwrap();
        }
        drop(go);
        let (before, after) = ([true, false, false], [true, true, false]);
        assert_eq!(keeper.join().unwrap(), [before, after, after]);
    });
    // The host opens them as before, and has no mount more.
    assert!(nodes.iter().all(|node| read(node).is_ok()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*directory.path().to_string_lossy()), "{mounts}");
}

// A group's further VM was refused where the service may not mount, once its daemon had been started again.
#[test]
fn who_sees_all_from_another_namespace_is_given_nothing_by_one_that_may_not_mount() {
    let directory = tempfile::tempdir().unwrap();
    let config = host(directory.path());
    let (tell, told) = mpsc::channel();
    let (go, goes) = mpsc::channel::<()>();
    let config = &config;
    thread::scope(|scope| {
        scope.spawn(move || {
            begin().unwrap();
            tell.send(nix::unistd::gettid().as_raw()).unwrap();
            // Until the other one is done.
            let _ = goes.recv();
        });
        let its = u32::try_from(told.recv().unwrap()).unwrap();
        let admits = scope.spawn(move || {
            let held = capabilities(None).unwrap();
            let effective = held.effective.difference(CapabilitySet::SYS_ADMIN);
            set_capabilities(None, CapabilitySets { effective, ..held }).unwrap();
            assert!(begin().is_err());
            admit(config, &name("shop"), &that_reads(&["/dev/urandom".into()]), its)
        });
        let admitted = admits.join().unwrap();
        drop(go);
        admitted.unwrap();
    });
}

#[test]
fn who_sees_all_is_given_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let config = host(directory.path());
    admit(&config, &name("shop"), &Files::default(), std::process::id()).unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*directory.path().to_string_lossy()), "{mounts}");
}
