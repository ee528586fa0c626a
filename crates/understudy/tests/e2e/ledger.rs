//! Frames in flight across a snapshot, by payments that are sent once and that nobody repeats
//! (`guests/tools/src/once.rs`): what was sent before the cut is received before it or in the log,
//! and nothing twice. What loses or doubles a frame must be noticed: mutants prove it.

use crate::cluster::{
    Bank, MEMBERS, PORT, address, ask, bank_of, bank_options, home, name, options_with,
};
use crate::stage::{LIMIT, play};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;
use understudy_lab::{LongLine, Scene, SceneOptions, wait_for};
use understudy_protocol::literal;
use understudy_snapshot::{Member, SnapshotNumber, Store};

/// Payments in a row, every 30 ms, so that some are on their way at any moment.
const BURST: u64 = 2;
/// Milliseconds between two payments of the kind that is repeated, which are beside the point.
const PACE_MS: u32 = 100;
/// Snapshots until one was taken with a payment in flight; with the long line the first has some.
const SNAPSHOTS: usize = 4;
/// Delay of the line from host a to host b while a snapshot is taken. Either b's member takes its
/// own before what host a's sent comes, or so much later that what it sends meanwhile comes to
/// host a behind their moment.
const DELAY: Duration = Duration::from_millis(60);
const LINE_BITS_PER_SECOND: u64 = 1_000_000_000;
/// Payments of a burst that prove that it goes on.
const PAID: u64 = 20;

/// The one who pays, and the one who is paid.
type Pair = (usize, usize);
/// The payments in flight across a snapshot, in the order of the log.
type InFlight = BTreeMap<Pair, Vec<u64>>;

