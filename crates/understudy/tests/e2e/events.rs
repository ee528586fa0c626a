//! Tests of what the hosts tell of a fail-over: by `understudy events`, as a stream, and to a
//! receiver of the operator's.

use crate::keepers::in_keepers;
use crate::refusals::quick;
use crate::stage::{Calm, LIMIT, options, play, protection, restart_daemon};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{Scene, in_namespace, wait_for};

const HOOK: &str = "127.0.0.1:9188";

#[test]
fn a_fail_over_is_told_event_by_event() {
    let mut options = options().calm();
    let b = options.daemons.get_mut("b").expect("the laboratory has a host b");
    b.settings += &format!("[webhook]\nurl = \"http://{HOOK}/understudy\"\n");
    play(options, |scene| {
        // Until now nobody listened: what was refused is posted again.
        let posted = receive_posts(scene)?;
        scene.protected_guest("a", "b")?;
        let before = told(scene, "a", &[])?;
        let kinds = kinds(&before);
        for kind in ["started", "synchronising", "copied", "protected"] {
            ensure!(kinds.contains(&kind.to_owned()), "no {kind} in {kinds:?}");
        }
        let mut stream = BufReader::new(streamed(scene, "b")?);
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        let took_over = await_kind(scene, "b", "took-over")?;
        ensure!(took_over["vm"] == VM, "{took_over}");
        ensure!(took_over["severity"] == "warning", "{took_over}");
        let phases = &took_over["phases"];
        let outage = phases["outage_ms"].as_f64().context("no outage_ms")?;
        ensure!(outage > 0.0 && phases["restart_ms"].as_f64() > Some(0.0), "{phases}");
        ensure!(read_stream(&mut stream, "took-over")? == took_over, "the stream says otherwise");
        let in_words = scene.host("b")?.call(["events", "--vm", VM])?;
        ensure!(in_words.contains(&format!("{VM}: WARNING took over:")), "{in_words}");
        let number = took_over["number"].to_string();
        let later = told(scene, "b", &["--after", &number])?;
        ensure!(later.iter().all(|event| event["number"].as_u64() > number.parse().ok()));
        let known = scene.status("b")?["since_ms"].as_u64();
        ensure!(known >= took_over["at_ms"].as_u64(), "since {known:?}, not {took_over}");
        await_post(&posted, &took_over)?;
        let page = scene.host("b")?.call(["top"])?;
        for words in ["host b", "NOT PROTECTED", "took over: clients waited", "standing by for a"] {
            ensure!(page.contains(words), "{words:?} is not in {page}");
        }
        let shown = on_a_terminal(scene, "b", "top", "q")?;
        ensure!(shown.contains("NOT PROTECTED"), "{shown:?}");
        ensure!(shown.ends_with("\x1b[?1049l"), "the terminal is left as it was not: {shown:?}");
        Ok(())
    });
}

