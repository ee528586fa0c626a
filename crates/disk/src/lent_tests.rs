use super::*;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

const HEADER: &[u8] = b"sixteen bytes!!!";

/// A file in the page cache; none where the kernel cannot tell that it is there.
fn cached_file(bytes: usize) -> Option<(File, Vec<u8>)> {
    let mut file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..bytes).map(|n| (n / 251 + n) as u8).collect();
    file.write_all(&content).unwrap();
    is_cached(&file, 0, bytes as u64).then_some((file, content))
}

fn sent(loan: &mut Loan, bytes: usize) -> Vec<u8> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| loan.send(&ours).unwrap());
        let mut got = vec![0; bytes];
        theirs.read_exact(&mut got).unwrap();
        got
    })
}

#[test]
fn a_range_arrives_behind_its_header_again_and_again() {
    let Some((file, content)) = cached_file(600_000) else { return };
    let mut loan = Loan::default();
    for (offset, len) in [(0, 131_072), (4096, 500_000), (513, 70_001), (599_999, 1)] {
        assert!(loan.take(HEADER, &file, offset as u64, len));
        let got = sent(&mut loan, HEADER.len() + len);
        assert_eq!(got[..HEADER.len()], *HEADER);
        assert!(got[HEADER.len()..] == content[offset..offset + len], "{len} bytes at {offset}");
    }
}

#[test]
fn what_cannot_be_taken_whole_leaves_nothing_behind() {
    let Some((file, content)) = cached_file(3 * 1024 * 1024 + 100) else { return };
    let mut loan = Loan::default();
    let end = content.len() as u64;
    for (offset, len, why) in [
        (0, 3 * 1024 * 1024, "more than fits"),
        (end - 50, 60, "the last page is there, the file's end before the range's"),
        (end - 50, 100_000, "beyond the end"),
    ] {
        assert!(!loan.take(HEADER, &file, offset, len), "{why}");
    }
    assert!(loan.take(HEADER, &file, 0, 40_000));
    assert!(sent(&mut loan, HEADER.len() + 40_000)[HEADER.len()..] == content[..40_000]);
}

#[test]
fn a_hole_is_not_in_the_page_cache() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    file.write_all_at(&[7; 4096], 0).unwrap();
    assert!(!is_cached(&file, 0, 65_536));
}

#[test]
fn a_socket_that_is_closed_is_an_error() {
    let Some((file, _)) = cached_file(65_536) else { return };
    let mut loan = Loan::default();
    assert!(loan.take(HEADER, &file, 0, 65_536));
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    assert!(loan.send(&ours).is_err());
}
