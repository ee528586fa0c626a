//! The API over the network: who may do what there, and long work as jobs, on a real daemon.

use crate::stage::{self, Calm, LIMIT, options, play, run};
use anyhow::{Context, Result, ensure};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, in_namespace, wait_for};

pub const PORT: u16 = 7780;
pub const ADMIN: &str = "admin-0123456789abcdef";
const OPERATE: &str = "operate-0123456789abcdef";

/// Adds the API over the network to a host, with a token for each of these roles.
pub fn serve(options: &mut SceneOptions, host: &str, directory: &Path) -> Result<()> {
    let mut tokens = String::new();
    for (role, token) in [("admin", ADMIN), ("operate", OPERATE)] {
        let path = directory.join(role);
        fs::write(&path, format!("{token}\n"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        tokens += &format!("{role} = {path:?}\n");
    }
    let daemon = options.daemons.get_mut(host).context("no such host")?;
    daemon.settings += &format!(
        "[api]\nlisten = \"0.0.0.0:{PORT}\"\n[api.tokens]\n{tokens}\
         [api.certificates]\nalice = \"read\"\n"
    );
    Ok(())
}

#[test]
fn the_api_is_for_those_whom_the_configuration_names() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        let pki = scene.lab().directory().join("pki");
        let other = directory.path().join("other");
        for (authority, names) in [(&pki, &["alice", "bob"][..]), (&other, &["alice"])] {
            issue(authority, names)?;
        }
        let status = |caller: &Caller<'_>| ask(scene, caller, "GET", "/v1/status", "");
        let (code, body) = status(&Caller::Token(ADMIN))?;
        ensure!(code == 200 && body["name"] == "a", "{code}: {body}");
        let (code, body) = status(&Caller::Certificate(&pki, "alice"))?;
        ensure!(code == 200, "{code}: {body}");
        refused(status(&Caller::Nobody)?, 401, "Authorization: Bearer")?;
        refused(status(&Caller::Token("guessed-0123456789abcdef"))?, 401, "in no file")?;
        refused(status(&Caller::Certificate(&pki, "bob"))?, 403, "[api.certificates]")?;
        refused(status(&Caller::Certificate(&other, "alice"))?, 403, "understudy pki issue")?;
        let alice = Caller::Certificate(&pki, "alice");
        let failover = format!("/v1/vms/{VM}/failover");
        refused(ask(scene, &alice, "POST", &failover, "")?, 403, "takes the role operate")?;
        let definition = "{\"name\": \"x\", \"memory\": \"64M\", \"vcpus\": 1}";
        let operator = Caller::Token(OPERATE);
        refused(
            ask(scene, &operator, "POST", "/v1/vms", definition)?,
            403,
            "takes the role admin",
        )?;
        // The daemon would write there as root.
        let snapshot = format!("/v1/vms/{VM}/snapshot");
        let elsewhere = "{\"store\": \"/etc/elsewhere\"}";
        let said = ask(scene, &operator, "POST", &snapshot, elsewhere)?;
        refused(said, 403, "snapshot_stores")?;
        let said = ask(scene, &operator, "GET", "/v1/snapshots?store=/etc/elsewhere", "")?;
        refused(said, 403, "snapshot_stores")?;
        let (code, page) = raw(scene, &Caller::Nobody, "GET", "/", "")?;
        ensure!(code == 200 && page.contains("<main"), "the page: {code}");
        ensure!(!page.contains(VM), "the page holds data");
        // A token that is taken away counts no more, without a restart.
        fs::write(directory.path().join("admin"), "another-0123456789abcdef\n")?;
        refused(status(&Caller::Token(ADMIN))?, 401, "in no file")
    });
}

