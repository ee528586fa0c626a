//! Image of a protected VM on its backup at the end of an epoch, stored for a snapshot while
//! later epochs are applied. The guest does not notice, and no acknowledgement waits.

use crate::disk::DiskCapture;
use crate::memory::{Pace, Saving, most_copies, most_traced};
use crate::messages::{KeepOrder, Kept, KeptImage};
use crate::part::Shape;
use crate::store_keys::{StoreKeys, Stores};
use crate::upload::Upload;
use crate::{Stop, Stopped};
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_machine::Machine;
use understudy_memory::{MAIN_MEMORY, StillImage, StillPage};
use understudy_protocol::{BaseId, BlockId, Time};
use understudy_snapshot::{
    AreaMap, Lane, Packer, Page, SnapshotNumber, Standstill, WorkingSet, working_set_size,
};
use understudy_threads::spawn;

/// Time between two looks for the end of the trace.
const LOOK: Duration = Duration::from_millis(20);

/// Time between two looks whether a job goes on.
const WATCH: Duration = Duration::from_millis(500);

/// Callback for how a job went. Called once: by the job, or by whoever has given it up.
type Answer = Arc<dyn Fn(anyhow::Result<KeptImage>) + Send + Sync>;

/// What a backup needs to keep an image of a VM.
pub struct Keeper {
    keys: StoreKeys,
    /// Stores that a primary may name.
    stores: Stores,
}

impl Keeper {
    /// What is kept goes to one of these stores, with its key.
    pub fn new(stores: Stores, keys: StoreKeys) -> Keeper {
        Keeper { keys, stores }
    }

    /// Keeps what the standby has now: nothing is written at this moment, and nothing else is kept of it.
    /// `directory` is the VM's own. `answer` is called once.
    pub fn keep(
        &self,
        order: KeepOrder,
        machine: &Machine,
        directory: &Path,
        device_state: &[u8],
        answer: impl Fn(Kept) + Send + Sync + 'static,
    ) -> Option<Arc<KeptJob>> {
        let (group, number) = (order.group.clone(), order.number);
        let answer: Answer = Arc::new(move |image| {
            let image = image.map_err(|error| format!("{error:#}"));
            if let Err(why) = &image {
                warn!("what was kept for snapshot {number} of {group} is given up: {why}");
            }
            answer(Kept { group: group.clone(), number, image });
        });
        match self.begin(order, machine, directory, device_state, answer.clone()) {
            Ok(kept) => Some(kept),
            Err(error) => {
                answer(Err(error));
                None
            }
        }
    }

    fn begin(
        &self,
        order: KeepOrder,
        machine: &Machine,
        directory: &Path,
        device_state: &[u8],
        answer: Answer,
    ) -> anyhow::Result<Arc<KeptJob>> {
        self.stores.check(&order.store)?;
        // There before anything is kept: one that cannot be started would leave it so for good.
        let (hand, handed) = mpsc::sync_channel::<Job>(1);
        let keys = self.keys.clone();
        let job = move || {
            if let Ok(job) = handed.recv() {
                job.carry_out(&keys, &answer);
            }
        };
        spawn("keep", job).context("cannot start a thread")?;
        let job = Job::begin(order, machine, directory, device_state)?;
        let kept = job.kept.clone();
        // It waits for nothing else.
        let _ = hand.send(job);
        Ok(kept)
    }
}

/// What became of a job, which is said once.
const RUNS: u8 = 0;
const ENDED: u8 = 1;
/// It has not moved for long; its thread may never end.
const HUNG: u8 = 2;

/// An image that is kept, on its way to the store.
pub struct KeptJob {
    number: SnapshotNumber,
    image: StillImage,
    stop: Stop,
    fate: AtomicU8,
}

impl KeptJob {
    fn new(number: SnapshotNumber, image: StillImage) -> Arc<KeptJob> {
        let (stop, fate) = (Stop::default(), AtomicU8::new(RUNS));
        Arc::new(KeptJob { number, image, stop, fate })
    }

