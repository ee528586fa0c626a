//! Numbered records, on disk before they are acknowledged.
//!
//! | request              | answer      | |
//! |----------------------|-------------|-|
//! | `append N PAYLOAD\n` | `ok N\n`    | after the line `N PAYLOAD\n` was appended and `fdatasync`ed |
//! | `last\n`             | `last N\n`  | the number appended last, 0 if there is none |
//! | `ping X\n`           | `pong X\n`  | without touching the disk |
//! | anything else        | `error …\n` | |

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::server;

/// Serves the protocol above on `port`, with the records in `file`.
pub fn serve(port: u16, file: &Path) -> Result<(), String> {
    let journal = Journal::open(file)
        .map_err(|error| format!("cannot open {} for appending: {error}", file.display()))?;
    // The lock is what keeps the lines of several connections whole.
    let journal = Mutex::new(journal);
    server::serve(port, move |stream| {
        server::answer_lines(stream, |request| {
            let mut journal = journal.lock().unwrap_or_else(PoisonError::into_inner);
            journal.answer(request)
        })
    })
}

struct Journal {
    file: File,
    last: u64,
}

impl Journal {
    /// Opens or creates the file, and cuts off a last line that a crash tore:
    /// it was never acknowledged, and would spoil the line after it.
    fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut content = Vec::new();
        file.read_to_end(&mut content)?;
        let whole = content.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if whole < content.len() {
            file.set_len(whole as u64)?;
            file.seek(SeekFrom::End(0))?;
        }
        let last = last_number(&content[..whole]);
        Ok(Self { file, last })
    }

    fn answer(&mut self, request: &str) -> io::Result<Vec<u8>> {
        let (verb, rest) = request.split_once(' ').unwrap_or((request, ""));
        let answer = match verb {
            "append" => match parse_record(rest) {
                Some((number, _)) => {
                    self.append(number, rest)?;
                    format!("ok {number}\n")
                }
                None => format!("error: `append` needs a number and a payload, got `{rest}`\n"),
            },
            "last" => format!("last {}\n", self.last),
            "ping" => format!("pong {rest}\n"),
            _ => format!("error: unknown request `{verb}`; known: append, last, ping\n"),
        };
        Ok(answer.into_bytes())
    }

    fn append(&mut self, number: u64, record: &str) -> io::Result<()> {
        self.file.write_all(format!("{record}\n").as_bytes())?;
        self.file.sync_data()?;
        self.last = number;
        Ok(())
    }
}

fn parse_record(record: &str) -> Option<(u64, &str)> {
    let (number, payload) = record.split_once(' ')?;
    Some((number.parse().ok()?, payload))
}

fn last_number(content: &[u8]) -> u64 {
    String::from_utf8_lossy(content)
        .lines()
        .next_back()
        .and_then(parse_record)
        .map_or(0, |(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("guest-tools-{}-{name}", std::process::id()))
    }

    #[test]
    fn appended_records_are_in_the_file_and_the_last_is_known_after_reopening() {
        let path = scratch("append");
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.answer("append 1 first one").unwrap(), b"ok 1\n");
        assert_eq!(journal.answer("append 2 second").unwrap(), b"ok 2\n");
        assert_eq!(std::fs::read(&path).unwrap(), b"1 first one\n2 second\n");
        let mut reopened = Journal::open(&path).unwrap();
        assert_eq!(reopened.answer("last").unwrap(), b"last 2\n");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_torn_last_line_is_cut_off() {
        let path = scratch("torn");
        std::fs::write(&path, "1 whole\n2 to").unwrap();
        let mut journal = Journal::open(&path).unwrap();
        assert_eq!(journal.last, 1);
        journal.append(2, "2 again").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"1 whole\n2 again\n");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_bad_request_changes_nothing() {
        let path = scratch("bad");
        let mut journal = Journal::open(&path).unwrap();
        for request in ["append x y", "append 3", "erase", ""] {
            assert!(journal.answer(request).unwrap().starts_with(b"error"), "{request}");
        }
        assert_eq!(journal.answer("ping a b").unwrap(), b"pong a b\n");
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        std::fs::remove_file(path).unwrap();
    }
}
