//! Facts of a machine that are known without asking: its name and its address.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::net::{IpAddr, UdpSocket};
use understudy_protocol::HostName;

/// A documentation address: no packet is sent to it, only the route to it is looked up.
const ELSEWHERE: &str = "192.0.2.1:9";

/// The machine's own name, as far as it can be a host's.
pub fn default_name() -> Option<HostName> {
    let name = nix::unistd::gethostname().ok()?.into_string().ok()?;
    name.split('.').next()?.to_ascii_lowercase().parse().ok()
}

/// The address from which this machine reaches others, or its only one; none if it is not clear.
pub fn default_address() -> Option<IpAddr> {
    routed().or_else(only)
}

fn routed() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect(ELSEWHERE).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|address| !address.is_loopback())
}

fn only() -> Option<IpAddr> {
    let up = |flags: InterfaceFlags| {
        flags.contains(InterfaceFlags::IFF_UP) && !flags.contains(InterfaceFlags::IFF_LOOPBACK)
    };
    let found = getifaddrs().ok()?.filter(|one| up(one.flags));
    let addresses: Vec<IpAddr> =
        found.filter_map(|one| Some(one.address?.as_sockaddr_in()?.ip().into())).collect();
    match addresses[..] {
        [one] => Some(one),
        _ => None,
    }
}
