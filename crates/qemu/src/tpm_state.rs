//! The part of a TPM's state that outlives a power-off, out of QEMU's device state.
//!
//! QEMU saves three blobs of its swtpm, in the section `tpm-emulator`: each has its flags, its
//! length, and the bytes that swtpm gave. The first one is that part.

const SECTION: u8 = 4;
const FOOTER: u8 = 0x7e;
const NAME: &[u8] = b"\x0ctpm-emulator";
/// Bytes of a section before its name (kind, id), and between that and its fields (instance,
/// version).
const BEFORE_NAME: usize = 5;
const AFTER_NAME: usize = 8;
const BLOBS: usize = 3;

/// The device state has no TPM's of the kind that is known.
#[derive(Debug, thiserror::Error)]
#[error("QEMU's device state has no state of the TPM of the kind that is known")]
pub struct NoTpmState;

/// Returns what swtpm calls its permanent state.
pub fn permanent_state(device_state: &[u8]) -> Result<&[u8], NoTpmState> {
    let places = (0..device_state.len()).filter(|&at| device_state[at..].starts_with(NAME));
    places.filter_map(|name| blob_at(device_state, name)).next().ok_or(NoTpmState)
}

/// The first blob of the section with this name, if it is one from its beginning to its end.
fn blob_at(state: &[u8], name: usize) -> Option<&[u8]> {
    let begin = name.checked_sub(BEFORE_NAME)?;
    let id = state.get(begin + 1..name)?;
    let mut rest = state.get(name + NAME.len() + AFTER_NAME..)?;
    let mut blobs = [&[][..]; BLOBS];
    for blob in &mut blobs {
        let (flags, behind) = number(rest)?;
        let (length, behind) = number(behind)?;
        // swtpm has no key, so nothing is encrypted.
        (*blob, rest) = behind.split_at_checked(length as usize).filter(|_| flags == 0)?;
    }
    let ends = rest.first() == Some(&FOOTER) && rest.get(1..BEFORE_NAME) == Some(id);
    let [permanent, ..] = blobs;
    let is_one = state[begin] == SECTION && ends && !permanent.is_empty();
    is_one.then_some(permanent)
}

fn number(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device state with this section of a TPM between others.
    fn state(blobs: [&[u8]; BLOBS], flags: u32, footer: u8) -> Vec<u8> {
        let mut state = b"before\x0ctpm-emulator, which is no section".to_vec();
        state.extend([&[SECTION, 0, 0, 0, 9], NAME, &[0; AFTER_NAME]].concat());
        for blob in blobs {
            state.extend(flags.to_be_bytes());
            state.extend((blob.len() as u32).to_be_bytes());
            state.extend(blob);
        }
        state.extend([footer, 0, 0, 0, 9]);
        state.extend(b"behind");
        state
    }

    #[test]
    fn the_permanent_state_is_found_among_others() {
        let found = state([b"endorsed", b"volatile", b""], 0, FOOTER);
        assert_eq!(permanent_state(&found).unwrap(), b"endorsed");
    }

    #[test]
    fn what_is_no_state_of_a_tpm_is_none() {
        let whole = [&b"endorsed"[..], b"volatile", b""];
        assert!(permanent_state(&state(whole, 2, FOOTER)).is_err(), "it is encrypted");
        assert!(permanent_state(&state(whole, 0, 0)).is_err(), "it does not end there");
        assert!(permanent_state(&state([b"", b"volatile", b""], 0, FOOTER)).is_err());
        let cut = state(whole, 0, FOOTER);
        assert!((0..cut.len() - 10).all(|end| permanent_state(&cut[..end]).is_err()));
    }
}
