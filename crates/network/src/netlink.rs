//! Links and bridges, through rtnetlink, behind blocking functions.

use crate::error::NetworkError;
use crate::mac::MacAddress;
use crate::vlan::Vlans;
use futures_util::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    BridgeVlanInfoFlags, InfoBridge, InfoData, InfoKind, LinkAttribute, LinkFlags, LinkInfo,
    LinkMessage,
};
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourMessage};
use rtnetlink::{Handle, LinkBridgeVlan, LinkDelRequest, LinkUnspec};
use std::path::Path;
use std::{fs, io};
use tracing::{info, warn};

/// The directory where the kernel tells about interfaces what rtnetlink does not.
const INTERFACES: &str = "/sys/class/net";

/// An address that somebody has chosen (`NET_ADDR_SET`), in `addr_assign_type`.
const CHOSEN: &str = "3";

/// Whether a Linux bridge of this name exists in the caller's network namespace.
///
/// # Errors
/// If there is an interface of that name that is no bridge, or the kernel
/// refuses to say.
pub fn bridge_exists(name: &str) -> Result<bool, NetworkError> {
    blocking(async |handle| Ok(find_bridge(&handle, name).await?.is_some()))
}

/// Whether a bridge has learned that `mac` lives behind one of its ports.
///
/// Says whether a new VM would collide with a machine that is already there. A
/// standby finds its own primary, so ask this only before a VM first starts.
///
/// # Errors
/// If the bridge does not exist, or the kernel refuses to say.
pub fn mac_in_use(bridge: &str, mac: MacAddress) -> Result<bool, NetworkError> {
    blocking(async |handle| {
        let link = require_bridge(&handle, bridge).await?;
        let mut entries =
            handle.neighbours().get().set_address_family(AddressFamily::Bridge).execute();
        let action = || format!("read the addresses that bridge {bridge} has learned");
        while let Some(entry) = entries.try_next().await.map_err(failed(action))? {
            if says(&entry, link.index, mac) {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// Whether a bridge keeps VLANs apart.
///
/// # Errors
/// If the bridge does not exist, or the kernel refuses to say.
pub fn filters_vlans(bridge: &str) -> Result<bool, NetworkError> {
    blocking(async |handle| Ok(require_bridge(&handle, bridge).await?.filters))
}

/// Gives a tap its address and the bridge's MTU, makes it a port of the bridge, whose
/// own address stays as it is, and sets it up. In VLANs it carries these, and before nothing.
pub(crate) fn attach(
    tap: &str,
    bridge: &str,
    mac: MacAddress,
    vlans: &Vlans,
) -> Result<(), NetworkError> {
    blocking(async |handle| {
        let bridge_link = require_bridge(&handle, bridge).await?;
        keep_address(&handle, bridge, &bridge_link).await;
        let action = || format!("attach {tap} to bridge {bridge}");
        let Some(tap_link) = find(&handle, tap).await? else {
            return Err(NetworkError::system(action(), io::Error::from(io::ErrorKind::NotFound)));
        };
        let port = tap_link.header.index;
        if !vlans.is_empty() {
            // A port that is up carries frames in the bridge's default VLAN until it is told its own.
            let down = handle.link().set(LinkUnspec::new_with_index(port).down().build());
            down.execute().await.map_err(failed(action))?;
        }
        let mut change =
            LinkUnspec::new_with_index(port).address(mac.0.to_vec()).controller(bridge_link.index);
        if let Some(mtu) = bridge_link.mtu {
            change = change.mtu(mtu);
        }
        let request = handle.link().set(change.build());
        request.execute().await.map_err(failed(action))?;
        if !vlans.is_empty() {
            let action = || format!("put {tap} into its VLANs on bridge {bridge}");
            set_vlans(&handle, port, &bridge_link, vlans).await.map_err(failed(action))?;
        }
        let up = handle.link().set(LinkUnspec::new_with_index(port).up().build());
        up.execute().await.map_err(failed(action))
    })
}

/// Sees that a tap is a port of its bridge, and makes it one again of a bridge that was made anew; whether it had to.
pub(crate) fn see_to(
    tap: &str,
    bridge: &str,
    mac: MacAddress,
    vlans: &Vlans,
) -> Result<bool, NetworkError> {
    check_bridge(bridge, vlans)?;
    let (is_attached, is_up) = blocking(async |handle| {
        let bridge = require_bridge(&handle, bridge).await?;
        let Some(found) = find(&handle, tap).await? else {
            return Err(NetworkError::TapGone { tap: tap.to_owned() });
        };
        // One that is down was left so by an attempt that came to no end.
        let is_attached =
            controller(&found) == Some(bridge.index) && found.header.flags.contains(LinkFlags::Up);
        Ok((is_attached, bridge.is_up))
    })?;
    if !is_attached {
        attach(tap, bridge, mac, vlans)?;
    }
    match is_up {
        true => Ok(!is_attached),
        false => Err(NetworkError::BridgeDown { bridge: bridge.to_owned() }),
    }
}

/// The bridge that an interface is a port of.
fn controller(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Controller(index) => Some(*index),
        _ => None,
    })
}

/// A new port is in the bridge's default VLAN; this one is in its own instead.
async fn set_vlans(
    handle: &Handle,
    port: u32,
    bridge: &Bridge,
    vlans: &Vlans,
) -> Result<(), rtnetlink::Error> {
    if let Some(default) = bridge.default_vlan {
        let leave = LinkBridgeVlan::new(port).vlan(default, BridgeVlanInfoFlags::empty());
        LinkDelRequest::new_with_message(handle.clone(), leave.build()).execute().await?;
    }
    let mut join = LinkBridgeVlan::new(port);
    for &(first, last) in vlans.trunk.runs() {
        join = match first == last {
            true => join.vlan(first, BridgeVlanInfoFlags::empty()),
            false => join
                .vlan_range_start(first, BridgeVlanInfoFlags::empty())
                .vlan_range_end(last, BridgeVlanInfoFlags::empty()),
        };
    }
    if let Some(access) = vlans.access {
        // Last: a trunk may have it, too.
        join = join.vlan(access, BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged);
    }
    handle.link().set(join.build()).execute().await
}

/// Fails with an explanation if there is no bridge of that name, or it cannot keep a card in its
/// VLANs.
pub(crate) fn check_bridge(name: &str, vlans: &Vlans) -> Result<(), NetworkError> {
    let bridge = blocking(async |handle| require_bridge(&handle, name).await)?;
    match bridge.filters || vlans.is_empty() {
        true => Ok(()),
        false => Err(NetworkError::NotFiltering { bridge: name.to_owned() }),
    }
}

struct Bridge {
    index: u32,
    mtu: Option<u32>,
    address: Option<MacAddress>,
    is_up: bool,
    /// Whether it keeps VLANs apart.
    filters: bool,
    /// The VLAN that a new port is in.
    default_vlan: Option<u16>,
}

impl Bridge {
    fn note_vlans<'a>(&mut self, data: impl Iterator<Item = &'a InfoBridge>) {
        for attribute in data {
            match attribute {
                InfoBridge::VlanFiltering(filters) => self.filters = *filters,
                InfoBridge::VlanDefaultPvid(id) => {
                    self.default_vlan = Some(*id).filter(|id| *id != 0);
                }
                _ => {}
            }
        }
    }
}

/// Chooses the address that a bridge has, unless somebody has chosen one.
///
/// Else it is the lowest of its ports', where no network card of the host's has it that of a
/// tap. Taps come and go with VMs, and guests send to an address that is gone until they ask
/// for it again, for up to half a minute.
async fn keep_address(handle: &Handle, name: &str, bridge: &Bridge) {
    let Some(address) = bridge.address else { return };
    if is_chosen(Path::new(INTERFACES), name, bridge.index, address) {
        return;
    }
    let change = LinkUnspec::new_with_index(bridge.index).address(address.0.to_vec());
    match handle.link().set(change.build()).execute().await {
        Ok(()) => info!(bridge = name, %address, "the bridge keeps the address that it has"),
        Err(error) => warn!(
            bridge = name, %address, %error,
            "cannot keep the bridge's address: it may change when a VM starts or ends, and guests \
             then lose the host for up to 30 s; choose one with \
             \"ip link set {name} address {address}\""
        ),
    }
}

/// Whether somebody has chosen the bridge's address. Not if `interfaces` shows another bridge
/// of that name, as it does where it was mounted for another network namespace.
fn is_chosen(interfaces: &Path, name: &str, index: u32, address: MacAddress) -> bool {
    let says = |file: &str, wanted: &str| {
        let path = interfaces.join(name).join(file);
        fs::read_to_string(path).is_ok_and(|text| text.trim() == wanted)
    };
    says("ifindex", &index.to_string())
        && says("address", &address.to_string())
        && says("addr_assign_type", CHOSEN)
}

async fn require_bridge(handle: &Handle, name: &str) -> Result<Bridge, NetworkError> {
    find_bridge(handle, name)
        .await?
        .ok_or_else(|| NetworkError::NoBridge { bridge: name.to_owned() })
}

async fn find_bridge(handle: &Handle, name: &str) -> Result<Option<Bridge>, NetworkError> {
    let Some(link) = find(handle, name).await? else {
        return Ok(None);
    };
    if !is_bridge(&link) {
        return Err(NetworkError::NotABridge { name: name.to_owned() });
    }
    let index = link.header.index;
    let is_up = link.header.flags.contains(LinkFlags::Up);
    let mut bridge =
        Bridge { index, mtu: None, address: None, is_up, filters: false, default_vlan: None };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => bridge.mtu = Some(*mtu),
            LinkAttribute::Address(bytes) => {
                bridge.address = bytes.as_slice().try_into().ok().map(MacAddress);
            }
            LinkAttribute::LinkInfo(infos) => {
                let data = infos.iter().find_map(|info| match info {
                    LinkInfo::Data(InfoData::Bridge(data)) => Some(data),
                    _ => None,
                });
                bridge.note_vlans(data.into_iter().flatten());
            }
            _ => {}
        }
    }
    Ok(Some(bridge))
}

