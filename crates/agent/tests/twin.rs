//! A checkpoint is the guest's memory: a twin that is built from captures alone is compared with
//! the stopped guest byte by byte, while Linux in it writes without rest.
//!
//! On KVM (`make test-kvm`) it counts as well what the checkpoints do to the guest: page faults
//! that KVM takes, exits, and how many of its mappings are left.

#[allow(dead_code)] // It has what the other tests need.
mod machine;

use machine::linux::boot;
use machine::{Machine, Start, deadline, wait_for};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_machine::{LogTracker, Tracker, main_memory};
use understudy_memory::{
    CapturedChunk, DirtySet, DirtyTracker, PageStaging, RamBlock, Reprotect, StagingPool, capture,
};
use understudy_protocol::{PAGE_SIZE, PageIndex, literal};
use understudy_qemu::pause::AgentPauser;
use understudy_qemu::qmp::DeviceState;

/// File of Debian's package ovmf.
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// Kernel, initial RAM disk, and what the guest needs beside the pages that it writes.
const SYSTEM_MIB: u64 = 192;
/// Pages that are copied at a time, so that the staging memory is bounded.
const PIECE_PAGES: u64 = 4096;
/// Number of checkpoints that the guest has for its mappings to come back, before they are counted.
const WARM_UP: usize = 3;

/// Time between two rounds while a read is waited for, which takes a second.
const BETWEEN_ROUNDS: Duration = Duration::from_millis(100);
/// Time after which no further read comes.
const GIVEN_UP: Duration = Duration::from_secs(5);

#[test]
fn a_checkpoint_by_scans_is_the_guests_memory() {
    compare(scans(), 2_000, 10);
}

#[test]
fn a_checkpoint_by_the_dirty_log_is_the_guests_memory() {
    compare(Way::Log, 2_000, 10);
}

#[test]
#[ignore = "long: a hundred checkpoints of 50 000 pages; `make test-kvm` runs it"]
fn a_hundred_checkpoints_of_a_busy_guest_are_its_memory() {
    compare(Way::Log, 50_000, 100);
}

#[test]
#[ignore = "counts, and asserts nothing that others do not"]
fn counts_of_each_way() {
    for pages in [1_000, 10_000] {
        for way in [Way::Scans(Reprotect::AtOnce), Way::Scans(Reprotect::Runs), Way::Log] {
            compare(way, pages, 10);
        }
    }
}

/// The firmware writes its variables, which lie in a flash of QEMU's, while it boots for the first time.
#[test]
fn a_checkpoint_has_what_the_firmware_wrote_to_its_flash() {
    for way in [scans(), Way::Log] {
        let directory = tempfile::tempdir().unwrap();
        let variables = directory.path().join("variables.fd");
        fs::copy(VARIABLES, &variables).expect("ovmf is installed: run scripts/setup tests");
        let accel = accelerator();
        let start = Start { accel: &accel, uefi: Some((CODE, &variables)), ..Start::default() };
        let mut machine = Machine::start(start);
        let blocks = machine.blocks();
        let (mut tracker, pauser) = track(&machine, way, &blocks);
        let mut twin = Twin::of(&blocks);
        let mut dirty = DirtySet::new();
        let before = fs::read(&variables).unwrap();
        machine.qmp("cont");
        wait_for("the firmware to write its variables", || fs::read(&variables).unwrap() != before);
        let mut pause = pauser.begin().unwrap().expect("the guest runs");
        tracker.scan(&mut dirty).unwrap();
        twin.take(&mut dirty);
        pause.saved().unwrap();
        twin.prove(0);
        pause.resume().unwrap();
        drop(tracker);
        assert_eq!(machine.quit(), Some(0));
    }
}

/// QEMU's AHCI controller tells the guest of a read's end by writes into memory that it has mapped for good, of
/// which no log knows. The firmware reads a disk on it, and does nothing behind the last read.
#[test]
fn what_an_ahci_controller_writes_is_found_by_scans_alone() {
    for (way, finds_all) in [(scans(), true), (Way::Log, false)] {
        let accel = accelerator();
        let start = Start { accel: &accel, slow_disk: true, ..Start::default() };
        let mut machine = Machine::start(start);
        let blocks = machine.blocks();
        let (mut tracker, pauser) = track(&machine, way, &blocks);
        let mut twin = Twin::of(&blocks);
        let mut dirty = DirtySet::new();
        machine.qmp("cont");
        let (mut reads, mut since) = (0, Instant::now());
        wait_for("the firmware to give the disk up", || {
            tracker.scan(&mut dirty).unwrap();
            twin.take(&mut dirty);
            thread::sleep(BETWEEN_ROUNDS);
            let now =
                machine.qmp("query-blockstats")[0]["stats"]["rd_operations"].as_u64().unwrap();
            if now > reads {
                (reads, since) = (now, Instant::now());
            }
            reads > 0 && since.elapsed() > GIVEN_UP
        });
        let mut pause = pauser.begin().unwrap().expect("the guest runs");
        tracker.scan(&mut dirty).unwrap();
        twin.take(&mut dirty);
        pause.saved().unwrap();
        match finds_all {
            true => twin.prove(0),
            false => assert!(twin.differs(), "the log has it: scans are for nothing"),
        }
        pause.resume().unwrap();
        drop(tracker);
        assert_eq!(machine.quit(), Some(0));
    }
}

