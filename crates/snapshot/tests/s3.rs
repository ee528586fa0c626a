//! A store in S3, at a server of its own on this machine (`scripts/setup` installs it).
//!
//! Where the storage is, and its credentials, come from the environment, as for other programs:
//! the test proper runs in a process of its own.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use understudy_protocol::BlockId;
use understudy_protocol::literal;
use understudy_snapshot::{
    Area, AreaEntry, AreaMap, Blob, Compression, Incarnation, Lane, Machine, Manifest, MemberEntry,
    MemberManifest, Packer, SnapshotNumber, Store, StoreError, StoreKey, Swept, UNIT_BYTES,
    WorkingSet,
};

const UNITS: u64 = 300;
const NOW: u64 = 1_790_000_000;
const STORE: &str = "s3://snapshots/below/this";
const SEALED: &str = "s3://snapshots/below/that";
/// Says to the process with the test proper that it is one, and where the server is.
const PORT: &str = "UNDERSTUDY_TEST_S3_PORT";
/// The port of what is between.
const BETWEEN: &str = "UNDERSTUDY_TEST_S3_BETWEEN";

struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start() -> Server {
        let python = guest_files().join("s3/bin/python");
        assert!(python.exists(), "{} is not there: run scripts/setup", python.display());
        let port = free_port();
        let process = Command::new(python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server { process, port };
        let deadline = Instant::now() + Duration::from_secs(120);
        while !server.make_bucket() {
            assert!(Instant::now() < deadline, "the S3 server does not answer");
            thread::sleep(Duration::from_millis(100));
        }
        server
    }

    fn make_bucket(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let request = "PUT /snapshots HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
                       Authorization: AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/\
                       aws4_request, SignedHeaders=host, Signature=0\r\nConnection: close\r\n\r\n";
        let mut answer = String::new();
        let sent = stream.write_all(request.as_bytes());
        let heard = sent.and_then(|()| stream.read_to_string(&mut answer));
        heard.is_ok() && answer.split(' ').nth(1) == Some("200")
    }
}

/// What is wrong with the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// It does nothing at the moment.
    Away,
    /// It has no room.
    Full,
    /// It knows of no conditions.
    Overwrites,
}

/// Storage with faults, before the server.
struct Between(Arc<Mutex<Fault>>);

impl Between {
    fn start(port: u16, server: u16) -> Between {
        let fault = Arc::new(Mutex::new(Fault::Nothing));
        let (listener, faults) = (TcpListener::bind(("127.0.0.1", port)).unwrap(), fault.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let faults = faults.clone();
                // A client that goes away is none of its business.
                thread::spawn(move || drop(hand_on(client.unwrap(), server, &faults)));
            }
        });
        Between(fault)
    }

    fn is(&self, fault: Fault) {
        *self.0.lock().unwrap() = fault;
    }
}

