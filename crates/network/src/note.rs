//! A note of what the agent has said of a card, written where it outlives this process: a file in
//! memory, of which another process has a descriptor.

use crate::control::HeaderLength;
use crate::header::Offloads;
use crate::next::FrameFormat;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

const BYTES: usize = 8;

/// The note about one card.
#[derive(Debug)]
pub(crate) struct CardNote(File);

impl CardNote {
    /// An empty one: QEMU has said nothing.
    pub fn create() -> nix::Result<CardNote> {
        let note = CardNote(memfd_create("card", MFdFlags::MFD_CLOEXEC)?.into());
        note.write(FrameFormat { header: HeaderLength::Short, offloads: Offloads::NONE });
        Ok(note)
    }

    /// Another process's.
    pub fn adopt(file: OwnedFd) -> CardNote {
        CardNote(file.into())
    }

    /// Duplicates it for another process.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.0.try_clone()?.into())
    }

    /// Writes it down, before the agent is answered.
    pub fn write(&self, format: FrameFormat) {
        let full = u32::from(format.header == HeaderLength::Full);
        let bytes = (u64::from(full) << 32 | u64::from(format.offloads.bits())).to_le_bytes();
        if let Err(error) = self.0.write_all_at(&bytes, 0) {
            tracing::warn!("cannot note what QEMU said of a card: {error}");
        }
    }

    pub fn read(&self) -> io::Result<FrameFormat> {
        let mut bytes = [0; BYTES];
        self.0.read_exact_at(&mut bytes, 0)?;
        let bits = u64::from_le_bytes(bytes);
        let header = match bits >> 32 {
            0 => HeaderLength::Short,
            _ => HeaderLength::Full,
        };
        let offloads = Offloads::from_bits(bits as u32);
        let offloads = offloads.ok_or_else(|| io::Error::other("unknown offloads of a card"))?;
        Ok(FrameFormat { header, offloads })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_last_is_read_by_another() {
        let note = CardNote::create().unwrap();
        let other = CardNote::adopt(note.duplicate().unwrap());
        let read = || {
            let format = other.read().unwrap();
            (format.header, format.offloads)
        };
        assert_eq!(read(), (HeaderLength::Short, Offloads::NONE));
        let offloads = Offloads::SUMS.and(Offloads::TCP4);
        note.write(FrameFormat { header: HeaderLength::Full, offloads });
        assert_eq!(read(), (HeaderLength::Full, offloads));
    }
}
