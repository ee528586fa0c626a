//! A laboratory on one machine: hosts as network namespaces joined by a
//! switch, a client, watchers, and every failure that a host can suffer.
//!
//! ```text
//!  usP-N-client     usP-N-sw               usP-N-a                usP-N-b
//!  10.77.0.100      bridge sw0             10.77.0.1              10.77.0.2
//!     net ────────── p-client
//!                    p-a ───────── uplink ─ br0 ─ the VM's tap
//!                    p-b ──────────────────────────── uplink ─ br0 ─ tap
//! ```
//!
//! [`Lab::with_cables`] adds networks of the same kind between the hosts alone:
//! 10.81.0.1 on `cable1`, 10.82.0.1 on `cable2`, and so on.
//!
//! `P` is the process id and `N` counts the laboratories of the process, so
//! that several can stand side by side. A [`Lab`] is removed when it is
//! dropped, also by a panic, and when the process gets SIGINT or SIGTERM; what
//! a killed process left is removed by the next one that makes a laboratory.
//!
//! | module        | is |
//! |---------------|----|
//! | `lab`         | the namespaces, the switch, cutting and healing |
//! | `host`        | a daemon in its namespace, and its deaths |
//! | `etcd`        | an etcd that is the arbiter, and its links to the hosts |
//! | `part`        | failures of a part of a host |
//! | [`scene`]     | daemons, a guest and its protection: what most tests begin with |
//! | `booted`      | guests that were saved when they had booted, to go on from there |
//! | `plain`       | a guest on QEMU without the product, to compare with |
//! | `migration`   | live migration of such a guest, and its downtime |
//! | `colo`        | the same guest under QEMU's own fault tolerance |
//! | `records`     | the client that must not lose a record nor its connection |
//! | `chatter`     | load: many connections, every byte verified |
//! | `shell`       | commands inside the guest |
//! | `console`     | commands on its serial console, timed from outside |
//! | `round_trips` | how long the guest takes to answer |
//! | `bench_guest` | what the guest of the benchmark suite boots from |
//! | `processors`  | the processors, shared out among the sides |
//! | `protection`  | whether a VM has its backup, as its host says |
//! | `watcher`     | who sent frames in the guest's name, and when |
//! | [`check`]     | the survivor's disk: file system and records |
//! | `long_line`   | distance between two hosts: delay and a limited rate |
//! | `leftovers`   | what was not cleaned up |

mod bench_guest;
mod booted;
mod chatter;
pub mod check;
mod colo;
mod command;
pub mod companion;
mod console;
mod control_groups;
mod conversation;
mod emulator;
mod etcd;
mod host;
mod lab;
mod leftovers;
mod long_line;
mod migration;
mod namespace;
mod packet;
mod part;
mod plain;
mod processes;
mod processors;
mod protection;
mod qmp;
mod records;
mod remains;
mod round_trips;
mod saved;
pub mod scene;
mod shell;
mod sibling;
mod wait;
mod watcher;

pub use bench_guest::BenchGuest;
pub use chatter::{ChatterClient, ChatterReport, Load};
pub use colo::{Colo, ColoError};
pub use companion::Companion;
pub use console::{Console, ConsoleOutput};
pub use conversation::ConversationError;
pub use etcd::Etcd;
pub use host::{
    ArbiterKind, HostOptions, HostProcess, LONGEST_QEMU_TIMEOUT_MS, LONGEST_TIMEOUT_MS,
    issue_certificates,
};
pub use lab::{BRIDGE, CLIENT_ADDRESS, GUEST_ADDRESS, Lab, PEER_PORT, UPLINK};
pub use leftovers::Leftovers;
pub use long_line::LongLine;
pub use migration::{Migration, MigrationLimits};
pub use namespace::{Namespace, in_namespace};
pub use part::{Frozen, Part};
pub use plain::{PLAIN_ADDRESS, PlainGuest, PlainOptions};
pub use protection::{is_followed, tells_of_a_follower};
pub use records::{Ack, RecordClient, RecordReport, record_payload};
pub use remains::LabName;
pub use round_trips::round_trips;
pub use saved::{Saved, SavedInside};
pub use scene::{Scene, SceneOptions};
pub use shell::{GuestOutput, GuestShell};
pub use sibling::Sibling;
pub use wait::{connect_patiently, patience, wait_for};
pub use watcher::{Mac, Watcher};
