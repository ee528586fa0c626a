//! The failures of this host while its primary is sound.

/// The reason why this backup cannot use what came, which is neither the primary's fault nor the
/// connection's: it gives up then, and does not contest the VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum OwnFailure {
    /// A mirror does not hold what the primary's image does, or does not show it.
    #[error("{0}")]
    Mirror(String),
    /// A failure of something else.
    #[error("{0}")]
    Other(String),
}

impl OwnFailure {
    /// The failure that this error is: of something else, unless it says that it is a mirror's.
    pub fn of(error: anyhow::Error) -> OwnFailure {
        error.downcast().unwrap_or_else(OwnFailure::other)
    }

    /// The failure of something else than a mirror.
    pub fn other(error: impl Into<anyhow::Error>) -> OwnFailure {
        OwnFailure::Other(format!("{:#}", error.into()))
    }
}
