//! The application of committed epochs to the backup's memory, disks and device state.

use super::failure::OwnFailure;
use crate::messages::Piece;
use anyhow::{Context, bail, ensure};
use std::io;
use std::sync::Arc;
use understudy_disk::Disk;
use understudy_encoding::delta::each_run;
use understudy_encoding::{DiskBlock, EncodingError, Page, PageData, Reference, read_pages};
use understudy_machine::Machine;
use understudy_memory::{MAIN_MEMORY, RamBlock, StillImage};
use understudy_protocol::wire::DiskRange;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, Time};

/// Refuses a piece of an epoch that does not fit this machine, before it is
/// acknowledged: nothing of a bad epoch is ever applied. An [`OwnFailure`] is no fault of the piece.
pub fn validate(machine: &Machine, piece: &Piece<'_>) -> anyhow::Result<()> {
    match piece {
        Piece::Pages(pages) => {
            let mut scratch = [0; PAGE_SIZE];
            read_pages(&pages.bytes(), |block, page, data| {
                if block_of(machine, block).is_none_or(|block| page.0 >= block.pages()) {
                    bail!("page {page} of RAM block {block} is not part of this machine");
                }
                // Whether data are right does not depend on the page that they change,
                // which may be in an epoch yet to be applied. A block that is referred to is
                // in none: the primary waited for its last write to be settled.
                let read = |block, page: &mut Page| read_mirror(machine, block, page);
                data.check(&mut scratch, read).map_err(|error| blame(machine, data, error))
            })?;
        }
        Piece::DiskWrite(write) => check_range(machine, &write.range())?,
        Piece::DiskZero(range) => check_range(machine, range)?,
        Piece::Outbound(frames) => {
            let card = frames.card();
            if usize::from(card.0) >= machine.ports().len() {
                bail!("frames of card {card}, which this machine lacks");
            }
        }
        Piece::Medium(medium) => medium.check_drive(machine)?,
        Piece::Console(_) if machine.console_output().is_none() => {
            bail!("a console spoke, which this machine lacks");
        }
        Piece::Console(_) | Piece::DeviceState(_) | Piece::DeviceStatePart(_) | Piece::Keep(_) => {}
        // Whether the session turns now is its own business.
        Piece::LogBegins | Piece::LogEnds(_) => {}
    }
    Ok(())
}

fn check_range(machine: &Machine, range: &DiskRange) -> anyhow::Result<()> {
    let DiskRange { disk, offset, length } = range;
    match disk_of(machine, range) {
        Some(_) => Ok(()),
        None => bail!("bytes {offset}+{length} are not part of disk {disk}"),
    }
}

/// The disk of this machine that has these bytes.
fn disk_of(machine: &Machine, range: &DiskRange) -> Option<Arc<Disk>> {
    let end = range.offset.checked_add(range.length)?;
    let disk = machine.disks().into_iter().nth(range.disk.0.into())?;
    (end <= disk.export_bytes()).then_some(disk)
}

/// Applies a change that passed [`validate`]. Whoever reads the image as it was before is told of
/// what is written.
pub fn apply(
    machine: &Machine,
    change: Piece<'_>,
    image: Option<&StillImage>,
) -> anyhow::Result<()> {
    match change {
        Piece::Pages(pages) => {
            read_pages(&pages.bytes(), |block, page, data| {
                image.inspect(|image| image.before_write(block, page));
                apply_page(machine, block, page, data)
            })?;
        }
        Piece::DiskWrite(write) => {
            let range = write.range();
            let disk = &machine.disks()[usize::from(range.disk.0)];
            disk.write(range.offset, write.data()).map_err(|error| cannot_write(disk, error))?;
        }
        Piece::DiskZero(range) => {
            let disk = &machine.disks()[usize::from(range.disk.0)];
            disk.zero(range.offset, range.length).map_err(|error| cannot_write(disk, error))?;
        }
        Piece::Console(words) => {
            if let Some(console) = machine.console_output() {
                console.say(&words);
            }
        }
        // No changes: a whole epoch has them beside these.
        Piece::DeviceState(_) | Piece::DeviceStatePart(_) | Piece::Keep(_) | Piece::Outbound(_) => {
        }
        Piece::Medium(_) | Piece::LogBegins | Piece::LogEnds(_) => {}
    }
    Ok(())
}

