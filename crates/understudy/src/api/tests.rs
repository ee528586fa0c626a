//! The API and the client, over a unix socket, with a host that only records.

mod recorder;

use super::*;
use crate::socket::ApiSocket;
use crate::table::tests::example;
use recorder::Recorder;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, RwLock};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use understudy_client::{Client, Exit, Failure, FailureKind};
use understudy_encoding::EncodingPlan;
use understudy_protocol::literal;
use understudy_protocol::{Epoch, Policy};
use understudy_report::Meters;
use understudy_report::cluster::{RestoreRequest, SnapshotRequest};
use understudy_report::{
    AgainRequest, GroupRequest, MediumRequest, ProtectRequest, Protection, RecoverRequest,
    StartRequest,
};
use understudy_snapshot::SnapshotNumber;

/// An API that serves a [`Recorder`].
struct Served {
    host: Arc<Recorder>,
    client: Client,
    stores: StoreRoom,
    socket: ApiSocket,
    // Dropped in this order: the server ends, then its folder goes.
    _runtime: Runtime,
    _directory: TempDir,
}

fn serve() -> Served {
    let directory = tempfile::tempdir().unwrap();
    let socket = ApiSocket::bind(&directory.path().join("api.sock")).unwrap();
    let runtime = Runtime::new().unwrap();
    let host = Arc::new(Recorder::default());
    let api = Api::new(host.clone());
    let (routes, stores) = (api.router(&Guard::Local), api.stores);
    let listener = socket.listener().unwrap();
    runtime.spawn(async {
        let listener = tokio::net::UnixListener::from_std(listener).unwrap();
        axum::serve(listener, routes).await
    });
    let client = Client::new(socket.path()).unwrap();
    Served { host, client, stores, socket, _runtime: runtime, _directory: directory }
}

impl Served {
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.host.calls.lock().unwrap())
    }

    /// Sends bytes as they are; returns status code and body.
    fn raw(&self, request: &[u8]) -> (u16, String) {
        let mut stream = UnixStream::connect(self.socket.path()).unwrap();
        // A server that refuses a request need not read it to its end.
        let _ = stream.write_all(request);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (code.unwrap_or_else(|| panic!("no answer: {answer:?}")), body.to_owned())
    }

    fn request(&self, method: &str, path: &str, body: &str) -> (u16, serde_json::Value) {
        let length = body.len();
        let (code, body) = self.raw(
            format!(
                "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                 content-length: {length}\r\n\r\n{body}"
            )
            .as_bytes(),
        );
        (code, serde_json::from_str(&body).unwrap_or_else(|_| panic!("not JSON: {body}")))
    }
}

