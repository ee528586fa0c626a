//! Frames that lie back to back, so that one more costs no allocation.

/// Frames in their order, each with the header of [`crate::header`] before it.
#[derive(Debug, Default)]
pub struct Frames {
    /// Bytes of the frames; longer than what is in use once memory is used again.
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Frames {
    /// The frames with their headers, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).map(|n| self.get(n))
    }

    /// The frame at this place.
    pub(crate) fn get(&self, n: usize) -> &[u8] {
        let start = n.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..self.ends[n] as usize]
    }

    /// The number of frames.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of all frames and headers.
    pub(crate) fn used(&self) -> usize {
        self.ends.last().map_or(0, |&end| end as usize)
    }

    pub(crate) fn push(&mut self, frame: &[u8]) {
        self.room(frame.len()).copy_from_slice(frame);
        self.taken(frame.len());
    }

    /// Room for the next frame; [`taken`](Self::taken) makes it one.
    pub(crate) fn room(&mut self, bytes: usize) -> &mut [u8] {
        let (start, end) = (self.used(), self.used() + bytes);
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[start..end]
    }

    pub(crate) fn taken(&mut self, bytes: usize) {
        let end = self.used() + bytes;
        debug_assert!(end <= self.bytes.len(), "more than there was room for");
        self.ends.push(u32::try_from(end).expect("these are far less than 4 GiB"));
    }

    /// Takes the oldest frames away.
    pub(crate) fn skip(&mut self, frames: usize) {
        if frames == 0 {
            return;
        }
        let gone = self.ends[frames - 1];
        self.bytes.drain(..gone as usize);
        self.ends.drain(..frames);
        self.ends.iter_mut().for_each(|end| *end -= gone);
    }

    /// Forgets all frames, and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.ends.clear();
    }
}

/// Frames that go into QEMU's socket just now.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    pub frames: Frames,
    /// Number of them in the socket.
    pub sent: usize,
}

impl Moving {
    pub fn is_done(&self) -> bool {
        self.sent == self.frames.len()
    }

    /// Forgets what is left.
    pub fn clear(&mut self) {
        self.frames.clear();
        self.sent = 0;
    }

    /// The frames that are not yet in the socket.
    pub fn left(&self) -> impl Iterator<Item = &[u8]> {
        self.frames.iter().skip(self.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_is_forgotten_as_far_as_it_is_sent() {
        let mut moving = Moving::default();
        moving.frames.push(&[1; 14]);
        moving.frames.push(&[2; 14]);
        moving.sent = 1;
        assert_eq!(moving.left().collect::<Vec<_>>(), [&[2; 14]]);
        moving.sent = 2;
        assert!(moving.is_done());
        moving.clear();
        assert!(moving.is_done() && moving.left().next().is_none());
    }
}
