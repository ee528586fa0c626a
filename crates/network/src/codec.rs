//! QEMU's framing on a stream socket: each Ethernet frame after its length, four
//! bytes big-endian.

/// Bytes of the length that goes before each frame.
pub const HEADER_BYTES: usize = 4;

/// The longest frame that a card may send: the largest IP packet, an Ethernet
/// header and a VLAN tag.
pub const MAX_FRAME_BYTES: usize = 65_535 + 14 + 4;

/// What the decoder keeps: several of the longest frames, many ordinary ones.
const CAPACITY: usize = 256 * 1024;

/// A length beyond [`MAX_FRAME_BYTES`]: whatever follows cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("QEMU announced a frame of {length} bytes; at most {MAX_FRAME_BYTES} are possible")]
pub struct FrameTooLong {
    /// The length read from the stream.
    pub length: u32,
}

/// Writes the length of a frame into its header.
///
/// # Panics
/// If `header` is not [`HEADER_BYTES`] long.
pub fn encode(header: &mut [u8], frame_bytes: usize) {
    let length = u32::try_from(frame_bytes).expect("a frame is far shorter than 4 GiB");
    header.copy_from_slice(&length.to_be_bytes());
}

/// Cuts a byte stream into frames.
///
/// Read into [`spare`](Self::spare), tell how much with
/// [`filled`](Self::filled), then take frames until there is none.
pub struct Decoder {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Decoder { bytes: vec![0; CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Where the next bytes of the stream go; never empty once all whole frames
    /// have been taken.
    pub fn spare(&mut self) -> &mut [u8] {
        if self.start > 0 {
            // What is left is less than one frame, mostly nothing.
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// Says that the first `count` bytes of the spare room are now in use.
    ///
    /// # Panics
    /// If that is more than the spare room.
    pub fn filled(&mut self, count: usize) {
        assert!(count <= self.bytes.len() - self.end);
        self.end += count;
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// If the stream holds an impossible length; the decoder stays there.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameTooLong> {
        let Some((header, rest)) =
            self.bytes[self.start..self.end].split_first_chunk::<HEADER_BYTES>()
        else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*header);
        if length as usize > MAX_FRAME_BYTES {
            return Err(FrameTooLong { length });
        }
        let length = length as usize;
        if rest.len() < length {
            return Ok(None);
        }
        let first = self.start + HEADER_BYTES;
        self.start = first + length;
        Ok(Some(&self.bytes[first..self.start]))
    }

    /// Forgets the rest of a stream that has ended.
    pub fn reset(&mut self) {
        (self.start, self.end) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encoded(frames: &[Vec<u8>]) -> Vec<u8> {
        let mut stream = Vec::new();
        for frame in frames {
            let mut header = [0; HEADER_BYTES];
            encode(&mut header, frame.len());
            stream.extend_from_slice(&header);
            stream.extend_from_slice(frame);
        }
        stream
    }

    fn decode_in_pieces(stream: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, FrameTooLong> {
        let mut decoder = Decoder::new();
        let mut frames = Vec::new();
        let (mut rest, mut sizes) = (stream, pieces.iter().cycle());
        while !rest.is_empty() {
            let spare = decoder.spare();
            assert!(!spare.is_empty(), "no room although all frames were taken");
            let wanted = *sizes.next().unwrap_or(&1);
            let count = wanted.min(rest.len()).min(spare.len());
            spare[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            decoder.filled(count);
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame.to_vec());
            }
        }
        Ok(frames)
    }

    #[test]
    fn longest_frame_passes_and_a_longer_one_does_not() {
        let longest = vec![vec![7; MAX_FRAME_BYTES]; 5];
        assert_eq!(decode_in_pieces(&encoded(&longest), &[100_000]), Ok(longest));
        let error = decode_in_pieces(&encoded(&[vec![7; MAX_FRAME_BYTES + 1]]), &[100_000]);
        assert_eq!(error, Err(FrameTooLong { length: 65_554 }));
    }

    #[test]
    fn reset_forgets_a_partial_frame() {
        let mut decoder = Decoder::new();
        decoder.spare()[..6].copy_from_slice(&[0, 0, 0, 9, 1, 2]);
        decoder.filled(6);
        assert_eq!(decoder.next_frame(), Ok(None));
        decoder.reset();
        decoder.spare()[..5].copy_from_slice(&[0, 0, 0, 1, 3]);
        decoder.filled(5);
        assert_eq!(decoder.next_frame(), Ok(Some(&[3][..])));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting_of_the_stream(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..2000), 0..40),
            pieces in prop::collection::vec(1usize..5000, 1..20),
        ) {
            prop_assert_eq!(decode_in_pieces(&encoded(&frames), &pieces), Ok(frames));
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            stream in prop::collection::vec(any::<u8>(), 0..4000),
            pieces in prop::collection::vec(1usize..500, 1..20),
        ) {
            let _ = decode_in_pieces(&stream, &pieces);
        }
    }
}
