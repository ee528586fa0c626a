//! The NBD server that QEMU's `-blockdev driver=nbd` talks to.
//!
//! Written by hand, to the NBD project's `doc/proto.md`, because no library fits: `nbd`
//! serves one request at a time from a `Read + Write + Seek`, without flushes or FUA, and
//! calls itself early; `tokio-nbd` is GPL, allocates each reply and answers in order, so
//! that an fsync would hold up reads; the others are clients or single programs. What
//! we need is small: fixed newstyle, simple replies, six commands.
//!
//! - `protocol`: the bytes, pure.
//! - `handshake`: options, until client and server agree on the export.
//! - `connection`: requests and replies of one client.
//! - `reading`: the reads among them.
//! - `room`: how many requests may wait for their answers.
//! - `server`: the socket and the threads.

mod connection;
mod handshake;
mod protocol;
mod reading;
mod room;
mod server;
mod traffic;

pub use reading::AwaitedRead;
pub use server::NbdServer;
pub use traffic::Traffic;
