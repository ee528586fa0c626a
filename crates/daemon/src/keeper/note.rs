//! Note of a keeper on itself: `keeper.json` in its VM's directory, locked for as long as it lives.
//!
//! The file is written in place and never removed, since the lock is that of the file.

use super::legacy;
use crate::file_lock;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process;
use understudy_protocol::{Generation, GroupName, HostName, Spoken, VmName};
use understudy_report::error::{ErrorKind, HostError};

/// The versions of what daemon and keeper say to each other, that this program speaks: this file, the API behind the
/// socket, orders with their answers, and what goes with a descriptor through the other socket. Each release of a
/// new version speaks the one before, too; whichever of the two is newer says to the other nothing that it does not know.
const PROTOCOL: Spoken = Spoken { least: 1, highest: 1 };

pub(super) const FILE: &str = "keeper.json";

/// Note of a keeper on itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The least version of the local protocol that it speaks.
    protocol: u32,
    /// The highest one; none of a release that speaks no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    protocol_highest: Option<u32>,
    /// The host that it is one of.
    pub host: HostName,
    /// Its VM.
    pub vm: VmName,
    /// Its process.
    pub pid: u32,
    /// The group that its VM shares it with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupName>,
    /// Program that it is; none of a release whose keepers cannot be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<Program>,
    /// Whether it ends: a further signal would cut its guests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ending: bool,
    /// End of the keeper; none while it lives, and if it was killed.
    pub end: Option<End>,
}

/// Process of a keeper, of whatever release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Whether it ends: a further signal would cut its guests.
    #[serde(default)]
    pub ending: bool,
}

/// The program of a keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its version of the product.
    pub version: String,
    /// The version of what it leaves to the next keeper; see `keeper/legacy.rs`.
    pub leaves: u32,
    /// Whether it compares the agent in its QEMU with what the next keeper speaks, before it leaves that.
    #[serde(default)]
    pub compares_agents: bool,
}

impl Program {
    /// Program that this one is.
    pub fn own() -> Program {
        Program {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            leaves: legacy::VERSION,
            compares_agents: true,
        }
    }
}

/// End of a keeper's VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Its operator or its guest ended it, or it runs elsewhere as its operator wished.
    Gone,
    /// Loss: this host does not own it any more.
    Fenced {
        /// The last generation at which this host owned it.
        generation: Generation,
        /// Reason of the loss.
        reason: String,
        /// Whether another host has it.
        #[serde(default)]
        elsewhere: bool,
    },
    /// Departure: it was left to the next keeper.
    Left,
}

/// Traces of a keeper in a VM's directory.
#[derive(Debug)]
pub enum Found {
    /// None that lives, but what the last one has said, unless that is known already.
    Nobody(Option<Note>),
    /// One that has not said anything yet.
    Starting,
    /// One that lives.
    Lives(Note),
    /// One that this daemon does not understand, and why.
    Unknown(String),
}

/// Looks for a keeper. What cannot be read is taken for one: nobody may start the VM then.
pub fn look(directory: &Path) -> Found {
    let path = directory.join(FILE);
    match examine(&path) {
        Err(error) if is_absent(&error) => Found::Nobody(None),
        Err(error) => Found::Unknown(format!("{} cannot be read: {error}", path.display())),
        Ok((false, text)) => Found::Nobody(serde_json::from_slice(&text).ok()),
        Ok((true, text)) if text.is_empty() => Found::Starting,
        Ok((true, text)) => understand(&text, &path),
    }
}

/// The process of a keeper that lives; an error: there is one, and it is not known.
pub fn process_in(directory: &Path) -> io::Result<Option<Process>> {
    match examine(&directory.join(FILE)) {
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
        Ok((false, _)) => Ok(None),
        Ok((true, text)) if text.is_empty() => Err(io::Error::other("it is just starting")),
        Ok((true, text)) => Ok(Some(serde_json::from_slice(&text)?)),
    }
}

