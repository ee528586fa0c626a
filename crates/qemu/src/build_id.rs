//! The build of QEMU that a program is: the GNU build id that its linker gave it.
//!
//! Two builds of one version may differ in what they log and replay (a patch, an option, a
//! compiler), which lockstep cannot bear: a backup would diverge some time later.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A name for a build, in hexadecimal.
pub type BuildId = String;

const ELF_64_LITTLE: [u8; 6] = *b"\x7fELF\x02\x01";
const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
const NAME: &[u8] = b"GNU\0";
/// No program has more segments, or longer notes.
const MOST_SEGMENTS: u16 = 256;
const MOST_NOTE_BYTES: u64 = 64 << 10;

/// The build id of a program's file; none if it has none.
///
/// # Errors
/// If the file cannot be read.
pub fn build_id(program: &Path) -> io::Result<Option<BuildId>> {
    let file = File::open(program)?;
    let mut header = [0; 64];
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(&ELF_64_LITTLE) {
        return Ok(None);
    }
    let table = number(&header[32..40]);
    let (entry, entries) = (number(&header[54..56]), number(&header[56..58]));
    for i in 0..entries.min(MOST_SEGMENTS.into()) {
        let mut segment = [0; 56];
        file.read_exact_at(&mut segment, table.saturating_add(i * entry))?;
        if number(&segment[..4]) != u64::from(PT_NOTE) {
            continue;
        }
        let (offset, bytes) = (number(&segment[8..16]), number(&segment[32..40]));
        let mut notes = vec![0; bytes.min(MOST_NOTE_BYTES) as usize];
        file.read_exact_at(&mut notes, offset)?;
        if let Some(id) = find(&notes) {
            return Ok(Some(id));
        }
    }
    Ok(None)
}

/// The build id among the notes of a segment.
fn find(mut notes: &[u8]) -> Option<BuildId> {
    loop {
        let (head, rest) = notes.split_at_checked(12)?;
        let [name, content] = [&head[..4], &head[4..8]].map(|field| number(field) as usize);
        let (found, rest) = rest.split_at_checked(name.next_multiple_of(4))?;
        let id = rest.get(..content)?;
        if number(&head[8..]) == u64::from(NT_GNU_BUILD_ID) && found.starts_with(NAME) {
            return Some(id.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        notes = rest.get(content.next_multiple_of(4)..)?;
    }
}

fn number(little_endian: &[u8]) -> u64 {
    little_endian.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The reason why a backup's QEMU cannot execute the log of a primary's, by their builds; none if
/// it can.
pub fn peer_obstacle(ours: Option<&str>, theirs: Option<&str>) -> Option<String> {
    match (ours, theirs) {
        (Some(ours), Some(theirs)) if ours == theirs => None,
        (Some(ours), Some(theirs)) => Some(format!(
            "its QEMU is another build than the primary's (build id {ours}, the primary's \
             {theirs}), and lockstep needs the same: install the same package on both hosts"
        )),
        _ => Some(
            "lockstep needs the same build of QEMU on both hosts, and one of them has no GNU \
             build id to tell by"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(kind: u32, name: &[u8], content: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for field in [name.len() as u32, content.len() as u32, kind] {
            note.extend_from_slice(&field.to_le_bytes());
        }
        for part in [name, content] {
            note.extend_from_slice(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn the_build_id_is_found_among_other_notes() {
        let mut notes = note(1, NAME, &[7; 16]);
        notes.extend(note(NT_GNU_BUILD_ID, b"Go\0", &[1; 5]));
        assert_eq!(find(&notes), None);
        notes.extend(note(NT_GNU_BUILD_ID, NAME, &[0x0f, 0xbb, 0xd5]));
        assert_eq!(find(&notes).as_deref(), Some("0fbbd5"));
        assert_eq!(find(&notes[..notes.len() - 2]), None, "cut off");
        assert_eq!(find(&[0xff; 32]), None, "nonsense");
    }

    #[test]
    fn this_program_is_what_it_is_and_a_text_is_nothing() {
        let own = build_id(Path::new("/proc/self/exe")).unwrap();
        assert!(own.is_none_or(|id| id.len() >= 16));
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        assert_eq!(build_id(&text).unwrap(), None);
        assert!(build_id(Path::new("/nowhere")).is_err());
    }

    #[test]
    fn only_the_same_build_follows() {
        assert_eq!(peer_obstacle(Some("ab"), Some("ab")), None);
        let other = peer_obstacle(Some("ab"), Some("cd")).unwrap();
        assert!(other.contains("build id ab, the primary's cd"), "{other}");
        for (ours, theirs) in [(None, None), (Some("ab"), None), (None, Some("ab"))] {
            assert!(peer_obstacle(ours, theirs).is_some_and(|why| why.contains("no GNU build id")));
        }
    }
}
