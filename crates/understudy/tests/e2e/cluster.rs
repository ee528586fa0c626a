//! Groups of VMs that pay money to each other over TCP and UDP, on two hosts: snapshots at
//! random moments, everything ends, and all runs again, with no payment lost or doubled.

use crate::lazy::{HeldStore, Orphaned};
use crate::refusals::says;
use crate::stage::{
    Calm, LIMIT, await_forgotten, daemon, fail_at, hand_over, options, play, protect, refusal, vms,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use toml::Table;
use understudy_lab::{
    GUEST_ADDRESS, GuestShell, HostOptions, HostProcess, Scene, SceneOptions, connect_patiently,
    in_namespace, wait_for,
};

pub const MEMBERS: usize = 3;
pub const PORT: u16 = 7100;
const SHELL_PORT: u16 = 7001;
/// The balance that each begins with.
const START: i64 = 1_000_000;
/// Milliseconds between two payments of one to another: some are on their way at any moment, and
/// three guests leave the processors time for other stories.
pub const PACE_MS: u32 = 80;
/// Payments of a member that prove that its connections live.
const PAID: u64 = 20;
const CLUSTER: &str = "[cluster.bank]\nmembers = { bank0 = \"a\", bank1 = \"b\", bank2 = \"a\" }\n";

pub fn with_cluster(mut host: HostOptions) -> HostOptions {
    host.settings += CLUSTER;
    host
}

pub fn bank_options() -> SceneOptions {
    let mut options = SceneOptions { disks: 0, memory_mib: 96, ..options() };
    for host in ["a", "b"] {
        options.daemons.insert(host.to_owned(), with_cluster(daemon()));
    }
    options
}

/// The options of banks of which these are protected.
pub fn options_with(protected: &[usize]) -> SceneOptions {
    if protected.is_empty() { bank_options() } else { bank_options().calm() }
}

pub fn address(member: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, 60 + member as u8)
}

pub fn home(member: usize) -> &'static str {
    ["a", "b", "a"][member]
}

pub fn name(member: usize) -> String {
    format!("bank{member}")
}

/// The report of a bank about itself.
#[derive(Debug)]
struct Report {
    balance: i64,
    pending: u64,
    moves: u64,
}

pub fn bank_of(member: usize) -> SocketAddr {
    SocketAddr::from((address(member), PORT))
}

fn all_banks() -> Vec<SocketAddr> {
    (0..MEMBERS).map(bank_of).collect()
}

pub fn ask(scene: &Scene, bank: SocketAddr, request: &str) -> Result<String> {
    let mut stream = in_namespace(&scene.lab().client(), || connect_patiently(bank, LIMIT))??;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    Ok(answer.trim().to_owned())
}

fn report(scene: &Scene, bank: SocketAddr) -> Result<Report> {
    let text = ask(scene, bank, "report")?;
    let words: Vec<&str> = text.split(' ').collect();
    let [balance, pending, moves, broken] = words[..] else {
        anyhow::bail!("bank {bank} says {text:?}");
    };
    ensure!(broken == "-", "bank {bank}: {broken}");
    let (balance, pending) = (balance.parse()?, pending.parse()?);
    Ok(Report { balance, pending, moves: moves.parse()? })
}

/// Waits until each pays on the connections that it always had.
pub fn await_payments(scene: &Scene, banks: &[SocketAddr]) -> Result<()> {
    let mut goals = Vec::new();
    for &bank in banks {
        // Not until it says something good: what is broken stays so.
        wait_for(&format!("bank {bank} to answer"), LIMIT, || {
            Ok(ask(scene, bank, "report").ok().map(drop))
        })?;
        goals.push((bank, report(scene, bank)?.moves + PAID));
    }
    for (bank, goal) in goals {
        wait_for(&format!("bank {bank} to pay"), LIMIT, || {
            Ok((report(scene, bank)?.moves >= goal).then_some(()))
        })?;
    }
    Ok(())
}

/// Audits the banks when nothing is on its way any more: the total must be what it was.
pub fn audit(scene: &Scene, banks: &[SocketAddr]) -> Result<()> {
    let all = |request| banks.iter().try_for_each(|&bank| ask(scene, bank, request).map(drop));
    all("pause")?;
    for &bank in banks {
        wait_for("payments to be answered", LIMIT, || {
            Ok((report(scene, bank)?.pending == 0).then_some(()))
        })?;
    }
    let mut total = 0;
    for &bank in banks {
        total += report(scene, bank)?.balance;
    }
    ensure!(total == banks.len() as i64 * START, "the total is {total}");
    all("resume")
}

/// The banks, wherever they run.
pub struct Bank<'a> {
    pub scene: &'a Scene,
    pub store: String,
}

