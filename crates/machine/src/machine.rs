//! A machine on this host: one QEMU with everything around it. The same for a
//! VM that runs and for a standby.

use crate::console::{ConsoleOutput, ConsoleServer};
use crate::custody::Custody;
use crate::doorbell::Doorbell;
use crate::hearing::Hearing;
use crate::home::LocalSockets;
use crate::pause::Pauser;
use crate::process::Process;
use crate::tpm::Tpm;
use crate::watching::Watching;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_disk::{Disk, NbdServer};
use understudy_memory::agent::AgentLink;
use understudy_memory::{DemandPager, GuestRam, Missing, RamBlock};
use understudy_network::{GuestsEnd, NetworkError, NextGuest, Port, Station, Unread};
use understudy_protocol::{CardIndex, PageIndex};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::{self, LogChannel};
use understudy_qemu::qmp::{DeviceState, QmpError};
use understudy_qemu::tsc::TscRate;
use understudy_qemu::{Accelerator, Monitor, VmDefinition, build_id};
use understudy_report::LimitsReport;
use understudy_threads::{Mutex, MutexGuard, RwLock, RwLockReadGuard, lock, spawn};

/// An event that happens to a machine by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// The guest powered off; QEMU stands still.
    PoweredOff {
        /// Whether it did so by itself, and not because its kernel panicked.
        in_order: bool,
    },
    /// QEMU ended, and its last words.
    Died(String),
    /// The guest stands still at this error of one of its disks.
    DiskFailed(String),
    /// A request of the guest failed with this error in lockstep, and it waits for it while it goes
    /// on.
    DiskWithholds(String),
    /// The guest rebooted.
    Rebooted,
    /// The guest's kernel panicked.
    Panicked,
    /// A notice for the user.
    Notice(String),
}

/// Callback for a machine's events.
pub type OnEvent = Arc<dyn Fn(MachineEvent) + Send + Sync>;

/// A QEMU and everything around it. Dropping it ends QEMU.
pub struct Machine {
    pub(crate) definition: VmDefinition,
    pub(crate) machine_type: String,
    pub(crate) accelerator: Accelerator,
    pub(crate) slow: Option<String>,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) blocks: Vec<RamBlock>,
    pub(crate) watching: Watching,
    pub(crate) fittings: RwLock<Fittings>,
    pub(crate) ports: Vec<Arc<Port>>,
    /// The numbers under which QEMU has the other ends of the ports' sockets.
    pub(crate) card_ends: Vec<RawFd>,
    pub(crate) monitor: Mutex<Monitor>,
    pub(crate) device_state: DeviceState,
    pub(crate) pauser: Pauser,
    pub(crate) lockstep: Option<Lockstep>,
    pub(crate) log: Option<LogChannel>,
    pub(crate) local: LocalSockets,
    pub(crate) doorbell: Arc<Doorbell>,
    /// Whether its QEMU waits for a disk that goes away, until it is back.
    pub(crate) awaits_disks: bool,
    /// Another machine has its place.
    pub(crate) retired: AtomicBool,
    /// Its guest stands still, whatever would let it run: another host may have been given the VM.
    pub(crate) held: AtomicBool,
    /// Its guest's last state is on its way to a backup: it does not run on beside that.
    pub(crate) passed_on: AtomicBool,
    pub(crate) process: Arc<Process>,
    /// Its TPM; none, too, of a machine that a daemon before this one has started: it ends with
    /// QEMU.
    pub(crate) tpm: Option<Tpm>,
    pub(crate) on_event: OnEvent,
    // Held open: their ends tell QEMU that this daemon lives.
    pub(crate) agent: AgentLink,
    pub(crate) _hearing: Hearing,
    pub(crate) console_server: Option<ConsoleServer>,
    /// Presence of the machine, last: fields are dropped in order.
    pub(crate) presence: Arc<()>,
}

