//! Snapshots and lazy restores of a real QEMU's memory, with the daemon's side of them in this
//! process. The guest is firmware, which is reset again and again: it writes memory enough.

#[allow(dead_code)] // It has what the other tests need.
mod machine;

use machine::{Machine, Start, deadline, wait_for};
use serde_json::json;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use understudy_memory::{CaptureRequest, Cut, DemandPager, Guard, MAIN_MEMORY, Missing, RamBlock};
use understudy_protocol::{BaseId, PAGE_SIZE, PageIndex};

/// More pages than these are waited for, and then none for so long: the rest is filled in.
const FEW_DEMANDED: u32 = 3;
const DEMANDS_END: Duration = Duration::from_secs(2);

const EVERYTHING: CaptureRequest =
    CaptureRequest { since: None, trace: 0, every_access: false, most_copies: usize::MAX };

struct Guarded {
    machine: Machine,
    main: RamBlock,
    guard: Option<Arc<Guard>>,
}

impl Guarded {
    fn start() -> Guarded {
        let mut machine = Machine::start(Start::default());
        let main = machine.blocks().into_iter().find(|block| block.id() == MAIN_MEMORY).unwrap();
        let link = machine.link();
        let guard = Guard::attach(link.faults(), link.mappings(), &main).unwrap();
        machine.qmp("cont");
        settle(&mut machine);
        Guarded { machine, main, guard: Some(Arc::new(guard)) }
    }

    fn guard(&self) -> &Arc<Guard> {
        self.guard.as_ref().unwrap()
    }

    /// Has the firmware begin anew; it writes.
    fn reset(&mut self) {
        self.machine.qmp("system_reset");
        settle(&mut self.machine);
        assert!(self.guard().written() > 5);
    }

    /// Takes a cut of the machine, and what was in its memory then.
    fn cut(&mut self, request: CaptureRequest) -> (Cut, Vec<u8>) {
        let mut cut = self.guard().arm(request).unwrap();
        self.machine.qmp("stop");
        cut.take().unwrap();
        let truth = content(&self.main);
        self.machine.qmp("cont");
        (cut, truth)
    }
}

/// Waits until the firmware has found nothing to boot, and sleeps. Reset in the midst of its first
/// steps it would go astray, with or without us.
fn settle(machine: &mut Machine) {
    wait_for("the firmware to end", || {
        let registers = json!({ "command-line": "info registers" });
        let registers = machine.qmp_with("human-monitor-command", registers);
        registers.as_str().unwrap().contains("HLT=1")
    });
}

/// All of a machine that stands still.
fn content(block: &RamBlock) -> Vec<u8> {
    let mut bytes = vec![0; block.pages() as usize * PAGE_SIZE];
    block.read(PageIndex(0), &mut bytes).unwrap();
    bytes
}

fn save(cut: &mut Cut, image: &mut [u8]) {
    let mut store = |page: PageIndex, content: &[u8]| {
        image[page.byte_offset() as usize..][..PAGE_SIZE].copy_from_slice(content);
    };
    while let Some(copies) = cut.copy_some().unwrap() {
        copies.pages.iter().for_each(|copy| store(copy.page, &copy.content));
    }
    for first in cut.end_trace() {
        store(first.page, &first.content.expect("it was not written before"));
    }
}

#[test]
fn snapshots_of_a_machine_equal_its_memory_when_it_stood_still() {
    let mut guarded = Guarded::start();
    let mut image = vec![0; guarded.main.bytes() as usize];
    let (base, mut traced) = (BaseId::new_here(), 0);
    for round in 0..8 {
        guarded.reset();
        let trace = [0, 200, usize::MAX][round % 3];
        let since = (round != 5).then_some(base);
        let request = CaptureRequest { since, trace, ..EVERYTHING };
        let (mut cut, truth) = guarded.cut(request);
        guarded.machine.qmp("system_reset");
        let before = image.clone();
        save(&mut cut, &mut image);
        assert!(image == truth, "round {round}");
        settle(&mut guarded.machine);
        traced += usize::from(trace > 0);
        if round % 4 == 3 {
            drop(cut);
            image = before;
        } else {
            cut.commit(base);
        }
    }
    assert!(traced > 0);
    guarded.guard = None;
    assert_eq!(guarded.machine.quit(), Some(0));
}

