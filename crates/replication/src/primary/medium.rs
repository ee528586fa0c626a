//! A medium is changed while the VM is protected: the backup is asked first, then told with the
//! epoch in which the guest gets it.

use super::send::Outgoing;
use super::session::Session;
use crate::medium::{Medium, MediumAnswer, MediumRefused, is_locked};
use crate::messages::{Piece, ToBackup};
use anyhow::bail;
use crossbeam_channel::RecvTimeoutError;
use std::time::{Duration, Instant};
use understudy_protocol::{HostName, PrimaryPhase};

/// Time that a backup may take to read a medium: a DVD from a slow disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// Time that it may take until the epoch of the change is committed.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two looks whether protection has ended.
const LOOK: Duration = Duration::from_millis(50);

impl Session {
    /// The backup says whether it has a medium.
    pub(super) fn medium_answered(&self, answer: MediumAnswer) {
        self.present.lock().awaited.medium.answered(answer);
    }

    /// Changes a medium on both hosts. Returns when the backup has it, or protection has ended; one
    /// caller at a time.
    pub fn change_medium(
        &self,
        medium: &Medium,
        opened: &understudy_machine::Medium,
        force: bool,
    ) -> anyhow::Result<()> {
        self.ask_for_medium(medium)?;
        let machine = self.machine();
        let mut monitor = machine.monitor();
        // No epoch ends while the monitor is held: the change is in this one.
        if let Some(references) = &self.references {
            references.forget_disk(medium.drive);
        }
        let changed = machine.change_medium(&mut monitor, opened, force);
        if changed.as_ref().is_err_and(is_locked) {
            return changed;
        }
        let told = match &changed {
            Ok(()) => medium.clone(),
            Err(_) => Medium { drive: medium.drive, file: None },
        };
        let epoch = self.running();
        self.outbox.put_now(Outgoing::Piece(epoch, Piece::Medium(told)));
        drop(monitor);
        self.group.ring();
        let committed =
            self.wait_for_phase(COMMIT_TIMEOUT, |_| self.has_committed(epoch) || self.is_over());
        changed?;
        let (Ok(phase) | Err(phase)) = committed;
        check_kept(self.has_committed(epoch), &phase, &self.peer)
    }

    fn ask_for_medium(&self, medium: &Medium) -> anyhow::Result<()> {
        let Some(answers) = self.present.lock().awaited.medium.ask() else {
            let why = format!(
                "host {} has not answered yet whether it has the medium that it was asked for before: try again in a while",
                self.peer
            );
            return Err(MediumRefused(why).into());
        };
        self.say(&ToBackup::MediumAsked(medium.clone()))?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match answers.recv_timeout(LOOK) {
                Ok(MediumAnswer::Ready) => return Ok(()),
                Ok(MediumAnswer::Refused(why)) => {
                    let why = format!("host {} refuses: {why}", self.peer);
                    return Err(MediumRefused(why).into());
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the session has ended"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.is_over() || Instant::now() > deadline {
                let why = format!("host {} does not say whether it has the medium", self.peer);
                return Err(MediumRefused(why).into());
            }
        }
    }
}

/// Checks that the guest has its new medium wherever it goes on: its backup has it, or there is none any more.
fn check_kept(has_committed: bool, phase: &PrimaryPhase, peer: &HostName) -> anyhow::Result<()> {
    match phase {
        _ if has_committed => Ok(()),
        PrimaryPhase::Alone(_) => Ok(()),
        PrimaryPhase::Halted(reason) => bail!(
            "this copy has ended ({reason}), and if host {peer} runs the VM it has the medium of before: change it there"
        ),
        phase => bail!("it is changed here, and not yet on host {peer}: {phase}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    /// Its operator heard that it was changed, and the VM ran on the other host with the former one.
    #[test]
    fn a_medium_that_only_a_copy_had_that_is_over_is_not_said_to_be_changed() {
        let b = literal("b");
        let words = |phase| check_kept(false, &phase, &b).map_err(|error| error.to_string());
        let halted = || PrimaryPhase::Halted("host b has it".to_owned());
        let lost = words(halted()).unwrap_err();
        assert!(lost.contains("if host b runs the VM it has the medium of before"), "{lost}");
        let late = words(PrimaryPhase::Contesting("it is silent".to_owned())).unwrap_err();
        assert!(late.contains("not yet on host b"), "{late}");
        assert_eq!(words(PrimaryPhase::Alone(Some("it is silent".to_owned()))), Ok(()));
        assert!(check_kept(true, &halted(), &b).is_ok(), "it went over with the guest");
    }
}
