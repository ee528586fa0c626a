//! The first line of a manifest and of a store's mark: what the file is, its version, and the
//! checksum of the rest. It is read before anything else is believed.

/// The only version so far. A change that this version's reader would misread needs another.
const VERSION: u32 = 1;

/// The reason why a file is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// Another program's, or damaged in its first line.
    Foreign,
    /// The file was written by a version that this one does not know.
    Version(u32),
    /// The rest is not what was written.
    Checksum,
}

/// `body` behind its first line.
pub(crate) fn seal_envelope(kind: &str, body: &str) -> String {
    format!("understudy {kind} {VERSION} {}\n{body}", blake3::hash(body.as_bytes()))
}

/// The body, checked.
pub(crate) fn open_envelope<'a>(kind: &str, text: &'a [u8]) -> Result<&'a str, HeaderError> {
    let text = std::str::from_utf8(text).map_err(|_| HeaderError::Foreign)?;
    let (line, body) = text.split_once('\n').ok_or(HeaderError::Foreign)?;
    let mut words = line.split(' ');
    let (program, found, version, sum) = (words.next(), words.next(), words.next(), words.next());
    if program != Some("understudy") || found != Some(kind) {
        return Err(HeaderError::Foreign);
    }
    let version: u32 = version.and_then(|word| word.parse().ok()).ok_or(HeaderError::Foreign)?;
    if version != VERSION {
        return Err(HeaderError::Version(version));
    }
    match sum == Some(blake3::hash(body.as_bytes()).to_hex().as_str()) {
        true => Ok(body),
        false => Err(HeaderError::Checksum),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ours_not_known_or_not_whole_is_told_apart() {
        let sealed = seal_envelope("snapshot", "{}\n");
        assert_eq!(open_envelope("snapshot", sealed.as_bytes()), Ok("{}\n"));
        assert_eq!(open_envelope("store", sealed.as_bytes()), Err(HeaderError::Foreign));
        assert_eq!(open_envelope("snapshot", b"{\"version\": 1}"), Err(HeaderError::Foreign));
        assert_eq!(open_envelope("snapshot", &[0xff; 90]), Err(HeaderError::Foreign));
        let newer = sealed.replacen("snapshot 1", "snapshot 2", 1);
        assert_eq!(open_envelope("snapshot", newer.as_bytes()), Err(HeaderError::Version(2)));
        let damaged = sealed.replace("{}", "{ }");
        assert_eq!(open_envelope("snapshot", damaged.as_bytes()), Err(HeaderError::Checksum));
    }
}
