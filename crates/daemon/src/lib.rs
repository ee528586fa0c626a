//! The host daemon: VMs, primaries, backups and the links between hosts
