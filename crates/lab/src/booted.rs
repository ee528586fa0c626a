//! Guests that go on where one like them had booted, so that most tests do without the boot.
//!
//! The first test with a guest of some shape (its machine, kernel, disks and address) boots one in
//! a laboratory of its own, and keeps its memory, its devices and its disks when it is up and idle.
//! A daemon that was built with fail points starts a guest from there, once, and any further time
//! boots it from its disks, as daemons without fail points do.

use crate::command::run;
use crate::host::{HostOptions, HostProcess};
use crate::lab::Lab;
use crate::scene::{ECHO_PORT, RECORDS_PORT, SHELL_PORT};
use crate::shell::GuestShell;
use crate::wait::{await_servers, wait_for};
use anyhow::{Context, Result, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use understudy_qemu::command::BootFiles;
use understudy_qemu::definition::{AcceleratorChoice, DiskFormat};
use understudy_qemu::programs::find_qemu;
use understudy_qemu::{Accelerator, Kvm, Resources, Role, VmDefinition, command_line};

/// The directory of a laboratory in which daemons look for saved guests.
pub(crate) const DIRECTORY: &str = "booted";
/// The environment variable that tells them.
pub(crate) const VARIABLE: &str = "UNDERSTUDY_BOOTED";

/// Changes with what is saved, and how.
const FORMAT: u32 = 2;
const HOST: &str = "a";
const CONSOLE_LOG: &str = "console.log";
/// The console's last words of a boot, and the first of the shell behind it.
const UP: &str = "UNDERSTUDY-GUEST-READY";
const PROMPT: &str = "# ";
/// Has the guest clear most of what is free of its memory: what the boot left there is three
/// quarters of all that a backup would copy, and nothing to any guest.
const CLEAR: &str = "echo 3 > /proc/sys/vm/drop_caches; mkdir /zeros; mount -t tmpfs -o size=100% none /zeros; \
                     free=$(awk '/MemFree/ { print $2 - 12288 }' /proc/meminfo); \
                     fallocate -l ${free}k /zeros/file; umount /zeros; rmdir /zeros";
const LIMIT: Duration = Duration::from_secs(120);
/// Age after which saved guests that no test has used are removed.
const KEPT: Duration = Duration::from_secs(24 * 3600);
const LOCK: &str = ".lock";
const UNFINISHED: &str = "unfinished-";
/// Length of the part of a disk that tells it from another, in bytes.
const BEGINNING: usize = 4096;

/// Has the guest of this definition start where one like it had booted, and brings its disks
/// there. Guests that are not worth it are left as they are: those that boot from a disk, that
/// have several cards or disks of another format.
pub(crate) fn prepare(lab: &Lab, definition: &Path, store: &Path, binary: &Path) -> Result<()> {
    let text = fs::read_to_string(definition)?;
    let mut definition: VmDefinition = toml::from_str(&text).context("the VM's definition")?;
    // The machine is the same, and boots in a fraction of the time.
    definition.lockstep = false;
    if !is_usual(&definition) {
        return Ok(());
    }
    let saved = saved(&definition, store, binary).context("cannot save a guest that has booted")?;
    for (n, disk) in definition.disks.iter().enumerate() {
        copy(&saved.join(disk_name(n)), &disk.path)?;
    }
    let directory = lab.directory().join(DIRECTORY);
    fs::create_dir_all(&directory)?;
    symlink(&saved, directory.join(&*definition.name))?;
    Ok(())
}

fn is_usual(definition: &VmDefinition) -> bool {
    let raw = definition.disks.iter().all(|disk| disk.format == DiskFormat::Raw);
    let switches = definition.append.as_deref().is_some_and(|line| line.contains("rdinit="));
    definition.kernel.is_some() && raw && !switches && definition.cards.len() == 1
}

/// Path of the saved guest, which is made if there is none.
fn saved(definition: &VmDefinition, store: &Path, binary: &Path) -> Result<PathBuf> {
    fs::create_dir_all(store)?;
    let store = store.canonicalize()?;
    let name = shape(definition)?;
    let saved = store.join(&name);
    let lock = File::create(store.join(format!("{name}{LOCK}")))?;
    let lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
    if !saved.exists() {
        remove_old(&store)?;
        let unfinished = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&store)?;
        save(definition, binary, unfinished.path())?;
        fs::set_permissions(unfinished.path(), fs::metadata(&store)?.permissions())?;
        fs::rename(unfinished.keep(), &saved)?;
    }
    // When it was used last.
    lock.set_modified(SystemTime::now())?;
    Ok(saved)
}