/// Fittings of a machine as they are now. Nobody waits for anything while he has their lock.
pub(crate) struct Fittings {
    /// The machine's definition, with the media that are in its drives.
    pub definition: Arc<VmDefinition>,
    /// Server of each disk; none only while a medium is changed, or if it could not be.
    pub servers: Vec<Option<NbdServer>>,
    /// Disks and media: replaced one by one, as media are changed.
    pub disks: Vec<Arc<Disk>>,
    /// The ports' sockets to this QEMU, while another one has them.
    pub next_guests: Vec<NextGuest>,
    /// Custodian that stops it should this daemon die, and keeps it for the next one.
    pub custody: Option<Custody>,
}

impl Machine {
    /// The presence of the machine: dead once it is gone with all that it had, not a moment before.
    pub fn presence(&self) -> Weak<()> {
        Arc::downgrade(&self.presence)
    }

    /// The VM as it was when its QEMU was started: all but the media in its drives.
    pub fn definition(&self) -> &VmDefinition {
        &self.definition
    }

    /// The VM as it is on this host.
    pub fn definition_now(&self) -> Arc<VmDefinition> {
        self.fittings().definition.clone()
    }

    /// The versioned machine type.
    pub fn machine_type(&self) -> &str {
        &self.machine_type
    }

    /// The accelerator that executes the guest's instructions.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// The rate of the guest's time stamp counter, on KVM.
    pub fn tsc(&self) -> Option<TscRate> {
        let rate = (self.accelerator == Accelerator::Kvm).then(|| self.monitor().tsc_rate())?;
        let unknown = |error: &QmpError| {
            let vm = &self.definition.name;
            warn!(%vm, "a backup cannot tell whether it has the guest's time stamp counter: {error}");
        };
        rate.inspect_err(unknown).ok().flatten()
    }

