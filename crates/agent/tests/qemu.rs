//! The agent in a real QEMU, with the daemon's side of it in this process. The guest is
//! nothing but firmware: SeaBIOS runs, and writes to memory enough.

#[allow(dead_code)] // It has what the other tests need.
mod machine;

use machine::{DEADLINE, Machine, Start, wait_for};
use std::process::Command;
use understudy_memory::{
    CapturedChunk, DirtySet, DirtyTracker, MAIN_MEMORY, MemoryError, PageStaging, RamBlock,
    Reprotect, StagingPool, capture,
};
use understudy_protocol::{PAGE_SIZE, PageIndex};

/// Every page of every block, read from the stopped machine.
fn content(blocks: &[RamBlock]) -> Vec<Vec<u8>> {
    let read = |block: &RamBlock| {
        let mut bytes = vec![0; block.pages() as usize * PAGE_SIZE];
        block.read(PageIndex(0), &mut bytes).unwrap();
        bytes
    };
    blocks.iter().map(read).collect()
}

/// Tracks a machine from its first instruction on, and rebuilds all its memory from what
/// was captured.
fn memory_is_rebuilt_from_captures(display: &str) {
    let mut machine = Machine::start(Start { display, ..Start::default() });
    let blocks = machine.blocks();
    let names: Vec<_> = blocks.iter().map(RamBlock::name).collect();
    assert!(names.contains(&"pc.bios") && names.contains(&"/rom@etc/acpi/tables"), "{names:?}");
    assert_eq!(names.contains(&"0000:00:01.0/vga.vram"), display == "std", "{names:?}");

    let userfaultfd = machine.link().userfaultfd().clone();
    let mut tracker =
        DirtyTracker::attach(machine.link().pid(), userfaultfd, &blocks, Reprotect::AtOnce)
            .unwrap();
    tracker.arm().unwrap();
    let mut replica = content(&blocks); // The machine has not run yet.
    let mut staging = PageStaging::new(StagingPool::new(1 << 20).unwrap());
    let mut dirty = DirtySet::new();
    let mut main_pages = 0;

    machine.qmp("cont");
    for _ in 0..20 {
        let before = main_pages;
        wait_for("the firmware to write memory", || {
            tracker.scan(&mut dirty).unwrap();
            let main = dirty.runs().iter().filter(|run| run.block == MAIN_MEMORY);
            main_pages += main.map(|run| run.count).sum::<u64>();
            capture(&blocks, &dirty, &mut staging).unwrap();
            // SeaBIOS ends up waiting with hardly a write, so later epochs may be empty.
            main_pages > before || main_pages > 100
        });
    }
    machine.qmp("stop");
    tracker.scan(&mut dirty).unwrap();
    capture(&blocks, &dirty, &mut staging).unwrap();
    for page in staging.take().chunks.iter().flat_map(CapturedChunk::pages) {
        let at = blocks.iter().position(|block| block.id() == page.block).unwrap();
        let offset = page.index.byte_offset() as usize;
        replica[at][offset..offset + PAGE_SIZE].copy_from_slice(page.bytes);
    }

    for ((block, now), rebuilt) in blocks.iter().zip(content(&blocks)).zip(&replica) {
        assert!(now == *rebuilt, "RAM block {} differs", block.name());
    }
    // QEMU itself is well: it leaves on request, in order.
    tracker.detach().unwrap();
    machine.qmp("cont");
    assert_eq!(machine.quit(), Some(0));
}

#[test]
fn memory_of_a_machine_without_display_is_rebuilt_from_captures() {
    memory_is_rebuilt_from_captures("none");
}

#[test]
fn memory_of_a_machine_with_vga_is_rebuilt_from_captures() {
    memory_is_rebuilt_from_captures("std");
}

#[test]
fn closing_the_daemons_side_ends_qemu() {
    let mut machine = Machine::start(Start::default());
    machine.qmp("cont");
    machine.drop_link();
    let status = machine.wait_for_exit();
    assert_eq!(status.code(), Some(71), "{status}");
}

#[test]
fn closing_the_daemons_side_ends_a_stopped_qemu_with_a_tracker_attached() {
    let mut machine = Machine::start(Start::default());
    let blocks = machine.blocks();
    let userfaultfd = machine.link().userfaultfd().clone();
    let mut tracker =
        DirtyTracker::attach(machine.link().pid(), userfaultfd, &blocks, Reprotect::AtOnce)
            .unwrap();
    tracker.arm().unwrap();
    machine.drop_link();
    assert_eq!(machine.wait_for_exit().code(), Some(71));
    let scanned = tracker.scan(&mut DirtySet::new());
    assert!(matches!(scanned, Err(MemoryError::QemuGone { .. })), "{scanned:?}");
}

#[test]
fn auxiliary_blocks_can_be_written_for_a_warm_backup() {
    let mut machine = Machine::start(Start { incoming: true, ..Start::default() });
    let blocks = machine.blocks();
    let main = blocks.iter().find(|block| block.id() == MAIN_MEMORY).unwrap();
    let mut content = DirtySet::new();
    main.add_content_to(&mut content).unwrap();
    assert!(content.is_empty(), "a waiting QEMU leaves main memory alone: {content:?}");

    let bios = blocks.iter().find(|block| block.name() == "pc.bios").unwrap();
    let page = [0xa5; PAGE_SIZE];
    bios.write(PageIndex(1), &page).unwrap();
    let mut read_back = [0; PAGE_SIZE];
    bios.read(PageIndex(1), &mut read_back).unwrap();
    assert_eq!(read_back, page);
    assert_eq!(machine.quit(), Some(0));
}

#[test]
fn without_a_daemon_qemu_does_not_start() {
    let output = Command::new("qemu-system-x86_64")
        .arg("--version")
        .env("LD_PRELOAD", machine::agent_library())
        .env("UNDERSTUDY_AGENT", "/nonexistent/agent.sock")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(70));
    assert!(output.stdout.is_empty());
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("/nonexistent/agent.sock"), "{message}");
}

#[test]
fn without_the_variable_the_agent_does_nothing() {
    let output = Command::new("qemu-system-x86_64")
        .arg("--version")
        .env("LD_PRELOAD", machine::agent_library())
        .env_remove("UNDERSTUDY_AGENT")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_silent_agent_is_reported_at_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.sock");
    let listener = understudy_memory::agent::AgentListener::bind(&path).unwrap();
    let deadline = std::time::Instant::now() + DEADLINE / 100;
    let error = listener.accept(deadline).unwrap_err().to_string();
    assert!(error.contains("did not connect"), "{error}");
    drop(listener);
    assert!(!path.exists());
}
