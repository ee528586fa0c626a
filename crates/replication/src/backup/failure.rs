//! What goes wrong on this host while its primary is sound.

/// Why this backup cannot use what came, which is neither the primary's fault nor the connection's: it gives up
/// then, and does not contest the VM.
#[derive(Debug, thiserror::Error)]
pub(super) enum OwnFailure {
    /// A mirror does not hold what the primary's image does, or does not show it.
    #[error("{0}")]
    Mirror(String),
    /// Something else.
    #[error("{0}")]
    Other(String),
}

impl OwnFailure {
    /// Something else than a mirror.
    pub fn other(error: impl Into<anyhow::Error>) -> OwnFailure {
        OwnFailure::Other(format!("{:#}", error.into()))
    }
}
