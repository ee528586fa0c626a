//! Guests of tests that go on where another had booted, instead of booting.
//!
//! With the fail point `save-booted=return(DIRECTORY)` a guest that is to be ended by force is saved
//! there instead. Laboratories leave such directories, with a VM's name each, below that of [`VARIABLE`].
//! One serves one start: any other boots from the disks.

use crate::home::Home;
use crate::{Machine, Plan};
use anyhow::{Context, bail};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use understudy_memory::GuestRam;
use understudy_protocol::{PAGE_SIZE, PageIndex};
use understudy_qemu::counting::count_instructions;
use understudy_qemu::user::{self, User, path_in_qemu};
use understudy_qemu::{Monitor, Role, TickRate};

/// Environment variable with the directory of saved guests.
const VARIABLE: &str = "UNDERSTUDY_BOOTED";
/// Names of a directory's files: the guest's memory, and what QEMU saved beside it.
const RAM: &str = "ram";
const DEVICES: &str = "devices";
/// Memory that is read at once.
const PIECE_PAGES: usize = 256;

/// The devices of a guest that has booted, as QEMU saved them; its memory is in place.
pub(crate) struct Booted {
    devices: File,
}

impl Booted {
    /// Fills `ram` for a first start, if there is a saved guest for it.
    pub(crate) fn take(
        plan: &mut Plan<'_>,
        ram: &GuestRam,
        user: Option<User>,
    ) -> anyhow::Result<Option<Booted>> {
        let Some(directory) = env::var_os(VARIABLE) else { return Ok(None) };
        let saved = Path::new(&directory).join(&*plan.definition.name);
        let is_first = plan.role == Role::Fresh && plan.former.is_none();
        if !is_first || !saved.exists() {
            return Ok(None);
        }
        let taken = saved.with_extension("taken");
        fs::rename(&saved, &taken)?;
        fill(ram, &File::open(taken.join(RAM))?).context("cannot fill the guest's memory")?;
        let devices = taken.join(DEVICES);
        if let Some(lockstep) = &mut plan.lockstep {
            let rate = TickRate::of_this_host();
            lockstep.clock = lockstep.clock.clone().with_tick_rate(rate);
            let mut state = fs::read(&devices)?;
            count_instructions(&mut state, rate, fs::metadata(&devices)?.modified()?)?;
            // Not over it: other laboratories have the same.
            let counting = taken.with_extension("counting");
            fs::write(&counting, state)?;
            return Ok(Some(Booted { devices: user::lend(&counting, user)? }));
        }
        Ok(Some(Booted { devices: user::lend(&devices, user)? }))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.devices.as_fd()
    }

    /// Has QEMU wait for it, and keep from telling the network that the guest has come.
    pub(crate) fn arguments() -> [OsString; 4] {
        ["-incoming", "defer", "-global", "migration.announce-rounds=0"].map(OsString::from)
    }

    /// Has QEMU load it; the guest stands still.
    pub(crate) fn load(&self, monitor: &mut Monitor) -> anyhow::Result<()> {
        Ok(monitor.load_beside_memory(&path_in_qemu(self.devices.as_raw_fd()))?)
    }
}

/// Saves a guest, which stands still from now on; its disks are what they are.
pub fn save(machine: &Machine, home: &Home, directory: &Path) -> anyhow::Result<()> {
    machine.monitor().save_beside_memory(Path::new(DEVICES))?;
    fs::copy(home.path(DEVICES), directory.join(DEVICES))?;
    let saved = File::create(directory.join(RAM))?;
    saved.set_len(machine.ram.bytes())?;
    copy_pages(&File::from(machine.ram.fd().try_clone_to_owned()?), |page, content| {
        Ok(saved.write_all_at(content, page.byte_offset())?)
    })
}

/// Fills the memory of a guest.
fn fill(ram: &GuestRam, saved: &File) -> anyhow::Result<()> {
    let bytes = saved.metadata()?.len();
    if bytes != ram.bytes() {
        bail!("the saved guest has {bytes} bytes of memory, not {}", ram.bytes());
    }
    copy_pages(saved, |page, content| {
        ram.write(page, content);
        Ok(())
    })
}

/// Hands each page with content to `write`.
fn copy_pages(
    from: &File,
    mut write: impl FnMut(PageIndex, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut piece = vec![0; PIECE_PAGES * PAGE_SIZE];
    let mut at = 0;
    while let Some(start) = seek(from, at, Whence::SeekData)? {
        at = start;
        // Behind the last data is a hole, too.
        let end = seek(from, start, Whence::SeekHole)?.unwrap_or(start);
        while at < end {
            let length = piece.len().min((end - at) as usize);
            from.read_exact_at(&mut piece[..length], at)?;
            let first = at / PAGE_SIZE as u64;
            for (page, content) in (first..).zip(piece[..length].chunks(PAGE_SIZE)) {
                if content.iter().any(|byte| *byte != 0) {
                    write(PageIndex(page), content)?;
                }
            }
            at += length as u64;
        }
    }
    Ok(())
}

/// The next data, or the next hole; none behind the last.
fn seek(file: &File, from: u64, what: Whence) -> nix::Result<Option<u64>> {
    match lseek(file, from as i64, what) {
        Ok(found) => Ok(Some(found as u64)),
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}