/// Way in which written pages are found.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// QEMU's dirty log: the daemon's way on KVM.
    Log,
    Scans(Reprotect),
}

/// Scans as the daemon has them.
fn scans() -> Way {
    Way::Scans(if accelerator() == "kvm" { Reprotect::Runs } else { Reprotect::AtOnce })
}

/// The accelerator: that of all tests, where it is set.
fn accelerator() -> String {
    std::env::var("UNDERSTUDY_ACCEL").unwrap_or_else(|_| "tcg".to_owned())
}

/// The tracking of one machine, as the daemon has it; and what pauses it.
fn track(machine: &Machine, way: Way, blocks: &[RamBlock]) -> (Tracker, Arc<AgentPauser>) {
    let (link, state) = (machine.link(), DeviceState::create().unwrap());
    let logged = main_memory(blocks).into_iter().collect();
    let pauser = Arc::new(AgentPauser::arm(link.socket(), &state, deadline(), logged).unwrap());
    let mut tracker = match way {
        Way::Log => {
            let log = LogTracker::begin(&literal("twin"), &pauser, link, blocks).unwrap();
            Tracker::Log(log.expect("QEMU keeps a log"))
        }
        Way::Scans(reprotect) => {
            let (pid, userfaultfd) = (link.pid(), link.userfaultfd().clone());
            let attached = DirtyTracker::attach(pid, userfaultfd, blocks, reprotect);
            Tracker::Scans(attached.unwrap())
        }
    };
    tracker.arm().unwrap();
    (tracker, pauser)
}

/// `checkpoints` times, with at least `pages` written before each.
fn compare(way: Way, pages: u64, checkpoints: usize) {
    let accel = accelerator();
    let mebibytes = SYSTEM_MIB + pages * PAGE_SIZE as u64 / (1 << 20);
    let start = Start { accel: &accel, mebibytes, ..Start::default() };
    let (mut machine, mut console) = boot(start);
    let blocks = machine.blocks();
    let mut counts = Counts::of(machine.link().pid());
    let (mut tracker, pauser) = track(&machine, way, &blocks);
    let mut twin = Twin::of(&blocks);
    let mut dirty = DirtySet::new();
    console.say(&format!("guest-tools dirty {pages} 0 &"));
    for checkpoint in 0..checkpoints {
        // As the daemon does: while the guest runs, then in the pause. The guest writes its pages
        // in turn, so that many are written between the rounds, and during them.
        let mut written = 0;
        counts.before();
        wait_for("the guest to write its pages", || {
            let begun = Instant::now();
            tracker.scan(&mut dirty).unwrap();
            written += dirty.pages();
            twin.take(&mut dirty);
            // On one processor the guest does nothing during a round.
            thread::sleep(begun.elapsed() * 3);
            written >= pages
        });
        let mut pause = pauser.begin().unwrap().expect("the guest runs");
        tracker.scan(&mut dirty).unwrap();
        written += dirty.pages();
        twin.take(&mut dirty);
        pause.saved().unwrap();
        twin.prove(checkpoint);
        counts.after(written, checkpoint >= WARM_UP);
        pause.resume().unwrap();
    }
    println!("{accel}, {way:?}, {pages} pages, {checkpoints} checkpoints: all equal");
    counts.print();
    assert_eq!(machine.quit(), Some(0));
}

/// Copy that a backup would have of the guest's memory.
struct Twin<'a> {
    blocks: &'a [RamBlock],
    content: Vec<Vec<u8>>,
    staging: PageStaging,
    piece: DirtySet,
}

