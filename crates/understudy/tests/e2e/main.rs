//! End to end: real daemons, real QEMUs, real guests, one failure after the
//! other, on the laboratory of `understudy-lab`.
//!
//! Needs root, the agent library beside the binary, and the guests of
//! `make guests`; `make test` sees to all of it. Several stories play side by side, each in a
//! laboratory of its own.
//!
//! | module      | shows |
//! |-------------|-------|
//! | [`api`]     | the API over the network, and its jobs |
//! | [`dashboard`] | the dashboard, in a browser ([`browser`]) |
//! | [`arbiter`] | "protected" only while the backup reaches the arbiter; a wait that ends |
//! | [`autostart`] | VMs that come up with their hosts |
//! | [`stage`]   | how a test begins and ends, and what it always checks |
//! | [`deaths`]  | every way in which a host, a daemon or a QEMU can die |
//! | [`devices`] | other devices than virtio's |
//! | [`firmware`] | a guest as virt-install makes one: UEFI, SCSI, SATA, a CD-ROM, the agent's channel |
//! | [`idle`]    | many idle VMs: what each takes, and that all live on |
//! | [`keepers`] | VMs in processes of their own, which outlive their daemon |
//! | [`kept_members`] | what comes into such a process, and what does not |
//! | [`kept_deaths`] | daemons that die again and again beside them |
//! | [`kept_hangs`] | keepers that hang, and are ended by command |
//! | [`kept_orders`] | what is said to one out of order |
//! | [`replaced_keepers`] | keepers that are replaced while their guests run |
//! | [`staying_keepers`] | keepers that are not, since that would lose something |
//! | [`limits`]  | what one QEMU may use of its host |
//! | [`upgrade`] | hosts of two versions |
//! | [`import`] | guests that libvirt has defined |
//! | [`block_devices`] | disks on block devices |
//! | [`faulty_devices`] | devices and wires that fail as the kernel has them fail |
//! | [`bridges`] | bridges that are made anew under a VM |
//! | [`full_epochs`] | a guest that writes to its disk without a word |
//! | [`bulk`]    | bulk transfers on long TCP segments |
//! | [`hostile`] | a peer that says whatever may do harm |
//! | [`hangs`]   | a QEMU that lives and does nothing |
//! | [`starved`] | a backup that hardly gets a processor |
//! | [`stalls`]  | stalled hosts and daemons that come back |
//! | [`sync`]    | the same before the first synchronisation has ended |
//! | [`planned`] | what people do on purpose: fail over, stop, reboot |
//! | [`closing`] | the end of a daemon, and the next start of its guests |
//! | [`getting_started`] | docs/getting-started.md, word by word |
//! | [`group`]   | two guests that are protected as one |
//! | [`confinement`] | a QEMU without rights |
//! | [`crowd`]   | one backup for eight VMs of two primaries |
//! | [`pauses`]  | both ways to pause a guest |
//! | [`inbound`] | what clients have just said survives their primary |
//! | [`phases`]  | deaths at each phase of the protocol |
//! | [`events`]  | what the hosts tell of a fail-over |
//! | [`fencing`] | partitions, and an arbiter that cannot be reached |
//! | [`late_renewals`] | requests to etcd that are carried out long after they were asked |
//! | [`lease`]   | a sole owner without its arbiter, and `recover --force` beside a host that sleeps |
//! | [`forced_restores`] | the same of restores by force |
//! | [`repair`]  | redundancy that restores itself, on three hosts |
//! | [`recover`] | all hosts are lost: which images are valid |
//! | [`panics`]  | a panic in what one VM runs |
//! | [`paths`]   | several paths between the hosts, cut one by one |
//! | [`resync`]  | only what changed is copied after a failure |
//! | [`sick_disks`] | disks that lose writes, and full ones |
//! | [`disk_reads`] | reads that travel with the log of lockstep |
//! | [`distance`]| a backup far away |
//! | [`lockstep`] | the same failures of a VM in lockstep |
//! | [`lockstep_divergences`] | backups in lockstep that do otherwise than their primaries |
//! | [`comparison`] | both machines of a VM in lockstep compared while they run |
//! | [`service`] | what a service manager is told of a daemon's life |
//! | [`setup`]   | hosts that are set up by `init`, `invite` and `join` |
//! | [`shapes`]  | two vCPUs, two disks, two cards |
//! | [`compression`] | every way to encode pages |
//! | [`machines`] | another machine type, modern virtio, an installed system |
//! | [`medium`]  | CD-ROMs that are changed while the VM is protected |
//! | [`counter`] | a guest for every accelerator |
//! | [`wire`]    | corrupt and truncated messages |
//! | [`plain`]   | a guest without the product beside a guest with it |
//! | [`colo`]    | QEMU's own fault tolerance, or why it does not run |
//! | [`refusals`]| bad input |
//! | [`forged_offers`] | offers that do not fit, and noise |
//! | [`doctor`]  | `understudy doctor`, which asks peers and arbiter |
//! | [`room`]    | a backup whose file system is too small |
//! | [`lockstep_refusals`] | what lockstep is not proven for |
//! | [`security`]| who is let in |
//! | [`cards`]   | a protected member of a group, with two cards |
//! | [`cluster`] | groups that are snapshotted and restored as one |
//! | [`cluster_deaths`] | hosts that die while a group is snapshotted or restored |
//! | [`ledger`]  | frames in flight across a snapshot, by payments that nobody repeats |
//! | [`installed`] | a clean Debian with the package, for the test above |
//! | [`lazy`]    | guests whose memory is still to come |
//! | [`snapshot`] | snapshots, and VMs that run again as they were |
//! | [`sealed_snapshots`] | snapshots in an encrypted store |
//! | [`s3`]      | snapshots in S3-compatible storage |
//! | [`succession`] | a VM goes on in another QEMU |
//! | [`switching`] | checkpoints become lockstep, and back |
//! | [`throttle`]| a guest that writes faster than a slow link carries |
//! | [`tpm`]     | a guest's TPM is the same wherever it begins again |
//! | [`unheld`]  | output that is not held |
//! | [`vlans`]   | cards in VLANs of bridges that filter them |
//! | [`relay`]   | what can go wrong on the wire, for the tests above |