/// Whether a note is locked, and its text.
fn examine(path: &Path) -> io::Result<(bool, Vec<u8>)> {
    let mut file = File::open(path)?;
    let is_locked = file_lock::is_taken(&file)?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    Ok((is_locked, text))
}

/// Whether there is no such file, and no directory that could have it.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Whether a keeper lives there.
pub fn lives_in(directory: &Path) -> bool {
    !matches!(look(directory), Found::Nobody(_))
}

fn understand(text: &[u8], path: &Path) -> Found {
    #[derive(Deserialize)]
    struct Protocol {
        protocol: u32,
        #[serde(default)]
        protocol_highest: Option<u32>,
    }
    let unknown =
        |error: serde_json::Error| format!("{} is not understood: {error}", path.display());
    let theirs = match serde_json::from_slice(text) {
        Err(error) => return Found::Unknown(unknown(error)),
        Ok(Protocol { protocol: least, protocol_highest }) => {
            Spoken { least, highest: protocol_highest.unwrap_or(least) }
        }
    };
    if PROTOCOL.agree(theirs).is_none() {
        return Found::Unknown(format!(
            "it speaks {theirs} of the local protocol, and this daemon {PROTOCOL}: run the daemon of the \
             keeper's release, or end its VM by SIGTERM to the keeper"
        ));
    }
    match serde_json::from_slice(text) {
        Ok(note) => Found::Lives(note),
        Err(error) => Found::Unknown(unknown(error)),
    }
}

/// The last keeper's words were heard.
pub fn forget(directory: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).open(directory.join(FILE))?.set_len(0)
}

/// A keeper's hold on its VM: the lock, for as long as the process lives.
#[derive(Debug)]
pub struct Claim {
    file: File,
    note: Note,
}

