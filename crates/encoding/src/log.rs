//! Form in which a batch of QEMU's log travels (lockstep mode): as it is, or as one LZ4 block if
//! that is shorter. Most of a log is the same few events again and again.

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};

/// Length of the log before its bytes.
const HEAD_BYTES: usize = 4;

/// A shorter batch travels as it is: the packet costs more than its bytes.
const LEAST_BYTES: usize = 512;

/// The longest batch. A message has room for it whether or not it can be compressed.
pub const MOST_LOG_BYTES: usize = understudy_protocol::wire::MAX_PAYLOAD - HEAD_BYTES;

/// Error in what is to be a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LogError(&'static str);

/// The message of a batch of log, whose bytes replace those of `message`.
///
/// # Panics
/// If the batch is longer than [`MOST_LOG_BYTES`].
pub fn encode_log(log: &[u8], message: &mut Vec<u8>) {
    assert!(log.len() <= MOST_LOG_BYTES, "{} bytes of log in one batch", log.len());
    message.clear();
    message.extend_from_slice(&(log.len() as u32).to_le_bytes());
    if log.len() >= LEAST_BYTES {
        message.resize(HEAD_BYTES + get_maximum_output_size(log.len()), 0);
        let compressed = compress_into(log, &mut message[HEAD_BYTES..]).ok();
        // A block of the log's own length would be taken for the log.
        if let Some(bytes) = compressed.filter(|&bytes| bytes < log.len()) {
            return message.truncate(HEAD_BYTES + bytes);
        }
        message.truncate(HEAD_BYTES);
    }
    message.extend_from_slice(log);
}

/// Reads what [`encode_log`] made.
pub fn decode_log(message: &[u8]) -> Result<Vec<u8>, LogError> {
    let (head, rest) = message.split_first_chunk().ok_or(LogError("no room for its length"))?;
    let length = u32::from_le_bytes(*head) as usize;
    if length == rest.len() {
        return Ok(rest.to_vec());
    }
    if length > MOST_LOG_BYTES {
        return Err(LogError("it is longer than any batch"));
    }
    let mut log = vec![0; length];
    match decompress_into(rest, &mut log) {
        Ok(bytes) if bytes == length => Ok(log),
        _ => Err(LogError("its length is another")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn logs_come_back(
            piece in proptest::collection::vec(any::<u8>(), 0..700), times in 0..20usize,
        ) {
            let log = piece.repeat(times);
            let mut message = vec![7; 3];
            encode_log(&log, &mut message);
            prop_assert!(message.len() <= HEAD_BYTES + log.len());
            prop_assert_eq!(decode_log(&message).unwrap(), log);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let _ = decode_log(&bytes);
        }
    }

    #[test]
    fn what_repeats_is_short_and_too_long_a_log_is_refused() {
        let mut message = Vec::new();
        encode_log(&[30; 10_000], &mut message);
        assert!(message.len() < 200, "{} bytes", message.len());
        message[..HEAD_BYTES].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(decode_log(&message).is_err());
        assert!(decode_log(&[1]).is_err());
    }
}
