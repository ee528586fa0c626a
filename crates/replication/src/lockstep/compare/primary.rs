//! The primary's side: it stands still for a moment, twice for each place, and asks.
//!
//! At the first stop it is read what is compared, so that is known afterwards which pages have
//! not changed since, and the disks' extents are in this host's memory. At the second one the
//! place of the comparison is. The place goes to the backup before any log from behind it: the
//! log's thread takes the message after it has read the log ([`Comparer::take`]), and waits
//! while one is being made.
//!
//! [`Comparer::take`]: super::comparer::Comparer::take

use super::{all_spots, checksum, read, sample, sizes};
use crate::clock;
use crate::lockstep::be_urgent;
use crate::lockstep::primary::Recording;
use crate::messages::ToBackup;
use crate::primary::Session;
use anyhow::{Context, ensure};
use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{debug, warn};
use understudy_lockstep::{Comparison, Inquiry, LogPosition, Place, Reading, Spot, Tally};
use understudy_machine::Machine;
use understudy_protocol::PrimaryPhase;
use understudy_qemu::hold::Hold;
use understudy_qemu::lockstep::LogChannel;
use understudy_report::comparison::words;
use understudy_report::{ComparisonReport, Difference, Part};
use understudy_threads::inherit;

/// The bytes that are read while the guest stands still: some 1 ms.
const HOLD_BYTES: u64 = 4 << 20;

/// A guest that does not come to stand still is left alone: its log has no room.
const HOLD_PATIENCE: Duration = Duration::from_millis(200);

/// Time between the two stops of a place.
const BETWEEN_STOPS: Duration = Duration::from_millis(2);

/// Time between two places: most of the time is the guest's.
const BETWEEN_PLACES: Duration = Duration::from_millis(5);

/// The same when only spots are left that differed: what is under way shall end meanwhile.
const BETWEEN_DOUBTS: Duration = Duration::from_millis(25);

/// A moment at which no disk has a request is tried for so often.
const QUIET_TRIES: u32 = 8;

/// Places that the backup may not have answered for.
pub(super) const MOST_UNANSWERED: usize = 4;

/// A backup that answers nothing for so long does not compare. It may be far behind.
const ANSWER_PATIENCE: Duration = Duration::from_secs(60);

/// The longest wait without another look.
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// The lag above which no sample is taken of a backup.
const MOST_LAG: Duration = Duration::from_secs(1);

/// Time between two samples that are compared, and what a sample has.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
const SAMPLE_PAGES: usize = 256;
const SAMPLE_EXTENTS: usize = 4;

/// Compares as it is asked to, and samples now and then, until protection ends.
pub fn run(session: &Session, machine: &Machine, recording: &Recording) {
    let comparer = recording.comparer();
    be_urgent();
    let mut sampled = Instant::now();
    while is_current(session, recording) {
        if comparer.is_wanted() {
            let compared = compare((session, machine), recording, all_spots(machine));
            if let Err(error) = &compared {
                debug!(vm = %session.vm, "no result of a comparison: {error:#}");
            }
            comparer.tell(compared.map_err(|error| format!("{error:#}")));
            sampled = Instant::now();
        } else if sampled.elapsed() >= SAMPLE_INTERVAL
            && recording.lag() < MOST_LAG
            && may_hold(session, recording)
        {
            let seed = clock::now().0.as_nanos() as u64;
            let spots = sample(&sizes(machine), SAMPLE_PAGES, SAMPLE_EXTENTS, seed);
            if let Err(error) = compare((session, machine), recording, spots.into_iter()) {
                warn!(vm = %session.vm, "no result of a sample of the backup: {error:#}");
            }
            sampled = Instant::now();
        } else {
            comparer.await_change(LONGEST_WAIT);
        }
    }
    comparer.close();
}

/// Whether this is the log that the backup follows.
fn is_current(session: &Session, recording: &Recording) -> bool {
    let current = session.recording();
    !session.is_over() && current.is_some_and(|current| std::ptr::eq(&*current, recording))
}