impl Claim {
    /// Takes a VM's lock and says who has it; refused if there is another keeper.
    pub fn take(
        directory: &Path,
        host: &HostName,
        vm: &VmName,
        group: Option<&GroupName>,
    ) -> Result<Claim, HostError> {
        let conflict = |message: String| HostError::new(ErrorKind::Conflict, message);
        let path = directory.join(FILE);
        let cannot =
            |error: io::Error| conflict(format!("cannot lock {}: {error}", path.display()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(cannot)?;
        if !file_lock::try_take(&file).map_err(cannot)? {
            return Err(conflict(format!("{vm} has a keeper on host {host} already")));
        }
        let note = Note {
            protocol: PROTOCOL.least,
            protocol_highest: Some(PROTOCOL.highest),
            host: host.clone(),
            vm: vm.clone(),
            pid: process::id(),
            group: group.cloned(),
            program: Some(Program::own()),
            ending: false,
            end: None,
        };
        let mut claim = Claim { file, note };
        claim.say().map_err(cannot)?;
        Ok(claim)
    }

    /// The keeper ends, and is not to be told again.
    pub fn note_ending(&mut self) -> io::Result<()> {
        self.note.ending = true;
        self.say()
    }

    /// The last that this keeper says.
    pub fn end(&mut self, end: End) -> io::Result<()> {
        self.note.end = Some(end);
        self.say()
    }

    fn say(&mut self) -> io::Result<()> {
        let text = serde_json::to_vec(&self.note)?;
        self.file.rewind()?;
        self.file.write_all(&text)?;
        // Not before: without a word it would be taken for a keeper that is just starting.
        self.file.set_len(text.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use understudy_protocol::literal;

    fn take(directory: &Path) -> Result<Claim, HostError> {
        Claim::take(directory, &literal("a"), &literal("db"), None)
    }

    #[test]
    fn a_keeper_is_there_for_as_long_as_it_holds_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(look(directory.path()), Found::Nobody(None)));
        let file = directory.path().join("no-directory");
        fs::write(&file, "").unwrap();
        assert!(matches!(look(&file), Found::Nobody(None)));
        let claim = take(directory.path()).unwrap();
        match look(directory.path()) {
            Found::Lives(note) => assert_eq!((note.pid, note.end), (process::id(), None)),
            other => panic!("{other:?}"),
        }
        let error = take(directory.path()).unwrap_err();
        assert!(error.message.contains("already"), "{error}");
        drop(claim);
        match look(directory.path()) {
            Found::Nobody(Some(note)) => assert_eq!(note.end, None, "it was killed"),
            other => panic!("{other:?}"),
        }
        forget(directory.path()).unwrap();
        assert!(matches!(look(directory.path()), Found::Nobody(None)));
    }

    #[test]
    fn what_a_keeper_of_an_older_release_does_not_say_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let _claim = take(directory.path()).unwrap();
        let lives = || match look(directory.path()) {
            Found::Lives(note) => note,
            other => panic!("{other:?}"),
        };
        assert_eq!(lives().program, Some(Program::own()));
        let text = r#"{"protocol":1,"host":"a","vm":"db","pid":1,"end":null}"#;
        fs::write(directory.path().join(FILE), text).unwrap();
        assert_eq!(lives().program, None);
    }

    #[test]
    fn a_keeper_of_the_next_release_speaks_this_version_too() {
        let directory = tempfile::tempdir().unwrap();
        let _claim = take(directory.path()).unwrap();
        for (protocol, is_known) in [
            (r#""protocol":1"#, true),
            (r#""protocol":1,"protocol_highest":2"#, true),
            (r#""protocol":0,"protocol_highest":1"#, true),
            (r#""protocol":2,"protocol_highest":3"#, false),
            (r#""protocol":0"#, false),
        ] {
            let text = format!(r#"{{{protocol},"host":"a","vm":"db","pid":1,"end":null}}"#);
            fs::write(directory.path().join(FILE), text).unwrap();
            match look(directory.path()) {
                Found::Lives(_) => assert!(is_known, "{protocol}"),
                Found::Unknown(problem) => {
                    assert!(
                        !is_known && problem.contains("local protocol"),
                        "{protocol}: {problem}"
                    )
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn the_last_words_of_a_keeper_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (generation, reason) = (Generation(3), "host b has it".to_owned());
        let end = End::Fenced { generation, reason, elsewhere: true };
        take(directory.path()).unwrap().end(end.clone()).unwrap();
        match look(directory.path()) {
            Found::Nobody(Some(note)) => assert_eq!(note.end, Some(end)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_that_is_not_understood_is_one_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let _claim = take(directory.path()).unwrap();
        let file = directory.path().join(FILE);
        for (text, words) in [
            (r#"{"protocol":9,"pid":1}"#, "version 9"),
            ("no JSON", "not understood"),
            (r#"{"protocol":1,"pid":1}"#, "not understood"),
        ] {
            fs::write(&file, text).unwrap();
            match look(directory.path()) {
                Found::Unknown(problem) => assert!(problem.contains(words), "{problem}"),
                other => panic!("{other:?}"),
            }
        }
        fs::write(&file, "").unwrap();
        assert!(matches!(look(directory.path()), Found::Starting));
    }

    #[test]
    fn what_cannot_be_read_may_be_one() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join(FILE)).unwrap();
        match look(directory.path()) {
            Found::Unknown(problem) => assert!(problem.contains("cannot be read"), "{problem}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_keeper_that_says_more_is_never_taken_for_one_that_is_starting() {
        let directory = tempfile::tempdir().unwrap();
        let (host, vm) = (literal("a"), literal("db"));
        let mut claim = Claim::take(directory.path(), &host, &vm, None).unwrap();
        std::thread::scope(|scope| {
            let saying = scope.spawn(|| {
                for end in (0..2000).map(|round| (round % 2 == 0).then_some(End::Gone)) {
                    claim.note.end = end;
                    claim.say().unwrap();
                }
            });
            while !saying.is_finished() {
                assert!(!matches!(look(directory.path()), Found::Starting));
            }
        });
    }
}
