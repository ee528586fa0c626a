//! The questions to the backup beside the epochs, and who waits for its answers: one of each kind.

use super::keep::Keeping;
use crate::medium::MediumAnswer;
use crossbeam_channel::Sender;

#[derive(Default)]
pub(super) struct Awaited {
    /// An epoch whose image the backup is to keep.
    pub keeping: Keeping,
    /// Channel for its answer about a medium.
    pub medium: Option<Sender<MediumAnswer>>,
}
