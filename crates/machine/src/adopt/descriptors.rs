//! The descriptors by which a machine is held, in the order in which [`super::Machine::entrusted`] gives them:
//! looked at before anything is done with them, since another release may have left them.

use super::{MachineNote, NotUnderstood};
use anyhow::Context;
use nix::sys::stat::{SFlag, fstat};
use std::io;
use std::os::fd::OwnedFd;

/// The kind of which a descriptor must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file, in memory too.
    File,
    Socket,
    /// A pidfd, a userfaultfd, a bell or a tap: kernels differ in what they say of those, but none is a socket.
    Other,
}

impl Kind {
    fn of(descriptor: &OwnedFd) -> io::Result<Kind> {
        let mode = SFlag::from_bits_truncate(fstat(descriptor)?.st_mode) & SFlag::S_IFMT;
        Ok(match mode {
            SFlag::S_IFREG => Kind::File,
            SFlag::S_IFSOCK => Kind::Socket,
            _ => Kind::Other,
        })
    }

    fn may_be(self, found: Kind) -> bool {
        self == found || (self == Kind::Other && found == Kind::File)
    }
}

/// All that a machine has.
fn expected(note: &MachineNote) -> Vec<Kind> {
    use Kind::{File, Other, Socket};
    // QEMU's pidfd, its memory, the device state, the monitors, and those of its agent.
    let mut kinds = vec![Other, File, File, Socket, Socket, Socket, Socket, Other, Other, Socket];
    if note.pause_obstacle.is_none() {
        kinds.extend([File, Other]);
    }
    if note.definition.console {
        kinds.push(Socket);
    }
    for _ in &note.definition.cards {
        kinds.extend([Socket, File]);
        kinds.extend(note.keeps_taps.then_some(Other));
    }
    // The pidfd of its TPM.
    kinds.extend(note.tpm.map(|_| Other));
    kinds
}

/// The descriptors, which are taken one after the other.
pub(super) struct Descriptors(std::vec::IntoIter<OwnedFd>);

impl Descriptors {
    /// Checks those of a machine; refused if they are not all that it has, and nothing else.
    pub fn of(note: &MachineNote, descriptors: Vec<OwnedFd>) -> anyhow::Result<Descriptors> {
        let expected = expected(note);
        if descriptors.len() != expected.len() {
            let (came, has) = (descriptors.len(), expected.len());
            let message = format!("{came} descriptors of it are there, and it has {has}");
            return Err(NotUnderstood(message).into());
        }
        for (at, (descriptor, expected)) in descriptors.iter().zip(expected).enumerate() {
            let kind = Kind::of(descriptor).context("cannot look at a descriptor of it")?;
            if !expected.may_be(kind) {
                let message = format!("its descriptor {at} is a {kind:?}, not a {expected:?}");
                return Err(NotUnderstood(message).into());
            }
        }
        Ok(Descriptors(descriptors.into_iter()))
    }

    pub fn next(&mut self) -> anyhow::Result<OwnedFd> {
        self.0.next().context("there are too few descriptors of it")
    }

    pub fn array<const N: usize>(&mut self) -> anyhow::Result<[OwnedFd; N]> {
        let some: Vec<OwnedFd> = self.0.by_ref().take(N).collect();
        some.try_into().ok().context("there are too few descriptors of it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn note(card: bool) -> MachineNote {
        let mut definition = serde_json::json!({
            "name": "db", "memory": "64M", "vcpus": 1,
            "disk": [{ "path": "/d.img", "format": "raw" }],
        });
        if card {
            let card = serde_json::json!([{ "mac": "52:54:00:75:73:01", "bridge": "br0" }]);
            definition["card"] = card;
        }
        let note = serde_json::json!({
            "definition": definition, "machine_type": "pc", "accelerator": "tcg", "qemu_pid": 1,
            "log_start": 0, "version": { "major": 10, "minor": 0, "micro": 2 }, "hello": [],
            "device_state": 5, "card_ends": [], "blocks": [], "pause_obstacle": null,
            "keeps_taps": true,
        });
        serde_json::from_value(note).unwrap()
    }

    fn one(kind: Kind) -> OwnedFd {
        match kind {
            Kind::File => tempfile::tempfile().unwrap().into(),
            Kind::Socket => UnixStream::pair().unwrap().0.into(),
            Kind::Other => io::pipe().unwrap().0.into(),
        }
    }

    /// The error about a machine with a card whose descriptors are these.
    fn said(kinds: &[Kind]) -> Option<String> {
        let descriptors = kinds.iter().map(|&kind| one(kind)).collect();
        let error = Descriptors::of(&note(true), descriptors).err()?;
        assert!(error.downcast_ref::<NotUnderstood>().is_some(), "{error:#}");
        Some(error.to_string())
    }

    #[test]
    fn those_of_a_machine_are_taken_and_no_others() {
        let whole = expected(&note(true));
        assert_eq!(whole.len(), expected(&note(false)).len() + 3, "a card has three");
        let mut with_tpm = serde_json::to_value(note(true)).unwrap();
        with_tpm["tpm"] = serde_json::json!({ "pid": 2, "log_start": 0 });
        let with_tpm: MachineNote = serde_json::from_value(with_tpm).unwrap();
        assert_eq!(expected(&with_tpm), [&whole[..], &[Kind::Other]].concat());
        assert_eq!(said(&whole), None);
        let [fewer, more] = [&whole[1..], &[&whole[..], &[Kind::File]].concat()];
        for wrong in [&[], fewer, more] {
            let words = said(wrong).unwrap();
            assert!(words.contains(&format!("{} descriptors", wrong.len())), "{words}");
        }
        let mut other = whole;
        other.swap(1, 3);
        let words = said(&other).unwrap();
        assert!(words.contains("descriptor 1 is a Socket, not a File"), "{words}");
    }
}