    /// The snapshot that it is for.
    pub fn number(&self) -> SnapshotNumber {
        self.number
    }

    /// The image: whoever writes memory has to tell of it.
    pub fn image(&self) -> &StillImage {
        &self.image
    }

    /// Ends it: nothing is kept for this snapshot any more.
    pub fn end(&self) {
        self.end_as(ENDED);
    }

    /// Whether it has ended, and needs to be told of nothing.
    pub fn is_over(&self) -> bool {
        self.fate.load(Ordering::Acquire) != RUNS
    }

    /// Returns whether it was still to end.
    fn end_as(&self, fate: u8) -> bool {
        let ended = self.fate.compare_exchange(RUNS, fate, Ordering::AcqRel, Ordering::Acquire);
        // Whoever was first: nothing is read any more as this returns.
        self.stop.say();
        self.image.end();
        ended.is_ok()
    }

    /// The result that is to be told of a job which has done its work; none if that was given up as hung.
    fn settle<T>(&self, image: anyhow::Result<T>) -> Option<anyhow::Result<T>> {
        if self.end_as(ENDED) {
            return Some(image);
        }
        // What was ended meanwhile is not said to be there.
        (self.fate.load(Ordering::Acquire) != HUNG).then(|| image.and(Err(Stopped.into())))
    }

    /// Watches it for as long as it runs. Of one that hangs, in a store on a mount that has gone
    /// say, the answer is that it has failed: its thread may never end.
    fn watch(&self, answer: &Answer) {
        let began = Instant::now();
        let now = || Time(began.elapsed());
        let mut standstill = Standstill::new(now());
        while !self.is_over() {
            thread::sleep(WATCH);
            if standstill.look(now(), self.stop.looks()) && self.end_as(HUNG) {
                answer(Err(anyhow::anyhow!("it {}", Standstill::words())));
            }
        }
    }
}

/// One image on its way to the store.
struct Job {
    order: KeepOrder,
    shape: Shape,
    kept: Arc<KeptJob>,
    disks: DiskCapture,
    device_state: Vec<u8>,
    since: Instant,
}

impl Job {
    fn begin(
        order: KeepOrder,
        machine: &Machine,
        directory: &Path,
        device_state: &[u8],
    ) -> anyhow::Result<Job> {
        let shape = Shape::of(machine);
        let traced = most_traced(machine.ram().pages(), order.trace_ms.into());
        let image = StillImage::take(shape.blocks(), traced, most_copies()?)?;
        let kept = KeptJob::new(order.number, image);
        // A mirror has no snapshot that the next one could build on.
        let mut disks =
            DiskCapture::arm(machine, order.compression, directory, (None, BaseId::new_here()))?;
        disks.take();
        let device_state = device_state.to_vec();
        Ok(Job { order, shape, kept, disks, device_state, since: Instant::now() })
    }

    /// Does it, and says what came of it.
    fn carry_out(self, keys: &StoreKeys, answer: &Answer) {
        let kept = self.kept.clone();
        let (watched, about) = (kept.clone(), answer.clone());
        let watched = spawn("keep-watch", move || watched.watch(&about));
        let image =
            watched.context("cannot start a thread").and_then(|_| self.run(keys, &kept.stop));
        if let Some(image) = kept.settle(image) {
            answer(image);
        }
    }

