//! The API from the caller's side: one request, one connection.

mod paths;
mod remote;
mod silence;

pub use remote::{Credentials, HostUrl};

use crate::failure::{ErrorBody, Failure, FailureKind};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::http::request;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use paths::{path, subject_path, vm_path, which};
use remote::Remote;
use serde::Serialize;
use serde::de::DeserializeOwned;
use silence::Hearing;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::VmDefinition;
use understudy_report::HostError;
use understudy_report::cluster::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_report::events::EventList;
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};
use understudy_report::{
    AgainRequest, CheckpointTiming, ComparisonReport, GroupRequest, HostStatus, MediumRequest,
    ProtectRequest, RecoverReport, RecoverRequest, StartRequest, VmStatus,
};
use understudy_snapshot::SnapshotNumber;

/// The longest answer that is read; timings are the longest, with about 1 MiB.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// The longest that a daemon waits for an event before it answers.
pub const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Time for a daemon to say what it knows. What it is to do takes as long as it takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// VM or group that is snapshotted, or restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A VM by itself.
    Vm(VmName),
    /// A group.
    Cluster(GroupName),
}

impl Subject {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Subject::Vm(name) => name,
            Subject::Cluster(name) => name,
        }
    }
}

/// A daemon, by its API. All calls block until the daemon has answered; those that only ask what it
/// knows give up on one that hangs, and others if they were told when.
#[derive(Debug)]
pub struct Client {
    way: Way,
    runtime: Runtime,
    patience: Duration,
    /// Time for what it is told to do; none waits for as long as that takes.
    bound: Option<Duration>,
    /// What it must go on to answer meanwhile; none does not ask.
    hearing: Option<Hearing>,
}

/// Way in which a daemon is reached.
#[derive(Debug)]
enum Way {
    /// Its unix socket.
    Socket(PathBuf),
    /// Its address on another machine.
    Remote(Box<Remote>),
}

impl Client {
    /// The daemon that listens on `socket`; nothing is sent yet.
    pub fn new(socket: &Path) -> Result<Client, Failure> {
        Client::by(Way::Socket(socket.to_owned()))
    }

    /// The daemon of another machine; nothing is sent yet.
    pub fn remote(host: HostUrl, credentials: &Credentials) -> Result<Client, Failure> {
        Client::by(Way::Remote(Box::new(Remote::new(host, credentials)?)))
    }

    /// The same, which gives up after so long on one that says nothing.
    pub fn patient(self, patience: Duration) -> Client {
        Client { patience, ..self }
    }

    /// The same, which gives up after so long on one that has not done what it is told, too.
    pub fn bounded(self, bound: Duration) -> Client {
        Client { bound: Some(bound), ..self }
    }

    /// The same, which gives up on one that has said nothing about this VM for so long, either, while it does what it is
    /// told: that may take as long as it takes.
    pub fn while_heard(self, vm: &str, longest: Duration) -> Client {
        Client { hearing: Some(Hearing { question: vm_path(vm, ""), longest }), ..self }
    }

    /// Whether it is on this machine.
    pub fn is_local(&self) -> bool {
        matches!(self.way, Way::Socket(_))
    }