/// All that the state of the booted guest depends on.
fn shape(definition: &VmDefinition) -> Result<String> {
    let qemu = find_qemu()?;
    let boot = [&definition.kernel, &definition.initrd].into_iter().flatten();
    let disks = definition.disks.iter().map(|disk| &disk.path);
    let mut hasher = DefaultHasher::new();
    FORMAT.hash(&mut hasher);
    Kvm::of_this_machine().obstacle().is_none().hash(&mut hasher);
    for file in boot.chain([&qemu]) {
        let found = file.metadata().with_context(|| format!("no {}", file.display()))?;
        (found.len(), found.mtime(), found.mtime_nsec()).hash(&mut hasher);
    }
    for disk in disks {
        // A file system says there when it was made.
        let mut beginning = vec![0; BEGINNING];
        let disk = File::open(disk)?;
        disk.read_exact_at(&mut beginning, 0)?;
        (disk.metadata()?.len(), beginning).hash(&mut hasher);
    }
    likeness(definition).hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}

/// The product's command line of the machine, but for what differs from start to start.
fn likeness(definition: &VmDefinition) -> Vec<OsString> {
    let mut same = definition.clone();
    same.name = "saved".parse().expect("a name");
    let resources = Resources {
        machine_type: same.machine.clone(),
        accelerator: match same.accel {
            AcceleratorChoice::Tcg => Accelerator::Tcg,
            AcceleratorChoice::Auto | AcceleratorChoice::Kvm => Accelerator::Kvm,
        },
        kvm: None,
        boot: BootFiles::default(),
        monitors: [-1; 3],
        console: None,
        tpm: None,
        awaits_disks: false,
        role: Role::Fresh,
        lockstep: None,
        ram: -1,
        disks: vec![PathBuf::new(); same.disks.len()],
        cards: vec![-1; same.cards.len()],
    };
    command_line(&same, &resources)
}

/// Boots a guest, and saves all of it in `directory`.
fn save(definition: &VmDefinition, binary: &Path, directory: &Path) -> Result<()> {
    let lab = Lab::new(&[HOST])?;
    let mut own = definition.clone();
    for (n, disk) in own.disks.iter_mut().enumerate() {
        let copied = lab.directory().join(disk_name(n));
        copy(&disk.path, &copied)?;
        disk.path = copied;
    }
    let file = lab.directory().join("vm.toml");
    fs::write(&file, toml::to_string(&own)?)?;
    let point = format!("save-booted=return({})", directory.display());
    let environment = vec![("FAILPOINTS".to_owned(), point)];
    let options = HostOptions { environment, insecure: true, ..HostOptions::default() };
    let host = HostProcess::start_with(&lab, HOST, binary, &options)?;
    host.call(["vm", "start", &file.to_string_lossy()])?;
    await_idle(&lab, &host, &own)?;
    host.call(["vm", "stop", &own.name, "--force"])?;
    let saves = directory.read_dir()?.next().is_some();
    ensure!(saves, "{} has saved nothing: it has no fail points", binary.display());
    for (n, disk) in own.disks.iter().enumerate() {
        copy(&disk.path, &directory.join(disk_name(n)))?;
    }
    Ok(())
}