/// Each daemon told its receiver all that keepers remember once more, under new numbers.
#[test]
fn what_a_keeper_remembers_is_posted_once_however_often_its_daemon_is_restarted() {
    let mut options = in_keepers(quick());
    let b = options.daemons.get_mut("b").expect("the laboratory has a host b");
    b.settings += &format!("[webhook]\nurl = \"http://{HOOK}/understudy\"\n");
    play(options, |scene| {
        let posted = receive_posts(scene)?;
        scene.start_guest("b")?;
        await_kind(scene, "b", "started")?;
        let marks = scene.host("b")?.directory().join("state/webhook.posted");
        wait_for("what was posted to be noted", LIMIT, || Ok(marks.exists().then_some(())))?;
        for _ in 0..2 {
            restart_daemon(scene, "b")?;
            await_kind(scene, "b", "started")?;
        }
        scene.protect("b", "a")?;
        let mut kinds = Vec::new();
        while !kinds.contains(&"synchronising".to_owned()) {
            let post = posted.recv_timeout(LIMIT).context("the protection was not posted")?;
            kinds.push(post["kind"].as_str().context("no kind")?.to_owned());
        }
        let times = kinds.iter().filter(|kind| *kind == "started").count();
        ensure!(times == 1, "it was posted {times} times: {kinds:?}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// A VM that had just come was once said for a moment to run here with no protection asked for, and
/// not to have been taken over.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_vm_that_is_live_says_at_once_how_it_came() {
    let mut options = quick();
    let slow = ("FAILPOINTS".to_owned(), "note-take-over=sleep(500)".to_owned());
    options.daemons.get_mut("b").expect("the laboratory has a host b").environment.push(slow);
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        let status = scene.await_live("b")?;
        let (state, reason) = protection(&status);
        ensure!(state == "degraded" && reason.contains("took over"), "{status}");
        ensure!(status["takeover"]["outage_ms"].as_f64() > Some(0.0), "{status}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// The text that a command shows on a terminal on which these keys are pressed.
fn on_a_terminal(scene: &Scene, host: &str, command: &str, keys: &str) -> Result<String> {
    let host = scene.host(host)?;
    let program = env!("CARGO_BIN_EXE_understudy");
    let line = format!("{program} --socket {} {command}", host.socket().display());
    let mut terminal = Command::new("script")
        .args(["--quiet", "--return", "--command", &line, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    terminal.stdin.as_mut().context("no keyboard")?.write_all(keys.as_bytes())?;
    let output = terminal.wait_with_output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The events that a host's `understudy events --json` tells.
fn told(scene: &Scene, host: &str, arguments: &[&str]) -> Result<Vec<Value>> {
    let all = [&["events", "--json"], arguments].concat();
    let list: Value = serde_json::from_str(&scene.host(host)?.call(all)?)?;
    list["events"].as_array().cloned().context("no list of events")
}

fn kinds(events: &[Value]) -> Vec<String> {
    events.iter().filter_map(|event| Some(event["kind"].as_str()?.to_owned())).collect()
}

fn await_kind(scene: &Scene, host: &str, kind: &str) -> Result<Value> {
    wait_for(&format!("{kind} on host {host}"), LIMIT, || {
        Ok(told(scene, host, &[])?.into_iter().find(|event| event["kind"] == kind))
    })
}

/// The events of a host as they happen.
fn streamed(scene: &Scene, host: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(scene.host(host)?.socket())?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /v1/events/stream HTTP/1.1\r\nhost: localhost\r\n\r\n")?;
    Ok(stream)
}

fn read_stream(stream: &mut BufReader<UnixStream>, kind: &str) -> Result<Value> {
    let mut line = String::new();
    while stream.read_line(&mut line)? > 0 {
        if let Some(json) = line.strip_prefix("data: ") {
            let event: Value = serde_json::from_str(json)?;
            if event["kind"] == kind {
                return Ok(event);
            }
        }
        line.clear();
    }
    anyhow::bail!("the stream of events ended without {kind}")
}

/// Takes posts on host b until the receiving end is dropped.
fn receive_posts(scene: &Scene) -> Result<Receiver<Value>> {
    let namespace = scene.host("b")?.namespace();
    let listener = in_namespace(namespace, || TcpListener::bind(HOOK))??;
    listener.set_nonblocking(true)?;
    let (sender, receiver) = channel();
    std::thread::spawn(move || take_posts(&listener, &sender));
    Ok(receiver)
}

fn take_posts(listener: &TcpListener, posts: &Sender<Value>) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                let Ok(post) = take_post(stream) else { return };
                if posts.send(post).is_err() {
                    return;
                }
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn take_post(stream: TcpStream) -> Result<Value> {
    stream.set_nonblocking(false)?;
    let mut reader = BufReader::new(stream);
    let (mut line, mut length) = (String::new(), 0);
    while reader.read_line(&mut line)? > 2 {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse()?;
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let mut stream = reader.into_inner();
    stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")?;
    Ok(serde_json::from_slice(&body)?)
}

/// Waits until the event was posted; every one before it came once, in order.
fn await_post(posted: &Receiver<Value>, event: &Value) -> Result<()> {
    let (deadline, mut last) = (Instant::now() + LIMIT, 0);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let post = posted.recv_timeout(left).context("the take-over was not posted")?;
        let number = post["number"].as_u64().context("no number")?;
        ensure!(number > last && post["host"] == "b", "after {last} came {post}");
        last = number;
        if post["number"] == event["number"] {
            ensure!(post["kind"] == event["kind"], "{post}");
            return Ok(());
        }
    }
}
