//! What a keeper sees of its host's files: in a mount namespace of its own, the directories of its own VMs, and not
//! those of others; no keys that are not its host's own; and no devices but its VMs' can be opened. The
//! rest is as it is for its daemon.
//!
//! Nothing can be mounted from within any more: [`super::rights`] sees to that. A further VM of its group is
//! [admitted](admit) by the daemon.

mod attributes;
mod devices;

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

    /// Those that are devices. Storage that hangs holds this up, and nothing that comes after it.
    pub(super) fn that_are_devices(mut self, user: &RunAs) -> Files {
        self.disks.retain(|path| devices::is_disk(path));
        self.read.retain(|path| devices::is_read(path, user));
        self
    }

    /// All of them, which are devices ([`Files::that_are_devices`]).
    fn devices(&self) -> impl Iterator<Item = &PathBuf> {
        self.disks.iter().chain(&self.read)
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

/// Gives this process, which has one thread, the view of the keeper of a VM that has these files, which are devices.
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
    let begun = || -> anyhow::Result<()> {
        unshare(CloneFlags::CLONE_NEWNS)?;
        // By the old call, which a host may refuse, as a container does, where it lets the new ones through.
        let flags = MsFlags::MS_SLAVE | MsFlags::MS_REC;
        mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)?;
        devices::try_to_hold()
    };
    begun().map_err(|error| format!("it cannot have a mount namespace of its own: {error:#}"))
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
    devices::leave_only(files.devices())?;
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
    disks.filter_map(|disk| entry_of(config, disk)).collect()
}

/// The entry of the state directory in which an image lies.
fn entry_of(config: &HostConfig, disk: &DiskDefinition) -> Option<PathBuf> {
    let inner = disk.path.strip_prefix(&config.state_dir).ok()?.components().next()?;
    Some(config.state_dir.join(inner))
}

/// Refuses images that are there, and that the VM's keeper would not find: they lie in what is hidden from it.
pub(super) fn check_seen(config: &HostConfig, definition: &VmDefinition) -> Result<(), HostError> {
    let vm = &definition.name;
    let mut shown = of_images(config, vm);
    shown.push(vm.below(&config.state_dir));
    for disk in &definition.disks {
        let hidden = entry_of(config, disk).filter(|it| !shown.contains(it) && !is_nobodys(it));
        let Some(entry) = hidden.filter(|_| disk.path.exists() && probe().is_ok()) else {
            continue;
        };
        let message = format!(
            "the keeper of {vm} would not see {}: {} is another VM's directory, or closed to all but its owner. Move the \
             image out of it, or open it (`chmod go+rx`) if it is no VM's",
            disk.path.display(),
            entry.display()
        );
        return Err(HostError::new(ErrorKind::Invalid, message));
    }
    Ok(())
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
        let devices = closed(files.devices(), keeper)?;
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
mod tests;