    fn run(self, keys: &StoreKeys, stop: &Stop) -> anyhow::Result<KeptImage> {
        let compression = self.order.compression;
        let store = keys
            .open(&self.order.store)
            .with_context(|| format!("the backup cannot reach the store {}", self.order.store))?;
        let upload = Upload { store: &store, compression, stop };
        let device_state = upload.blob(&self.device_state)?;
        let mut packers = self.packers();
        let mut saving = Saving::new(upload);
        self.copy(&mut saving, &mut packers, stop)?;
        let queue = self.end_trace(&mut saving, &mut packers, stop)?;
        for block in self.shape.blocks() {
            let packer = packers.remove(&block.id()).context("no such RAM block")?;
            saving.finish(block.id(), packer, &AreaMap::zeros(block.pages()))?;
        }
        saving.end()?;
        stop.check()?;
        let disks = self.disks.save(&store, None, stop)?;
        stop.check()?;
        fail::fail_point!("snapshot-kept");
        let areas = self.shape.put_areas(upload, &saving.areas, &disks.areas)?;
        let traced = queue.len() as u64;
        let working_set = WorkingSet { queue, size: working_set_size(traced, traced) };
        let working_set = upload.blob(&working_set.encode())?;
        let (number, group) = (self.order.number, &self.order.group);
        let took = self.since.elapsed().as_secs_f64();
        info!(traced, "the image for snapshot {number} of {group} is stored after {took:.1} s");
        Ok(KeptImage { areas, device_state, working_set })
    }

    fn packers(&self) -> BTreeMap<BlockId, Packer> {
        self.shape.blocks().iter().map(|block| (block.id(), Packer::new())).collect()
    }

    /// Copies all, and notes first writes for as long as is wanted.
    fn copy(
        &self,
        saving: &mut Saving<'_>,
        packers: &mut BTreeMap<BlockId, Packer>,
        stop: &Stop,
    ) -> anyhow::Result<()> {
        let trace: Duration = self.order.trace_ms.into();
        let mut pace = Pace::from_now();
        loop {
            stop.check()?;
            match self.kept.image.copy_some()? {
                Some(pages) => {
                    put(saving, packers, &pages, Lane::Rest)?;
                    pace.copied(pages.len() as u64);
                }
                None if self.since.elapsed() < trace => thread::sleep(LOOK),
                None => return Ok(()),
            }
        }
    }

    /// Packs what was written first, in its order.
    fn end_trace(
        &self,
        saving: &mut Saving<'_>,
        packers: &mut BTreeMap<BlockId, Packer>,
        stop: &Stop,
    ) -> anyhow::Result<Vec<Page>> {
        let first = self.kept.image.end_trace();
        put(saving, packers, &first, Lane::WorkingSet)?;
        // What writers have copied at the very end.
        while let Some(pages) = self.kept.image.copy_some()? {
            stop.check()?;
            put(saving, packers, &pages, Lane::Rest)?;
        }
        // The other blocks are loaded whole before any start.
        let main = first.iter().filter(|one| one.block == MAIN_MEMORY);
        Ok(main.map(|one| Page { block: one.block, index: one.page }).collect())
    }
}

fn put(
    saving: &mut Saving<'_>,
    packers: &mut BTreeMap<BlockId, Packer>,
    pages: &[StillPage],
    lane: Lane,
) -> anyhow::Result<()> {
    for StillPage { block, page, content } in pages {
        let packer = packers.get_mut(block).context("no such RAM block")?;
        saving.store(packer.put(page.0, content, lane))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Arc<KeptJob> {
        KeptJob::new(SnapshotNumber(7), StillImage::take(&[], 0, 0).unwrap())
    }

    #[test]
    fn an_image_is_said_to_be_there_unless_it_was_ended_before() {
        let done = job();
        assert!(done.settle(Ok(())).unwrap().is_ok() && done.is_over());
        done.end();

        let ended = job();
        ended.end();
        assert!(ended.stop.is_said() && ended.image.copy_some().is_err());
        assert!(ended.settle(Ok(())).unwrap().unwrap_err().is::<Stopped>());
    }

    #[test]
    fn of_a_job_that_hung_nothing_is_said_again() {
        let hung = job();
        assert!(hung.end_as(HUNG) && !hung.end_as(HUNG));
        hung.end();
        assert!(hung.settle(Ok(())).is_none());
    }
}
