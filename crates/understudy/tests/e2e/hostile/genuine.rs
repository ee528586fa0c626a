//! The messages of a host that means well, in today's words: to be said with something wrong, and
//! about what the hostile host may not have.

use super::{OWN, PAWN};
use anyhow::{Context, Result, ensure};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use understudy_cluster::messages::{ToCoordinator, ToMember};
use understudy_lab::Scene;
use understudy_lab::scene::VM;
use understudy_protocol::Epoch;
use understudy_protocol::wire::{Kind, Message};
use understudy_replication::handshake::{Purpose, Ready, Welcome};
use understudy_replication::messages::{ToBackup, ToPrimary};

/// The bytes of a file that is announced, and comes.
pub const FILE_BYTES: usize = 16;
/// The number of the CD-ROM drive of the VM that the hostile host owns.
pub const DRIVE: u16 = 1;
/// See [`name_of`].
const PURPOSES: usize = 13;

/// Files of the other hosts.
pub struct Places {
    /// Its owner's alone.
    pub secret: PathBuf,
    /// The same, and nobody writes to it.
    fifo: PathBuf,
    /// A medium that everybody may read, and the hash of what is in it.
    medium: PathBuf,
    hash: String,
    /// A store of snapshots that the hosts' configuration has, with one of the pawn.
    pub store: PathBuf,
}

impl Places {
    pub fn make(scene: &Scene) -> Result<Places> {
        let below = |name: &str| scene.lab().directory().join(name);
        let (secret, fifo, medium) = (below("secret"), below("fifo"), below("medium.iso"));
        fs::write(&secret, "nobody's business")?;
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
        mkfifo(&fifo, Mode::S_IRUSR)?;
        let content = [7; 4096];
        fs::write(&medium, content)?;
        let hash = blake3::hash(&content).to_hex().to_string();
        let store = below("store");
        let text = store.to_string_lossy();
        scene.host("a")?.call(["vm", "snapshot", PAWN, "--store", &text])?;
        Ok(Places { secret, fifo, medium, hash, store })
    }
}

/// Notices whoever opens a file, or reads it, however short that takes.
pub struct Guard(Inotify);

impl Guard {
    pub fn over(file: &Path) -> Result<Guard> {
        let guard = Guard(Inotify::init(InitFlags::IN_NONBLOCK)?);
        guard.0.add_watch(file, AddWatchFlags::IN_OPEN | AddWatchFlags::IN_ACCESS)?;
        drop(fs::File::open(file)?);
        ensure!(guard.has_noticed()?, "an opened file is not noticed");
        Ok(guard)
    }