/// Waits until the guest is up, has written what it had to write, and waits for others.
fn await_idle(lab: &Lab, host: &HostProcess, definition: &VmDefinition) -> Result<()> {
    let address = address(definition)?;
    let servers = [RECORDS_PORT, SHELL_PORT, ECHO_PORT].map(|port| (address, port).into());
    await_servers(lab, "the guest", &servers)?;
    let console = host.machine_directory(&definition.name).join(CONSOLE_LOG);
    wait_for("the guest's console to be ready", LIMIT, || {
        let said = fs::read(&console).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let behind = said.split_once(UP).map(|(_, behind)| behind.contains(PROMPT));
        Ok(behind.unwrap_or_default().then_some(()))
    })?;
    let shell: SocketAddr = (address, SHELL_PORT).into();
    let synced = GuestShell::connect(lab, shell)?.run(&format!("sync; {CLEAR}; sleep 0.2"))?;
    ensure!(synced.code == 0, "the guest's disks are not synced: {}", synced.text);
    Ok(())
}

/// Address that the kernel's command line gives to the guest's card.
fn address(definition: &VmDefinition) -> Result<Ipv4Addr> {
    let line = definition.append.as_deref().unwrap_or_default();
    let value = line.split(' ').find_map(|word| word.strip_prefix("us.ip="));
    let address = value.and_then(|value| value.split('/').next()?.parse().ok());
    address.with_context(|| format!("`{line}` gives the guest no address"))
}

fn disk_name(n: usize) -> String {
    format!("disk{n}")
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let paths = [&*from.to_string_lossy(), &*to.to_string_lossy()];
    run("cp", &[&["--sparse=always", "--reflink=auto"][..], &paths].concat()).map(drop)
}

/// Removes what was not used lately, and what was never finished.
fn remove_old(store: &Path) -> Result<()> {
    for entry in fs::read_dir(store)?.flatten() {
        let (path, used) = (entry.path(), entry.metadata().and_then(|found| found.modified()));
        if used.is_ok_and(|used| used.elapsed().is_ok_and(|since| since < KEPT)) {
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(shape) = name.strip_suffix(LOCK) {
            // Another process may do the same.
            let _ = fs::remove_dir_all(store.join(shape));
            let _ = fs::remove_file(&path);
        } else if name.starts_with(UNFINISHED) {
            let _ = fs::remove_dir_all(&path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "name = \"a\"\nmemory = \"64M\"\nvcpus = 1\nkernel = \"/etc/hostname\"\n\
                        append = \"quiet us.ip=10.77.0.50/24\"\n\
                        [[card]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"b\"";

    fn definition(text: &str) -> VmDefinition {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_guest_is_like_another_but_for_its_name() {
        let likeness = |text: &str| likeness(&definition(text));
        assert_eq!(likeness(TEXT), likeness(&TEXT.replace("name = \"a\"", "name = \"b\"")));
        for (old, new) in [("64M", "66M"), ("0.50", "0.51"), (":01", ":02"), ("= 1", "= 2")] {
            assert_ne!(likeness(TEXT), likeness(&TEXT.replace(old, new)), "{new}");
        }
    }

    #[test]
    fn guests_that_boot_otherwise_are_left_alone() {
        assert!(is_usual(&definition(TEXT)));
        let switched = TEXT.replace("quiet", "rdinit=/etc/switch");
        let without_kernel = TEXT.replace("kernel = \"/etc/hostname\"", "");
        let two_cards = format!("{TEXT}\n[[card]]\nmac = \"52:54:00:00:00:02\"\nbridge = \"b\"");
        for other in [switched, without_kernel, two_cards] {
            assert!(!is_usual(&definition(&other)), "{other}");
        }
    }

    #[test]
    fn the_address_is_what_the_kernel_is_told() {
        assert_eq!(address(&definition(TEXT)).unwrap(), Ipv4Addr::new(10, 77, 0, 50));
        let error = address(&definition(&TEXT.replace("us.ip", "ip"))).unwrap_err().to_string();
        assert!(error.contains("no address"), "{error}");
    }
}
