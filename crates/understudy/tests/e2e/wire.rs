//! Corrupt and truncated messages on the wire: the connection is dropped with
//! the reason, nothing of a bad epoch is applied, and one host has the guest.

use crate::deaths::await_one_owner;
use crate::relay::{Fault, Relay, Then};
use crate::stage::{
    Calm, LIMIT, PACE, await_forgotten, await_service, hand_over, options, play, prove_survival,
};
use anyhow::{Context, Result};
use std::fs;
use std::path::PathBuf;
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, wait_for};
use understudy_protocol::Epoch;
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind, Message};

/// The offsets of a header's fields (docs/WIRE.md).
const KIND: usize = 4;
const LENGTH: usize = 8;
const EPOCH: usize = 12;

fn of_an_epoch(header: &Header) -> bool {
    header.kind == Kind::Pages && header.epoch > Epoch(0)
}

fn device_state(header: &Header) -> bool {
    header.kind == Kind::DeviceState
}

fn epoch_end(header: &Header) -> bool {
    header.kind == Kind::EpochEnd
}

fn acknowledgement(header: &Header) -> bool {
    header.kind == Kind::Acknowledge
}

/// A fault, and a word of the reason that must be given.
struct Case {
    name: &'static str,
    fault: Fault,
    reason: &'static str,
}

const fn sent(
    name: &'static str,
    fits: fn(&Header) -> bool,
    damage: fn(&mut Vec<u8>) -> Then,
    reason: &'static str,
) -> Case {
    Case { name, fault: Fault { from_primary: true, fits, damage }, reason }
}

const fn answered(
    name: &'static str,
    damage: fn(&mut Vec<u8>) -> Then,
    reason: &'static str,
) -> Case {
    let fault = Fault { from_primary: false, fits: acknowledgement, damage };
    Case { name, fault, reason }
}

fn flip(bytes: &mut [u8], at: usize) -> Then {
    bytes[at] ^= 0x10;
    Then::Forward
}

/// A number that no kind of message has; with a single flipped bit it may be another's.
fn no_kind(bytes: &mut [u8]) -> Then {
    bytes[KIND] = u8::MAX;
    Then::Forward
}

fn flip_last(bytes: &mut [u8]) -> Then {
    let last = bytes.len() - 1;
    flip(bytes, last)
}

fn set_length(bytes: &mut [u8], change: fn(u32) -> u32) -> Then {
    let field = &mut bytes[LENGTH..LENGTH + 4];
    let length = u32::from_le_bytes(field.try_into().expect("four bytes"));
    field.copy_from_slice(&change(length).to_le_bytes());
    Then::Forward
}

fn truncate(bytes: &mut Vec<u8>) -> Then {
    bytes.truncate(bytes.len() / 2);
    Then::Close
}

fn lose(bytes: &mut Vec<u8>) -> Then {
    bytes.clear();
    Then::Forward
}

fn repeat(bytes: &mut Vec<u8>) -> Then {
    bytes.extend_from_within(..);
    Then::Forward
}

