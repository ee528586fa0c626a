//! A host with a genuine certificate that says whatever may do harm, to two others, as one that
//! dials and as one that is dialled: every kind of message, with hostile content and in every wrong
//! order. The others live, what they protect stays protected, no file but theirs is touched, and none
//! is opened because the hostile host names it.
//!
//! `UNDERSTUDY_HOSTILE_SECONDS` says for how long, `UNDERSTUDY_HOSTILE_SEED` repeats what a run
//! has printed.

mod genuine;
mod link;
mod words;

use crate::peer::PORT;
use crate::refusals::{definition, quick, write};
use crate::stage::{Calm, LIMIT, daemon_with_peers, has_backup, play};
use anyhow::{Context, Result, ensure};
use genuine::{DRIVE, FILE_BYTES, Genuine, Guard, Places};
use link::{Certificate, LONG_PATIENCE, Line, PATIENCE};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use understudy_lab::scene::VM;
use understudy_lab::{
    CLIENT_ADDRESS, Namespace, PEER_PORT, Scene, SceneOptions, in_namespace, wait_for,
};
use understudy_protocol::Epoch;
use understudy_protocol::wire::Kind;
use words::{Words, on_wire};

const SECONDS: u64 = 5;
const LONG_SECONDS: u64 = 300;
/// Processes are started meanwhile.
const KEEPERS_SECONDS: u64 = 8;
/// The number of those who attack at the same time: one dials host a, the others host b.
const DIALLERS: u64 = 3;
/// Messages of one conversation.
const MOST_MESSAGES: usize = 60;
/// The memory that a daemon may hold for itself: what one session of the hostile host's may have
/// staged (its guest's memory and half a GiB), and as much as a daemon needs.
const MOST_MIB: u64 = 900;
/// The VM that the hostile host owns, as the arbiter says, and may offer.
const OWN: &str = "evil";
/// The VM of host a that its operator protects to the hostile host.
const PAWN: &str = "pawn";

fn number_of(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number: {text}")))
}

fn hostile_options(keepers: bool) -> SceneOptions {
    let mut options = quick();
    let peers = format!(
        "a = \"10.77.0.1:{PEER_PORT}\"\nb = \"10.77.0.2:{PEER_PORT}\"\n\
         mallory = \"{CLIENT_ADDRESS}:{PORT}\""
    );
    for (host, other) in [("a", "b"), ("b", "a")] {
        let own = |line: &&str| !line.starts_with(&format!("{host} "));
        let peers: Vec<&str> = peers.lines().filter(own).collect();
        assert!(peers.iter().any(|line| line.starts_with(other)));
        let mut daemon = daemon_with_peers(&peers.join("\n")).calm();
        daemon.settings.insert_str(0, if keepers { "keepers = true\n" } else { "" });
        options.daemons.insert(host.to_owned(), daemon);
    }
    options
}

/// The hostile host, from which connections come and to which they go.
struct Mallory {
    certificate: Certificate,
    namespace: Namespace,
    genuine: Genuine,
    over: AtomicBool,
    conversations: AtomicU64,
    /// Sessions of these that were accepted.
    sessions: AtomicU64,
}