#[test]
fn a_protection_is_a_job_that_is_watched_and_cancelled() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        scene.start_guest("a")?;
        let operator = Caller::Token(OPERATE);
        let path = format!("/v1/vms/{VM}/protect?wait=false");
        let (code, job) = ask(scene, &operator, "POST", &path, "{\"to\": \"b\"}")?;
        ensure!(code == 202 && job["kind"] == "protect", "{code}: {job}");
        let done = ended(scene, &operator, &job)?;
        ensure!(done["state"] == "done", "{done}");
        ensure!(done["answer"]["protection"]["state"] == "protected", "{done}");
        let again = ask(scene, &operator, "POST", &path, "{\"to\": \"b\"}")?.1;
        let failed = ended(scene, &operator, &again)?;
        ensure!(
            failed["error"]["message"].to_string().contains("protected to b already"),
            "{failed}"
        );
        scene.host("a")?.call(["unprotect", VM])?;
        let job = ask(scene, &operator, "POST", &path, "{\"to\": \"b\"}")?.1;
        let (code, _) = ask(scene, &operator, "DELETE", &format!("/v1/jobs/{}", job["id"]), "")?;
        ensure!(code == 200, "{code}");
        let end = ended(scene, &operator, &job)?;
        // The copy may have been faster.
        let state = end["state"].as_str().unwrap_or_default();
        let expected = if state == "cancelled" { "off" } else { "protected" };
        ensure!(["cancelled", "done"].contains(&state), "{end}");
        wait_for(&format!("the guest to be {expected}"), LIMIT, || {
            Ok((scene.status("a")?["protection"]["state"] == expected).then_some(()))
        })
    });
}

/// The command line from another machine, here the client: the same commands, over TLS.
#[test]
fn the_command_line_works_from_another_machine() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        let pki = scene.lab().directory().join("pki");
        issue(&pki, &["alice"])?;
        let ca = pki.join("ca.pem").display().to_string();
        let host = format!("a={}:{PORT}", scene.lab().host_address("a")?);
        let understudy = |arguments: &[&str]| -> Result<Output> {
            let mut command = scene.lab().client().command(env!("CARGO_BIN_EXE_understudy"));
            command.env("UNDERSTUDY_HOST", &host).env("UNDERSTUDY_CA", &ca).args(arguments);
            command.output().context("cannot run understudy")
        };
        let token = directory.path().join("admin").display().to_string();
        let call = |arguments: &[&str]| -> Result<String> {
            let output = understudy(&[&["--token-file", &token], arguments].concat())?;
            ensure!(output.status.success(), "{arguments:?}: {output:?}");
            Ok(String::from_utf8(output.stdout)?)
        };
        call(&["vm", "start", &scene.definition().to_string_lossy()])?;
        call(&["protect", VM, "--to", "b", "--no-wait"])?;
        scene.await_protected("a", |_| ())?;
        let status = understudy(&["--token-file", &token, "status", VM, "--json"])?;
        let status: Value = serde_json::from_slice(&status.stdout)?;
        ensure!(stage::has_backup(&status), "{status}");
        ensure!(call(&["vm", "show", VM])?.contains("[[disk]]"));
        ensure!(call(&["vm", "list"])?.contains(VM));
        ensure!(call(&["events"])?.contains("protected: b stands by"));

        let refused = |arguments: &[&str], exit: i32, words: &str| -> Result<()> {
            let (code, said) = stage::refused(&understudy(arguments)?, &arguments.join(" "))?;
            ensure!(code == exit && said.contains(words), "{arguments:?}: {code}: {said}");
            // What the grammar refuses comes with a hint.
            ensure!(exit == 2 || said.trim_end().lines().count() == 1, "{arguments:?}: {said}");
            Ok(())
        };
        refused(&["status"], 1, "--token-file")?;
        refused(&["--token-file", &token, "vm", "console", VM], 2, "works on the host itself")?;
        refused(&["doctor"], 2, "works on the host itself")?;
        refused(&["--cert", &ca, "status"], 2, "belong together")?;
        let wrong = directory.path().join("wrong");
        fs::write(&wrong, "wrong-0123456789abcdef\n")?;
        fs::set_permissions(&wrong, Permissions::from_mode(0o600))?;
        let wrong = wrong.display().to_string();
        refused(&["--token-file", &wrong, "status"], 1, "in no file")?;
        let [cert, key] = ["alice.pem", "alice.key"].map(|it| pki.join(it).display().to_string());
        let alice = ["--cert", &cert[..], "--key", &key[..]];
        let output = understudy(&[&alice[..], &["status"]].concat())?;
        ensure!(output.status.success(), "{output:?}");
        refused(&[&alice[..], &["failover", VM]].concat(), 1, "takes the role operate")?;
        scene.await_protected("a", |_| ())?;
        wait_for("the backup to be one", LIMIT, || Ok(call(&["failover", VM]).ok()))?;
        scene.await_live("b")?;
        // What answers there is another host, by its certificate.
        let address = scene.lab().host_address("a")?;
        let other = format!("b={address}:{PORT}");
        refused(&["--host", &other, "--token-file", &token, "status"], 5, "NAME its name")?;
        refused(&["--host", "nonsense", "status"], 2, "NAME=ADDRESS:PORT")?;
        let nobody = format!("a={address}:1");
        refused(&["--host", &nobody, "--token-file", &token, "status"], 5, "[api]")
    });
}