fn cannot_write(disk: &Disk, error: io::Error) -> anyhow::Error {
    let words = format!("the backup cannot write to its mirror {}", disk.path().display());
    match disk.is_outgrown(&error) {
        // It would be brought up to date by the next session, and fail again.
        true => OwnFailure::Mirror(format!("{words}: its device has no room for it")).into(),
        false => anyhow::Error::new(error).context(words),
    }
}

/// The checkpoint that a guest goes on from, beside its memory and disks.
#[derive(Debug)]
pub struct Checkpoint {
    /// QEMU's device state at the end of an epoch.
    pub device_state: Vec<u8>,
    /// Time of that, by this host's clock.
    pub taken: Time,
}

/// Applies the changes of a whole epoch. `image` is told of what is written; `done` is told of the
/// bytes of each.
pub fn apply_changes(
    machine: &Machine,
    changes: Vec<Piece<'static>>,
    image: Option<&StillImage>,
    done: &dyn Fn(u64),
) -> anyhow::Result<()> {
    for change in changes {
        let bytes = change.bytes();
        apply(machine, change, image)?;
        done(bytes);
    }
    Ok(())
}

fn apply_page(
    machine: &Machine,
    block: BlockId,
    page: PageIndex,
    data: PageData<'_>,
) -> anyhow::Result<()> {
    let block = block_of(machine, block).context("validated before")?;
    match data {
        PageData::Zero => block.clear(page, 1)?,
        PageData::Raw(bytes) => block.write(page, bytes)?,
        // In place: of most pages few bytes change. Other blocks take a system call for each part.
        PageData::Delta(delta) if block.id() == MAIN_MEMORY => {
            let mut written = Ok(());
            let fits = each_run(delta, |at, bytes| {
                if written.is_ok() {
                    written = block.write_part(page, at, bytes);
                }
            });
            written?;
            ensure!(fits, "a delta that does not fit was not refused");
        }
        PageData::Delta(_) | PageData::General(_) | PageData::Reference(_) => {
            let mut content = [0; PAGE_SIZE];
            if let PageData::Delta(_) = data {
                block.read(page, &mut content)?;
            }
            data.apply(&mut content, |block, page| read_mirror(machine, block, page))
                .map_err(|error| blame(machine, data, error))?;
            block.write(page, &content)?;
        }
    }
    Ok(())
}

/// Reads what a reference means.
fn read_mirror(machine: &Machine, block: DiskBlock, page: &mut Page) -> anyhow::Result<()> {
    let DiskBlock { disk: index, number } = block;
    let Some((disk, offset)) = find(machine, block) else {
        bail!("a page refers to block {number} of disk {index}, which this machine lacks");
    };
    disk.read(offset, page)
        .with_context(|| format!("cannot read block {number} of the mirror of disk {index}"))
}

/// The disk and the offset of a block that this machine has.
fn find(machine: &Machine, block: DiskBlock) -> Option<(Arc<Disk>, u64)> {
    let offset = block.offset()?;
    let range = DiskRange { disk: block.disk, offset, length: PAGE_SIZE as u64 };
    Some((disk_of(machine, &range)?, offset))
}

/// The one whose failure it is that a page's data are not right: if the mirror does not give what
/// they refer to it is this host's, unless there is no such block.
fn blame(machine: &Machine, data: PageData<'_>, error: anyhow::Error) -> anyhow::Error {
    let PageData::Reference(Reference { block, .. }) = data else { return error };
    if find(machine, block).is_none() {
        return error;
    }
    let DiskBlock { disk, number } = block;
    let reason = match error.is::<EncodingError>() {
        true => format!("block {number} of the mirror of disk {disk} is not what the primary has"),
        false => format!("{error:#}"),
    };
    OwnFailure::Mirror(reason).into()
}

fn block_of(machine: &Machine, id: BlockId) -> Option<&RamBlock> {
    machine.blocks().get(usize::from(id.0))
}