impl Mallory {
    /// Gets its certificate, and an offer that host a makes it.
    fn begin(scene: &Scene) -> Result<Mallory> {
        let directory = scene.lab().directory().join("pki");
        let issued = Command::new(env!("CARGO_BIN_EXE_understudy"))
            .args(["pki", "issue", "mallory", "--dir", &directory.to_string_lossy()])
            .output()?;
        ensure!(issued.status.success(), "{issued:?}");
        let certificate = Certificate::load(&directory, "mallory")?;
        let namespace = scene.lab().client();
        let pawn = write(scene, "pawn.toml", &definition(scene, PAWN)?)?;
        scene.host("a")?.call(["vm", "start", &pawn.to_string_lossy()])?;
        let listener = listen(&namespace)?;
        let hello = thread::scope(|scope| {
            let asked = scope.spawn(|| -> Result<Value> {
                let mut line = certificate.taken(listener.accept()?.0, LIMIT)?;
                let hello = line.receive()?;
                line.send(&on_wire(Kind::Refuse, Epoch(0), b"only asking".to_vec()))?;
                Ok(serde_json::from_slice(&hello.payload)?)
            });
            scene.host("a")?.cli(["protect", PAWN, "--to", "mallory"])?;
            asked.join().expect("no panic")
        })?;
        let genuine = Genuine::of(hello, Places::make(scene)?);
        genuine.check().context("it would say what nobody understands any more")?;
        // Its own, as the arbiter says: a file arbiter is a directory that all hosts share.
        let record = scene.lab().arbiter_directory().join(OWN);
        fs::create_dir(&record)?;
        fs::write(record.join("1"), r#"{"host":"mallory"}"#)?;
        Ok(Mallory {
            certificate,
            namespace,
            genuine,
            over: AtomicBool::new(false),
            conversations: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
        })
    }

    /// Whether it was heard often enough for the test to be about it.
    fn was_heard(&self) -> bool {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        count(&self.conversations) > 20 && count(&self.sessions) > 0
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn dial(&self, host: &str, address: SocketAddr) -> Result<Line> {
        let connect = || TcpStream::connect_timeout(&address, LIMIT);
        self.certificate.dialled(in_namespace(&self.namespace, connect)??, host)
    }

    /// Talks to a host until it is over: one conversation after the other.
    fn attack(&self, host: &str, address: SocketAddr, mut words: Words) {
        let mut number = 0_u64;
        while !self.is_over() {
            number += 1;
            // How it ends is the host's affair.
            let _ = self.converse(host, address, &mut words, number);
            self.conversations.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn converse(
        &self,
        host: &str,
        address: SocketAddr,
        words: &mut Words,
        number: u64,
    ) -> Result<()> {
        let session = format!("{host}-{number}-{}", words.below(1 << 30));
        let offers = self.genuine.offers(&session);
        let purposes = self.genuine.purposes(&session);
        let purpose = match words.below(4) {
            0 => &offers[0],
            1 => &offers[words.below(offers.len())],
            _ => &purposes[words.below(purposes.len())],
        };
        let mut hello = self.genuine.hello.clone();
        hello["purpose"] = purpose.clone();
        let mut line = self.dial(host, address)?;
        let is_offer = purpose["purpose"] == "protect";
        let honest = is_offer && words.below(2) == 0;
        if honest {
            let said = on_wire(Kind::Hello, Epoch(0), hello.to_string().into_bytes());
            line.send(&said)?;
            let patience = if hello["keeper_of"].is_string() { LONG_PATIENCE } else { PATIENCE };
            let answer = line.answer((&self.certificate, host), &said, patience)?;
            ensure!(answer.header.kind == Kind::Welcome, "refused");
            for _ in purpose["files"].as_array().into_iter().flatten() {
                line.send(&on_wire(Kind::File, Epoch(0), vec![0; FILE_BYTES]))?;
            }
            self.take_part(host, address, &mut line, words, &session)?;
        } else {
            if hello["keeper_of"].is_string() {
                hello["keeper_of"] = json!([VM, PAWN, OWN, "../none"][words.below(4)]);
            }
            let said = words.json(Kind::Hello, &hello);
            line.send(&said)?;
            if words.below(2) == 0 {
                let _ = line.answer((&self.certificate, host), &said, PATIENCE);
            }
        }
        let hellos = purposes.into_iter().map(|purpose| (Kind::Hello, purpose));
        let genuine: Vec<(Kind, Value)> = hellos.chain(self.genuine.bodies()).collect();
        for _ in 0..words.below(MOST_MESSAGES) {
            line.send(&words.message(&genuine))?;
        }
        let _ = line.receive();
        Ok(())
    }

    /// Has its offer accepted, so that what comes next is said within a session.
    fn take_part(
        &self,
        host: &str,
        address: SocketAddr,
        line: &mut Line,
        words: &mut Words,
        session: &str,
    ) -> Result<()> {
        line.send(&on_wire(Kind::Prepare, Epoch(0), Vec::new()))?;
        let deadline = Instant::now() + Duration::from_secs(5);
        let ready = std::iter::from_fn(|| Some(line.receive()))
            .take_while(|_| Instant::now() < deadline)
            .find_map(Result::ok);
        ensure!(ready.is_some_and(|message| message.header.kind == Kind::Ready), "not ready");
        self.sessions.fetch_add(1, Ordering::Relaxed);
        if words.below(2) == 0 {
            let mut hello = self.genuine.hello.clone();
            hello["purpose"] = json!({ "purpose": "heartbeat", "session": session, "path": 0 });
            let mut beats = self.dial(host, address)?;
            let said = on_wire(Kind::Hello, Epoch(0), hello.to_string().into_bytes());
            beats.send(&said)?;
            let _ = beats.answer((&self.certificate, host), &said, PATIENCE);
            beats.send(&on_wire(Kind::Heartbeat, Epoch(0), Vec::new()))?;
            if words.below(4) == 0 {
                beats.send(&words.message(&self.genuine.bodies()))?;
            }
        }
        Ok(())
    }

    /// Takes whatever connections other hosts open to it until it is over.
    fn answer(&self, listener: &TcpListener, mut words: Words) -> Result<()> {
        listener.set_nonblocking(true)?;
        while !self.is_over() {
            let Ok((socket, _)) = listener.accept() else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            socket.set_nonblocking(false)?;
            if let Ok(line) = self.certificate.taken(socket, PATIENCE) {
                let _ = self.reply(line, &mut words);
                self.conversations.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn reply(&self, mut line: Line, words: &mut Words) -> Result<()> {
        line.receive()?;
        let welcome = json!({ "host": "mallory" });
        line.send(&words.json(Kind::Welcome, &welcome))?;
        while words.below(3) > 0 && line.receive().is_ok() {}
        let ready = json!({ "blocks": [["pc.ram", 67_108_864], ["pc.bios", 262_144]] });
        line.send(&words.json(Kind::Ready, &ready))?;
        let bodies = self.genuine.bodies();
        for _ in 0..words.below(MOST_MESSAGES) {
            line.send(&words.message(&bodies))?;
        }
        Ok(())
    }
}

fn listen(namespace: &Namespace) -> Result<TcpListener> {
    Ok(in_namespace(namespace, || TcpListener::bind((CLIENT_ADDRESS, PORT)))??)
}

/// The files that nobody but the operator changes: when they were written, and how long they are.
fn foreign_files(scene: &Scene, places: &Places) -> Result<BTreeMap<PathBuf, (SystemTime, u64)>> {
    // Whoever compiles on this machine meanwhile writes there.
    let compilers = PathBuf::from("/root/.cargo");
    let pki = scene.lab().directory().join("pki");
    let own = [scene.lab().arbiter_directory(), pki, compilers, places.store.clone()];
    let hosts = ["a", "b"].map(|host| scene.lab().host_directory(host));
    let hosts = hosts.into_iter().collect::<Result<Vec<_>>>()?;
    let is_theirs = |path: &Path| {
        own.iter().any(|own| path.starts_with(own))
            || hosts.iter().any(|host| path.starts_with(host))
            || path.extension().is_some_and(|extension| extension == "img")
    };
    let mut found = BTreeMap::new();
    let mut directories =
        vec![scene.lab().directory().to_owned(), "/etc".into(), "/root".into(), "/srv".into()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten() {
            let entry = entry?;
            // What has just gone was somebody else's.
            let Ok(about) = entry.metadata() else { continue };
            let path = entry.path();
            if is_theirs(&path) {
                continue;
            }
            if about.is_dir() {
                directories.push(path);
            } else {
                found.insert(path, (about.modified()?, about.len()));
            }
        }
    }
    Ok(found)
}

/// The memory that a daemon has for itself, in MiB.
fn private_mib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: u64 = line.context("no RssAnon")?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024)
}

/// Looks until the time is over, and the hostile host was heard: nobody may take notice.
fn watch(scene: &mut Scene, mallory: &Mallory, time: Duration) -> Result<()> {
    let begun = Instant::now();
    let is_over = || {
        let elapsed = begun.elapsed();
        elapsed >= time && (mallory.was_heard() || elapsed >= time + LIMIT)
    };
    let pids = [scene.host("a")?.pid(), scene.host("b")?.pid()];
    let keepers = |scene: &Scene| -> Result<[Value; 2]> {
        Ok([scene.status("a")?["keeper_pid"].clone(), scene.status("b")?["keeper_pid"].clone()])
    };
    let kept = keepers(scene)?;
    let (mut most, mut protects) = (0, 0);
    while !is_over() {
        for (host, pid) in ["a", "b"].into_iter().zip(pids) {
            let daemon = scene.host_mut(host)?;
            ensure!(daemon.is_running() && daemon.pid() == pid, "the daemon of host {host} ended");
            let mib = private_mib(pid)?;
            ensure!(mib < MOST_MIB, "the daemon of host {host} has {mib} MiB for itself");
            most = most.max(mib);
        }
        let status = scene.status("a")?;
        ensure!(has_backup(&status), "the other VM: {status}");
        ensure!(keepers(scene)? == kept, "a keeper ended");
        for keeper in kept.iter().filter_map(Value::as_u64) {
            let mib = private_mib(keeper as u32)?;
            ensure!(mib < MOST_MIB, "a keeper has {mib} MiB for itself");
        }
        // Host a's operator trusts the hostile host with a VM.
        scene.host("a")?.cli(["protect", PAWN, "--to", "mallory", "--no-wait"])?;
        protects += 1;
    }
    println!("daemons had {most} MiB at most; {protects} times the hostile host was trusted");
    Ok(())
}

#[test]
fn a_hostile_peer_harms_nobody() {
    harms_nobody(number_of("UNDERSTUDY_HOSTILE_SECONDS").unwrap_or(SECONDS), false);
}

/// The same, where every VM has a process of its own.
#[test]
fn a_hostile_peer_harms_no_keeper() {
    harms_nobody(number_of("UNDERSTUDY_HOSTILE_SECONDS").unwrap_or(KEEPERS_SECONDS), true);
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_hostile_peer_harms_nobody_for_long() {
    harms_nobody(number_of("UNDERSTUDY_HOSTILE_SECONDS").unwrap_or(LONG_SECONDS), false);
}

/// A medium was once opened, as root, and its content was for the guest of whoever had named it.
#[test]
fn a_medium_that_was_not_asked_for_ends_the_session() {
    play(hostile_options(false), |scene| {
        scene.protected_guest("a", "b")?;
        let mallory = Mallory::begin(scene)?;
        let guard = Guard::over(&mallory.genuine.places.secret)?;
        let address = SocketAddr::from((scene.lab().host_address("b")?, PEER_PORT));
        let session = || -> Result<Line> {
            let mut hello = mallory.genuine.hello.clone();
            hello["purpose"] = mallory.genuine.offers("s").swap_remove(0);
            let mut line = mallory.dial("b", address)?;
            line.send(&on_wire(Kind::Hello, Epoch(0), hello.to_string().into_bytes()))?;
            line.send(&on_wire(Kind::Prepare, Epoch(0), Vec::new()))?;
            line.await_kind(Kind::Ready)?;
            Ok(line)
        };
        let secret = json!({
            "drive": DRIVE,
            "file": { "path": mallory.genuine.places.secret, "hash": "00" },
        });
        let say = |line: &mut Line, kind, epoch| {
            line.send(&on_wire(kind, Epoch(epoch), secret.to_string().into_bytes()))
        };
        // The daemon ended: it noted the medium in a record that had no such drive.
        let mut line = session()?;
        let ejected = json!({ "drive": DRIVE, "file": null }).to_string().into_bytes();
        line.send(&on_wire(Kind::Medium, Epoch(1), ejected))?;
        let refusal = line.await_kind(Kind::Refuse)?;
        ensure!(refusal.contains("with the first epoch"), "{refusal}");
        await_no_backup(scene)?;
        let mut line = session()?;
        say(&mut line, Kind::MediumAsked, 0)?;
        let answer = line.await_kind(Kind::MediumAnswer)?;
        ensure!(answer.contains("everybody on its host may read"), "{answer}");
        say(&mut line, Kind::Medium, 2)?;
        let refusal = line.await_kind(Kind::Refuse)?;
        ensure!(refusal.contains("had not asked for"), "{refusal}");
        ensure!(!guard.has_noticed()?, "it was opened");
        await_no_backup(scene)
    });
}

fn await_no_backup(scene: &Scene) -> Result<()> {
    wait_for("host b to forget the hostile host's VM", LIMIT, || {
        Ok((!scene.host("b")?.call(["status"])?.contains(OWN)).then_some(()))
    })
}

/// Ends what would outlive its daemon.
fn end_keepers(scene: &Scene) -> Result<()> {
    for (host, vm) in [("b", VM), ("a", PAWN)] {
        scene.host(host)?.call(["vm", "stop", vm, "--force"])?;
    }
    for host in ["a", "b"] {
        let daemon = scene.host(host)?;
        wait_for(&format!("the keepers of host {host} to end"), LIMIT, || {
            Ok((daemon.namespace().processes()? == [daemon.pid()]).then_some(()))
        })?;
    }
    Ok(())
}

fn harms_nobody(seconds: u64, keepers: bool) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let seed = number_of("UNDERSTUDY_HOSTILE_SEED").unwrap_or(now);
    println!("UNDERSTUDY_HOSTILE_SEED={seed} UNDERSTUDY_HOSTILE_SECONDS={seconds}");
    play(hostile_options(keepers), |scene| {
        scene.protected_guest("a", "b")?;
        let mallory = Mallory::begin(scene)?;
        let forbidden = scene.lab().directory().join("forbidden");
        fs::create_dir(&forbidden)?;
        fs::write(forbidden.join("file"), "as it was")?;
        let words = |part| Words::new(seed ^ (part << 56), &forbidden.to_string_lossy());
        let address = |host: &str| -> Result<SocketAddr> {
            Ok(SocketAddr::from((scene.lab().host_address(host)?, PEER_PORT)))
        };
        let (a, b) = (address("a")?, address("b")?);
        let listener = listen(&mallory.namespace)?;
        let before = foreign_files(scene, &mallory.genuine.places)?;
        let guard = Guard::over(&mallory.genuine.places.secret)?;
        let watched = thread::scope(|scope| {
            for part in 0..DIALLERS {
                let (host, address) = if part == 0 { ("a", a) } else { ("b", b) };
                let (mallory, words) = (&mallory, words(part));
                scope.spawn(move || mallory.attack(host, address, words));
            }
            scope.spawn(|| mallory.answer(&listener, words(DIALLERS)));
            let watched = watch(scene, &mallory, Duration::from_secs(seconds));
            mallory.over.store(true, Ordering::Release);
            watched
        });
        watched?;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (all, sessions) = (count(&mallory.conversations), count(&mallory.sessions));
        println!("{all} conversations, of which {sessions} were sessions");
        ensure!(mallory.was_heard(), "it was hardly heard: nothing was shown");
        ensure!(!guard.has_noticed()?, "a host has opened a file because a peer named it");
        let after = foreign_files(scene, &mallory.genuine.places)?;
        let touched = |path: &&PathBuf| before.get(*path) != after.get(*path);
        let touched: BTreeSet<_> = before.keys().chain(after.keys()).filter(touched).collect();
        ensure!(touched.is_empty(), "files outside of the hosts' own were touched: {touched:?}");
        // The protection that was there all the while was a real one.
        scene.host("a")?.kill_qemu(VM)?;
        wait_for("host b to take over", LIMIT, || {
            let status = scene.status("b")?;
            Ok((status["role"] == "primary" && status["live"] == true).then_some(()))
        })?;
        if keepers { end_keepers(scene) } else { Ok(()) }
    });
}