    /// The guest's main memory.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// All RAM blocks; a block's id is its place here, the same on both hosts.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// The disks, in the definition's order.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.fittings().disks.clone()
    }

    fn fittings(&self) -> RwLockReadGuard<'_, Fittings> {
        self.fittings.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cards, in the definition's order.
    pub fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    /// The frames of each card that the guest, which stands still, was given and has not read. To
    /// be dropped before it goes on.
    pub fn unread(&self) -> Result<Vec<(CardIndex, Unread)>, NetworkError> {
        let unread = |(port, number): (&Arc<Port>, &RawFd)| {
            let end = GuestsEnd::borrow(self.qemu_pid(), *number)?;
            Ok((port.card(), port.unread(end)))
        };
        self.ports.iter().zip(&self.card_ends).map(unread).collect()
    }

    /// Rings when there is output to release; the session rings it too.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// The monitor; a checkpoint holds it for its length.
    pub fn monitor(&self) -> MutexGuard<'_, Monitor> {
        lock(&self.monitor)
    }

    /// Tells the VM's user something about it.
    pub fn notice(&self, text: String) {
        (self.on_event)(MachineEvent::Notice(text));
    }

    /// Makes errors of its disks, in lockstep, its owner's, and not QEMU's, which would stop the
    /// guest.
    pub fn withhold_disk_errors(&self) {
        for disk in self.disks() {
            let (on_event, index) = (self.on_event.clone(), disk.index());
            disk.withhold_errors(Arc::new(move |error| {
                let words = format!("an error on disk{index}: {error}");
                on_event(MachineEvent::DiskWithholds(words));
            }));
        }
    }

    /// Whether the guest waits for requests that failed.
    pub fn waits_for_disk(&self) -> bool {
        self.disks().iter().any(|disk| disk.withholds_errors())
    }

    /// The reason why this QEMU cannot be in lockstep, by the way it was built; none if it can.
    pub fn lockstep_obstacle(&self) -> Option<String> {
        lockstep::build_obstacle(self.agent.hello())
    }

    /// The reason why pauses go through the monitor and take longer; none if they do not.
    pub fn pause_obstacle(&self) -> Option<&str> {
        self.pauser.obstacle()
    }

    /// The way in which its QEMU was started for lockstep; none if it cannot take part.
    pub fn lockstep(&self) -> Option<&Lockstep> {
        self.lockstep.as_ref()
    }

    /// The way of its log, if its QEMU can take part in lockstep.
    pub fn log(&self) -> Option<&LogChannel> {
        self.log.as_ref()
    }

    /// The unix sockets by which the guest is reached on this host.
    pub fn local_sockets(&self) -> &LocalSockets {
        &self.local
    }

    /// The guest's words on its console, on its way out; none if it has no console.
    pub fn console_output(&self) -> Option<&Arc<ConsoleOutput>> {
        self.console_server.as_ref().map(ConsoleServer::output)
    }

    /// The reason why the guest is slower than its definition let hope.
    pub fn slowness(&self) -> Option<String> {
        self.slow.clone()
    }

    /// QEMU's process.
    pub fn qemu_pid(&self) -> u32 {
        self.process.qemu.pid()
    }

    /// The build of QEMU that runs; none if it has no name.
    pub fn qemu_build(&self) -> Option<String> {
        let program = format!("/proc/{}/exe", self.qemu_pid());
        build_id(Path::new(&program)).ok().flatten()
    }

    /// The most that QEMU may use of this host.
    pub fn limits(&self) -> LimitsReport {
        self.process.limits.report()
    }

    /// The way in which a QEMU that does not run any more ended, for people.
    pub fn last_words(&self) -> String {
        self.process.last_words()
    }

    /// Whether QEMU runs.
    pub fn is_alive(&self) -> bool {
        matches!(self.process.qemu.try_wait(), Ok(None))
    }

    /// Whether the guest powered off. QEMU refuses to go on with it then.
    pub fn is_powered_off(&self) -> bool {
        self.process.powered_off.load(Ordering::Acquire)
    }

    /// Has accesses to missing pages of main memory wait; `demand` is asked for each.
    pub fn page_in(
        &self,
        demand: impl FnMut(PageIndex) -> Missing + Send + 'static,
    ) -> anyhow::Result<DemandPager> {
        Ok(DemandPager::attach(self.agent.faults(), self.main_memory(), demand)?)
    }

    pub(crate) fn main_memory(&self) -> &RamBlock {
        // QEMU's list begins with it; see `launch`.
        &self.blocks[0]
    }

    /// Starts the guest of a standby from `device_state`; its memory and disks
    /// are those of the same epoch. Its clocks go on as if it had run all the time since then,
    /// which is `age`. Nothing leaves it before [`Machine::open_network`].
    pub fn start_standby(&self, device_state: &[u8], age: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        if let Some(agent) = self.pauser.agent() {
            agent.continue_clocks(age);
        }
        for disk in self.disks() {
            disk.set_read_only(false);
        }
        self.device_state.fill(device_state)?;
        self.monitor()
            .go_live(&self.device_state)
            .map_err(|error| self.process.explain(error.into()))?;
        info!(
            vm = %self.definition.name,
            "live after {:.1} ms",
            began.elapsed().as_secs_f64() * 1e3
        );
        Ok(())
    }

    /// The guest runs here, and `stations` behind its cards: its output goes out from here on, behind
    /// `before`, which it sent on its former host. Returns how many of those were sent.
    pub fn open_network(&self, stations: &[Station], before: &[(CardIndex, Vec<u8>)]) -> u64 {
        let mut sent = 0;
        for port in &self.ports {
            port.go_live();
            // First of all, so that what follows finds its way back.
            port.announce(stations);
            let own = before.iter().filter(|(card, _)| *card == port.card());
            sent += own.filter(|(_, frame)| port.resend(frame)).count() as u64;
            port.open_gate();
        }
        sent
    }

    /// Loads the state of a machine whose memory and disks are complete, or come when they are
    /// asked for; the guest stands still. Its QEMU may write the disks from now on.
    pub fn load(&self, device_state: &[u8]) -> anyhow::Result<()> {
        for disk in self.disks() {
            disk.set_read_only(false);
        }
        self.device_state.fill(device_state)?;
        let loaded = self.monitor().load(&self.device_state);
        loaded.map_err(|error| self.process.explain(error.into()))
    }

    /// Makes what its TPM has on this host's disk the TPM's state from now on. To be called once
    /// the machine has the guest's state, or begins with a new one, and its images are known to be
    /// the guest's.
    pub fn settle_tpm(&self) -> anyhow::Result<()> {
        self.tpm.as_ref().map_or(Ok(()), Tpm::settle)
    }

    /// Lets the guest of a loaded machine run; its output goes out from here on.
    pub fn start_loaded(&self) -> anyhow::Result<()> {
        self.monitor().cont().map_err(|error| self.process.explain(error.into()))?;
        self.open_network(&[], &[]);
        Ok(())
    }

    /// Presses the power button.
    pub fn press_power_button(&self) -> anyhow::Result<()> {
        Ok(self.monitor().system_powerdown()?)
    }

    /// Takes ports and disks over from the machine in whose place this one goes on.
    pub fn take_place(&self) {
        self.take_over_ports(Port::hand_over);
    }

    /// The same of a standby's.
    pub fn take_place_aside(&self) {
        self.take_over_ports(Port::attach_next);
    }

    fn take_over_ports(&self, take: impl Fn(&Port, NextGuest)) {
        self.fittings().servers.iter().flatten().for_each(NbdServer::adopt);
        let next_guests = std::mem::take(&mut self.fittings_to_change().next_guests);
        for (port, next) in self.ports.iter().zip(next_guests) {
            take(port, next);
        }
    }

    /// Sets the custody by which the guest, should this daemon die, stands still until the next
    /// one.
    pub fn set_custody(&self, custody: Custody) {
        let former = self.fittings_to_change().custody.replace(custody);
        drop(former);
    }

    /// Ends the custody: the guest ends with this daemon again, as any does.
    pub fn end_custody(&self) {
        // Not under the lock: that takes a moment.
        let custody = self.fittings_to_change().custody.take();
        drop(custody);
    }

    /// Ends this copy for good. Nothing leaves it afterwards.
    pub fn halt(&self) {
        // Not if they are another machine's: it has taken them, or not given them yet.
        if !self.is_retired() && self.fittings().next_guests.is_empty() {
            for port in &self.ports {
                port.shut();
            }
        }
        self.end();
    }

    /// Ends this copy for good; another has its place, and its ports. When this returns QEMU is
    /// gone.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.end();
    }

    /// Whether another machine has its place.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Whether this daemon has ended it.
    pub fn is_halted(&self) -> bool {
        self.process.halted.load(Ordering::Acquire)
    }

    fn end(&self) {
        let halted_before = self.process.halted.swap(true, Ordering::AcqRel);
        if !halted_before {
            self.end_qemu();
        }
    }

    /// Ends QEMU, whose ports are shut, for whoever must not wait until it is gone: it may hang in the
    /// kernel.
    pub fn end_aside(self: &Arc<Self>) {
        let halted_before = self.process.halted.swap(true, Ordering::AcqRel);
        if halted_before {
            return;
        }
        if let Err(error) = self.process.qemu.tell_to_end() {
            warn!(vm = %self.definition.name, "ending QEMU: {error}");
        }
        let machine = self.clone();
        if let Err(error) =
            spawn(format!("end-{}", self.definition.name), move || machine.end_qemu())
        {
            warn!(vm = %self.definition.name, "its QEMU is waited for later: no thread: {error}");
        }
    }

    /// Returns when QEMU is gone.
    fn end_qemu(&self) {
        if let Err(error) = self.process.qemu.kill() {
            warn!(vm = %self.definition.name, "ending QEMU: {error}");
        }
        self.end_custody();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.halt();
    }
}
