//! Errors of a card's setup, in words for whoever has to mend it.

use std::io;

/// The reason why a card's tap, bridge or socket could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The bridge of the card's definition is missing.
    #[error(
        "bridge {bridge} does not exist on this host: make it with the host's network configuration, the uplink as a port of it, so that it is there after a \
         reboot, in the same segment as on the other hosts; or name another bridge"
    )]
    NoBridge {
        /// The bridge's name as configured.
        bridge: String,
    },
    /// The bridge of the card's definition is there, and carries nothing.
    #[error("bridge {bridge} is down on this host: \"ip link set {bridge} up\"")]
    BridgeDown {
        /// The bridge's name as configured.
        bridge: String,
    },
    /// A card's tap was removed under it.
    #[error(
        "tap {tap} was removed from this host, and nothing brings it back to a card that is open: \
         hand the VM over to its backup, or stop it and start it again; on the backup, end the \
         protection and begin it again"
    )]
    TapGone {
        /// The tap's name.
        tap: String,
    },
    /// An interface of that name exists, but of another kind.
    #[error("interface {name} is no Linux bridge: name a bridge for the card")]
    NotABridge {
        /// The interface's name.
        name: String,
    },
    /// A card is to be in a VLAN, and its bridge knows of none.
    #[error(
        "bridge {bridge} does not filter VLANs on this host, so it cannot keep a card in one: \
         switch that on with \"ip link set {bridge} type bridge vlan_filtering 1\", and put the \
         bridge's uplink into the VLAN with \"bridge vlan add vid N dev UPLINK\""
    )]
    NotFiltering {
        /// The bridge's name.
        bridge: String,
    },
    /// No interface may have this name.
    #[error(
        "\"{tap}\" cannot be the name of a tap device: use 1 to 15 characters \
         without blanks, \"/\", \":\" and \"%\""
    )]
    BadTapName {
        /// The name as configured.
        tap: String,
    },
    /// Another interface has the tap's name.
    #[error(
        "an interface named {tap} exists already: another VM uses it, or choose \
         another name for the tap"
    )]
    TapInUse {
        /// The tap's name.
        tap: String,
    },
    /// `/dev/net/tun` is missing.
    #[error("this host has no /dev/net/tun: load the kernel module with \"modprobe tun\"")]
    NoTun,
    /// The process lacks CAP_NET_ADMIN.
    #[error("no permission to {action}: run the daemon as root or give it CAP_NET_ADMIN")]
    NotPermitted {
        /// The action that was refused.
        action: String,
    },
    /// The kernel refused something else.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that was refused.
        action: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl NetworkError {
    /// The error for `action` having failed with `source`.
    pub(crate) fn system(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (action, source) = (action.into(), source.into());
        if source.kind() == io::ErrorKind::PermissionDenied {
            NetworkError::NotPermitted { action }
        } else {
            NetworkError::System { action, source }
        }
    }
}
