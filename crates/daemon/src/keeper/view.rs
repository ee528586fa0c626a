//! What a keeper sees of its host's files: in a mount namespace of its own, the directories of its own VMs, and not
//! those of others; no keys that are not its host's own; and no devices but its VMs' can be opened. The
//! rest is as it is for its daemon.
//!
//! Nothing can be mounted from within any more: [`super::rights`] sees to that. A further VM of its group is
//! [admitted](admit) by the daemon.

mod attributes;
mod devices;

use self::attributes::only_follow;
use self::devices::Device;
use super::note;
use crate::config::HostConfig;
use crate::host::prepare_directory;
use anyhow::Context;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::fs::{self, File};
use std::io::{self, ErrorKind as IoErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{env, thread};
use understudy_arbiter::MEMORY;
use understudy_link::pki::CA_KEY;
use understudy_protocol::VmName;
use understudy_qemu::definition::DiskDefinition;
use understudy_qemu::{RunAs, VmDefinition};
use understudy_replication::records::{self, Records};
use understudy_report::error::{ErrorKind, HostError};

/// What a mount that hides something is called in /proc/self/mountinfo.
const COVER: &str = "understudy-keeper";
/// Room for the names of what is left.
const ROOM: &str = "mode=0700,size=256k";

/// Files of a VM outside its directory, as far as they are there.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Its disks, and media.
    pub disks: Vec<PathBuf>,
    /// Devices that its QEMU reads by itself, sources of random numbers say, if it may. A peer can name them.
    pub read: Vec<PathBuf>,
}

impl Files {
    /// What these definitions name.
    pub(super) fn of<'a>(definitions: impl Iterator<Item = &'a VmDefinition>) -> Files {
        let mut files = Files::default();
        for definition in definitions {
            files.disks.extend(definition.disks.iter().map(|disk| disk.path.clone()));
            let words = definition.qemu_args.iter().flat_map(|it| it.split([',', '=']));
            files.read.extend(words.filter(|word| word.starts_with('/')).map(PathBuf::from));
        }
        files
    }

    fn devices(&self, user: &RunAs) -> impl Iterator<Item = &PathBuf> {
        let disks = self.disks.iter().filter(|path| devices::is_disk(path));
        disks.chain(self.read.iter().filter(|path| devices::is_read(path, user)))
    }
}

/// How far the host lets it have one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    /// It sees no other VMs.
    Own,
    /// It sees all; why.
    Whole(String),
}

/// Gives this process, which has one thread, the view of the keeper of a VM that has these files.
pub fn enter(config: &HostConfig, vm: &VmName, files: &Files) -> Result<View, HostError> {
    if let Err(why) = begin() {
        return Ok(View::Whole(why));
    }
    narrow(config, vm, files).map(|()| View::Own).map_err(|error| {
        let message = format!("a keeper cannot be kept from what is other VMs': {error:#}");
        HostError::new(ErrorKind::Internal, message)
    })
}

/// Whether a keeper would get one here: tried in a thread that ends.
pub fn probe() -> Result<(), String> {
    thread::spawn(begin).join().unwrap_or_else(|_| Err("the thread that tried it panicked".into()))
}

/// Only if nothing that is mounted here is mounted for the host, too.
fn begin() -> Result<(), String> {
    let begun = unshare(CloneFlags::CLONE_NEWNS).and_then(|()| only_follow());
    begun.map_err(|error| format!("it cannot have a mount namespace of its own: {error}"))
}

fn narrow(config: &HostConfig, vm: &VmName, files: &Files) -> anyhow::Result<()> {
    // What it works in would lead to what is covered.
    let working = env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let state = &config.state_dir;
    let own = vm.below(state);
    prepare_directory(&own)?;
    let mut left = vec![own, state.join(MEMORY)];
    left.extend(nobodys(state)?);
    left.extend(of_images(config, vm));
    left.sort();
    left.dedup();
    show_only(state, &left)?;
    for file in strange_keys(config)? {
        bar(&file).with_context(|| format!("cannot hide {}", file.display()))?;
    }
    devices::leave_only(files.devices(&config.run_as))?;
    env::set_current_dir(working).or_else(|_| env::set_current_dir("/"))?;
    Ok(())
}