impl<'a> Twin<'a> {
    /// Copies all that is there; the guest may run.
    fn of(blocks: &'a [RamBlock]) -> Twin<'a> {
        Twin {
            blocks,
            content: blocks.iter().map(content).collect(),
            staging: PageStaging::new(StagingPool::new(PIECE_PAGES as usize * PAGE_SIZE).unwrap()),
            piece: DirtySet::new(),
        }
    }

    /// Takes over the pages of `dirty`, as they are now.
    fn take(&mut self, dirty: &mut DirtySet) {
        while !dirty.is_empty() {
            dirty.take(PIECE_PAGES, &mut self.piece);
            capture(self.blocks, &self.piece, &mut self.staging).unwrap();
            for page in self.staging.take().chunks.iter().flat_map(CapturedChunk::pages) {
                let at = self.blocks.iter().position(|block| block.id() == page.block).unwrap();
                let offset = page.index.byte_offset() as usize;
                self.content[at][offset..offset + PAGE_SIZE].copy_from_slice(page.bytes);
            }
        }
    }

    /// Whether the stopped guest's memory is another one.
    fn differs(&self) -> bool {
        self.blocks.iter().zip(&self.content).any(|(block, twin)| content(block) != *twin)
    }

    /// The stopped guest's memory is the same, in every block.
    fn prove(&self, checkpoint: usize) {
        for (block, twin) in self.blocks.iter().zip(&self.content) {
            let now = content(block);
            let pages = now.chunks(PAGE_SIZE).zip(twin.chunks(PAGE_SIZE));
            let other: Vec<_> = pages.enumerate().filter(|(_, (a, b))| a != b).collect();
            let (name, first) = (block.name(), other.first().map(|(page, _)| page));
            assert!(
                other.is_empty(),
                "checkpoint {checkpoint}: {} pages of {name} differ, the first is {first:?}",
                other.len()
            );
        }
    }
}

fn content(block: &RamBlock) -> Vec<u8> {
    let mut bytes = vec![0; block.pages() as usize * PAGE_SIZE];
    block.peek(PageIndex(0), &mut bytes).unwrap();
    bytes
}

/// Counts that KVM has of this machine; none where it is not KVM's.
struct Counts {
    directory: Option<PathBuf>,
    before: BTreeMap<&'static str, u64>,
    /// Sums of all checkpoints that are counted: from one to the next.
    sums: BTreeMap<&'static str, u64>,
    mappings: Vec<(u64, u64)>,
    written: u64,
    checkpoints: u64,
    resumed: Option<BTreeMap<&'static str, u64>>,
}

/// Files of a machine in KVM's directory of debugfs that only grow.
const GROWING: [&str; 6] =
    ["pf_taken", "pf_fixed", "pf_fast", "exits", "remote_tlb_flush", "mmu_cache_miss"];
/// Pages that are mapped now.
const MAPPED: &str = "pages_4k";

impl Counts {
    fn of(pid: i32) -> Counts {
        let prefix = format!("{pid}-");
        let machines = fs::read_dir("/sys/kernel/debug/kvm").into_iter().flatten().flatten();
        let directory = machines.map(|entry| entry.path()).find(|path| {
            path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix))
        });
        Counts {
            directory,
            before: BTreeMap::new(),
            sums: BTreeMap::new(),
            mappings: Vec::new(),
            written: 0,
            checkpoints: 0,
            resumed: None,
        }
    }

    fn look(&self) -> BTreeMap<&'static str, u64> {
        let read = |name: &'static str| {
            let path = self.directory.as_ref()?.join(name);
            Some((name, fs::read_to_string(path).ok()?.trim().parse().ok()?))
        };
        GROWING.into_iter().chain([MAPPED]).filter_map(read).collect()
    }

    /// A checkpoint begins.
    fn before(&mut self) {
        self.before = self.look();
    }

    /// Counts a checkpoint that is over; in it `written` pages were found.
    fn after(&mut self, written: u64, counts: bool) {
        let now = self.look();
        if let Some(resumed) = self.resumed.replace(now.clone()).filter(|_| counts) {
            for name in GROWING {
                let grown = now.get(name).zip(resumed.get(name)).map(|(now, then)| now - then);
                *self.sums.entry(name).or_default() += grown.unwrap_or(0);
            }
            if let Some(mapped) = self.before.get(MAPPED).zip(now.get(MAPPED)) {
                self.mappings.push((*mapped.0, *mapped.1));
            }
            self.written += written;
            self.checkpoints += 1;
        }
    }

    fn print(&self) {
        if self.directory.is_none() || self.checkpoints == 0 {
            return;
        }
        let each = |sum: u64| sum as f64 / self.checkpoints as f64;
        println!(
            "a checkpoint, on average of {}: {:.0} pages written",
            self.checkpoints,
            each(self.written)
        );
        for (name, sum) in &self.sums {
            println!("  {name} {:.1}", each(*sum));
        }
        let (before, after) = self.mappings.iter().fold((0, 0), |(b, a), (x, y)| (b + x, a + y));
        println!("  {MAPPED} before {:.0}, after {:.0}", each(before), each(after));
        let faults = self.sums.get("pf_taken").copied().unwrap_or(0);
        println!("  faults for each page written {:.3}", faults as f64 / self.written as f64);
    }
}