/// Hands one request on, and its answer back.
fn hand_on(mut client: TcpStream, server: u16, fault: &Mutex<Fault>) -> io::Result<()> {
    let (mut head, mut body) = (Vec::new(), Vec::new());
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let is = |line: &str, name: &str| line.to_ascii_lowercase().starts_with(&format!("{name}:"));
    let length = head.lines().find(|line| is(line, "content-length"));
    let length = length.and_then(|line| line.split(' ').nth(1)?.trim().parse().ok());
    client.try_clone()?.take(length.unwrap_or(0)).read_to_end(&mut body)?;
    let fault = *fault.lock().unwrap();
    let refused = match fault {
        Fault::Away => Some("503 Service Unavailable"),
        Fault::Full if head.starts_with("PUT ") => Some("403 Forbidden"),
        Fault::Full | Fault::Nothing | Fault::Overwrites => None,
    };
    if let Some(refused) = refused {
        let answer =
            format!("HTTP/1.1 {refused}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return client.write_all(answer.as_bytes());
    }
    let kept = |line: &&str| {
        let condition = fault == Fault::Overwrites && is(line, "if-none-match");
        !condition && !is(line, "connection") && !line.is_empty()
    };
    let mut lines: Vec<&str> = head.lines().filter(kept).collect();
    lines.extend(["Connection: close", "", ""]);
    let mut upstream = TcpStream::connect(("127.0.0.1", server))?;
    upstream.write_all(lines.join("\r\n").as_bytes())?;
    upstream.write_all(&body)?;
    io::copy(&mut upstream, &mut client).map(drop)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn guest_files() -> PathBuf {
    let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    std::env::var_os("UNDERSTUDY_GUEST").map_or_else(built, PathBuf::from)
}

#[test]
fn snapshots_live_in_s3_as_in_a_directory() {
    // Itself once more, in an environment of its own: that is where the credentials are.
    let port = |name| Some(std::env::var(name).ok()?.parse().unwrap());
    if let (Some(server), Some(between)) = (port(PORT), port(BETWEEN)) {
        return proper(&Between::start(between, server));
    }
    let (server, between) = (Server::start(), free_port());
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "snapshots_live_in_s3_as_in_a_directory", "--nocapture"])
        .env(PORT, server.port.to_string())
        .env(BETWEEN, between.to_string())
        .env("AWS_ENDPOINT", format!("http://127.0.0.1:{between}"))
        .envs([("AWS_ALLOW_HTTP", "true"), ("AWS_REGION", "us-east-1")])
        .envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")])
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

fn proper(between: &Between) {
    a_store_is_as_a_directory(&Place { location: STORE, key: None });
    let keys = tempfile::tempdir().unwrap();
    let key = |name: &str| {
        let file = keys.path().join(name);
        StoreKey::make(&file).unwrap();
        StoreKey::read(&file).unwrap()
    };
    let (key, other) = (key("one"), key("other"));
    a_store_is_as_a_directory(&Place { location: SEALED, key: Some(&key) });
    let opened = |key| Store::open_with(SEALED, key);
    assert!(matches!(opened(None), Err(StoreError::Encrypted(_))));
    assert!(matches!(opened(Some(&other)), Err(StoreError::WrongKey(_))));
    a_second_host_leaves_the_mark_alone(between, &key);
    a_full_store_recovers(between);
    what_may_pass_is_told_from_what_does_not(between);
    let nowhere = Store::open("s3://another-bucket/x").unwrap_err().to_string();
    assert!(nowhere.contains("another-bucket"), "{nowhere}");
}

/// Regression: where conditions are ignored, the first snapshot of a second host gave the store another key, and nothing
/// in it could be read any more.
fn a_second_host_leaves_the_mark_alone(between: &Between, key: &StoreKey) {
    const LOCATION: &str = "s3://snapshots/second/host";
    between.is(Fault::Overwrites);
    let refused = Store::create_with(LOCATION, Some(key));
    assert!(matches!(refused, Err(StoreError::Overwrites(_))), "{refused:?}");
    assert!(matches!(Store::open(LOCATION), Err(StoreError::Unknown(_))), "something was made");
    between.is(Fault::Nothing);
    let store = Store::create_with(LOCATION, Some(key)).unwrap();
    let blob = store.put_blob(b"its own", Compression::None).unwrap();
    between.is(Fault::Overwrites);
    let second = Store::create_with(LOCATION, Some(key)).unwrap();
    assert_eq!(second.blob(&blob).unwrap(), b"its own");
    between.is(Fault::Nothing);
}

/// Regression: in a store without room a snapshot that was deleted took up its room for ever: a sweep begins with a mark.
fn a_full_store_recovers(between: &Between) {
    let store = Store::create("s3://snapshots/full").unwrap();
    let (first, _) = take(&store, &AreaMap::zeros(UNITS), 0..UNITS, 1);
    between.is(Fault::Full);
    let removed = store.remove(&literal("shop"), first.number, NOW).unwrap();
    assert!(matches!(removed, Swept::Failed(_)), "{removed:?}");
    assert!(store.snapshot(&literal("shop"), None).is_err(), "it is gone all the same");
    // Now that it is, there is room for a mark.
    between.is(Fault::Nothing);
    let swept = store.sweep(NOW).unwrap();
    assert!(matches!(swept, Swept::Removed(count) if count > 0), "{swept:?}");
}

fn what_may_pass_is_told_from_what_does_not(between: &Between) {
    let store = Store::create("s3://snapshots/away").unwrap();
    let passes = |fault| {
        between.is(fault);
        store.put_blob(b"some", Compression::None).unwrap_err().is_passing()
    };
    assert_eq!((passes(Fault::Away), passes(Fault::Full)), (true, false));
    between.is(Fault::Nothing);
    store.put_blob(b"some", Compression::None).unwrap();
}

/// The place of a store, and what it is encrypted with.
struct Place<'a> {
    location: &'a str,
    key: Option<&'a StoreKey>,
}

impl Place<'_> {
    fn open(&self) -> Result<Store, StoreError> {
        Store::open_with(self.location, self.key)
    }

    fn create(&self) -> Store {
        Store::create_with(self.location, self.key).unwrap()
    }
}