/// The ledger of a bank's payments that are sent once.
#[derive(Debug, Deserialize)]
struct Ledger {
    sent: BTreeMap<String, u64>,
    got: BTreeMap<String, Got>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct Got {
    last: u64,
    holes: Vec<(u64, u64)>,
    again: Vec<u64>,
}

/// Both sides of each pair: the last payment that was sent, and what came.
fn ledgers(scene: &Scene) -> Result<BTreeMap<Pair, (u64, Got)>> {
    let mut pairs: BTreeMap<Pair, (u64, Got)> = BTreeMap::new();
    for own in 0..MEMBERS {
        let text = ask(scene, bank_of(own), "ledger")?;
        let ledger: Ledger = serde_json::from_str(&text).with_context(|| text.clone())?;
        for other in (0..MEMBERS).filter(|other| *other != own) {
            let sent = ledger.sent.get(&format!("{}:{PORT}", address(other))).copied();
            pairs.entry((own, other)).or_default().0 = sent.unwrap_or_default();
            let got = ledger.got.get(&name(other)).cloned();
            pairs.entry((other, own)).or_default().1 = got.unwrap_or_default();
        }
    }
    Ok(pairs)
}

fn burst(scene: &Scene, length: u64) -> Result<()> {
    (0..MEMBERS).try_for_each(|member| {
        let answer = ask(scene, bank_of(member), &format!("once {length}"))?;
        ensure!(answer == "ok", "{} says {answer:?}", name(member));
        Ok(())
    })
}

/// Waits until each bank hears each other one pay.
fn await_bursts(scene: &Scene) -> Result<()> {
    let last =
        || -> Result<Vec<u64>> { Ok(ledgers(scene)?.values().map(|(_, got)| got.last).collect()) };
    let before = last()?;
    wait_for("all banks to pay each other", LIMIT, || {
        let mut pairs = last()?.into_iter().zip(&before);
        Ok(pairs.all(|(now, before)| now >= before + PAID).then_some(()))
    })
}

/// The ledgers once nothing is on its way any more.
fn settled(scene: &Scene) -> Result<BTreeMap<Pair, (u64, Got)>> {
    burst(scene, 0)?;
    wait_for("the last payments to come", LIMIT, || {
        let pairs = ledgers(scene)?;
        Ok(pairs.values().all(|(sent, got)| *sent == got.last).then_some(pairs))
    })
}

/// The payments in the log of a snapshot.
fn in_flight(bank: &Bank<'_>, number: u64) -> Result<InFlight> {
    let store = Store::open(&bank.store)?;
    let manifest = store.snapshot(&literal("bank"), Some(SnapshotNumber(number)))?;
    let mut all = InFlight::new();
    for (to, entry) in manifest.members.iter().enumerate() {
        for frame in store.frames(&store.member(entry)?)? {
            let Member(from) = frame.from;
            if let Some(paid) = payment(&frame.bytes) {
                all.entry((usize::from(from), to)).or_default().push(paid);
            }
        }
    }
    for (pair, paid) in &all {
        let in_order = paid.windows(2).all(|two| two[0] < two[1]);
        ensure!(in_order, "in flight {pair:?}: {paid:?}");
    }
    Ok(all)
}

/// The number of the payment in a frame, if it is one: `once NAME NUMBER` and a newline.
fn payment(frame: &[u8]) -> Option<u64> {
    let at = frame.windows(5).position(|word| word == b"once ")?;
    let text = frame[at..].split(|byte| *byte == b'\n').next()?;
    std::str::from_utf8(text).ok()?.split(' ').nth(2)?.parse().ok()
}

/// Host a reaches host b over the long line.
fn with_line(mut options: SceneOptions) -> SceneOptions {
    let peers = format!("\n[peers]\nb = \"{}\"\n", LongLine::address());
    options.daemons.get_mut("a").expect("a host of every scene").settings += &peers;
    options
}

fn lay_line(scene: &Scene) -> Result<LongLine> {
    LongLine::lay(scene.lab(), "b", LINE_BITS_PER_SECOND)
}

/// Takes snapshots of banks that pay until one has payments in flight.
fn snapshot(bank: &Bank<'_>, line: &LongLine) -> Result<(u64, InFlight)> {
    for taken in 0..SNAPSHOTS {
        await_bursts(bank.scene)?;
        line.set_delay(DELAY);
        let number = bank.snapshot(["a", "b"][taken % 2])?;
        line.set_delay(Duration::ZERO);
        let paid = in_flight(bank, number)?;
        if !paid.is_empty() {
            let count: usize = paid.values().map(Vec::len).sum();
            eprintln!("snapshot {number}: {count} payments in flight");
            return Ok((number, paid));
        }
    }
    bail!("no payment was in flight across {SNAPSHOTS} snapshots");
}

/// The amount that may be lost of what each bank was sent until now: one payment in each pause of
/// its VM. QEMU, when it stops, drops the frame that it has read and that the card has no room for
/// (`net_vm_change_state_handler`); a busy guest has none for moments.
fn may_be_lost(scene: &Scene, member: usize, snapshots: u64) -> Result<u64> {
    let status = scene.host(home(member))?.status(&name(member))?;
    Ok(snapshots + status["checkpoints"].as_u64().unwrap_or_default())
}

/// The payments of a pair that did not come, up to one of them.
fn holes(got: &Got, last: u64) -> impl Iterator<Item = u64> + '_ {
    got.holes.iter().flat_map(|(first, last)| *first..=*last).filter(move |paid| *paid <= last)
}

/// The banks that go on after `snapshots` snapshots: nothing came twice, and nothing is lost but
/// what QEMU drops.
fn prove_undisturbed(scene: &Scene, snapshots: u64) -> Result<()> {
    let pairs = settled(scene)?;
    let mut lost = [0; MEMBERS];
    for (pair, (sent, got)) in &pairs {
        ensure!(*sent > 0, "{pair:?}: nothing was paid");
        ensure!(got.again.is_empty(), "{pair:?}: payments came twice: {got:?}");
        lost[pair.1] += holes(got, *sent).count() as u64;
    }
    for (member, lost) in lost.into_iter().enumerate() {
        let most = may_be_lost(scene, member, snapshots)?;
        ensure!(lost <= most, "{member}: {lost} payments are lost, not {most} at most: {pairs:?}");
    }
    Ok(())
}

