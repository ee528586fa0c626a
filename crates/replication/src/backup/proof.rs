//! The proof that this backup could take over, and what it does while it would and cannot.
//!
//! A backup that follows proves every [`INTERVAL`] that its own disks take what a take-over writes, that
//! it reads the VM's record at the arbiter, of the generation that it follows, and could write the next
//! one, and tells the primary. One that waits for the arbiter asks its former primary, too: the arbiter may have made that one the
//! sole owner meanwhile.

use super::session::Session;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use understudy_arbiter::Unreachable;
use understudy_protocol::{BackupPhase, Ownership};
use understudy_session::backup::Event;

/// The primary believes a proof for 4.5 s ([`crate::primary`]).
const INTERVAL: Duration = Duration::from_secs(2);

/// The reason why a host that ends is no backup.
const ENDS: &str = "it is shutting down";

/// Asks the host that was the primary who owns the VM; none if it does not say.
pub type Former = Box<dyn Fn() -> Option<Ownership> + Send + Sync>;

/// Proves, or asks, for as long as the session lives. An arbiter's storage that hangs holds this
/// thread and nothing else: not the session, whose end must not wait for it.
pub(super) fn run(session: &Weak<Session>) {
    while let Some(present) = session.upgrade() {
        let phase = present.phase();
        match phase {
            BackupPhase::Live | BackupPhase::Discarded => return,
            BackupPhase::Syncing | BackupPhase::Standing => {
                present.group.each(Session::probe_qemu);
                // Those of a first synchronisation are being written.
                if phase == BackupPhase::Standing {
                    present.group.each(Session::prove_disks);
                }
                let (arbiter, membership) = (present.arbiter.clone(), present.membership().clone());
                let primary = present.primary.clone();
                let unconnected = unconnected(&present);
                let stays = present.stays();
                drop(present);
                // A host that ends waits for no arbiter to say so.
                let prove = || membership.prove(&arbiter, &primary);
                let proof = stays.and_then(|()| prove().map_err(|Unreachable(reason)| reason));
                if let Some(session) = session.upgrade() {
                    let stays = session.stays();
                    session.event(Event::Proven(stays.and(proof).and(unconnected)));
                }
            }
            BackupPhase::HandingBack(_) => {}
            BackupPhase::Contesting(_) => {
                present.group.each(Session::probe_qemu);
                let former = present.former.clone();
                drop(present);
                if let (Some(owner), Some(session)) = (former(), session.upgrade()) {
                    session.event(Event::OwnedElsewhere(owner));
                }
            }
        }
        thread::sleep(INTERVAL);
    }
}

/// Sees that all cards are on their bridges, which may have been made anew; an error if one cannot be.
/// The primary is told, and gives no sick guest to such a host. Should it die the VM goes on here all
/// the same: a guest that nobody hears until its bridge is there is more than none.
fn unconnected(leader: &Session) -> Result<(), String> {
    let mut found = Ok(());
    leader.group.each(|member| {
        for port in member.machine().ports() {
            if let Err(error) = port.see_to_bridge()
                && found.is_ok()
            {
                found = Err(format!("a guest's card would not be connected: {error}"));
            }
        }
    });
    found
}

impl Session {
    /// This host is about to end. With its next proof it says so: none is to be handed to it, or called protected, from
    /// then on.
    pub fn end_soon(&self) {
        self.group.ends_soon.store(true, Ordering::Release);
    }

    fn stays(&self) -> Result<(), String> {
        let ends = self.group.ends_soon.load(Ordering::Acquire);
        if ends { Err(ENDS.to_owned()) } else { Ok(()) }
    }

    /// The reason why this host could not take over, as it last found.
    pub fn obstacle(&self) -> Option<String> {
        self.group.core().standby.obstacle()
    }

    /// Describes what this host does with the VM, for people on any host.
    pub fn describe(&self) -> String {
        let primary = &self.primary;
        match self.phase() {
            BackupPhase::Contesting(_) => format!(
                "would take it over from host {primary} and waits for the arbiter ({}): it goes on \
                 by itself once the arbiter answers, and lets go once host {primary} says that it \
                 owns the VM at a later generation",
                self.obstacle().unwrap_or_else(|| "asked just now".to_owned())
            ),
            BackupPhase::HandingBack(reason) => format!(
                "won it, could not start it ({reason}), and hands it back to host {primary} as soon as \
                 the arbiter answers"
            ),
            _ => format!("stands by for host {primary}"),
        }
    }
}

/// The thread's body, for a session that has just begun.
pub(super) fn body(session: &Arc<Session>) -> impl FnOnce() + Send + 'static {
    let session = Arc::downgrade(session);
    move || run(&session)
}