/// A caller who only connects keeps nobody from the API, nor does one who guesses.
#[test]
fn who_holds_connections_or_guesses_tokens_stands_in_nobodys_way() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        issue(&scene.lab().directory().join("pki"), &["alice"])?;
        let address = (scene.lab().host_address("a")?, PORT);
        let connect = || -> Result<TcpStream> {
            Ok(in_namespace(&scene.lab().client(), || TcpStream::connect(address))??)
        };
        let held: Vec<TcpStream> = (0..40).map(|_| connect()).collect::<Result<_>>()?;
        // What is over the bound of one address is closed, and others get in.
        wait_for("the connections over the bound to be closed", LIMIT, || {
            let mut closed = 0;
            for mut socket in &held {
                socket.set_nonblocking(true)?;
                closed += usize::from(matches!(socket.read(&mut [0]), Ok(0)));
            }
            Ok((closed >= 8).then_some(()))
        })?;
        let other = in_namespace(&scene.lab().host("b")?, || TcpStream::connect(address))??;
        drop((held, other));
        wait_for("room for the client again", LIMIT, || {
            Ok(ask(scene, &Caller::Token(ADMIN), "GET", "/v1/status", "").ok())
        })?;
        let guess = |n: u32| -> Result<u16> {
            let token = format!("guessed-{n}-0123456789abcdef");
            Ok(ask(scene, &Caller::Token(&token), "GET", "/v1/status", "")?.0)
        };
        wait_for("somebody who guesses to be shut out", LIMIT, || {
            let code = guess(1)?;
            ensure!([401, 429].contains(&code), "{code}");
            Ok((code == 429).then_some(()))
        })?;
        let told = scene.host("a")?.call(["events"])?;
        ensure!(told.contains("shows wrong tokens to the API"), "{told}");
        let pki = scene.lab().directory().join("pki");
        let alice = Caller::Certificate(&pki, "alice");
        let (code, body) = ask(scene, &alice, "GET", "/v1/status", "")?;
        ensure!(code == 200, "a certificate counts still: {code}: {body}");
        scene.host("a")?.call(["status"]).map(drop)
    });
}

/// A byte now and then held a seat for good, and a stream of events outlived its caller's token.
#[test]
fn a_seat_is_for_requests_and_for_those_who_may_make_them() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        let mut dripping = open(scene, &Caller::Nobody)?;
        dripping.write_all(b"GET /v1/status HTTP/1.1\r\nx: ")?;
        wait_for("a request that is never whole to be ended", LIMIT, || {
            Ok(dripping.write_all(b"y").and_then(|()| dripping.flush()).is_err().then_some(()))
        })?;
        let mut events = open(scene, &Caller::Nobody)?;
        write!(
            events,
            "GET /v1/events/stream HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
             authorization: Bearer {ADMIN}\r\n\r\n"
        )?;
        events.sock.set_read_timeout(Some(Duration::from_millis(100)))?;
        let mut told = Vec::new();
        wait_for("the stream to begin", LIMIT, || {
            ensure!(!has_ended(&mut events, &mut told), "it has ended: {told:?}");
            Ok(told.starts_with(b"HTTP/1.1 200").then_some(()))
        })?;
        fs::write(directory.path().join("admin"), "another-0123456789abcdef\n")?;
        wait_for("the stream to end with its token", LIMIT, || {
            Ok(has_ended(&mut events, &mut told).then_some(()))
        })
    });
}

