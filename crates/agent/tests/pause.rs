//! Pauses by the agent in a real QEMU, with the daemon's side of them in this process. The
//! guest is nothing but firmware.

#[allow(dead_code)] // It has what the other tests need.
mod machine;

use machine::{DEADLINE, Machine, Start};
use serde_json::json;
use std::fs;
use understudy_qemu::AgentPauser;
use understudy_qemu::lockstep::LogErrand;
use understudy_qemu::pause::PauseError;
use understudy_qemu::qmp::DeviceState;

/// A machine that is armed for pauses.
struct Armed {
    machine: Machine,
    state: DeviceState,
    pauser: AgentPauser,
}

impl Armed {
    fn start() -> Armed {
        let machine = Machine::start(Start::default());
        assert_eq!(machine.link().hello().missing, None);
        assert_eq!(machine.link().hello().missing_for_lockstep, None);
        let state = DeviceState::create().unwrap();
        let pauser =
            AgentPauser::arm(machine.link().socket(), &state, DEADLINE, Vec::new()).unwrap();
        Armed { machine, state, pauser }
    }

    fn running() -> Armed {
        let mut armed = Armed::start();
        armed.machine.qmp("cont");
        armed
    }

    fn run_state(&mut self) -> String {
        self.machine.qmp("query-status")["status"].as_str().unwrap().to_owned()
    }
}

#[test]
fn a_machine_is_paused_saved_and_runs_again() {
    let mut armed = Armed::running();
    for _ in 0..50 {
        let mut pause = armed.pauser.begin().unwrap().expect("the machine runs");
        let bytes = pause.saved().unwrap();
        pause.resume().unwrap();
        let mut state = Vec::new();
        armed.state.read_first(bytes, &mut state).unwrap();
        assert!(state.starts_with(b"QEVM") && state.len() > 10_000, "{} bytes", state.len());
    }
    assert_eq!(armed.run_state(), "running");
    assert_eq!(armed.machine.quit(), Some(0));
}

#[test]
fn what_the_agent_saves_is_what_qemu_saves() {
    let mut armed = Armed::running();
    let mut pause = armed.pauser.begin().unwrap().expect("the machine runs");
    let bytes = pause.saved().unwrap();
    drop(pause);
    assert_eq!(armed.run_state(), "paused");
    let mut by_agent = Vec::new();
    armed.state.read_first(bytes, &mut by_agent).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("state");
    let arguments = json!({ "filename": file, "live": false });
    armed.machine.qmp_with("xen-save-devices-state", arguments);
    assert!(fs::read(file).unwrap() == by_agent, "the device states differ");
}

#[test]
fn an_abandoned_pause_leaves_the_machine_stopped_and_is_not_the_last() {
    let mut armed = Armed::running();
    drop(armed.pauser.begin().unwrap().expect("the machine runs"));
    assert_eq!(armed.run_state(), "paused");
    assert!(armed.pauser.begin().unwrap().is_none(), "it did not run");
    armed.machine.qmp("cont");
    let mut pause = armed.pauser.begin().unwrap().expect("the machine runs");
    pause.saved().unwrap();
    pause.resume().unwrap();
    assert_eq!(armed.run_state(), "running");
}

/// The bell also rings for probes and for the dirty log.
#[test]
fn a_pause_that_was_refused_is_not_carried_out_at_the_next_ring() {
    let mut armed = Armed::start();
    assert!(armed.pauser.begin().unwrap().is_none(), "it has not run");
    armed.machine.qmp("cont");
    armed.pauser.probe().unwrap();
    assert_eq!(armed.run_state(), "running");
    assert_eq!(armed.pauser.echoed(), Some(true));
}

#[test]
fn a_machine_that_is_not_in_lockstep_refuses_what_only_lockstep_has() {
    let mut armed = Armed::running();
    for errand in [LogErrand::Attach, LogErrand::Detach] {
        assert!(armed.pauser.begin_with(errand).unwrap().is_none());
    }
    assert_eq!(armed.run_state(), "running");
}

#[test]
fn a_machine_that_has_not_run_yet_is_left_alone() {
    let mut armed = Armed::start();
    assert!(armed.pauser.begin().unwrap().is_none());
    assert_eq!(armed.run_state(), "prelaunch");
}

/// A reset that is asked for while the machine is paused over and over is carried out.
#[test]
fn a_reset_is_not_lost_to_a_pause() {
    let mut armed = Armed::running();
    for _ in 0..20 {
        armed.machine.send("system_reset");
        let mut pause = armed.pauser.begin().unwrap().expect("the machine runs");
        pause.saved().unwrap();
        pause.resume().unwrap();
        armed.machine.await_event("RESET");
    }
    assert_eq!(armed.machine.quit(), Some(0));
}

#[test]
fn a_qemu_that_dies_in_a_pause_is_noticed() {
    let mut armed = Armed::running();
    let mut pause = armed.pauser.begin().unwrap().expect("the machine runs");
    pause.saved().unwrap();
    armed.machine.kill();
    let ended = pause.resume();
    assert!(matches!(ended, Err(PauseError::Ended)), "{ended:?}");
    let again = armed.pauser.begin();
    assert!(matches!(again, Err(PauseError::Ended)), "{again:?}");
}

#[test]
fn a_daemon_that_dies_in_a_pause_takes_qemu_along() {
    let mut armed = Armed::running();
    let pause = armed.pauser.begin().unwrap().expect("the machine runs");
    std::mem::forget(pause); // As a death does: nothing is said any more.
    drop(armed.pauser);
    armed.machine.drop_link();
    assert_eq!(armed.machine.wait_for_exit().code(), Some(71));
}

#[test]
fn what_is_no_order_ends_qemu() {
    let mut machine = Machine::start(Start::default());
    machine.send_to_agent(b"rubbish!");
    assert_eq!(machine.wait_for_exit().code(), Some(71));
}
