//! Apply committed epochs to the backup's memory, disks and device state.

use crate::medium::Medium;
use anyhow::{Context, bail};
use understudy_cluster::messages::KeepOrder;
use understudy_disk::Disk;
use understudy_encoding::{DiskBlock, Page, PageData, read_pages};
use understudy_machine::Machine;
use understudy_memory::{RamBlock, StillImage};
use understudy_protocol::wire::{DiskRange, Kind, Message};
use understudy_protocol::{BlockId, CardFrames, PAGE_SIZE, PageIndex, StagedEpoch, Time};

/// Refuses a data message that does not fit this machine, before it is
/// acknowledged: nothing of a bad epoch is ever applied.
pub fn validate(machine: &Machine, message: &Message) -> anyhow::Result<()> {
    match message.header.kind {
        Kind::Pages => {
            let mut any = [0; PAGE_SIZE];
            read_pages(&message.payload, |block, page, data| {
                if block_of(machine, block).is_none_or(|block| page.0 >= block.pages()) {
                    bail!("page {page} of RAM block {block} is not part of this machine");
                }
                // Whether data are right does not depend on the page that they change,
                // which may be in an epoch yet to be applied. A block that is referred to is
                // in none: the primary waited for its last write to be settled.
                data.apply(&mut any, |block, page| read_mirror(machine, block, page))
            })?;
        }
        Kind::DiskWrite | Kind::DiskZero => {
            let (range, _) = DiskRange::decode(message)?;
            let disks = machine.disks();
            let disk = disks.get(usize::from(range.disk.0));
            if disk.is_none_or(|disk| range.offset + range.length > disk.export_bytes()) {
                bail!(
                    "bytes {}+{} are not part of disk {}",
                    range.offset,
                    range.length,
                    range.disk
                );
            }
        }
        Kind::Outbound => {
            let (card, _) = CardFrames::decode(message)?;
            if usize::from(card.0) >= machine.ports().len() {
                bail!("frames of card {card}, which this machine lacks");
            }
        }
        Kind::Keep => keep_order(message).map(drop)?,
        Kind::Medium => drop(Medium::read(machine, message)?),
        Kind::Console if machine.console_output().is_none() => {
            bail!("a console spoke, which this machine lacks");
        }
        Kind::Console | Kind::DeviceState => {}
        other => bail!("unexpected {other:?} message from the primary"),
    }
    Ok(())
}

/// Applies one data message that passed [`validate`]; device state is returned. Whoever reads
/// the image as it was before is told of what is written.
pub fn apply(
    machine: &Machine,
    message: Message,
    image: Option<&StillImage>,
) -> anyhow::Result<Option<Vec<u8>>> {
    match message.header.kind {
        Kind::Pages => {
            read_pages(&message.payload, |block, page, data| {
                image.inspect(|image| image.before_write(block, page));
                apply_page(machine, block, page, data)
            })?;
        }
        Kind::DiskWrite => {
            let (range, data) = DiskRange::decode(&message)?;
            let disk = &machine.disks()[usize::from(range.disk.0)];
            disk.write(range.offset, data).with_context(|| cannot_write(disk))?;
        }
        Kind::DiskZero => {
            let (range, _) = DiskRange::decode(&message)?;
            let disk = &machine.disks()[usize::from(range.disk.0)];
            disk.zero(range.offset, range.length).with_context(|| cannot_write(disk))?;
        }
        Kind::Console => {
            if let Some(console) = machine.console_output() {
                console.say(&message.payload);
            }
        }
        Kind::DeviceState => return Ok(Some(message.payload)),
        _ => {}
    }
    Ok(None)
}

fn cannot_write(disk: &Disk) -> String {
    format!("the backup cannot write to its mirror {}", disk.path().display())
}

/// What a guest goes on from, beside its memory and disks.
#[derive(Debug)]
pub struct Checkpoint {
    /// QEMU's device state at the end of an epoch.
    pub device_state: Vec<u8>,
    /// When that was, by this host's clock.
    pub taken: Time,
}

/// A whole epoch that was applied.
pub struct Applied {
    /// Where it ends.
    pub checkpoint: Checkpoint,
    /// What is there now is to be kept for a snapshot.
    pub keep: Option<KeepOrder>,
}

/// Applies a whole epoch. `image` is told of what is written; `done` is told of the
/// bytes of each message.
pub fn apply_epoch(
    machine: &Machine,
    epoch: StagedEpoch,
    image: Option<&StillImage>,
    done: &dyn Fn(u64),
) -> anyhow::Result<Applied> {
    let (mut device_state, mut keep, taken) = (None, None, epoch.taken);
    for message in epoch.messages {
        let bytes = message.payload.len() as u64;
        if message.header.kind == Kind::Keep {
            keep = Some(keep_order(&message)?);
        } else if let Some(state) = apply(machine, message, image)? {
            device_state = Some(state);
        }
        done(bytes);
    }
    let device_state =
        device_state.with_context(|| format!("epoch {} has no device state", epoch.epoch))?;
    Ok(Applied { checkpoint: Checkpoint { device_state, taken }, keep })
}

fn keep_order(message: &Message) -> anyhow::Result<KeepOrder> {
    serde_json::from_slice(&message.payload).context("a malformed Keep message")
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
        PageData::Delta(_) | PageData::General(_) | PageData::Reference(_) => {
            let mut content = [0; PAGE_SIZE];
            if let PageData::Delta(_) = data {
                block.read(page, &mut content)?;
            }
            data.apply(&mut content, |block, page| read_mirror(machine, block, page))?;
            block.write(page, &content)?;
        }
    }
    Ok(())
}

/// Reads what a reference means.
fn read_mirror(machine: &Machine, block: DiskBlock, page: &mut Page) -> anyhow::Result<()> {
    let DiskBlock { disk: index, number } = block;
    let disks = machine.disks();
    let disk = disks.get(usize::from(index.0));
    let (Some(disk), Some(offset)) = (disk, block.offset()) else {
        bail!("a page refers to block {number} of disk {index}, which this machine lacks");
    };
    disk.read(offset, page)
        .with_context(|| format!("a page refers to block {number} of disk {index}"))
}

fn block_of(machine: &Machine, id: BlockId) -> Option<&RamBlock> {
    machine.blocks().get(usize::from(id.0))
}
