//! Connections between hosts: who is at the other end, and messages whole or not at all.
//!
//! | module | is |
//! |---|---|
//! | [`link`] | one connection: messages of `understudy_protocol::wire`, over TCP or TLS |
//! | [`channel`] | a session's data over whichever connection there is, each message once |
//! | [`tls`] | certificates of hosts and callers, renewed and revoked while in use |
//! | [`pki`] | an authority of one's own |

pub mod channel;
pub mod link;
pub mod pki;
pub mod tls;
