//! Snapshots in S3-compatible storage, at a server that all hosts reach.

use crate::lazy::HeldStore;
use crate::refusals::says;
use crate::snapshot::{busy, json, number, prove_restored, small};
use crate::stage::{LIMIT, await_forgotten, daemon, play, refusal};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use understudy_lab::scene::VM;
use understudy_lab::{CLIENT_ADDRESS, HostOptions, Scene, SceneOptions, wait_for};

const PORT: u16 = 5000;
const STORE: &str = "s3://snapshots/below/this";
/// Serves S3, with one bucket, until it is killed.
const SERVER: &str = "\
import boto3, signal, sys
from moto.server import ThreadedMotoServer
host, port = sys.argv[1], int(sys.argv[2])
ThreadedMotoServer(ip_address=host, port=port, verbose=False).start()
boto3.client('s3', endpoint_url=f'http://{host}:{port}', region_name='us-east-1',
             aws_access_key_id='test', aws_secret_access_key='test').create_bucket(Bucket='snapshots')
print('ready', flush=True)
signal.pause()
";

/// An S3 server beside the hosts.
struct Server(Child);

impl Server {
    fn start(scene: &Scene) -> Result<Server> {
        let python = scene.guest_files().join("s3/bin/python");
        ensure!(python.exists(), "{} is not there: run scripts/setup", python.display());
        let mut command = scene.lab().client().command(&python);
        command.args(["-c", SERVER, &CLIENT_ADDRESS.to_string(), &PORT.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = Server(command.spawn().context("cannot start the S3 server")?);
        let said = server.0.stdout.take().context("no output")?;
        let ready = BufReader::new(said).lines().next().transpose()?;
        ensure!(ready.as_deref() == Some("ready"), "the S3 server said {ready:?}");
        Ok(server)
    }

    /// Sends it a signal: once stopped, it answers nothing any more, until [`Signal::SIGCONT`].
    fn send(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id() as i32), signal)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The variables that say where the storage is, and how to get in, as programs of this kind are
/// told.
fn environment() -> Vec<(String, String)> {
    [
        ("AWS_ENDPOINT", format!("http://{CLIENT_ADDRESS}:{PORT}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// The options with which most of a guest is still to come when it has started on host b.
fn options(held_store: &HeldStore) -> SceneOptions {
    let mut options = small();
    let mut held = environment();
    held.push(held_store.environment());
    for (host, environment) in [("a", environment()), ("b", held)] {
        options.daemons.insert(host.to_owned(), HostOptions { environment, ..daemon() });
    }
    options
}

/// The storage falls silent while a guest is loaded from it lazily, and answers again.
#[test]
fn a_vm_is_restored_from_s3_though_that_falls_silent() {
    let held_store = HeldStore::new();
    play(options(&held_store), |scene| {
        let server = Server::start(scene)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "1", "--store", STORE];
        json(scene, "a", &take)?;
        let report = json(scene, "a", &take)?;
        ensure!(report["number"] == 2, "{report}");
        let count = number(&mut shell, "/tmp/count")?;
        drop(shell);
        json(scene, "a", &["cluster", "delete", &format!("{VM}@1"), "--store", STORE])?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;

        let restore = ["vm", "restore", VM, "--store"];
        let nowhere = [&restore[..], &["s3://another-bucket"]].concat();
        says(&refusal(scene.host("b")?, &nowhere)?.1, &["another-bucket"])?;
        json(scene, "b", &[&restore[..], &[STORE, "--mode", "lazy"]].concat())?;
        server.send(Signal::SIGSTOP)?;
        let stalled = wait_for("host b to say that the guest waits", LIMIT, || {
            let status = scene.status("b")?;
            ensure!(status["live"] == true, "the guest does not live any more: {status}");
            Ok(status["filling"]["stalled"].as_str().map(str::to_owned))
        })?;
        says(&stalled, &[STORE, "has not answered"])?;
        server.send(Signal::SIGCONT)?;
        prove_restored(scene, "b", &sums, count)?;
        held_store.let_go()?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        prove_restored(scene, "b", &sums, count)?;
        let verified = json(scene, "a", &["cluster", "verify", VM, "--store", STORE])?;
        ensure!(verified["problems"] == Value::Array(vec![]), "{verified}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}