/// Compares these spots, and gives a backup up that differs.
fn compare(
    (session, machine): (&Session, &Machine),
    recording: &Recording,
    spots: impl Iterator<Item = Spot>,
) -> anyhow::Result<ComparisonReport> {
    let log = machine.log().context("this QEMU does not record")?;
    let comparer = recording.comparer();
    comparer.forget_findings();
    let began = Instant::now();
    let mut run = Run {
        session,
        machine,
        recording,
        log,
        inquiry: Inquiry::new(spots),
        first: None,
        position: 0,
    };
    run.carry_out()?;
    let tally = run.inquiry.tally();
    let report = report_of(machine, &session.peer, tally, began.elapsed());
    let report = ComparisonReport { position: run.position, ..report };
    comparer.count(&report);
    if !report.differences.is_empty() {
        condemn(session, &report);
    }
    Ok(report)
}

/// Tells the backup that it has diverged: it keeps what it has of that, and ends.
fn condemn(session: &Session, report: &ComparisonReport) {
    let reason = format!(
        "the backup has diverged: after {} bytes of log it differs from the primary in {}",
        report.position,
        words(&report.differences)
    );
    warn!(vm = %session.vm, "{reason}");
    session.diverge();
    // Neither waits for the other: the backup may never hear it, and this host's disk may never answer.
    thread::scope(|scope| {
        let noting = thread::Builder::new().name("distrust".to_owned());
        let noting = noting.spawn_scoped(scope, inherit(|| session.note_distrust()));
        tell(session, reason);
        if noting.is_err() {
            session.note_distrust();
        }
    });
}

fn tell(session: &Session, reason: String) {
    fail::fail_point!("condemn", |_| ());
    // If it cannot be sent the receiving thread finds out why.
    let _ = session.say(&ToBackup::Condemn(reason));
}

/// Whether the guest may stand still, and the backup stop, for a comparison.
fn may_hold(session: &Session, recording: &Recording) -> bool {
    session.phase() == PrimaryPhase::Protected
        && !session.was_handed_over()
        && !recording.is_blocked()
}

/// One comparison.
struct Run<'a, Spots: Iterator<Item = Spot>> {
    session: &'a Session,
    machine: &'a Machine,
    recording: &'a Recording,
    log: &'a LogChannel,
    inquiry: Inquiry<Spots>,
    /// Number of the first place.
    first: Option<u64>,
    position: u64,
}