    fn by(way: Way) -> Result<Client, Failure> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime =
            runtime.map_err(|error| Failure::internal(format!("cannot start: {error}")))?;
        Ok(Client { way, runtime, patience: PATIENCE, bound: None, hearing: None })
    }

    /// Everything on the host.
    pub fn status(&self) -> Result<HostStatus, Failure> {
        self.look("/v1/status", Duration::ZERO)
    }

    /// Plan of what a restart of the daemon for an upgrade would do to each VM.
    pub fn upgrade_plan(&self) -> Result<UpgradePlan, Failure> {
        self.look("/v1/upgrade", Duration::ZERO)
    }

    /// Everything on the host, as the daemon writes it.
    pub fn status_json(&self) -> Result<serde_json::Value, Failure> {
        self.look("/v1/status", Duration::ZERO)
    }

    /// Its figures for a monitoring system, as text.
    pub fn metrics(&self) -> Result<String, Failure> {
        let text = self.listen("/metrics", Duration::ZERO)?;
        String::from_utf8(text.into())
            .map_err(|error| Failure::internal(format!("its metrics are no text: {error}")))
    }

    /// The events after a number, of all VMs or of one; waits for the first if told to.
    pub fn events(&self, after: u64, vm: Option<&str>, wait: bool) -> Result<EventList, Failure> {
        let wait = if wait { LONGEST_WAIT } else { Duration::ZERO };
        let vm = vm.map_or_else(String::new, |vm| path("&vm=", vm, ""));
        self.look(&format!("/v1/events?after={after}&wait_ms={}{vm}", wait.as_millis()), wait)
    }

    /// Starts a VM, unprotected.
    pub fn vm_start(
        &self,
        definition: &VmDefinition,
        request: StartRequest,
    ) -> Result<VmStatus, Failure> {
        let StartRequest { force, other_host_is_off } = request;
        let path = format!("/v1/vms?force={force}&other_host_is_off={other_host_is_off}");
        self.json(Method::POST, &path, encode(definition)?)
    }

    /// Starts a VM as the host's record says, unprotected.
    pub fn vm_start_recorded(&self, name: &str) -> Result<VmStatus, Failure> {
        self.json(Method::POST, &vm_path(name, "/start"), Bytes::new())
    }

    /// A VM as it is on the host.
    pub fn definition(&self, name: &str) -> Result<VmDefinition, Failure> {
        self.look(&vm_path(name, "/definition"), Duration::ZERO)
    }

    /// Stops a VM.
    pub fn vm_stop(&self, name: &str, force: bool) -> Result<(), Failure> {
        let path = format!("{}?force={force}", vm_path(name, ""));
        self.send(Method::DELETE, &path, Bytes::new()).map(drop)
    }

    /// One VM's status.
    pub fn vm_status(&self, name: &str) -> Result<VmStatus, Failure> {
        self.look(&vm_path(name, ""), Duration::ZERO)
    }

    /// Starts protecting a VM.
    pub fn protect(&self, name: &str, request: &ProtectRequest) -> Result<VmStatus, Failure> {
        self.json(Method::POST, &vm_path(name, "/protect"), encode(request)?)
    }

    /// Starts protecting a VM, and its group, as it was wished, to another host.
    pub fn protect_again(&self, name: &str, request: &AgainRequest) -> Result<VmStatus, Failure> {
        self.json(Method::POST, &vm_path(name, "/protect-again"), encode(request)?)
    }

    /// Starts protecting VMs as one group.
    pub fn protect_group(
        &self,
        name: &str,
        request: &GroupRequest,
    ) -> Result<Vec<VmStatus>, Failure> {
        self.json(Method::POST, &path("/v1/groups/", name, "/protect"), encode(request)?)
    }

    /// Ends a VM's protection.
    pub fn unprotect(&self, name: &str) -> Result<VmStatus, Failure> {
        self.json(Method::POST, &vm_path(name, "/unprotect"), Bytes::new())
    }

    /// Hands a VM over to its backup.
    pub fn failover(&self, name: &str) -> Result<(), Failure> {
        self.send(Method::POST, &vm_path(name, "/failover"), Bytes::new()).map(drop)
    }

    /// Has a VM's keeper replaced by a process of the daemon's program, while its guest runs.
    pub fn replace_keeper(&self, name: &str) -> Result<KeeperReplacement, Failure> {
        self.json(Method::POST, &vm_path(name, "/keeper"), Bytes::new())
    }

    /// Changes the medium of a CD-ROM drive.
    pub fn change_medium(&self, name: &str, request: &MediumRequest) -> Result<VmStatus, Failure> {
        self.json(Method::POST, &vm_path(name, "/medium"), encode(request)?)
    }

    /// Names a VM's valid images and starts it on them.
    pub fn recover(&self, name: &str, request: RecoverRequest) -> Result<RecoverReport, Failure> {
        self.json(Method::POST, &vm_path(name, "/recover"), encode(&request)?)
    }

    /// The last checkpoints' timings, oldest first.
    pub fn timings(&self, name: &str) -> Result<Vec<CheckpointTiming>, Failure> {
        self.look(&vm_path(name, "/timings"), Duration::ZERO)
    }

    /// Compares a VM with its backup in lockstep.
    pub fn verify_lockstep(&self, name: &str) -> Result<ComparisonReport, Failure> {
        self.json(Method::POST, &vm_path(name, "/lockstep/verify"), Bytes::new())
    }

    /// Takes a snapshot.
    pub fn snapshot(
        &self,
        what: &Subject,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport, Failure> {
        self.json(Method::POST, &subject_path(what, "/snapshot"), encode(request)?)
    }

    /// Restores a snapshot.
    pub fn restore(
        &self,
        what: &Subject,
        request: &RestoreRequest,
    ) -> Result<RestoreReport, Failure> {
        self.json(Method::POST, &subject_path(what, "/restore"), encode(request)?)
    }

    /// The snapshots of a group, or of all.
    pub fn snapshots(
        &self,
        group: Option<&str>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, Failure> {
        self.json(Method::GET, &which("/v1/snapshots", group, None, store), Bytes::new())
    }

    /// Deletes a snapshot. With `force` even while it is being restored.
    pub fn delete_snapshot(
        &self,
        group: &str,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, Failure> {
        let mut path = which("/v1/snapshots", Some(group), Some(number), store);
        if force {
            path.push_str("&force=true");
        }
        self.json(Method::DELETE, &path, Bytes::new())
    }

    /// Checks a snapshot.
    pub fn verify_snapshot(
        &self,
        group: &str,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, Failure> {
        let path = which("/v1/snapshots/verify", Some(group), number, store);
        self.json(Method::POST, &path, Bytes::new())
    }

    fn json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, Failure> {
        understand(&self.send(method, path, body)?)
    }

    /// Asks what a daemon knows, which it says at once, but for the `wait` that it was asked for.
    fn look<T: DeserializeOwned>(&self, path: &str, wait: Duration) -> Result<T, Failure> {
        understand(&self.listen(path, wait)?)
    }

    /// [`look`](Client::look), as the daemon writes it.
    fn listen(&self, path: &str, wait: Duration) -> Result<Bytes, Failure> {
        let exchange = self.exchange(Method::GET, path, Bytes::new());
        let limit = self.patience + wait;
        // Made within the runtime, whose clock it needs.
        let bounded = async { timeout(limit, exchange).await };
        let answer = self.runtime.block_on(bounded).map_err(|_| self.hangs(limit))?;
        successful(answer?)
    }

    fn hangs(&self, limit: Duration) -> Failure {
        let daemon = match &self.way {
            Way::Socket(socket) => format!("the daemon on {}", socket.display()),
            Way::Remote(remote) => format!("the daemon of {}", remote.host.name),
        };
        let message = format!(
            "{daemon} has not answered for {} s: it hangs, and its VMs may go on; see its log. To \
             restart it ends those without a keeper on this host: protected ones go on at their backups",
            limit.as_secs()
        );
        Failure::new(FailureKind::DaemonSilent, message)
    }

    /// Sends one request; returns the body of a successful answer.
    fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, Failure> {
        let exchange = self.exchange(method, path, body);
        let answer = async {
            tokio::select! {
                answer = exchange => answer,
                given_up = self.given_up() => Err(given_up),
            }
        };
        successful(self.runtime.block_on(answer)?)
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "understudy")
            .header("content-type", "application/json")
            .header("connection", "close");
        match &self.way {
            Way::Socket(socket) => exchange_over(connect(socket).await?, request, body).await,
            Way::Remote(remote) => {
                let request = match &remote.token {
                    Some(token) => request.header("authorization", format!("Bearer {token}")),
                    None => request,
                };
                exchange_over(remote.connect().await?, request, body).await
            }
        }
    }
}

/// The body of a successful answer.
fn successful((status, answer): (StatusCode, Bytes)) -> Result<Bytes, Failure> {
    if status.is_success() {
        return Ok(answer);
    }
    match serde_json::from_slice::<ErrorBody<HostError>>(&answer) {
        Ok(body) => Err(body.error.into()),
        Err(_) => {
            let text = String::from_utf8_lossy(&answer);
            Err(Failure::internal(format!("the daemon answered {status}: {text}")))
        }
    }
}

fn understand<T: DeserializeOwned>(answer: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(answer).map_err(|error| {
        let message =
            format!("the daemon's answer is not understood ({error}): is it of the same version?");
        Failure::internal(message)
    })
}

async fn connect(socket: &Path) -> Result<UnixStream, Failure> {
    UnixStream::connect(socket).await.map_err(|error| {
        if error.kind() == io::ErrorKind::WouldBlock {
            let message = format!("{} has no room for a connection: it hangs", socket.display());
            return Failure::new(FailureKind::DaemonSilent, message);
        }
        let message = format!(
            "cannot reach the daemon on {}: {error}; is `understudy host` running, \
             and may you use its socket?",
            socket.display()
        );
        Failure::new(FailureKind::DaemonUnreachable, message)
    })
}

/// Sends a request over a connection of its own, and reads the answer.
async fn exchange_over(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: request::Builder,
    body: Bytes,
) -> Result<(StatusCode, Bytes), Failure> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(broken_off)?;
    // Its errors come out of the request, too.
    tokio::spawn(connection);
    let request = request
        .body(Full::new(body))
        .map_err(|error| Failure::internal(format!("malformed request: {error}")))?;
    let answer = sender.send_request(request).await.map_err(broken_off)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES);
    let body = body.collect().await.map_err(broken_off)?;
    Ok((status, body.to_bytes()))
}

fn broken_off(error: impl std::fmt::Display) -> Failure {
    let message = format!("the daemon broke the connection off: {error}; see its log");
    Failure::new(FailureKind::DaemonUnreachable, message)
}

fn encode(body: &impl Serialize) -> Result<Bytes, Failure> {
    let bytes = serde_json::to_vec(body)
        .map_err(|error| Failure::internal(format!("cannot write JSON: {error}")))?;
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_daemon_that_hangs_is_given_up_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("api.sock");
        // Connections wait in its queue for good.
        let _listener = UnixListener::bind(&socket).unwrap();
        let moment = Duration::from_millis(50);
        let client = Client::new(&socket).unwrap().patient(moment).bounded(moment);
        let asked = client.status().map(drop);
        let told = client.vm_start_recorded("db").map(drop);
        for failure in [asked, told].map(Result::unwrap_err) {
            assert_eq!(failure.kind, FailureKind::DaemonSilent);
            for words in [&*socket.to_string_lossy(), "it hangs"] {
                assert!(failure.message.contains(words), "{}", failure.message);
            }
        }
    }
}
