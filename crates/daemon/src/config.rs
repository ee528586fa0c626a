//! The host's configuration file.

/// A host's configuration.
pub struct HostConfig {}