/// What lies in the state directory and is no VM's: images that somebody has put there.
fn nobodys(state: &Path) -> anyhow::Result<Vec<PathBuf>> {
    Ok(listed(state)?.into_iter().filter(|path| is_nobodys(path)).collect())
}

fn listed(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let paths = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
    };
    paths().with_context(|| format!("cannot read {}", directory.display()))
}

/// A VM's directory is closed to all but root from its first moment, before there is anything in it.
fn is_nobodys(entry: &Path) -> bool {
    let of_vms = [note::FILE, records::FILE];
    fs::metadata(entry).is_ok_and(|found| match found.is_dir() {
        true => found.mode() & 0o077 != 0 && !of_vms.iter().any(|file| entry.join(file).exists()),
        // An image; not a lock, which is the daemon's.
        false => found.is_file() && found.len() > 0,
    })
}

/// Directories of its own images, where somebody has put them into the state directory.
fn of_images(config: &HostConfig, vm: &VmName) -> Vec<PathBuf> {
    // One that cannot be read is told of by whoever needs it.
    let record = Records::new(&config.state_dir, &config.name).read(vm).ok().flatten();
    let disks = record.iter().flat_map(|record| &record.definition.disks);
    let below = |disk: &DiskDefinition| {
        let inner = disk.path.strip_prefix(&config.state_dir).ok()?.components().next()?;
        Some(config.state_dir.join(inner))
    };
    disks.filter_map(below).collect()
}

/// The authority's key and those of other hosts, where this one was set up, and the tokens of its API.
fn strange_keys(config: &HostConfig) -> anyhow::Result<Vec<PathBuf>> {
    let tokens = config.api.iter().flat_map(|api| api.tokens.values().cloned());
    let Some(tls) = &config.tls else { return Ok(tokens.collect()) };
    let directory = tls.ca.parent().context("the authority's certificate is in no directory")?;
    let is_key = |path: &PathBuf| {
        // Files have the case that somebody gave them.
        let name = path.file_name().unwrap_or_default().to_ascii_lowercase();
        let of_host = name.to_str().and_then(|name| name.strip_suffix(".key"));
        name == CA_KEY || of_host.is_some_and(|host| config.peers.contains_key(host))
    };
    let keys = listed(directory)?.into_iter().filter(is_key).filter(|key| *key != tls.key);
    Ok(keys.chain(tokens).collect())
}

/// Covers a directory, with these of its entries, as far as they are there, in the cover.
fn show_only(directory: &Path, entries: &[PathBuf]) -> anyhow::Result<()> {
    let shown = || -> anyhow::Result<()> {
        // Held before they are out of sight.
        let mut held = Vec::new();
        for path in entries {
            match hold(path) {
                Ok(entry) => held.push((path, entry)),
                Err(error) if error.kind() == IoErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        mount(Some(COVER), directory, Some("tmpfs"), cover_flags(), Some(ROOM))?;
        for (path, entry) in held {
            match entry.metadata()?.is_dir() {
                true => fs::create_dir(path)?,
                false => drop(File::create_new(path)?),
            }
            bind(&PathBuf::from(format!("/proc/self/fd/{}", entry.as_raw_fd())), path)?;
            if path.ends_with(MEMORY) {
                close(path)?;
            }
        }
        Ok(close(directory)?)
    };
    shown().with_context(|| format!("cannot hide what is in {}", directory.display()))
}

fn hold(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(nix::libc::O_PATH).open(path)
}

fn cover_flags() -> MsFlags {
    MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC
}

fn bind(what: &Path, place: &Path) -> nix::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(what), place, None::<&str>, flags, None::<&str>)
}

/// What would be written into a cover would be lost.
fn close(cover: &Path) -> nix::Result<()> {
    change(cover, cover_flags() | MsFlags::MS_RDONLY)
}

fn open(cover: &Path) -> nix::Result<()> {
    change(cover, cover_flags())
}

fn change(place: &Path, flags: MsFlags) -> nix::Result<()> {
    let flags = flags | MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    mount(None::<&str>, place, None::<&str>, flags, None::<&str>)
}

/// Nobody opens it any more, root included: it is a device where there are none.
fn bar(file: &Path) -> nix::Result<()> {
    match bind(Path::new("/dev/null"), file) {
        Err(Errno::ENOENT) => Ok(()),
        bound => bound.and_then(|()| close(file)),
    }
}