impl Bank<'_> {
    /// The banks of a scene in which they were founded, or will be.
    pub fn of(scene: &Scene) -> Bank<'_> {
        Bank { scene, store: scene.lab().directory().join("store").display().to_string() }
    }

    /// Boots them, and has them pay.
    pub fn found(scene: &Scene) -> Result<Bank<'_>> {
        Bank::found_paying(scene, PACE_MS)
    }

    /// The same with so many milliseconds between two payments of one to another.
    pub fn found_paying(scene: &Scene, pace_ms: u32) -> Result<Bank<'_>> {
        let bank = Bank::of(scene);
        for member in 0..MEMBERS {
            let definition = bank.definition(member)?.display().to_string();
            scene.host(home(member))?.call(["vm", "start", &definition])?;
        }
        for member in 0..MEMBERS {
            let mut shell = bank.shell(member)?;
            let peers = (0..MEMBERS).filter(|peer| *peer != member);
            let peers: Vec<_> = peers.map(|peer| format!("{}:{PORT}", address(peer))).collect();
            let peers = peers.join(" ");
            let bank = format!("exec guest-tools bank {} {PORT} {peers}", name(member));
            shell.start(&format!("BANK_PACE_MS={pace_ms} {bank}"))?;
        }
        bank.await_payments()?;
        Ok(bank)
    }

    fn definition(&self, member: usize) -> Result<PathBuf> {
        let mut table: Table = fs::read_to_string(self.scene.definition())?.parse()?;
        let append = table.get("append").and_then(toml::Value::as_str).context("no append")?;
        let append = append.replace(&GUEST_ADDRESS.to_string(), &address(member).to_string());
        table.insert("append".into(), append.into());
        table.insert("name".into(), name(member).into());
        let card = table.get_mut("card").and_then(|cards| cards.get_mut(0));
        let card = card.and_then(toml::Value::as_table_mut).context("no card")?;
        card.insert("mac".into(), format!("52:54:00:75:75:{member:02x}").into());
        self.copy_disks(&mut table, member)?;
        let path = self.scene.lab().directory().join(format!("{}.toml", name(member)));
        fs::write(&path, table.to_string())?;
        self.scene.spare_boot(&path)?;
        Ok(path)
    }

    /// A member has disks of its own, if the scene's guest has any.
    fn copy_disks(&self, table: &mut Table, member: usize) -> Result<()> {
        let disks = table.get_mut("disk").and_then(toml::Value::as_array_mut);
        for disk in disks.into_iter().flatten() {
            let shared = disk["path"].as_str().context("a disk without a path")?.to_owned();
            let own = format!("{shared}.{}", name(member));
            fs::copy(&shared, &own)?;
            disk["path"] = own.into();
        }
        Ok(())
    }

    /// A shell of a member's guest.
    pub fn shell(&self, member: usize) -> Result<GuestShell> {
        let shell = SocketAddr::from((address(member), SHELL_PORT));
        wait_for("a bank to be there", LIMIT, || {
            Ok(GuestShell::connect(self.scene.lab(), shell).ok())
        })
    }

    fn report(&self, member: usize) -> Result<Report> {
        report(self.scene, bank_of(member))
    }

    pub fn await_payments(&self) -> Result<()> {
        await_payments(self.scene, &all_banks())
    }

    pub fn audit(&self) -> Result<()> {
        audit(self.scene, &all_banks())
    }

    pub fn json(&self, host: &str, arguments: &[&str]) -> Result<Value> {
        let arguments = [arguments, &["--store", &self.store, "--json"]].concat();
        Ok(serde_json::from_str(&self.scene.host(host)?.call(arguments)?)?)
    }

    pub fn snapshot(&self, host: &str) -> Result<u64> {
        let report = self.json(host, &["cluster", "snapshot", "bank", "--trace", "0.3"])?;
        report["number"].as_u64().with_context(|| format!("no number: {report}"))
    }

    /// Ends all members that run, as if their power had been cut.
    pub fn end(&self) -> Result<()> {
        for host in ["a", "b"] {
            let host = self.scene.host(host)?;
            // Who stands by for one that was stopped forgets it.
            for vm in vms(host)?.iter().filter(|vm| vm["role"] == "primary") {
                host.call(["vm", "stop", vm["name"].as_str().context("no name")?, "--force"])?;
            }
        }
        await_forgotten(self.scene, "a")?;
        await_forgotten(self.scene, "b")
    }

    /// Protects a member to the other host.
    pub fn protect(&self, member: usize) -> Result<()> {
        let (vm, from) = (name(member), home(member));
        let to = if from == "a" { "b" } else { "a" };
        protect(self.scene.host(from)?, &vm, &["--to", to])
    }

    pub fn restore(&self, host: &str, number: u64, more: &[&str]) -> Result<Value> {
        let which = format!("bank@{number}");
        let report = self.json(host, &[&["cluster", "restore", &which], more].concat())?;
        ensure!(report["members"].as_array().map(Vec::len) == Some(MEMBERS), "{report}");
        Ok(report)
    }
}