/// Takes what there is on a connection; whether that was all.
fn has_ended(stream: &mut impl Read, told: &mut Vec<u8>) -> bool {
    let mut bytes = [0; 4096];
    match stream.read(&mut bytes) {
        Ok(0) => true,
        Ok(length) => {
            told.extend(&bytes[..length]);
            false
        }
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

/// It stopped the daemon, or voided the tokens of all lower roles.
#[test]
fn tokens_that_others_may_read_count_for_nothing_and_void_no_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options();
    serve(&mut options, "a", directory.path()).expect("tokens");
    let admins = directory.path().join("admin");
    fs::set_permissions(&admins, Permissions::from_mode(0o644)).expect("permissions");
    play(options, |scene| {
        let status = |token| ask(scene, &Caller::Token(token), "GET", "/v1/status", "");
        refused(status(ADMIN)?, 401, "in no file")?;
        let (code, body) = status(OPERATE)?;
        ensure!(code == 200, "{code}: {body}");
        let problems = body["problems"].to_string();
        ensure!(problems.contains("chmod 600"), "{problems}");
        fs::set_permissions(&admins, Permissions::from_mode(0o600))?;
        let (code, body) = status(ADMIN)?;
        ensure!(code == 200 && !body["problems"].to_string().contains("chmod"), "{code}: {body}");
        Ok(())
    });
}

/// The one who asks.
pub enum Caller<'a> {
    Nobody,
    Token(&'a str),
    /// A certificate of the authority in this directory, by its name.
    Certificate(&'a Path, &'a str),
}

fn issue(authority: &Path, names: &[&str]) -> Result<()> {
    let program = env!("CARGO_BIN_EXE_understudy");
    let directory = authority.to_string_lossy();
    if !authority.exists() {
        run(program, &["pki", "init", "--dir", &directory])?;
    }
    for name in names {
        run(program, &["pki", "issue", name, "--dir", &directory])?;
    }
    Ok(())
}

fn refused((code, body): (u16, Value), expected: u16, words: &str) -> Result<()> {
    let message = body["error"]["message"].as_str().unwrap_or_default();
    ensure!(
        code == expected && message.contains(words),
        "{code}, not {expected} {words:?}: {body}"
    );
    Ok(())
}

/// The job once it has ended.
fn ended(scene: &Scene, caller: &Caller<'_>, job: &Value) -> Result<Value> {
    let path = format!("/v1/jobs/{}", job["id"]);
    wait_for("the job to end", LIMIT, || {
        let (code, job) = ask(scene, caller, "GET", &path, "")?;
        ensure!(code == 200, "{code}: {job}");
        Ok((job["state"] != "running").then_some(job))
    })
}

/// Calls host a's API from the client's side; returns the status and the JSON.
pub fn ask(
    scene: &Scene,
    caller: &Caller<'_>,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, Value)> {
    let (code, body) = raw(scene, caller, method, path, body)?;
    let json = serde_json::from_str(&body).with_context(|| format!("{code}, no JSON: {body}"))?;
    Ok((code, json))
}

fn raw(
    scene: &Scene,
    caller: &Caller<'_>,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    let mut stream = open(scene, caller)?;
    let token = match caller {
        Caller::Token(token) => format!("authorization: Bearer {token}\r\n"),
        _ => String::new(),
    };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: a\r\n{token}connection: close\r\ncontent-length: \
         {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let code = answer.split(' ').nth(1).context("no status")?.parse()?;
    Ok((code, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned()))
}

/// A connection from the client to host a's API.
fn open(scene: &Scene, caller: &Caller<'_>) -> Result<StreamOwned<ClientConnection, TcpStream>> {
    let address = (scene.lab().host_address("a")?, PORT);
    let socket = in_namespace(&scene.lab().client(), || TcpStream::connect(address))??;
    socket.set_read_timeout(Some(LIMIT))?;
    let ca = scene.lab().directory().join("pki").join("ca.pem");
    let tls = ClientConnection::new(Arc::new(config(&ca, caller)?), ServerName::try_from("a")?)?;
    Ok(StreamOwned::new(tls, socket))
}

fn config(ca: &Path, caller: &Caller<'_>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ca)?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let Caller::Certificate(authority, name) = caller else {
        return Ok(builder.with_no_client_auth());
    };
    let file = |end: &str| -> PathBuf { authority.join(format!("{name}.{end}")) };
    let chain = vec![CertificateDer::from_pem_file(file("pem"))?];
    Ok(builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(file("key"))?)?)
}