/// Plays every case on one guest, which is protected anew each time.
fn endure(cases: Vec<Case>) {
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), Relay::options());
    play(options, |scene| {
        let relay = Relay::start(scene)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        for case in cases {
            let name = case.name;
            suffer(scene, &relay, &client, case).with_context(|| format!("with {name}"))?;
        }
        // All that the backup took over after each of them was whole.
        protect(scene, "a", "b")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

fn protect(scene: &Scene, from: &str, to: &str) -> Result<()> {
    scene.protect(from, to)?;
    scene.await_protected(from, |_| ()).map(drop)
}

/// Host a's guest is protected, then a message is damaged; ends with the guest
/// on host a again, unprotected.
fn suffer(scene: &Scene, relay: &Relay, client: &RecordClient, case: Case) -> Result<()> {
    protect(scene, "a", "b")?;
    await_service(client)?;
    let logs = [Log::mark(scene, "a")?, Log::mark(scene, "b")?];
    relay.arm(case.fault);
    relay.await_strike()?;
    wait_for(&format!("a host to say `{}`", case.reason), LIMIT, || {
        let words = logs.iter().map(Log::since).collect::<Result<String>>()?;
        Ok(words.contains(case.reason).then_some(()))
    })?;
    let owner = await_one_owner(scene)?;
    await_service(client)?;
    if owner == "b" {
        protect(scene, "b", "a")?;
        hand_over(scene.host("b")?, VM)?;
        scene.await_live("a")?;
    }
    await_forgotten(scene, "b")
}

/// A daemon's log from some point on.
struct Log {
    path: PathBuf,
    start: usize,
}

impl Log {
    fn mark(scene: &Scene, host: &str) -> Result<Log> {
        let path = scene.host(host)?.directory().join("daemon.log");
        let start = fs::read(&path)?.len();
        Ok(Log { path, start })
    }

    fn since(&self) -> Result<String> {
        let log = fs::read(&self.path)?;
        Ok(String::from_utf8_lossy(&log[self.start..]).into_owned())
    }
}

#[test]
fn damaged_headers_end_the_connection() {
    endure(vec![
        sent("a wrong magic", of_an_epoch, |bytes| flip(bytes, 0), "bad magic"),
        sent("an unknown kind", device_state, |bytes| no_kind(bytes), "unknown message kind"),
        sent("a wrong epoch", device_state, |bytes| flip(bytes, EPOCH), "corrupt"),
        sent(
            "a length beyond all bounds",
            of_an_epoch,
            |bytes| set_length(bytes, |length| length | 1 << 31),
            "larger than",
        ),
        sent(
            "a length that is too long",
            device_state,
            |bytes| set_length(bytes, |length| length + (1 << 20)),
            "corrupt",
        ),
        sent(
            "a length that is too short",
            of_an_epoch,
            |bytes| set_length(bytes, |length| length / 2),
            "corrupt",
        ),
    ]);
}

#[test]
fn damaged_payloads_end_the_connection() {
    endure(vec![
        sent("a flipped bit in a page", of_an_epoch, |bytes| flip_last(bytes), "corrupt Pages"),
        sent(
            "a flipped bit in the device state",
            device_state,
            |bytes| flip_last(bytes),
            "corrupt DeviceState",
        ),
        sent(
            "a flipped bit in an epoch's end",
            epoch_end,
            |bytes| flip_last(bytes),
            "corrupt EpochEnd",
        ),
        sent("a message cut short", of_an_epoch, truncate, "closed the connection"),
        sent("a message that is missing", of_an_epoch, lose, "not what was sent"),
        sent("a message that comes twice", device_state, repeat, "not what was sent"),
        sent("an epoch that ends twice", epoch_end, repeat, "its epoch is not open"),
    ]);
}

#[test]
fn damaged_answers_end_the_connection() {
    endure(vec![
        answered("a flipped bit", |bytes| flip_last(bytes), "corrupt"),
        answered("an answer cut short", truncate, "closed the connection"),
        answered("an answer that comes twice", repeat, "which is not in flight"),
    ]);
}

/// Another `Pages` payload in the place of one, with the right checksums.
fn replace_pages(bytes: &mut Vec<u8>, payload: &[u8]) -> Then {
    let header = bytes.first_chunk::<HEADER_BYTES>().expect("a whole message");
    let header = Header::decode(header).expect("the primary's message");
    let message = Message::new(Kind::Pages, header.epoch, payload.to_vec());
    *bytes = [&message.header.encode()[..], &message.payload].concat();
    Then::Forward
}

/// A payload of one page of the guest's memory, number 256, in this kind and encoding.
fn one_page(kind: u8, encoded: &[u8]) -> Vec<u8> {
    let length = (encoded.len() as u16).to_le_bytes();
    let part = (encoded.len() as u32 + 2).to_le_bytes();
    [&[1, 0, 0, 0], &part[..], &[kind, 0, 1, 0, 0, 0, 0, 0], &length, encoded].concat()
}

/// Well-formed on the wire, but the encodings in it are not: refused before the epoch is
/// acknowledged, since its end never comes to be looked at.
#[test]
fn malformed_encodings_end_the_connection() {
    endure(vec![
        sent(
            "a delta that leaves its page",
            of_an_epoch,
            |bytes| replace_pages(bytes, &one_page(2, &[0xff, 0x1f, 2, 7, 7])),
            "a delta does not fit",
        ),
        sent(
            "compressed data that are none",
            of_an_epoch,
            |bytes| replace_pages(bytes, &one_page(3, &[0xff; 64])),
            "compressed data",
        ),
        sent(
            "an unknown kind of page",
            of_an_epoch,
            |bytes| replace_pages(bytes, &one_page(9, &[])),
            "unknown kind of page",
        ),
        sent(
            "more pages than there may be",
            of_an_epoch,
            |bytes| replace_pages(bytes, &[0xff; 5000]),
            "more pages",
        ),
    ]);
}
