//! Frames between the members of a cluster, on whatever hosts, and those of them that are in
//! flight across a snapshot (docs/cluster.md, "Frames between members").
//!
//! Whoever starts or restores a member's VM calls [`join`]. From then on what its guest
//! sends to other members goes in envelopes with its colour: to a member on this host from
//! queue to queue, to another host over a connection of its own for each direction. It waits
//! for its epoch's commit like all output, so a member may be protected; what it receives is to
//! it what comes from any client.
//!
//! Whoever takes snapshots does this for each member:
//!
//! ```text
//! coordinator says TAKE ─▶ Seat::take ─▶ CutListener::take ◀─ a frame from behind the cut
//!                          pause the VM; Seat::taken before it goes on
//!                          CutListener::log_complete ─▶ Seat::log ─▶ Store::put_frames
//! coordinator says COMMIT or ABANDON ─▶ Seat::over
//! ```
//!
//! and after a restore, once the machine is there and before it goes live: [`join`]
//! with a greater incarnation, then [`Seat::deliver`].

mod attested;
mod batch;
mod incoming;
mod mutant;
mod network;
mod outgoing;
mod roster;
mod seat;

use attested::Word;
pub(crate) use incoming::serve;
pub(crate) use network::Network;
pub(super) use network::listed;
pub use seat::Seat;
use std::thread::Builder;
use tracing::warn;
use understudy_protocol::{HostName, VmName};

use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use understudy_machine::Machine;
use understudy_protocol::Generation;
use understudy_snapshot::{Incarnation, Member, SnapshotNumber};

/// Time after which it is looked again whether members are gone and whether there are new hosts.
const LOOK: Duration = Duration::from_millis(500);
/// Number of looks after which an arbiter that was silent is asked again.
const ASKED_AGAIN: u32 = 8;

/// Listener by which the driver of a member's snapshots is told by its cut. Called on threads that
/// carry frames, under a VM's lock, too: it must not wait, nor look at the VM.
pub trait CutListener: Send + Sync {
    /// The VM is to be paused for this snapshot, by the coordinator's word or because another
    /// member has taken it already. Once for each snapshot. If nobody has prepared it here,
    /// nothing is to be done: its end is on the way.
    fn take(&self, number: SnapshotNumber);

    /// [`Seat::log`] is complete.
    fn log_complete(&self, number: SnapshotNumber);
}

/// A VM that becomes a member of a cluster.
pub struct Joining {
    /// The members' names, in the same order on all hosts.
    pub members: Vec<VmName>,
    /// Member that it is.
    pub member: Member,
    /// Generation in which this host owns the VM.
    pub generation: Generation,
    /// Incarnation: how often the cluster was restored.
    pub incarnation: Incarnation,
    /// The cluster's last snapshot: the one it was restored from, or the last one begun.
    pub number: SnapshotNumber,
    /// Receiver of the cut's events, which takes the member's snapshots.
    pub listener: Arc<dyn CutListener>,
}

/// The machine, which does not run yet or runs here, is a member from now on, until its
/// ports are gone. Joining once more, with whatever number, replaces what was.
///
/// # Errors
/// If the cluster lives a later incarnation on this host.
pub(super) fn join(
    host: &Arc<Host>,
    network: Arc<Network>,
    machine: &Machine,
    joining: Joining,
) -> anyhow::Result<Seat> {
    let member = joining.member;
    network.join(machine, joining)?;
    tend(&Arc::downgrade(host), &network);
    Ok(Seat::new(network, member))
}

/// Looks after a network until no member of it is left here.
fn tend(host: &Weak<Host>, network: &Arc<Network>) {
    if std::mem::replace(&mut network.state().tended, true) {
        return;
    }
    let (host, network) = (host.clone(), network.clone());
    // Of all members, and so of none: it must not end with one of them.
    let tending = Builder::new().name("fabric".to_owned());
    let tended = network.clone();
    let started = tending.spawn(move || {
        for looks in (0..ASKED_AGAIN).cycle() {
            let Some(alive) = host.upgrade() else { break };
            if looks == 0 {
                network.ask_again(&Word::of(&alive));
            }
            let known = alive.known_hosts();
            let own = alive.config.name.clone();
            drop(alive);
            let peers = known.into_keys().filter(|peer| *peer != own);
            if !look(&host, &network, peers) {
                return;
            }
            thread::sleep(LOOK);
        }
        network.state().end();
    });
    if let Err(error) = started {
        warn!("members of a group on other hosts are not reached: cannot start a thread: {error}");
        tended.state().tended = false;
    }
}

/// Whether there is still something to look after.
fn look(host: &Weak<Host>, network: &Arc<Network>, peers: impl Iterator<Item = HostName>) -> bool {
    let mut state = network.state();
    state.reap();
    if state.locals.is_empty() {
        state.end();
        return false;
    }
    for peer in peers {
        if let Some(way) = state.new_way(&peer) {
            let (host, network) = (host.clone(), network.clone());
            let (out, spare) = (Builder::new().name("fabric-out".to_owned()), way.clone());
            if let Err(error) = out.spawn(move || outgoing::run(&host, &network, &way, &peer)) {
                warn!("a host's members are not reached: cannot start a thread: {error}");
                spare.end();
            }
        }
    }
    true
}
