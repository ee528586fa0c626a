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
use understudy_threads::{Mutex, lock};

/// Time between two looks for the end of the trace.
const LOOK: Duration = Duration::from_millis(20);

/// Time between two looks whether a job goes on.
const WATCH: Duration = Duration::from_millis(500);

/// Callback, called once, for how a job went.
type Answer = Box<dyn FnOnce(anyhow::Result<KeptImage>) + Send>;

/// Keeper of what a backup keeps of one VM.
pub struct Keeper {
    keeping: Mutex<Option<Keeping>>,
    keys: StoreKeys,
    /// Stores that a primary may name.
    stores: Stores,
}

struct Keeping {
    number: SnapshotNumber,
    image: Arc<StillImage>,
    stop: Arc<Stop>,
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.stop.say();
        self.image.end();
    }
}

impl Keeper {
    /// Keeps nothing yet; what it will goes to one of these stores, with its key.
    pub fn new(stores: Stores, keys: StoreKeys) -> Keeper {
        Keeper { keeping: Mutex::new(None), keys, stores }
    }

    /// Image that whoever writes memory has to tell of it; none if nothing is kept.
    pub fn image(&self) -> Option<Arc<StillImage>> {
        lock(&self.keeping).as_ref().map(|keeping| keeping.image.clone())
    }

    /// Keeps what the standby has now, instead of whatever was kept before: nothing is written
    /// at this moment. `directory` is the VM's own. `answer` is called once.
    pub fn keep(
        self: &Arc<Self>,
        order: KeepOrder,
        machine: &Machine,
        directory: &Path,
        device_state: &[u8],
        answer: impl FnOnce(Kept) + Send + 'static,
    ) {
        let (group, number) = (order.group.clone(), order.number);
        let answer: Answer = Box::new(move |image| {
            let image = image.map_err(|error| format!("{error:#}"));
            if let Err(why) = &image {
                warn!("what was kept for snapshot {number} of {group} is given up: {why}");
            }
            answer(Kept { group, number, image });
        });
        if let Err(error) = self.stores.check(&order.store) {
            return answer(Err(error.into()));
        }
        // There before anything is kept: one that cannot be started would leave it so for good.
        let (hand, handed) = mpsc::sync_channel::<(Job, Arc<Stop>, Answer)>(1);
        let keeper = self.clone();
        let started = spawn("keep", move || {
            let Ok((job, stop, answer)) = handed.recv() else { return };
            let answer = Arc::new(Mutex::new(Some(answer)));
            let (watching, watched, about) = (keeper.clone(), stop.clone(), answer.clone());
            let watched = spawn("keep-watch", move || watching.watch(&watched, &about));
            let image = match watched {
                Ok(_) => job.run(&keeper.keys, &stop),
                Err(error) => Err(anyhow::Error::new(error).context("cannot start a thread")),
            };
            // What was given up meanwhile is not said to be there.
            let image = match keeper.is_over(&stop) {
                true => image,
                false => image.and(Err(Stopped.into())),
            };
            let answer = lock(&answer).take();
            if let Some(answer) = answer {
                answer(image);
            }
        });
        if let Err(error) = started {
            return answer(Err(anyhow::Error::new(error).context("cannot start a thread")));
        }
        // The former ends before the next one begins.
        self.end();
        let job = match Job::begin(order, machine, directory, device_state) {
            Ok(job) => job,
            Err(error) => return answer(Err(error)),
        };
        let keeping = Keeping { number, image: job.image.clone(), stop: Arc::default() };
        let stop = keeping.stop.clone();
        *lock(&self.keeping) = Some(keeping);
        // It waits for nothing else.
        let _ = hand.send((job, stop, answer));
    }

    /// Watches a job for as long as it is one. Of one that hangs, in a store on a mount that has gone
    /// say, the answer is that it has failed: its thread may never end.
    fn watch(&self, stop: &Arc<Stop>, answer: &Mutex<Option<Answer>>) {
        let began = Instant::now();
        let now = || Time(began.elapsed());
        let mut standstill = Standstill::new(now());
        let is_this = |keeping: &Keeping| Arc::ptr_eq(&keeping.stop, stop);
        while lock(&self.keeping).as_ref().is_some_and(is_this) {
            thread::sleep(WATCH);
            if !standstill.look(now(), stop.looks()) || !self.is_over(stop) {
                continue;
            }
            let answer = lock(answer).take();
            if let Some(answer) = answer {
                answer(Err(anyhow::anyhow!("it {}", Standstill::words())));
            }
        }
    }

    /// Nothing is kept for this snapshot any more.
    pub fn let_go(&self, number: SnapshotNumber) {
        let former = lock(&self.keeping).take_if(|keeping| keeping.number == number);
        drop(former);
    }

    /// Ends that job, which keeps nothing any more; returns whether it was still to. Another may
    /// have begun.
    fn is_over(&self, stop: &Arc<Stop>) -> bool {
        let former = lock(&self.keeping).take_if(|keeping| Arc::ptr_eq(&keeping.stop, stop));
        former.is_some()
    }

    /// Nothing is kept any more: the VM runs here, or is not followed any more.
    pub fn end(&self) {
        let former = lock(&self.keeping).take();
        drop(former);
    }
}

/// One image on its way to the store.
struct Job {
    order: KeepOrder,
    shape: Shape,
    image: Arc<StillImage>,
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
        let image = Arc::new(StillImage::take(shape.blocks(), traced, most_copies()?)?);
        // A mirror has no snapshot that the next one could build on.
        let mut disks =
            DiskCapture::arm(machine, order.compression, directory, (None, BaseId::new_here()))?;
        disks.take();
        let device_state = device_state.to_vec();
        Ok(Job { order, shape, image, disks, device_state, since: Instant::now() })
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
            match self.image.copy_some()? {
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
        let first = self.image.end_trace();
        put(saving, packers, &first, Lane::WorkingSet)?;
        // What writers have copied at the very end.
        while let Some(pages) = self.image.copy_some()? {
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