impl<Spots: Iterator<Item = Spot>> Run<'_, Spots> {
    /// Runs until all is compared, or something differs.
    fn carry_out(&mut self) -> anyhow::Result<()> {
        let mut answered = Instant::now();
        while !self.inquiry.is_over() && self.inquiry.tally().differing.is_empty() {
            ensure!(!self.session.is_over(), "protection ended: {:?}", self.session.phase());
            ensure!(is_current(self.session, self.recording), "its log has ended");
            if self.hear()? {
                answered = Instant::now();
                continue;
            }
            ensure!(
                answered.elapsed() < ANSWER_PATIENCE,
                "{} has compared nothing for {} s: is it far behind (`understudy status`)?",
                self.session.peer,
                ANSWER_PATIENCE.as_secs()
            );
            if self.inquiry.unanswered() >= MOST_UNANSWERED
                || !may_hold(self.session, self.recording)
            {
                self.rest(LONGEST_WAIT);
                continue;
            }
            let pause = if self.inquiry.only_again() { BETWEEN_DOUBTS } else { BETWEEN_PLACES };
            let spots = self.inquiry.next(HOLD_BYTES);
            if spots.is_empty() {
                self.rest(LONGEST_WAIT);
                continue;
            }
            match self.ask(&spots)? {
                Some(place) => {
                    self.first.get_or_insert(place.number);
                    self.inquiry.asked(place.number, spots);
                    self.position = place.position.0;
                }
                None => self.inquiry.put_back(spots),
            }
            self.rest(pause);
        }
        Ok(())
    }

    /// Takes an answer, if there is one.
    fn hear(&mut self) -> anyhow::Result<bool> {
        let Some(findings) = self.recording.comparer().next_findings() else { return Ok(false) };
        if self.first.is_none_or(|first| findings.number < first) {
            // An answer to a comparison that was given up.
            return Ok(true);
        }
        for found in &findings.differences {
            debug!(vm = %self.session.vm, "comparison {}: {found:?}", findings.number);
        }
        self.inquiry.heard(&findings)?;
        Ok(true)
    }

    fn rest(&self, longest: Duration) {
        self.recording.comparer().await_findings(longest);
    }

    /// Has the backup compare these. None if the guest did not stand still.
    fn ask(&self, spots: &[Spot]) -> anyhow::Result<Option<Place>> {
        let Some((before, former)) = self.look(spots)? else { return Ok(None) };
        thread::sleep(BETWEEN_STOPS);
        let Some(hold) = self.quiet_hold()? else { return Ok(None) };
        let at = hold.at();
        // Before the guest goes on: no log from behind the place is sent before this is done.
        let announcing = self.recording.comparer().announce();
        let now = self.read(spots)?;
        let lasted = hold.lasts();
        drop(hold);
        if !lasted {
            return Ok(None);
        }
        let moved = at.position > former;
        let reading = |((&spot, now), before): ((&Spot, &Vec<u8>), &Vec<u8>)| Reading {
            spot,
            checksum: checksum(now),
            is_steady: moved && now == before,
        };
        let place = Place {
            number: at.number,
            position: LogPosition(at.position),
            instructions: at.instructions,
            disk_requests: at.disk_requests,
        };
        let readings = spots.iter().zip(&now).zip(&before).map(reading).collect();
        announcing.done(Comparison { place, readings });
        Ok(Some(place))
    }

    /// The first stop: what the memory has, and where that is in the log. What is read of disks
    /// here does not count: it is in this host's memory afterwards.
    fn look(&self, spots: &[Spot]) -> anyhow::Result<Option<(Vec<Vec<u8>>, u64)>> {
        for &spot in spots.iter().filter(|spot| matches!(spot, Spot::Extent { .. })) {
            read(self.machine, spot, &mut Vec::new())?;
        }
        let Some(hold) = self.log.hold(HOLD_PATIENCE)? else { return Ok(None) };
        let content = self.read(spots)?;
        Ok(hold.lasts().then_some((content, hold.at().position)))
    }

    /// A hold while no disk works, as far as can be seen from here.
    fn quiet_hold(&self) -> anyhow::Result<Option<Hold<'_>>> {
        let mut tries = 1;
        loop {
            let hold = self.log.hold(HOLD_PATIENCE)?;
            let works = self.machine.disks().iter().any(|disk| disk.has_requests());
            if !works || tries == QUIET_TRIES || hold.is_none() {
                return Ok(hold);
            }
            drop(hold);
            tries += 1;
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn read(&self, spots: &[Spot]) -> anyhow::Result<Vec<Vec<u8>>> {
        let content = |&spot: &Spot| {
            let mut content = Vec::with_capacity(spot.bytes() as usize);
            read(self.machine, spot, &mut content)?;
            Ok(content)
        };
        spots.iter().map(content).collect()
    }
}

/// The report of this machine's comparison.
fn report_of(machine: &Machine, peer: &str, tally: &Tally, time: Duration) -> ComparisonReport {
    let named =
        |spots: &BTreeSet<Spot>| spots.iter().map(|&spot| difference(machine, spot)).collect();
    ComparisonReport {
        vm: machine.definition().name.to_string(),
        peer: peer.to_owned(),
        pages: tally.pages,
        extents: tally.extents,
        places: tally.places,
        position: 0,
        passed: tally.passed,
        seconds: time.as_secs_f64(),
        differences: named(&tally.differing),
        undecided: named(&tally.undecided),
    }
}

fn difference(machine: &Machine, spot: Spot) -> Difference {
    let of = match spot {
        Spot::Page { block, .. } => {
            let block = machine.blocks().get(usize::from(block));
            Part::Memory(block.map_or_else(String::new, |block| block.name().to_owned()))
        }
        Spot::Extent { disk, .. } => Part::Disk(disk),
    };
    Difference { of, offset: spot.offset(), bytes: spot.bytes() }
}