/// Snapshots at random moments, by each host in turn; each is restored. Some members may be
/// protected while they are taken: what they say waits for a commit then.
fn rounds(count: usize, protected: &[usize]) {
    play(options_with(protected), |scene| {
        let bank = Bank::found(scene)?;
        protected.iter().try_for_each(|member| bank.protect(*member))?;
        let mut numbers = Vec::new();
        let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as u64;
        for round in 0..count as u64 {
            let pause = seed.wrapping_mul(2 * round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
            std::thread::sleep(Duration::from_millis(pause));
            numbers.push(bank.snapshot(if round % 2 == 0 { "a" } else { "b" })?);
            bank.await_payments()?;
        }
        for (round, number) in numbers.iter().enumerate() {
            bank.end()?;
            let more: &[&str] = if round == 1 { &["--onto", "b"] } else { &[] };
            let report = bank.restore(if round % 2 == 0 { "b" } else { "a" }, *number, more)?;
            ensure!(round != 1 || report["members"][0]["host"] == "b", "{report}");
            bank.await_payments()?;
            bank.audit().with_context(|| format!("snapshot {number}, seed {seed}"))?;
        }
        // What was restored can be snapshotted at once.
        let last = bank.snapshot("a")?;
        ensure!(last > *numbers.last().unwrap_or(&0), "{last} after {numbers:?}");
        bank.end()
    });
}

#[test]
fn no_payment_is_lost_or_doubled() {
    rounds(2, &[]);
}

#[test]
fn no_payment_is_lost_or_doubled_by_a_snapshot_of_protected_members() {
    rounds(2, &[0, 1]);
}

#[test]
#[ignore = "takes half an hour: make test-long"]
fn no_payment_is_lost_or_doubled_fifty_times() {
    rounds(50, &[]);
}

/// The daemon of a member dies in a phase of the second snapshot: the others run on, nothing of
/// it is in the store, and all is restored from the first.
fn a_daemon_dies(point: &str) {
    let mut options = bank_options();
    let environment = vec![("FAILPOINTS".to_owned(), format!("{point}=1*off->panic"))];
    let dying = HostOptions { environment, ..with_cluster(daemon()) };
    options.daemons.insert("b".to_owned(), dying);
    play(options, |scene| {
        let first = {
            let bank = Bank::found(scene)?;
            let first = bank.snapshot("a")?;
            let arguments =
                ["cluster", "snapshot", "bank", "--store", &bank.store, "--trace", "0.3"];
            let (_, words) = refusal(scene.host("a")?, &arguments)?;
            says(&words, &["bank1 on host b", "given up", "run on"])?;
            let listed = bank.json("a", &["cluster", "snapshots", "bank"])?;
            ensure!(listed.as_array().map(Vec::len) == Some(1), "a partial snapshot: {listed}");
            for member in [0, 2] {
                bank.report(member).with_context(|| format!("after {point}"))?;
            }
            first
        };
        scene.restart_with("b", with_cluster(daemon()))?;
        let bank = Bank::of(scene);
        prove_refusals(&bank)?;
        bank.restore("b", first, &[])?;
        bank.await_payments()?;
        bank.audit()?;
        bank.end()
    });
}

#[test]
fn a_snapshot_that_fails_leaves_the_others_running() {
    a_daemon_dies("snapshot-taken");
}

#[test]
fn a_snapshot_that_fails_before_its_moment_leaves_the_others_running() {
    a_daemon_dies("snapshot-prepared");
}

#[test]
fn a_snapshot_that_fails_when_it_is_stored_leaves_the_others_running() {
    a_daemon_dies("snapshot-saved");
}

#[test]
fn no_payment_is_lost_by_a_daemon_that_dies_while_its_member_is_loaded() {
    a_member_is_taken_back("rejoin=off");
}

/// Regression: its fellows did not hear it any more, for good, and nobody said so.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_member_that_is_taken_back_and_cannot_join_at_once_joins_later() {
    a_member_is_taken_back("rejoin=return");
}