fn definition() -> VmDefinition {
    serde_json::from_str(r#"{"name": "db", "memory": "64M", "vcpus": 1, "kernel": "/k"}"#).unwrap()
}

#[test]
fn every_call_arrives_and_is_answered() {
    let api = serve();
    let client = &api.client;
    assert_eq!(client.status().unwrap(), api.host.status());
    let vm = example(Protection::Protected { peer: literal("b") });
    let request = StartRequest { force: true, other_host_is_off: false };
    assert_eq!(client.vm_start(&definition(), request).unwrap(), vm);
    assert_eq!(client.vm_start_recorded("db").unwrap(), vm);
    assert_eq!(client.definition("db").unwrap(), definition());
    assert_eq!(client.vm_status("db").unwrap(), vm);
    let policy = Some(Policy::Interval { hz: 5 });
    let request = ProtectRequest { to: "b".into(), policy, ..Default::default() };
    assert_eq!(client.protect("db", &request).unwrap(), vm);
    let again = AgainRequest { to: "c".into() };
    assert_eq!(client.protect_again("db", &again).unwrap(), vm);
    let request = GroupRequest {
        vms: vec![literal("db")],
        to: "b".into(),
        policy,
        encoding: EncodingPlan::default(),
        repair: true,
        hold_console: true,
    };
    assert_eq!(client.protect_group("shop", &request).unwrap(), std::slice::from_ref(&vm));
    assert_eq!(client.unprotect("db").unwrap(), vm);
    client.failover("db").unwrap();
    let request = RecoverRequest { dry_run: true, ..Default::default() };
    assert_eq!(client.recover("db", request).unwrap().status, Some(vm));
    assert_eq!(client.timings("db").unwrap()[0].epoch, Epoch(7));
    assert_eq!(client.verify_lockstep("db").unwrap().pages, 9);
    client.vm_stop("db", false).unwrap();
    client.vm_stop("db", true).unwrap();
    let expected = [
        "start db 1 true false",
        "start db as recorded",
        "definition db",
        "status db",
        "protect db b Some(Interval { hz: 5 })",
        "protect db again c",
        "group shop b [\"db\"]",
        "unprotect db",
        "failover db",
        "recover db true",
        "timings db",
        "verify db",
        "stop db false",
        "stop db true",
    ];
    assert_eq!(api.calls(), expected);
}

#[test]
fn errors_keep_their_kind_and_words() {
    let api = serve();
    let failure = api.client.vm_status("web").unwrap_err();
    assert_eq!(
        failure,
        Failure::new(FailureKind::Host(ErrorKind::NotFound), "there is no VM `web`")
    );
    assert_eq!(failure.exit(), Exit::NotFound);
    let codes = [
        (ErrorKind::Invalid, 400),
        (ErrorKind::NotFound, 404),
        (ErrorKind::Conflict, 409),
        (ErrorKind::Refused, 502),
        (ErrorKind::Unreachable, 503),
        (ErrorKind::Internal, 500),
    ];
    for (kind, expected) in codes {
        *api.host.fails_with.lock().unwrap() = Some(HostError::new(kind, "words"));
        let failure = api.client.unprotect("db").unwrap_err();
        assert_eq!(failure, Failure::new(FailureKind::Host(kind), "words"));
        let (code, body) = api.request("POST", "/v1/vms/db/failover", "");
        assert_eq!((code, &body["error"]["message"]), (expected, &"words".into()));
    }
}

#[test]
fn a_name_is_only_a_name() {
    let api = serve();
    for name in ["../status", "db?force=true", "a b", "ü", "db/protect"] {
        let failure = api.client.vm_status(name).unwrap_err();
        let said = format!("{name:?} is no name for a VM");
        assert!(failure.message.starts_with(&said), "{}", failure.message);
    }
}

#[test]
fn bad_requests_are_refused_before_the_host_is_asked() {
    let api = serve();
    let cases = [
        ("POST", "/v1/vms", "{", 400),
        ("POST", "/v1/vms", "{\"name\": \"db\"}", 400),
        ("POST", "/v1/vms/db/protect", "{\"to\": \"b\", \"speed\": 1}", 400),
        ("DELETE", "/v1/vms/db?force=perhaps", "", 400),
        ("DELETE", "/v1/vms/db?forse=true", "", 400),
        ("GET", "/v1/nothing", "", 404),
        ("PUT", "/v1/status", "", 405),
    ];
    for (method, path, body, expected) in cases {
        let (code, answer) = api.request(method, path, body);
        assert_eq!(code, expected, "{method} {path} {body}: {answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
        assert!(answer["error"]["kind"].is_string(), "{answer}");
    }
    let (_, answer) = api.request("POST", "/v1/vms/db/protect", "{\"to\": \"b\", \"speed\": 1}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("speed"), "{answer}");
    // Only the command checked it: the VM ran, and could be neither protected nor restored.
    let definition =
        r#"{"name": "db", "memory": "64M", "vcpus": 1, "kernel": "/k", "cpu": "host"}"#;
    let (code, answer) = api.request("POST", "/v1/vms", definition);
    assert_eq!(code, 400, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("request body: cpu: \"host\" means"), "{message}");
    assert!(api.calls().is_empty());
}

#[test]
fn a_huge_body_is_refused() {
    let api = serve();
    let (code, answer) = api.request("POST", "/v1/vms", &" ".repeat(MAX_REQUEST_BYTES + 1));
    assert_eq!((code, &answer["error"]["kind"]), (413, &"invalid".into()));
    assert!(api.calls().is_empty());
}

#[test]
fn a_daemon_that_is_not_there_has_its_own_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("api.sock");
    let failure = Client::new(&path).unwrap().status().unwrap_err();
    assert_eq!(failure.exit(), Exit::NoDaemon);
    assert!(failure.message.contains(path.to_str().unwrap()), "{}", failure.message);
}

#[test]
fn a_daemon_that_dies_in_the_middle_is_told_from_an_answer() {
    let directory = tempfile::tempdir().unwrap();
    let socket = ApiSocket::bind(&directory.path().join("api.sock")).unwrap();
    let listener = socket.listener().unwrap();
    listener.set_nonblocking(false).unwrap();
    let daemon = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let failure = Client::new(socket.path()).unwrap().status().unwrap_err();
    assert_eq!(failure.exit(), Exit::NoDaemon);
    daemon.join().unwrap();
}

/// Each call that waited for it kept a thread, and after some hundred nobody was answered any more.
#[test]
fn a_store_that_hangs_leaves_the_other_calls_alone() {
    let served = serve();
    let hanging = served.host.store.write().unwrap();
    let asking: Vec<UnixStream> = (0..room::MOST_AT_STORES)
        .map(|_| {
            let mut stream = UnixStream::connect(served.socket.path()).unwrap();
            stream.write_all(b"GET /v1/snapshots HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
            stream
        })
        .collect();
    // All of them are waiting as soon as no place is free.
    while served.stores.0.available_permits() > 0 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    for (method, path) in [
        ("GET", "/v1/snapshots?store=/srv/dead"),
        ("DELETE", "/v1/snapshots?group=db&number=1&store=/srv/dead"),
        ("POST", "/v1/snapshots/verify?group=db&store=/srv/dead"),
    ] {
        let (code, body) = served.request(method, path, "");
        let words = body["error"]["message"].as_str().unwrap();
        assert!(code == 503 && words.contains("/srv/dead is not asked"), "{code}: {words}");
    }
    let snapshot = "/v1/vms/db/snapshot?wait=false";
    let (code, body) = served.request("POST", snapshot, "{}");
    assert!(code == 503 && body.to_string().contains("the store of db"), "{code}: {body}");
    assert_eq!(served.request("GET", "/v1/status", "").0, 200);
    drop(hanging);
    drop(asking);
}

#[test]
fn snapshots_are_asked_for_with_all_that_names_them() {
    let served = serve();
    let shop = Subject::Cluster(literal("shop"));
    let asked = SnapshotRequest { label: Some("a b".into()), ..Default::default() };
    assert_eq!(served.client.snapshot(&shop, &asked).unwrap().number, SnapshotNumber(3));
    let number = Some(SnapshotNumber(3));
    let asked = RestoreRequest { number, ..Default::default() };
    assert_eq!(served.client.restore(&Subject::Vm(literal("db")), &asked).unwrap().group, "db");
    served.client.snapshots(Some("shop"), Some("s3://bucket/a b&c")).unwrap();
    served.client.delete_snapshot("shop", SnapshotNumber(3), None, false).unwrap();
    served.client.delete_snapshot("shop", SnapshotNumber(4), Some("/srv"), true).unwrap();
    served.client.verify_snapshot("shop", None, Some("/srv")).unwrap();
    let calls = [
        "snapshot Cluster(\"shop\") Some(\"a b\")",
        "snapshots None None",
        "restore Vm(\"db\") Some(SnapshotNumber(3)) Hot",
        "snapshots Some(\"shop\") Some(\"s3://bucket/a b&c\")",
        "delete shop 3 None false",
        "delete shop 4 Some(\"/srv\") true",
        "verify shop None Some(\"/srv\")",
    ];
    assert_eq!(served.calls(), calls);
    let (code, body) = served.raw(b"DELETE /v1/snapshots?group=shop HTTP/1.0\r\n\r\n");
    assert!(code == 400 && body.contains("`number`"), "{code}: {body}");
}

/// Waits until a job has ended; returns it.
fn ended(served: &Served, id: u64) -> serde_json::Value {
    loop {
        let (code, job) = served.request("GET", &format!("/v1/jobs/{id}"), "");
        assert_eq!(code, 200, "{job}");
        if job["state"] != "running" {
            return job;
        }
        std::thread::yield_now();
    }
}

#[test]
fn long_work_is_a_job_for_those_who_do_not_wait() {
    let served = serve();
    let (code, job) = served.request("POST", "/v1/vms/db/protect?wait=false", "{\"to\": \"b\"}");
    assert_eq!((code, &job["kind"], &job["subject"]), (202, &"protect".into(), &"db".into()));
    let done = ended(&served, job["id"].as_u64().unwrap());
    assert_eq!((&done["state"], &done["answer"]["name"]), (&"done".into(), &"db".into()), "{done}");
    *served.host.fails_with.lock().unwrap() =
        Some(HostError::new(ErrorKind::Conflict, "it is there already"));
    let (_, job) = served.request("POST", "/v1/vms/db/snapshot?wait=false", "{}");
    let failed = ended(&served, job["id"].as_u64().unwrap());
    assert_eq!(failed["state"], "failed");
    assert_eq!(failed["error"]["message"], "it is there already");
    assert_eq!(served.request("GET", "/v1/jobs", "").1.as_array().unwrap().len(), 2);
    let path = format!("/v1/jobs/{}", failed["id"]);
    assert_eq!(served.request("DELETE", &path, "").0, 200, "it is forgotten");
    assert_eq!(served.request("GET", &path, "").0, 404);
    assert_eq!(served.request("GET", "/v1/jobs/x", "").0, 400);
    assert_eq!(served.request("POST", "/v1/vms/db/protect?wait=perhaps", "{}").0, 400);
}

#[test]
fn a_synchronisation_is_cancelled_by_ending_protection() {
    let served = serve();
    *served.host.protection.lock().unwrap() = Protection::Syncing {
        peer: literal("b"),
        done_bytes: 3,
        total_bytes: 9,
        remaining_seconds: None,
    };
    let (_, job) = served.request("POST", "/v1/vms/db/protect?wait=false", "{\"to\": \"b\"}");
    let path = format!("/v1/jobs/{}", job["id"]);
    while served.request("GET", &path, "").1["progress"]["done_bytes"] != 3 {}
    assert_eq!(served.request("DELETE", &path, "").1["state"], "running");
    assert_eq!(ended(&served, job["id"].as_u64().unwrap())["state"], "cancelled");
    assert!(served.calls().contains(&"unprotect db".to_owned()));
}

#[test]
fn a_page_of_another_site_cannot_fail_a_vm_over() {
    let served = serve();
    let request =
        b"POST /v1/vms/db/failover HTTP/1.1\r\nhost: localhost\r\norigin: https://evil.example\r\n\
                    connection: close\r\n\r\n";
    let (code, words) = served.raw(request);
    assert!(code == 403 && words.contains("may change nothing here"), "{code}: {words}");
    assert!(served.calls().is_empty());
}

#[test]
fn the_dashboard_comes_with_all_that_it_asks_for_and_from_nowhere_else() {
    let served = serve();
    let get = |path: &str| {
        let end = "host: localhost\r\nconnection: close\r\n\r\n";
        let (code, body) = served.raw(format!("GET {path} HTTP/1.1\r\n{end}").as_bytes());
        assert_eq!(code, 200, "{path}");
        body
    };
    let html = get("/");
    let mut wanted = vec!["/page/page.css".to_owned(), "/page/main.js".to_owned()];
    assert!(wanted.iter().all(|path| html.contains(path.as_str())), "{html}");
    let mut seen = Vec::new();
    while let Some(path) = wanted.pop() {
        let text = get(&path);
        assert!(!text.contains("http://") || text.contains("www.w3.org/2000/svg"), "{path}");
        let imports = text.lines().filter_map(|line| line.split_once("from \"./"));
        let names = imports.filter_map(|(_, rest)| rest.split('"').next());
        wanted
            .extend(names.map(|name| format!("/page/{name}")).filter(|path| !seen.contains(path)));
        seen.push(path);
    }
}
