//! Several messages between two hosts in one: each with its length before it.

use anyhow::Context;

/// A batch that has so many bytes gets no more messages.
pub(super) const BATCH_BYTES: usize = 256 << 10;

/// Adds a message.
pub(super) fn append(batch: &mut Vec<u8>, message: &[u8]) {
    batch.extend((message.len() as u32).to_le_bytes());
    batch.extend_from_slice(message);
}

/// Takes the first message from a batch; none at its end.
pub(super) fn take_first<'a>(batch: &mut &'a [u8]) -> anyhow::Result<Option<&'a [u8]>> {
    if batch.is_empty() {
        return Ok(None);
    }
    let short = "a batch of frames that ends too early";
    let (length, rest) = batch.split_first_chunk().context(short)?;
    let length = u32::from_le_bytes(*length) as usize;
    let (message, rest) = rest.split_at_checked(length).context(short)?;
    *batch = rest;
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_cut_batches_do_not() {
        let messages: [&[u8]; 3] = [b"one", b"", b"three"];
        let mut batch = Vec::new();
        messages.iter().for_each(|message| append(&mut batch, message));
        let mut rest = &batch[..];
        for message in messages {
            assert_eq!(take_first(&mut rest).unwrap(), Some(message));
        }
        assert_eq!(take_first(&mut rest).unwrap(), None);
        for end in [1, 3, 6, 8, batch.len() - 1] {
            let mut cut = &batch[..end];
            let all = std::iter::from_fn(|| take_first(&mut cut).transpose());
            assert!(all.collect::<anyhow::Result<Vec<_>>>().is_err(), "{end}");
        }
    }
}