mod api;
mod arbiter;
mod autostart;
mod block_devices;
mod bridges;
mod browser;
mod bulk;
mod cards;
mod clocks;
mod closing;
mod cluster;
mod cluster_deaths;
mod colo;
mod comparison;
mod compression;
mod confinement;
mod console;
mod counter;
mod crowd;
mod dashboard;
mod datagrams;
mod deaths;
mod devices;
mod disk_reads;
mod distance;
mod doctor;
mod events;
mod faulty_devices;
mod fencing;
mod firmware;
mod forced_restores;
mod forged_offers;
mod full_disks;
mod full_epochs;
mod gate;
mod getting_started;
mod group;
mod hangs;
mod hostile;
mod idle;
mod import;
mod inbound;
mod installed;
mod keepers;
mod kept_backups;
mod kept_deaths;
mod kept_groups;
mod kept_hangs;
mod kept_members;
mod kept_orders;
mod kept_starts;
mod late_renewals;
mod lazy;
mod lease;
mod ledger;
mod limits;
mod lockstep;
mod lockstep_divergences;
mod lockstep_refusals;
mod machines;
mod medium;
mod metrics;
mod panics;
mod paths;
mod pauses;
mod peer;
mod phases;
mod plain;
mod planned;
mod recover;
mod refusals;
mod relay;
mod repair;
mod replaced_keepers;
mod resync;
mod room;
mod s3;
mod sealed_snapshots;
mod security;
mod service;
mod setup;
mod shapes;
mod sick_disks;
mod sick_hosts;
mod snapshot;
mod stage;
mod stalls;
mod starved;
mod staying_keepers;
mod succession;
mod switching;
mod sync;
mod threads;
mod throttle;
mod tpm;
mod unheld;
mod upgrade;
mod vlans;
mod wire;
