//! The failures of this host while its primary is sound.

use understudy_session::backup::Event;

/// The reason why this backup cannot use what came, which is neither the primary's fault nor the
/// connection's: it gives up then, and does not contest the VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum OwnFailure {
    /// A mirror does not hold what the primary's image does, or does not show it.
    #[error("{0}")]
    Mirror(String),
    /// A turn comes for which nothing is there.
    #[error("{0}")]
    Turn(String),
    /// A failure of something else.
    #[error("{0}")]
    Other(String),
}

impl OwnFailure {
    /// The failure that this error is: of something else, unless it says that it is a mirror's.
    pub fn of(error: anyhow::Error) -> OwnFailure {
        error.downcast().unwrap_or_else(OwnFailure::other)
    }

    /// What it is to the session.
    pub fn event(&self) -> Event {
        match self {
            OwnFailure::Turn(reason) => Event::CannotTurn(reason.clone()),
            OwnFailure::Mirror(reason) | OwnFailure::Other(reason) => {
                Event::CannotServe(reason.clone())
            }
        }
    }

    /// The failure of something else than a mirror.
    pub fn other(error: impl Into<anyhow::Error>) -> OwnFailure {
        OwnFailure::Other(format!("{:#}", error.into()))
    }
}