/// A directory that a keeper is to see.
struct Entry {
    path: PathBuf,
    is: (u64, u64),
    tree: OwnedFd,
}

/// Lets a keeper see what a VM has, a further one of its group say, before it is told of it: its directory, and the
/// devices among its files.
pub(super) fn admit(
    config: &HostConfig,
    vm: &VmName,
    files: &Files,
    keeper: u32,
) -> Result<(), HostError> {
    let admitted = || -> anyhow::Result<()> {
        let namespace = File::open(format!("/proc/{keeper}/ns/mnt"))?;
        let own = fs::metadata("/proc/self/ns/mnt")?;
        if identity(&namespace.metadata()?) == identity(&own) {
            return Ok(());
        }
        let directory = vm.below(&config.state_dir);
        prepare_directory(&directory)?;
        // One that a daemon before this one started need not be in this one's namespace, and has no view of its own where
        // the service may not mount.
        let entry = (!sees(keeper, &directory)?).then(|| Entry::new(directory)).transpose()?;
        let devices = closed(files.devices(&config.run_as), keeper)?;
        if entry.is_none() && devices.is_empty() {
            return Ok(());
        }
        let there = thread::Builder::new().name("admit".to_owned()).spawn(move || {
            // A thread of its own can be elsewhere than the others.
            unshare(CloneFlags::CLONE_FS)?;
            setns(namespace, CloneFlags::CLONE_NEWNS)?;
            entry.iter().try_for_each(Entry::show)?;
            devices.iter().try_for_each(Device::open)
        })?;
        there.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that did it panicked")))
    };
    admitted().map_err(|error| {
        let message = format!("the keeper of {vm} cannot be given what is {vm}'s: {error:#}");
        HostError::new(ErrorKind::Internal, message)
    })
}

/// The devices that a keeper cannot open.
fn closed<'a>(
    devices: impl Iterator<Item = &'a PathBuf>,
    keeper: u32,
) -> anyhow::Result<Vec<Device>> {
    let mut closed = Vec::new();
    for path in devices {
        // Of one that sees all nothing is held: that takes mounts, which this process may not be allowed either.
        if devices::is_closed_for(path, keeper)? {
            closed.extend(Device::hold(path)?);
        }
    }
    Ok(closed)
}

/// Whether a path is the same for a keeper as it is here.
fn sees(keeper: u32, path: &Path) -> anyhow::Result<bool> {
    // A link that begins with `/` would lead back here.
    let path = &fs::canonicalize(path)?;
    let theirs =
        Path::new("/proc").join(keeper.to_string()).join("root").join(path.strip_prefix("/")?);
    match fs::metadata(theirs) {
        Ok(seen) => Ok(identity(&seen) == identity(&fs::metadata(path)?)),
        Err(error) if error.kind() == IoErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Entry {
    fn new(path: PathBuf) -> anyhow::Result<Entry> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        let tree = open_tree(CWD, &path, flags).with_context(|| path.display().to_string())?;
        Ok(Entry { is: identity(&fs::metadata(&path)?), path, tree })
    }

    /// In the keeper's namespace.
    fn show(&self) -> anyhow::Result<()> {
        match fs::metadata(&self.path) {
            // Nothing is hidden from it, or this no more.
            Ok(seen) if identity(&seen) == self.is => return Ok(()),
            // It has been made anew since.
            Ok(_) => umount2(&self.path, MntFlags::MNT_DETACH)?,
            Err(error) if error.kind() == IoErrorKind::NotFound => self.make_place()?,
            Err(error) => return Err(error.into()),
        }
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&self.tree, "", CWD, &self.path, flags)
            .with_context(|| self.path.display().to_string())
    }

    fn make_place(&self) -> anyhow::Result<()> {
        let cover = self.path.parent().context("it is in a directory")?;
        open(cover)?;
        let made = fs::create_dir(&self.path);
        close(cover)?;
        Ok(made?)
    }
}

#[cfg(test)]
mod tests {
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
            let further =
                ["arbiter/db/1", "arbiter/shop/1", "pki/ca.pem", "pki/a.key", "state/db.raw"];
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
            files.devices(&RunAs::OwnNumber).count()
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
            files.devices(&RunAs::OwnNumber).count()
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
}
