//! Guest network cards: frame ports, the output buffer, tap devices and bridges.
//!
//! A card of a VM is `-netdev stream` in QEMU: Ethernet frames over a unix
//! socket. A [`Port`] is this host's end of that socket. It carries
//!
//! ```text
//! guest -> socket -> codec -> OutputBuffer -> tap -> bridge    held until committed
//! guest <- socket <----------------------- tap <- bridge       delivered at once
//! ```
//!
//! Between the cards of VMs that are protected as one group, a [`Switch`] hands
//! frames over at once.
//!
//! The output buffer is where output commit happens: a frame leaves it only
//! when the epoch that produced it is on the backup, or when this host is the
//! sole owner of the VM (Remus, section 2.4).

mod announce;
mod buffer;
mod codec;
mod error;
mod mac;
mod netlink;
mod port;
mod pump;
mod switch;
mod tap;

pub use announce::announcement;
pub use buffer::{DEFAULT_LIMIT_BYTES, FrameBatch, Gate, OutputBuffer, Pushed};
pub use codec::{Decoder, FrameTooLong, HEADER_BYTES, MAX_FRAME_BYTES, encode};
pub use error::NetworkError;
pub use mac::{MacAddress, MacParseError};
pub use netlink::{bridge_exists, mac_in_use};
pub use port::{GuestEnd, Port, PortConfig};
pub use pump::{OutputWaiting, PortCounters};
pub use switch::Switch;
pub use tap::Tap;
