//! The capabilities of a QEMU, kept for the next daemon or keeper that starts: to ask it takes two
//! starts of QEMU.
//!
//! An answer counts for one build of the product, one boot of the machine and one installed QEMU, as they are told apart
//! below. Whatever is wrong with the file, QEMU is asked; so is a script in its place, behind which there may be another
//! QEMU any day.

use crate::capabilities::{Capabilities, CapabilityError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tracing::debug;

/// The environment variable with the directory: systemd sets it for a unit with `CacheDirectory=`.
pub const VARIABLE: &str = "CACHE_DIRECTORY";
/// Directories where distributions put the parts of QEMU that it loads by name.
const MODULES: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu-kvm", "/usr/lib64/qemu", "/usr/lib/qemu"];
/// Modules that what KVM offers depends on.
const KVM_MODULES: [&str; 3] = ["kvm", "kvm_intel", "kvm_amd"];
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// An answer, and what it was the answer of.
#[derive(Serialize, Deserialize)]
struct Kept {
    of: Asked,
    capabilities: Capabilities,
}

/// All that an answer depends on.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Asked {
    /// The product's own build.
    asker: Stamp,
    /// The boot, and with it the kernel.
    boot: String,
    processor: Vec<String>,
    binary: Stamp,
    modules: BTreeMap<String, Stamp>,
    kvm: BTreeMap<String, String>,
    kvm_opens: bool,
}

/// A file, told from any that stood or will stand in its place.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<Metadata> for Stamp {
    fn from(file: Metadata) -> Stamp {
        Stamp {
            device: file.dev(),
            inode: file.ino(),
            length: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

impl Asked {
    fn now(binary: &Path) -> io::Result<Asked> {
        let stamp = |path: &str| fs::metadata(path).map(Stamp::from);
        let present = |path: &str| Some((path.to_owned(), stamp(path).ok()?));
        Ok(Asked {
            asker: stamp("/proc/self/exe")?,
            boot: fs::read_to_string(BOOT_ID)?,
            processor: processor(&fs::read_to_string("/proc/cpuinfo")?),
            binary: fs::metadata(binary)?.into(),
            modules: MODULES.into_iter().filter_map(present).collect(),
            kvm: KVM_MODULES.into_iter().flat_map(parameters).collect(),
            kvm_opens: File::options().read(true).write(true).open("/dev/kvm").is_ok(),
        })
    }
}

/// The lines about what guests see of the first processor: new microcode may change it.
fn processor(cpuinfo: &str) -> Vec<String> {
    let first = cpuinfo.lines().take_while(|line| !line.is_empty());
    let telling = |line: &&str| ["microcode", "flags"].iter().any(|key| line.starts_with(key));
    first.filter(telling).map(str::to_owned).collect()
}

fn is_program(binary: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(binary).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && magic == *b"\x7fELF"
}

/// The parameters of a loaded module; none if it is not.
fn parameters(module: &str) -> Vec<(String, String)> {
    let entries = fs::read_dir(format!("/sys/module/{module}/parameters"));
    let files = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    // Some can only be written.
    let read = |path: PathBuf| Some((path.display().to_string(), fs::read_to_string(&path).ok()?));
    files.filter_map(read).collect()
}

/// The directory of answers that this process was given, if it was.
pub fn directory() -> Option<PathBuf> {
    let named = std::env::var_os(VARIABLE)?;
    // A unit may have several, with colons between.
    std::env::split_paths(&named).find(|path| path.is_absolute())
}

/// The capabilities of a QEMU: as it said before, if `directory` has an answer that still counts,
/// or as it says now.
///
/// # Errors
/// Those of [`Capabilities::probe`]; a directory that cannot be read or written is none.
pub fn capabilities(
    binary: &Path,
    directory: Option<&Path>,
) -> Result<Capabilities, CapabilityError> {
    let Some(directory) = directory.filter(|_| is_program(binary)) else {
        return Capabilities::probe(binary);
    };
    let file = directory.join(file_name(binary));
    // Before it is asked: what changes meanwhile makes the answer one that does not count.
    let asked = Asked::now(binary);
    if let Ok(asked) = &asked
        && let Some(kept) = read(&file).filter(|kept| kept.of == *asked)
    {
        debug!("what {} can do is in {}", binary.display(), file.display());
        return Ok(Capabilities { binary: binary.to_owned(), ..kept.capabilities });
    }
    let capabilities = Capabilities::probe(binary)?;
    if let Ok(of) = asked
        && let Err(error) = write(&file, &Kept { of, capabilities: capabilities.clone() })
    {
        debug!("{} cannot be written: {error}", file.display());
    }
    Ok(capabilities)
}

fn file_name(binary: &Path) -> String {
    let digest = blake3::hash(binary.as_os_str().as_encoded_bytes()).to_hex();
    format!("qemu-{}.json", &digest[..16])
}

fn read(file: &Path) -> Option<Kept> {
    serde_json::from_slice(&fs::read(file).ok()?).ok()
}

/// Several processes may write at the same time; who reads finds a whole answer.
fn write(file: &Path, kept: &Kept) -> io::Result<()> {
    let unfinished = file.with_extension(format!("{}", std::process::id()));
    let result = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)
        .and_then(|mut file| file.write_all(&serde_json::to_vec(kept)?))
        .and_then(|()| fs::rename(&unfinished, file));
    if result.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    result
}
