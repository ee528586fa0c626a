//! A real etcd in a namespace of its own, with one link to every host: the
//! arbiter can be out of any host's reach while the hosts still see each other.
//!
//! The link of host number *n* is 10.79.*n*.0/24; etcd is at .1, the host at .2.

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::{in_namespace, processes, wait_for};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;
use understudy_qemu::programs::on_path;

/// Port where etcd answers, on every address of its namespace.
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;
/// Time for etcd to answer after its start, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(120);
/// A host's interface towards etcd.
pub(crate) const LINK: &str = "etcd";

/// One etcd that is the arbiter of a laboratory. Dropping it kills it.
pub struct Etcd {
    binary: PathBuf,
    namespace: Namespace,
    directory: PathBuf,
    process: Child,
}

impl Etcd {
    /// Lays the links and starts etcd; `guest_files` is where `scripts/setup`
    /// unpacked it, should it not be installed.
    pub fn start(lab: &Lab, guest_files: &Path) -> Result<Etcd> {
        let namespace = lab.etcd();
        namespace.create()?;
        for (index, host) in lab.hosts().iter().enumerate() {
            lay_link(&namespace, &lab.host(host)?, host, index)?;
        }
        let directory = lab.directory().join("etcd");
        std::fs::create_dir(&directory)?;
        let binary = find_binary(guest_files)?;
        let process = spawn(&binary, &namespace, &directory)?;
        let etcd = Etcd { binary, namespace, directory, process };
        etcd.await_answer()?;
        Ok(etcd)
    }

    /// The URL at which a host reaches it.
    pub fn endpoint(lab: &Lab, host: &str) -> Result<String> {
        let index = lab.hosts().iter().position(|other| other == host);
        let index = index.with_context(|| format!("no host `{host}` in this laboratory"))?;
        Ok(format!("http://{}:{CLIENT_PORT}", address(index, 1)))
    }

    /// Cuts the link of one host.
    pub fn cut(&self, host: &str) -> Result<()> {
        self.namespace.ip(&["link", "set", &port(host), "down"]).map(drop)
    }

    /// Undoes [`cut`](Etcd::cut).
    pub fn heal(&self, host: &str) -> Result<()> {
        self.namespace.ip(&["link", "set", &port(host), "up"]).map(drop)
    }

    /// SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill().context("cannot kill etcd")?;
        self.process.wait().context("cannot wait for etcd")?;
        processes::wait_until_gone(&[self.process.id()])
    }

    /// Starts it again on its data, and waits until it answers.
    pub fn restart(&mut self) -> Result<()> {
        self.process = spawn(&self.binary, &self.namespace, &self.directory)?;
        self.await_answer()
    }

    /// Has it refuse whatever takes space, as it does of itself once its database is full; or ends that.
    pub fn set_full(&self, full: bool) -> Result<()> {
        let member =
            self.ask("kv/range", &json!({ "key": "AA==" }))?["header"]["member_id"].clone();
        let action = if full { "ACTIVATE" } else { "DEACTIVATE" };
        let alarm = json!({ "action": action, "memberID": member, "alarm": "NOSPACE" });
        self.ask("maintenance/alarm", &alarm).map(drop)
    }

    /// Its newest revision: how often something was changed in it.
    pub fn revision(&self) -> Result<i64> {
        let answer = self.ask("kv/range", &json!({ "key": "AA==" }))?;
        let revision = answer["header"]["revision"].as_str().context("it names no revision")?;
        Ok(revision.parse()?)
    }

    /// Has it forget all revisions but the newest one.
    pub fn compact(&self) -> Result<()> {
        let newest = self.revision()?.to_string();
        self.ask("kv/compaction", &json!({ "revision": newest })).map(drop)
    }

    fn ask(&self, method: &str, body: &Value) -> Result<Value> {
        let body = body.to_string();
        let request = format!(
            "POST /v3/{method} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let exchange = move || -> Result<String> {
            let mut etcd = TcpStream::connect((Ipv4Addr::LOCALHOST, CLIENT_PORT))?;
            etcd.write_all(request.as_bytes())?;
            let mut answer = String::new();
            etcd.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = in_namespace(&self.namespace, exchange)??;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer of HTTP")?;
        ensure!(head.contains(" 200 "), "{answer}");
        serde_json::from_str(body).with_context(|| format!("it answers {body}"))
    }

    /// etcd opens its port once it has joined its (own) cluster.
    fn await_answer(&self) -> Result<()> {
        wait_for("etcd to answer", START_LIMIT, || {
            let to = SocketAddr::from((Ipv4Addr::LOCALHOST, CLIENT_PORT));
            let connect = || TcpStream::connect_timeout(&to, Duration::from_millis(200)).is_ok();
            Ok(in_namespace(&self.namespace, connect)?.then_some(()))
        })
        .with_context(|| format!("its log is {}", self.directory.join("etcd.log").display()))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::error!("cannot end etcd: {error:#}");
        }
    }
}

fn lay_link(namespace: &Namespace, host: &Namespace, name: &str, index: usize) -> Result<()> {
    let port = port(name);
    let veth = ["link", "add", &port, "type", "veth", "peer", "name", LINK, "netns", host.name()];
    namespace.ip(&veth)?;
    for (side, interface, last) in [(namespace, port.as_str(), 1), (host, LINK, 2)] {
        let address = format!("{}/24", address(index, last));
        side.ip(&["addr", "add", &address, "dev", interface])?;
        side.ip(&["link", "set", interface, "up"])?;
    }
    Ok(())
}

/// etcd's interface towards a host.
fn port(host: &str) -> String {
    format!("to-{host}")
}

fn address(index: usize, last: u8) -> Ipv4Addr {
    // Fits: a laboratory has fewer hosts.
    Ipv4Addr::new(10, 79, index as u8 + 1, last)
}

fn find_binary(guest_files: &Path) -> Result<PathBuf> {
    let unpacked = guest_files.join("etcd/usr/bin/etcd");
    on_path("etcd")
        .or_else(|| unpacked.is_file().then_some(unpacked))
        .context("there is no etcd: run scripts/setup, or install the package etcd-server")
}

fn spawn(binary: &Path, namespace: &Namespace, directory: &Path) -> Result<Child> {
    let log = directory.join("etcd.log");
    let log = File::options().create(true).append(true).open(log)?;
    let client = format!("http://0.0.0.0:{CLIENT_PORT}");
    let peer = format!("http://127.0.0.1:{PEER_PORT}");
    let mut etcd = namespace.command(binary);
    etcd.args(["--name", "arbiter", "--listen-client-urls", &client]);
    etcd.args(["--advertise-client-urls", &client, "--listen-peer-urls", &peer]);
    etcd.args(["--initial-advertise-peer-urls", &peer, "--initial-cluster"]);
    etcd.arg(format!("arbiter={peer}")).arg("--data-dir").arg(directory.join("data"));
    // What SIGKILL leaves is in the page cache, and no host here loses its power: an fsync would only make its
    // answers as late as the machine's disk.
    etcd.arg("--unsafe-no-fsync");
    etcd.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    etcd.spawn().with_context(|| format!("cannot start {}", binary.display()))
}