fn a_store_is_as_a_directory(place: &Place<'_>) {
    let opened = place.open();
    assert!(matches!(opened, Err(StoreError::Unknown(_))), "{opened:?}");
    let store = place.create();
    place.create();
    let (first, map) = take(&store, &AreaMap::zeros(UNITS), 0..UNITS, 1);
    let (second, changed) = take(&store, &map, 0..130, 2);
    assert_eq!((first.number, second.number), (SnapshotNumber(1), SnapshotNumber(2)));

    let store = place.open().unwrap();
    assert_eq!(store.groups().unwrap(), ["shop"]);
    for (manifest, version) in [(&first, 1), (&second, 2)] {
        let found = store.snapshot(&literal("shop"), Some(manifest.number)).unwrap();
        assert_eq!(found, *manifest);
        assert!(store.verify(&found).unwrap().problems.is_empty());
        let member = store.member(&found.members[0]).unwrap();
        let map = store.area(&member.areas[0]).unwrap();
        store.check_whole(&found).unwrap();
        for unit in [0, 129, 130, 299] {
            let version = if (0..130).contains(&unit) { version } else { 1 };
            let place = map.find(unit).unwrap();
            let at = usize::from(place.slot) * UNIT_BYTES;
            let chunk = store.chunk(place.chunk).unwrap();
            assert!(chunk[at..][..UNIT_BYTES] == content(unit, version), "unit {unit}");
        }
    }
    // Two that begin at once do not share a number; what is begun is not swept.
    let begun = store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
    let other = store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
    assert_eq!((begun.number, other.number), (SnapshotNumber(3), SnapshotNumber(4)));
    assert_eq!(store.sweep(NOW).unwrap(), Swept::Later);
    store.abandon(begun, NOW).unwrap();
    store.abandon(other, NOW).unwrap();

    let removed = store.remove(&literal("shop"), SnapshotNumber(1), NOW).unwrap();
    assert!(matches!(removed, Swept::Removed(count) if count > 0), "{removed:?}");
    assert!(store.verify(&second).unwrap().problems.is_empty(), "it needs none of what is gone");
    store.check_whole(&second).unwrap();
    let gone = map.chunks().iter().find(|id| !changed.chunks().contains(id)).unwrap();
    let missing = store.chunk(*gone);
    let Err(StoreError::MissingChunk(name)) = missing else { panic!("{missing:?}") };
    assert_eq!(name == *gone, place.key.is_none(), "it is named as it is in the store");
}

fn content(unit: u64, version: u64) -> Vec<u8> {
    (unit * 1000 + version).to_le_bytes().repeat(UNIT_BYTES / 8)
}

/// Takes a snapshot in which these units have the content of a version.
fn take(
    store: &Store,
    base: &AreaMap,
    changed: std::ops::Range<u64>,
    version: u64,
) -> (Manifest, AreaMap) {
    let packing = Compression::None;
    let writing = store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
    let mut packer = Packer::new();
    for unit in changed {
        let full = packer.put(unit, &content(unit, version), Lane::Rest);
        store.put_chunks(full.as_slice(), packing).unwrap();
    }
    let (last, map, _) = packer.finish(base);
    store.put_chunks(&last, packing).unwrap();
    let blob = |bytes: &[u8]| store.put_blob(bytes, packing).unwrap();
    let bytes = UNITS * UNIT_BYTES as u64;
    let entry = AreaEntry {
        area: Area::Memory(BlockId(0)),
        name: "pc.ram".into(),
        bytes,
        map: blob(&map.encode()),
    };
    let member = MemberManifest {
        name: literal("db"),
        machine: Machine {
            qemu: "10.0.2".into(),
            machine_type: "pc-q35-10.0".into(),
            vcpus: 1,
            memory: bytes,
        },
        definition: serde_json::json!({ "name": "db" }),
        firmware: None,
        kernel: None,
        initrd: None,
        areas: vec![entry],
        device_state: blob(b"state"),
        in_flight: Blob::default(),
        working_set: blob(&WorkingSet::default().encode()),
        recent: None,
        clock: None,
        sampled: None,
        pause_us: 0,
        base: None,
    };
    let part = store.put_member(&member, packing).unwrap();
    let manifest = Manifest {
        group: literal("shop"),
        number: writing.number,
        label: None,
        taken_at: NOW,
        incarnation: Incarnation(1),
        compression: packing,
        members: vec![MemberEntry {
            name: literal("db"),
            host: literal("host-a"),
            memory: bytes,
            part,
        }],
        crossings: vec![],
    };
    store.publish(writing, &manifest).unwrap();
    (manifest, map)
}