#[test]
fn what_the_firmware_reads_and_writes_first_is_noticed_and_the_code_that_runs() {
    let mut guarded = Guarded::start();
    guarded.reset();
    let request = CaptureRequest { trace: usize::MAX, ..EVERYTHING };
    let (mut cut, _) = guarded.cut(request);
    guarded.machine.qmp("system_reset");
    settle(&mut guarded.machine);
    while cut.copy_some().unwrap().is_some() {}
    let first = cut.end_trace();
    let written = guarded.guard().written();
    assert!(first.len() as u64 >= written, "{} accessed, {written} written", first.len());
    guarded.guard = None;
    drop(cut);
    assert_eq!(guarded.machine.quit(), Some(0));
}

#[test]
fn a_daemon_that_dies_in_a_snapshot_takes_qemu_along() {
    let mut guarded = Guarded::start();
    guarded.reset();
    let request = CaptureRequest { trace: 1000, ..EVERYTHING };
    let (cut, _) = guarded.cut(request);
    guarded.machine.send("system_reset");
    // As a death does: nobody answers a fault any more.
    std::mem::forget((cut, guarded.guard.take()));
    guarded.machine.drop_link();
    assert_eq!(guarded.machine.wait_for_exit().code(), Some(71));
}

/// The memory of one machine, given to another piece by piece while that runs.
#[test]
fn a_machine_runs_on_memory_that_is_still_to_come() {
    let mut guarded = Guarded::start();
    guarded.reset();
    guarded.machine.qmp("stop");
    let image = content(&guarded.main);
    let state = tempfile::NamedTempFile::new().unwrap();
    let arguments = |key: &str, value: String| json!({ key: value });
    let path = state.path().display().to_string();
    let mut save = arguments("filename", path.clone());
    save["live"] = false.into();
    guarded.machine.qmp_with("xen-save-devices-state", save);

    let mut restored = Machine::start(Start { incoming: true, ..Start::default() });
    let blocks = restored.blocks();
    for (from, to) in guarded.machine.blocks().iter().zip(&blocks) {
        if to.id() != MAIN_MEMORY {
            to.write(PageIndex(0), &content(from)).unwrap();
        }
    }
    let main = blocks.into_iter().find(|block| block.id() == MAIN_MEMORY).unwrap();
    let (demand, demanded) = mpsc::channel();
    let pager = DemandPager::attach(restored.link().faults(), &main, move |page| {
        demand.send(page).unwrap();
        Missing::Coming
    });
    let pager = pager.unwrap();
    let filler = std::thread::spawn(move || {
        let mut pages = 0;
        // Silence says nothing before a busy machine's guest has begun.
        let patience = |pages| if pages > FEW_DEMANDED { DEMANDS_END } else { deadline() };
        while let Ok(page) = demanded.recv_timeout(patience(pages)) {
            let first = PageIndex(page.0 & !7);
            pager.fill(first, &image[first.byte_offset() as usize..][..8 * PAGE_SIZE]).unwrap();
            pages += 1;
        }
        let rest = image.chunks(1 << 20);
        for (first, content) in (0..).step_by((1 << 20) / PAGE_SIZE).zip(rest) {
            pager.fill(PageIndex(first), content).unwrap();
        }
        pager.finish().unwrap();
        (pages, image)
    });
    restored.qmp_with("migrate-incoming", arguments("uri", format!("file:{path}")));
    wait_for("the state to be loaded", || restored.qmp("query-status")["status"] != "inmigrate");
    restored.qmp("cont");
    restored.qmp("system_reset");
    settle(&mut restored);
    let (demanded, _) = filler.join().unwrap();
    assert!(demanded > FEW_DEMANDED, "{demanded} pages were waited for");
    let status = restored.qmp("query-status");
    assert_eq!(status["status"], "running", "{status}");
    // It can be watched at once.
    let link = restored.link();
    drop(Guard::attach(link.faults(), link.mappings(), &main).unwrap());
    assert_eq!(restored.quit(), Some(0));
}