fn is_bridge(link: &LinkMessage) -> bool {
    link.attributes.iter().any(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => infos.contains(&LinkInfo::Kind(InfoKind::Bridge)),
        _ => false,
    })
}

fn says(entry: &NeighbourMessage, bridge: u32, mac: MacAddress) -> bool {
    let has = |wanted: NeighbourAttribute| entry.attributes.contains(&wanted);
    has(NeighbourAttribute::Controller(bridge))
        && has(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()))
}

async fn find(handle: &Handle, name: &str) -> Result<Option<LinkMessage>, NetworkError> {
    let mut links = handle.link().get().match_name(name.to_owned()).execute();
    match links.try_next().await {
        Ok(link) => Ok(link),
        Err(error) if is_no_device(&error) => Ok(None),
        Err(error) => Err(failed(|| format!("look for interface {name}"))(error)),
    }
}

fn is_no_device(error: &rtnetlink::Error) -> bool {
    match error {
        rtnetlink::Error::NetlinkError(message) => {
            message.raw_code() == -(nix::errno::Errno::ENODEV as i32)
        }
        _ => false,
    }
}

fn failed(action: impl Fn() -> String) -> impl Fn(rtnetlink::Error) -> NetworkError {
    move |error| match error {
        rtnetlink::Error::NetlinkError(message) => NetworkError::system(action(), message.to_io()),
        other => NetworkError::system(action(), io::Error::other(other.to_string())),
    }
}

