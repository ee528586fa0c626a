//! The guest of the benchmark suite (`guests/bench`), for whoever boots it.

use crate::scene::{self, INITRD, KERNEL};
use anyhow::{Result, ensure};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf, absolute};

/// The root file system, below the directory with the guests' files.
pub(crate) const BENCH_IMAGE: &str = "bench/disk.img";

/// Files that the bench guest boots from: the same for every QEMU that it is compared on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchGuest {
    /// Linux.
    pub kernel: PathBuf,
    /// The modules, and the way to the disk.
    pub initrd: PathBuf,
    /// The kernel's command line.
    pub append: String,
    /// The raw image of its disk; whoever boots it writes to a copy.
    pub image: PathBuf,
}

impl BenchGuest {
    /// Its files below `guest_files`, for a guest that will be at `address`.
    pub fn files(guest_files: &Path, address: Ipv4Addr) -> Result<BenchGuest> {
        let guest = BenchGuest {
            kernel: guest_files.join(KERNEL),
            initrd: guest_files.join(INITRD),
            append: append(address),
            image: guest_files.join(BENCH_IMAGE),
        };
        for path in [&guest.kernel, &guest.initrd, &guest.image] {
            check_file(path, "make bench-guest")?;
        }
        Ok(guest)
    }
}

/// Says where a guest's file is missing, and what to do: `make` it, or say where it is.
pub(crate) fn check_file(path: &Path, make: &str) -> Result<()> {
    let shown = absolute(path).unwrap_or_else(|_| path.to_owned());
    ensure!(
        path.is_file(),
        "there is no {}: build the guests with `{make}` in the source tree of \
         Understudy, or name the directory that has them with --guest DIR or UNDERSTUDY_GUEST=DIR",
        shown.display()
    );
    Ok(())
}

/// The kernel's command line for a guest at `address`.
pub(crate) fn append(address: Ipv4Addr) -> String {
    scene::append(address, 1) + " rdinit=/etc/switch"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_missing_file_is_named_with_the_way_to_build_it() {
        let directory = tempfile::tempdir().unwrap();
        let address = Ipv4Addr::new(10, 77, 0, 51);
        for file in [KERNEL, INITRD] {
            fs::write(directory.path().join(file), "").unwrap();
        }
        let error = BenchGuest::files(directory.path(), address).unwrap_err().to_string();
        assert!(error.contains(BENCH_IMAGE) && error.contains("make bench-guest"), "{error}");
        // A relative path tells nothing to who reads it elsewhere.
        let error =
            check_file(Path::new("nowhere/vmlinuz"), "make guests").unwrap_err().to_string();
        let looked_at = absolute("nowhere/vmlinuz").unwrap().display().to_string();
        for words in [&looked_at, "`make guests`", "--guest DIR", "UNDERSTUDY_GUEST"] {
            assert!(error.contains(words), "{words}: {error}");
        }
        fs::create_dir(directory.path().join("bench")).unwrap();
        fs::write(directory.path().join(BENCH_IMAGE), "").unwrap();
        let guest = BenchGuest::files(directory.path(), address).unwrap();
        assert!(guest.append.contains("us.ip=10.77.0.51/24 "), "{}", guest.append);
    }
}