/// A member stands still for as long as its daemon is away. The others wait for it.
fn a_member_is_taken_back(points: &str) {
    let (mut options, held_store) = (bank_options(), HeldStore::new());
    let (variable, held) = held_store.environment();
    let environment = vec![(variable, format!("{held};{points}"))];
    let held = HostOptions { environment, ..with_cluster(daemon()) };
    options.daemons.insert("b".to_owned(), held);
    play(options, |scene| {
        let number = {
            let bank = Bank::found(scene)?;
            let number = bank.snapshot("a")?;
            bank.end()?;
            bank.restore("a", number, &["--mode", "lazy"])?;
            number
        };
        let orphaned = Orphaned::make(scene, &name(1))?;
        scene.revive("b")?;
        orphaned.await_taken_back(scene, &name(1))?;
        let bank = Bank::of(scene);
        bank.await_payments()?;
        bank.audit()?;
        held_store.let_go()?;
        orphaned.await_whole(scene, &name(1))?;
        bank.await_payments()?;
        bank.audit()?;
        // It is a member as before.
        let next = bank.snapshot("b")?;
        ensure!(next > number, "{next} after {number}");
        bank.end()?;
        bank.restore("b", next, &[])?;
        bank.await_payments()?;
        bank.audit()?;
        bank.end()
    });
}

/// All members pay each other, and are snapshotted together; then the bank ends, and a VM that host b knows first.
fn heard_by_all(bank: &Bank<'_>, b: &HostProcess, vm: &str) -> Result<()> {
    bank.await_payments()?;
    bank.audit()?;
    bank.snapshot("b")?;
    b.call(["vm", "stop", vm, "--force"])?;
    bank.end()
}

/// A member moves to another host, while a second one stays, and back when its QEMU dies: all
/// know where it is.
#[test]
fn a_member_that_fails_over_is_heard_by_all() {
    play(bank_options().calm(), |scene| {
        let bank = Bank::found(scene)?;
        let (vm, a, b) = (name(0), scene.host("a")?, scene.host("b")?);
        bank.protect(0)?;
        hand_over(a, &vm)?;
        bank.await_payments()?;
        await_forgotten_of(a, &vm)?;
        bank.await_payments()?;
        protect(b, &vm, &["--to", "a"])?;
        b.kill_qemu(&vm)?;
        heard_by_all(&bank, b, &vm)
    });
}

/// Regression: a host whose arbiter did not answer at that moment took a member over and cut it off from its fellows, for
/// good and without a word.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_member_that_cannot_join_at_once_joins_later() {
    let mut options = bank_options().calm();
    // The first that joins there is its own.
    fail_at(&mut options, "b", "join-cluster=1*off->4*return->off");
    play(options, |scene| {
        let bank = Bank::found(scene)?;
        let (vm, a, b) = (name(0), scene.host("a")?, scene.host("b")?);
        bank.protect(0)?;
        hand_over(a, &vm)?;
        let is_outside = || -> Result<bool> {
            let status: Value = serde_json::from_str(&b.call(["status", "--json"])?)?;
            Ok(status["problems"].to_string().contains("do not go through the cluster bank"))
        };
        wait_for("host b to say that it is outside", LIMIT, || Ok(is_outside()?.then_some(())))?;
        wait_for("it to have joined", LIMIT, || Ok((!is_outside()?).then_some(())))?;
        heard_by_all(&bank, b, &vm)
    });
}

/// Regression: it was protected there, and cut off from its fellows once that host had taken it over.
#[test]
fn a_member_is_not_protected_to_a_host_without_its_cluster() {
    let mut options = bank_options().calm();
    options.daemons.insert("b".to_owned(), daemon().calm());
    play(options, |scene| {
        let bank = Bank::of(scene);
        let definition = bank.definition(0)?.display().to_string();
        scene.host("a")?.call(["vm", "start", &definition])?;
        let words = refusal(scene.host("a")?, &["protect", &name(0), "--to", "b"])?.1;
        says(&words, &["bank0 is in the cluster bank", "host b", "[cluster.bank]"])?;
        scene.host("a")?.call(["vm", "stop", &name(0), "--force"])?;
        await_forgotten_of(scene.host("a")?, &name(0))
    });
}

/// Waits until a host, which may run others, has no copy of a VM.
fn await_forgotten_of(host: &HostProcess, vm: &str) -> Result<()> {
    wait_for(&format!("host {} to forget {vm}", host.name()), LIMIT, || {
        Ok((!vms(host)?.iter().any(|known| known["name"] == vm)).then_some(()))
    })
}

/// Members that run, or hosts that are unknown: named, and nothing is started.
fn prove_refusals(bank: &Bank<'_>) -> Result<()> {
    let host = bank.scene.host("a")?;
    let store = ["--store", &bank.store];
    let words = |arguments: &[&str]| -> Result<String> {
        Ok(refusal(host, &[arguments, &store].concat())?.1)
    };
    says(&words(&["cluster", "restore", "bank"])?, &["bank0", "host a runs it"])?;
    says(&words(&["cluster", "snapshot", "bank"])?, &["bank1 runs on no host"])?;
    bank.end()?;
    says(&words(&["cluster", "restore", "bank", "--onto", "c"])?, &["host c", "[peers]"])?;
    says(&words(&["cluster", "restore", "bank@9"])?, &["no snapshot 9", "is 1"])?;
    await_forgotten(bank.scene, "a")
}
