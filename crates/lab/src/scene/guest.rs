//! The test guests: what they boot from, where their servers are, how their cards are told apart.

use std::net::Ipv4Addr;

/// The guest's record server.
pub const RECORDS_PORT: u16 = 7000;
/// The guest's server of shell lines.
pub const SHELL_PORT: u16 = 7001;
/// The guest's echo server.
pub const ECHO_PORT: u16 = 7002;
/// The bench guest's tbench server.
pub const TBENCH_PORT: u16 = 7003;
/// The bench guest's web server.
pub const WEB_PORT: u16 = 80;
/// The address of the guest's second card.
pub const SECOND_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 50);

/// The images that `guests/build` makes disks from, in the guest's order.
pub(super) const IMAGES: [&str; 2] = ["disk.img", "disk2.img"];
pub(super) const BOOT_IMAGE: &str = "boot-sector.img";
pub(super) const INSTALLED_IMAGE: &str = "installed/disk.img";
pub(crate) const KERNEL: &str = "vmlinuz";
pub(crate) const INITRD: &str = "initrd.gz";

/// Kind of test guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestKind {
    /// Linux with the guest tools.
    Linux,
    /// The real-mode boot sector: one disk, no card, no servers.
    BootSector,
    /// Debian with the programs of the benchmark suite: one disk, one card. Needs
    /// `guests/bench`.
    Bench,
    /// Debian that boots from its first disk, with its own boot loader and systemd; the second
    /// one has the records; one card. Needs `guests/installed`.
    Installed,
}

impl GuestKind {
    /// Whether it runs Linux, and so the servers of the guest tools.
    pub(super) fn is_linux(self) -> bool {
        self != GuestKind::BootSector
    }

    /// Whether its kernel comes from outside, and so its address.
    pub(super) fn has_kernel(self) -> bool {
        matches!(self, GuestKind::Linux | GuestKind::Bench)
    }

    /// The ports of the servers that are up once the guest is.
    pub(super) fn ports(self) -> &'static [u16] {
        match self {
            GuestKind::Linux | GuestKind::Installed => &[RECORDS_PORT, SHELL_PORT, ECHO_PORT],
            GuestKind::BootSector => &[],
            GuestKind::Bench => &[RECORDS_PORT, SHELL_PORT, ECHO_PORT, TBENCH_PORT, WEB_PORT],
        }
    }
}

/// The hardware address of one of the guest's cards.
pub(super) fn mac(card: usize) -> String {
    format!("52:54:00:75:73:{:02x}", card + 1)
}

/// The kernel's command line.
pub(crate) fn append(address: Ipv4Addr, cards: usize) -> String {
    // An emulated timer is late on a busy machine: no reason to call it broken.
    let mut line = "console=ttyS0 quiet no_timer_check cryptomgr.notests".to_owned();
    line += &format!(" us.ip={address}/24");
    if cards == 2 {
        // Both cards are on one bridge: each is to answer for itself only.
        line += &format!(" us.ip2={SECOND_ADDRESS}/24 sysctl.net.ipv4.conf.all.arp_ignore=1");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::GUEST_ADDRESS;
    use crate::watcher::Mac;

    #[test]
    fn cards_have_addresses_of_their_own() {
        assert_ne!(mac(0).parse::<Mac>().unwrap(), mac(1).parse::<Mac>().unwrap());
        assert!(append(GUEST_ADDRESS, 1).ends_with("us.ip=10.77.0.50/24"));
        assert!(append(GUEST_ADDRESS, 2).contains("us.ip2=10.78.0.50/24"));
    }
}