/// The banks as of a snapshot: what was in flight has come, and nothing twice. What they pay
/// before all of them run again is lost, as on any network: payments behind the log's last.
fn prove_restored(bank: &Bank<'_>, number: u64, paid: &InFlight) -> Result<()> {
    bank.end()?;
    bank.restore("b", number, &[])?;
    bank.await_payments()?;
    await_bursts(bank.scene)?;
    for (pair, (_, got)) in settled(bank.scene)? {
        ensure!(got.again.is_empty(), "{pair:?}: payments came twice: {got:?}");
        for paid in paid.get(&pair).into_iter().flatten() {
            let lost = holes(&got, *paid).any(|hole| hole == *paid);
            ensure!(!lost, "{pair:?}: payment {paid} was in flight, and is lost: {got:?}");
        }
    }
    bank.audit()
}

/// Snapshots of banks that pay, of which some may be protected.
fn frames_arrive_once(protected: &[usize]) {
    play(with_line(options_with(protected)), |scene| {
        let line = lay_line(scene)?;
        let bank = Bank::found_paying(scene, PACE_MS)?;
        protected.iter().try_for_each(|member| bank.protect(*member))?;
        burst(scene, BURST)?;
        let (number, paid) = snapshot(&bank, &line)?;
        await_bursts(scene)?;
        prove_undisturbed(scene, number)?;
        prove_restored(&bank, number, &paid)?;
        bank.end()
    });
}

#[test]
fn frames_in_flight_arrive_once() {
    frames_arrive_once(&[]);
}

#[test]
fn frames_in_flight_arrive_once_of_protected_members_too() {
    frames_arrive_once(&[0, 1]);
}

/// A mistake that the daemons make, `frames/mutant.rs`.
struct Mutant(tempfile::TempDir);

impl Mutant {
    fn new() -> Mutant {
        Mutant(tempfile::tempdir().expect("a directory for the test"))
    }

    fn options(&self) -> SceneOptions {
        let mut options = with_line(bank_options());
        let point = format!("frames-mutant=return({})", self.file().display());
        for daemon in options.daemons.values_mut() {
            daemon.environment.push(("FAILPOINTS".to_owned(), point.clone()));
        }
        options
    }

    fn file(&self) -> std::path::PathBuf {
        self.0.path().join("mistake")
    }

    /// The story with the mistake must fail, and say that.
    fn caught(&self, mistake: &str, words: &str, story: impl FnOnce() -> Result<()>) -> Result<()> {
        fs::write(self.file(), mistake)?;
        let outcome = story();
        fs::remove_file(self.file())?;
        let error = outcome.err().with_context(|| format!("{mistake}: not noticed"))?;
        let said = format!("{error:#}");
        eprintln!("{mistake}: {said}");
        ensure!(said.contains(words), "{mistake}: without {words:?}: {said}");
        Ok(())
    }
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn frames_that_are_lost_or_doubled_are_noticed() {
    let mutant = Mutant::new();
    play(mutant.options(), |scene| {
        let line = lay_line(scene)?;
        let bank = Bank::found_paying(scene, PACE_MS)?;
        burst(scene, BURST)?;
        let (number, paid) = snapshot(&bank, &line)?;
        let again = || prove_restored(&bank, number, &paid);
        mutant.caught("undelivered", "is lost", again)?;
        mutant.caught("delivered-twice", "came twice", again)?;
        again().context("without a mistake")?;
        burst(scene, BURST)?;
        mutant
            .caught("unlogged", "no payment was in flight", || snapshot(&bank, &line).map(drop))?;
        bank.end()
    });
}
