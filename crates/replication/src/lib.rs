//! One VM's protection, on the wire between two hosts: what the primary captures and sends, what
//! the backup receives, acknowledges, applies, and goes live from. What is decided is in
//! `understudy_protocol`; here it is carried out, for a machine of `understudy_machine`.
//!
//! | module | is |
//! |---|---|
//! | [`primary`] | capture, send, receive; output released by acknowledgements |
//! | [`backup`] | receive, stage, acknowledge, apply, take over |
//! | [`lockstep`] | the log of inputs, cut and fed; both machines compared |
//! | [`messages`] | what both sides say over a session's data connection, typed |
//! | [`turn`] | from the one way of keeping up to the other |
//! | [`medium`] | CD-ROMs that are changed while the VM runs |
//! | [`handshake`] | what two hosts say before the first byte of a VM moves |
//! | [`hand_back`] | what became of a VM that another host won |
//! | [`heartbeat`], [`paths`] | signs of life, over each path |
//! | [`membership`] | VMs that are protected as one |
//! | [`records`], [`resync`] | which images are valid, and what they lack |
//!
//! It knows nothing of the host around it: who may ask for what, which VMs there are, and where a
//! backup is found is the daemon's.

pub mod backup;
pub mod clock;
pub mod hand_back;
pub mod handshake;
pub mod heartbeat;
pub mod lockstep;
pub mod medium;
pub mod membership;
pub mod messages;
pub mod moments;
pub mod paths;
pub mod primary;
pub mod records;
pub mod resync;
pub mod sessions;
pub mod sync;
pub mod turn;
