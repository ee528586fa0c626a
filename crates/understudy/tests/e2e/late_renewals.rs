//! A request to etcd that a member of the cluster does not answer, and carries out all the same, later.

use crate::stage::options;
use anyhow::{Context, Result, ensure};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use understudy_arbiter::{Arbiter, ArbiterConfig, EtcdConfig, EtcdEndpoints};
use understudy_lab::{Etcd, Lab, in_namespace};
use understudy_protocol::{Generation, LeaseAnswer, LeaseErrand, Renewal, VmName, literal};

/// Time for etcd to say what it has to.
const ANSWER: Duration = Duration::from_secs(5);

/// A way to etcd that keeps one request to itself.
#[derive(Clone)]
struct Relay {
    etcd: String,
    kept: Arc<Mutex<Kept>>,
}

enum Kept {
    Nothing,
    /// The next request that changes something.
    Next,
    /// This request, whose asker has no answer.
    Request(Vec<u8>, TcpStream),
}

impl Relay {
    /// Begins to pass requests on to `etcd`; returns its own address, too.
    fn start(etcd: &str) -> Result<(Relay, String)> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let relay = Relay { etcd: etcd.to_owned(), kept: Arc::new(Mutex::new(Kept::Nothing)) };
        let passing = relay.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let relay = passing.clone();
                // Who asks sees what failed.
                thread::spawn(move || relay.pass(stream));
            }
        });
        Ok((relay, address))
    }

    fn set(&self, kept: Kept) -> Kept {
        std::mem::replace(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner), kept)
    }

    fn pass(&self, mut stream: TcpStream) -> Result<()> {
        let request = read_request(&stream)?;
        if !request.starts_with(b"POST /v3/kv/range") {
            match self.set(Kept::Nothing) {
                Kept::Next => {
                    self.set(Kept::Request(request, stream));
                    return Ok(());
                }
                kept => drop(self.set(kept)),
            }
        }
        io::copy(&mut self.ask(&request)?, &mut stream)?;
        Ok(())
    }

    fn ask(&self, request: &[u8]) -> Result<TcpStream> {
        let mut etcd = TcpStream::connect(&self.etcd)?;
        etcd.set_read_timeout(Some(ANSWER))?;
        etcd.write_all(request)?;
        Ok(etcd)
    }

    /// Has what was kept carried out.
    fn release(&self) -> Result<()> {
        let Kept::Request(request, asker) = self.set(Kept::Nothing) else {
            anyhow::bail!("no request was kept")
        };
        let mut status = String::new();
        BufReader::new(self.ask(&request)?).read_line(&mut status)?;
        ensure!(status.contains("200"), "etcd said {status}");
        drop(asker);
        Ok(())
    }
}

/// Reads one request, with its body.
fn read_request(stream: &TcpStream) -> Result<Vec<u8>> {
    let mut reader = BufReader::new(stream);
    let (mut request, mut length) = (Vec::new(), 0);
    loop {
        let start = request.len();
        ensure!(reader.read_until(b'\n', &mut request)? > 0, "it ended in its head");
        let line = String::from_utf8_lossy(&request[start..]).to_ascii_lowercase();
        if let Some(bytes) = line.strip_prefix("content-length:") {
            length = bytes.trim().parse().context("the length of a body")?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let head = request.len();
    request.resize(head + length, 0);
    reader.read_exact(&mut request[head..])?;
    Ok(request)
}

/// The renewal once took effect behind the withdrawal, and nobody removed it: a third host would
/// have found a lease that was over, and taken a VM whose owner lives.
fn a_late_renewal(etcd: &str) -> Result<()> {
    let (relay, address) = Relay::start(etcd.trim_start_matches("http://"))?;
    let endpoints = [format!("http://{address}"), etcd.to_owned()];
    let endpoints = EtcdEndpoints::new(&endpoints, None).map_err(anyhow::Error::msg)?;
    let config = EtcdConfig { endpoints, prefix: "/understudy".to_owned() };
    let cluster = understudy_arbiter::etcd::Etcd::new(&config)?;
    let config = ArbiterConfig::Etcd(config);
    let (vm, of): (VmName, _) = (literal("db"), Generation(1));
    let renewal = |mark| Renewal { host: literal("a"), length_ms: 15_000, mark };
    // One that asks the relay first.
    let asking = || Arbiter::new(&config, &literal("a"));
    let tend = |arbiter: &Arbiter, errand, mark| {
        let answer = arbiter.tend(&vm, of, errand, &renewal(mark));
        ensure!(answer == LeaseAnswer::Own, "{errand:?} {mark}: {answer:?}");
        Ok(())
    };
    let written = |arbiter: &Arbiter, mark: Option<u64>| {
        let found = arbiter.renewal(&vm, of)?;
        ensure!(found == mark.map(renewal), "the lease is {found:?}");
        Ok(())
    };
    // The second time there has been one before.
    for (first, late) in [(1, 2), (3, 4)] {
        let arbiter = &asking()?;
        arbiter.claim(&vm, Generation(0));
        tend(arbiter, LeaseErrand::Renew, first)?;
        written(arbiter, Some(first))?;
        relay.set(Kept::Next);
        tend(arbiter, LeaseErrand::Renew, late)?;
        written(arbiter, Some(late))?;
        tend(arbiter, LeaseErrand::Withdraw, late)?;
        relay.release()?;
        written(arbiter, None)?;
        // Before, a `null` was left, which another version of Understudy could not read.
        let left = cluster.get::<serde_json::Value>("/leases/db/1")?;
        ensure!(left.is_none(), "the withdrawn lease is {left:?}");
        // A withdrawal that comes behind another one, and a renewal, leaves that.
        let arbiter = &asking()?;
        relay.set(Kept::Next);
        tend(arbiter, LeaseErrand::Withdraw, late)?;
        tend(arbiter, LeaseErrand::Renew, late)?;
        relay.release()?;
        written(arbiter, Some(late))?;
        // What is not asked for need not be Understudy's.
        cluster.swap("/leases/db/7", 0, &"damaged")?;
        let of_all = arbiter.renewals(&vm, |it| it != Generation(7))?;
        ensure!(of_all == [(of, renewal(late))], "{of_all:?}");
        ensure!(arbiter.renewals(&vm, |_| true).is_err());
        tend(arbiter, LeaseErrand::Withdraw, late)?;
        // So did the version before this one.
        ensure!(cluster.swap("/leases/db/1", 0, &None::<Renewal>)?);
        written(arbiter, None)?;
        ensure!(arbiter.renewals(&vm, |it| it == of)?.is_empty());
        tend(arbiter, LeaseErrand::Withdraw, late)?;
    }
    Ok(())
}

#[test]
fn a_renewal_that_comes_behind_the_withdrawal_leaves_no_lease() {
    let lab = Lab::new(&["a"]).unwrap();
    let _etcd = Etcd::start(&lab, &options().guest_files).unwrap();
    let endpoint = Etcd::endpoint(&lab, "a").unwrap();
    let played = in_namespace(&lab.host("a").unwrap(), || a_late_renewal(&endpoint)).unwrap();
    played.unwrap_or_else(|error| panic!("{error:#}"));
}
