//! Guest network cards: frame ports, the output buffer, tap devices and bridges.
//!
//! A card of a VM is `-netdev tap` in QEMU, but what it takes for a tap is a unix
//! socket: the agent answers for it. A [`Port`] is this host's end of that socket,
//! on which each frame is a message, after virtio's network header. It carries
//!
//! ```text
//! guest -> socket -> OutputBuffer -> tap -> bridge    held until committed
//! guest <- socket <---------------- tap <- bridge     delivered at once
//! ```
//!
//! The header lets long TCP segments and frames without checksums through, as far
//! as the guest's driver has agreed to them: what it offers comes as a `control`
//! message between the frames.
//!
//! Between the cards of VMs that are protected as one group, a [`Switch`] hands
//! frames over at once. Between the members of a cluster, on whatever hosts, a [`Fabric`]
//! does, once they may leave their output buffer.
//!
//! The output buffer is where output commit happens: a frame leaves it only
//! when the epoch that produced it is on the backup, or when this host is the
//! sole owner of the VM (Remus, section 2.4).

mod announce;
mod buffer;
mod control;
mod entitlement;
mod error;
mod fabric;
mod frames;
mod header;
mod limit;
mod mac;
mod messages;
mod netlink;
mod next;
mod note;
mod outbound;
mod port;
mod pump;
mod segments;
mod shared;
mod stations;
mod switch;
mod tap;
mod unread;
mod vlan;

pub use announce::announcement;
pub use buffer::{DEFAULT_LIMIT_BYTES, FrameBatch, Gate, OutputBuffer, Pushed};
pub use control::CARDS_VARIABLE;
pub use error::NetworkError;
pub use fabric::{Fabric, Inlet, addresses};
pub use frames::Frames;
pub use header::{HEADER_BYTES, MAX_BYTES, MAX_FRAME_BYTES, Offloads, ethernet};
pub use limit::boot_time;
pub use mac::{MacAddress, MacParseError};
pub use netlink::{bridge_exists, filters_vlans, mac_in_use};
pub use next::NextGuest;
pub use outbound::InboundSink;
pub use port::{GuestEnd, Port, PortConfig};
pub use shared::{OutputWaiting, PortCounters};
pub use stations::{MOST_STATIONS, Station, Stations};
pub use switch::Switch;
pub use tap::Tap;
pub use unread::{GuestsEnd, Unread};
pub use vlan::{FIRST_VLAN, LAST_VLAN, VlanSet, VlanSetError, Vlans};