    pub fn has_noticed(&self) -> Result<bool> {
        match self.0.read_events() {
            Ok(events) => Ok(!events.is_empty()),
            Err(nix::errno::Errno::EAGAIN) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Genuine words, of the hostile host's own VM and of others.
pub struct Genuine {
    /// A hello with an offer of the VM that it owns.
    pub hello: Value,
    pub places: Places,
}

impl Genuine {
    /// Makes them of the offer of a VM of host a's.
    pub fn of(hello: Value, places: Places) -> Genuine {
        Genuine { hello: disguise(hello), places }
    }

    /// An error unless this host would understand all of it: a word of yesterday reaches nothing.
    pub fn check(&self) -> Result<()> {
        let mut purposes = BTreeSet::new();
        for purpose in [self.offers("s"), self.purposes("s")].concat() {
            let read =
                serde_json::from_value(purpose.clone()).with_context(|| purpose.to_string())?;
            purposes.insert(name_of(&read));
        }
        ensure!(purposes.len() == PURPOSES, "some purpose is never said: {purposes:?}");
        let bodies = self.bodies();
        for (kind, body) in &bodies {
            check_body(*kind, body).with_context(|| format!("{kind:?} {body}"))?;
        }
        let unsaid = |kind: &Kind| has_json(*kind) && !bodies.iter().any(|(said, _)| said == kind);
        let unsaid: Vec<Kind> = Kind::ALL.into_iter().filter(unsaid).collect();
        ensure!(unsaid.is_empty(), "never said: {unsaid:?}");
        Ok(())
    }

    /// Offers of its VM. The first is one that a host may take; the others name what is not the hostile host's.
    pub fn offers(&self, session: &str) -> Vec<Value> {
        let secret = self.places.secret.to_string_lossy();
        let fifo = self.places.fifo.to_string_lossy();
        let offer = |change: &dyn Fn(&mut Value)| {
            let mut offer = self.hello["purpose"].clone();
            offer["session"] = json!(session);
            change(&mut offer);
            offer
        };
        let file = |role: &str| json!({ "role": role, "bytes": FILE_BYTES });
        vec![
            offer(&|_| ()),
            offer(&|offer| offer["definition"]["kernel"] = json!(secret)),
            offer(&|offer| {
                offer["definition"]["kernel"] = json!("/boot/vmlinuz");
                offer["definition"]["initrd"] = json!(secret);
                offer["files"] = json!([file("kernel")]);
            }),
            // What came is what is taken, whatever was named.
            offer(&|offer| {
                offer["definition"]["kernel"] = json!(secret);
                offer["definition"]["initrd"] = json!(fifo);
                offer["files"] = json!([file("kernel"), file("initrd")]);
            }),
            offer(&|offer| offer["definition"]["disk"][0]["path"] = json!(secret)),
            offer(&|offer| {
                let words = ["-fw_cfg", &format!("name=opt/x,file={secret}"), "-acpitable"];
                let table = format!("file={secret}");
                offer["definition"]["qemu_args"] = json!([words[0], words[1], words[2], table]);
            }),
        ]
    }

    /// The other purposes that a connection may have.
    pub fn purposes(&self, session: &str) -> Vec<Value> {
        let store = self.places.store.to_string_lossy();
        let card = json!({ "mac": "52:54:00:75:73:0e", "bridge": "br0" });
        let kept = json!({ "name": null, "members": [{ "vm": VM, "generation": 1 }] });
        vec![
            json!({ "purpose": "survey", "vm": VM, "memory": 1 << 20,
                    "cpu": { "accelerator": "tcg", "model": null }, "cards": [card] }),
            json!({ "purpose": "may-follow", "build": "00" }),
            json!({ "purpose": "images", "vm": VM }),
            json!({ "purpose": "kept", "membership": kept, "from": 1 }),
            json!({ "purpose": "probe" }),
            json!({ "purpose": "clock" }),
            json!({ "purpose": "group" }),
            json!({ "purpose": "may-restore", "store": store, "group": PAWN, "number": 1,
                    "vms": [PAWN] }),
            json!({ "purpose": "frames", "cluster": "shop" }),
            json!({ "purpose": "heartbeat", "session": session, "path": 0 }),
            json!({ "purpose": "inbound", "session": session }),
            json!({ "purpose": "resume", "session": session, "path": 0, "received": 0 }),
        ]
    }

    /// JSON of messages within sessions and other conversations.
    pub fn bodies(&self) -> Vec<(Kind, Value)> {
        let group = json!({ "name": PAWN, "vms": [PAWN], "hosts": ["b"] });
        let store = self.places.store.to_string_lossy();
        let take = json!({ "group": group, "member": 0, "store": store,
                           "compression": "lz4", "trace_ms": 10, "recency": false });
        let restore = json!({ "id": "1-1", "group": group, "member": 0, "store": store,
                              "number": 1, "newest": 1, "incarnation": 1, "by_recency": false });
        let taken =
            |said: &str| (Kind::Snapshot, json!({ "Take": [take, { "number": 2, "said": said }] }));
        let restored = |order: Value| (Kind::Restore, json!({ "Restore": [restore, order] }));
        let wish = &self.hello["purpose"]["wish"];
        let wanted = json!({ "mode": "lockstep", "disk_reads": "backup", "clock": "2026-01-01T00:00:00",
                             "qemu_build": null, "wish": wish });
        let Places { secret, fifo, medium, hash, .. } = &self.places;
        let file = |path: &Path| json!({ "drive": DRIVE, "file": { "path": path, "hash": hash } });
        let media =
            [file(secret), file(fifo), file(medium), json!({ "drive": DRIVE, "file": null })];
        let mut bodies = vec![
            taken("Prepare"),
            taken("Take"),
            taken("Commit"),
            taken("Abandon"),
            (Kind::Snapshot, json!({ "Take": [0, { "number": 2, "said": "Prepared" }] })),
            restored(json!({ "Load": { "pages": 1 } })),
            restored(json!("Start")),
            restored(json!("Abort")),
            (Kind::Restore, json!({ "Restore": [0, "StartFin"] })),
            (
                Kind::Keep,
                json!({ "group": PAWN, "number": 2, "store": store, "compression": "lz4",
                                 "trace_ms": 1 }),
            ),
            (Kind::Kept, json!({ "group": PAWN, "number": 2, "image": { "Err": "no" } })),
            (
                Kind::Presence,
                json!({ "incarnation": 1, "answer": true,
                                     "members": [{ "member": 0, "generation": 1, "cards": [] }] }),
            ),
            (Kind::Turn, json!({ "prepare": wanted })),
            (Kind::Turn, json!("cancel")),
            (Kind::TurnAnswer, json!("ready")),
            (Kind::TurnAnswer, json!({ "refused": "no" })),
            (Kind::MediumAnswer, json!("ready")),
            (Kind::MediumAnswer, json!({ "refused": "no" })),
            (Kind::Ready, json!({ "blocks": [["pc.ram", 67_108_864], ["pc.bios", 262_144]] })),
            (Kind::Welcome, json!({ "host": "mallory", "full_because": "", "note": "x" })),
        ];
        let all = [Kind::MediumAsked, Kind::Medium];
        bodies.extend(all.into_iter().flat_map(|kind| media.clone().map(|medium| (kind, medium))));
        bodies
    }
}

/// The genuine offer of a VM of host a's, as one of the hostile host's own, which has a CD-ROM.
fn disguise(mut hello: Value) -> Value {
    hello["host"] = json!("mallory");
    if hello["keeper_of"].is_string() {
        hello["keeper_of"] = json!(OWN);
    }
    let offer = &mut hello["purpose"];
    offer["generation"] = json!(1);
    offer["definition"]["name"] = json!(OWN);
    offer["definition"]["card"] = json!([]);
    let drive = json!({ "path": "/srv/cd.iso", "format": "raw", "bus": "ide", "cdrom": true });
    for (list, one) in [("disk_bytes", json!(4096)), ("disk_used", json!(4096))] {
        offer[list].as_array_mut().expect("of each disk").push(one);
    }
    offer["definition"]["disk"].as_array_mut().expect("it has one").push(drive);
    offer["files"] = json!([]);
    offer["sessions"] = json!([]);
    hello
}

/// Every purpose has a name here, and is said.
fn name_of(purpose: &Purpose) -> &'static str {
    match purpose {
        Purpose::Protect(_) => "protect",
        Purpose::Images { .. } => "images",
        Purpose::Survey { .. } => "survey",
        Purpose::MayFollow { .. } => "may-follow",
        Purpose::Kept { .. } => "kept",
        Purpose::Probe => "probe",
        Purpose::Clock => "clock",
        Purpose::Group => "group",
        Purpose::MayRestore(_) => "may-restore",
        Purpose::Heartbeat { .. } => "heartbeat",
        Purpose::Inbound { .. } => "inbound",
        Purpose::Frames { .. } => "frames",
        Purpose::Resume { .. } => "resume",
    }
}

/// Whether a message of this kind has JSON that is not a hello.
fn has_json(kind: Kind) -> bool {
    use Kind::*;
    matches!(
        kind,
        Welcome
            | Ready
            | Turn
            | TurnAnswer
            | MediumAsked
            | MediumAnswer
            | Medium
            | Keep
            | Kept
            | Snapshot
            | Restore
            | Presence
    )
}

fn check_body(kind: Kind, body: &Value) -> Result<()> {
    let message = || Message::new(kind, Epoch(0), body.to_string().into_bytes());
    match kind {
        Kind::Welcome => drop(serde_json::from_value::<Welcome>(body.clone())?),
        Kind::Ready => drop(serde_json::from_value::<Ready>(body.clone())?),
        Kind::TurnAnswer | Kind::MediumAnswer | Kind::Kept => drop(ToPrimary::decode(message())?),
        Kind::Snapshot | Kind::Restore => {
            let is_order = serde_json::from_value::<ToMember>(body.clone()).is_ok();
            let is_report = serde_json::from_value::<ToCoordinator>(body.clone()).is_ok();
            ensure!(is_order || is_report, "neither an order nor a report");
        }
        // The daemon has its type for itself.
        Kind::Presence => {}
        _ => drop(ToBackup::decode(message())?),
    }
    Ok(())
}