/// Runs one conversation with the kernel to its end.
///
/// On a thread of its own: a tokio worker may not block on another runtime, and
/// a new thread has the network namespace of the one that made it.
fn blocking<T: Send>(
    conversation: impl AsyncFnOnce(Handle) -> Result<T, NetworkError> + Send,
) -> Result<T, NetworkError> {
    let failed = |source: io::Error| NetworkError::system("open a netlink socket", source);
    let run = || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(failed)?;
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().map_err(failed)?;
            tokio::spawn(connection);
            conversation(handle).await
        })
    };
    std::thread::scope(|scope| {
        scope.spawn(understudy_threads::inherit(run)).join().expect("netlink thread panicked")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_chosen_if_the_kernel_says_so_of_this_bridge() {
        let interfaces = tempfile::tempdir().unwrap();
        let address = MacAddress([2, 0, 0, 0, 0, 0xab]);
        let is_chosen = |index| is_chosen(interfaces.path(), "br0", index, address);
        assert!(!is_chosen(4));
        let say = |file: &str, text: &str| {
            fs::write(interfaces.path().join("br0").join(file), text).unwrap();
        };
        fs::create_dir(interfaces.path().join("br0")).unwrap();
        say("ifindex", "4\n");
        say("address", "02:00:00:00:00:ab\n");
        say("addr_assign_type", "3\n");
        assert!(is_chosen(4));
        assert!(!is_chosen(5), "another namespace's");
        say("address", "02:00:00:00:00:ac\n");
        assert!(!is_chosen(4), "another namespace's");
        say("address", "02:00:00:00:00:ab\n");
        say("addr_assign_type", "1\n");
        assert!(!is_chosen(4));
    }
}
