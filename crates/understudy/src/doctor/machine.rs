//! The kernel, KVM, networking, rights and memory of this machine.

use super::{Check, tap};
use indicatif::HumanBytes;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use understudy_daemon::probe::{self, Controller};
use understudy_memory::agent::DEVICE;
use understudy_memory::bytes_in;
use understudy_qemu::{Kvm, Obstacle};

/// The memory below which there is too little for any VM and its backup.
const LEAST_MEMORY: u64 = 512 * 1024 * 1024;

/// Capabilities that the daemon needs beyond an ordinary user's rights, and their bits of
/// `<linux/capability.h>`.
const CAPABILITIES: [(&str, u32); 2] = [("CAP_NET_ADMIN", 12), ("CAP_SYS_PTRACE", 19)];

/// `addr_assign_type` of an interface whose address somebody has chosen.
const CHOSEN_ADDRESS: &str = "3";

pub fn checks() -> Vec<Check> {
    let mut checks = kernel();
    checks.push(userfaultfd_device(Path::new(DEVICE)));
    checks.push(kvm());
    checks.push(rights());
    checks.extend(taps());
    let interfaces = Path::new("/sys/class/net");
    checks.push(bridges(interfaces));
    for bridge in bridges_among(interfaces) {
        checks.extend(dead_end(interfaces, &bridge));
        checks.extend(silent_ports(interfaces, &bridge));
    }
    checks.extend(filtered_frames(Path::new("/proc/sys/net/bridge")));
    checks.extend(own_group(Path::new("/sys/fs/cgroup/system.slice/understudy.service")));
    checks.push(memory());
    let slowing = "a guest that writes faster than the link carries is not slowed down: its output \
                   waits for longer";
    let memory = "a QEMU that takes ever more memory is not ended alone: the whole host may run out \
                  of it";
    let threads = "a QEMU's threads are not limited";
    for (controller, without) in
        [(Controller::Cpu, slowing), (Controller::Memory, memory), (Controller::Pids, threads)]
    {
        checks.push(control_groups(controller, without, probe::control_groups(controller)));
    }
    checks
}

fn kernel() -> Vec<Check> {
    let support = understudy_memory::probe();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let check = |name: &str, result: Result<(), String>| match result {
        Ok(()) => Check::ok(name, format!("works (Linux {})", release.trim())),
        Err(reason) => Check::fail(name, reason, "Linux 6.7 or later is needed, and root"),
    };
    vec![
        check("userfaultfd (write-protect async, shared memory)", support.wp_async_shmem),
        check("PAGEMAP_SCAN", support.pagemap_scan),
    ]
}

/// A QEMU that is not root makes its userfaultfd through this device.
fn userfaultfd_device(path: &Path) -> Check {
    let name = DEVICE;
    let error = match File::options().read(true).write(true).open(path) {
        Ok(_) => return Check::ok(name, "opens"),
        Err(error) => error,
    };
    let detail = format!("cannot be opened: {error}");
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if setting.trim() == "1" {
        let advice = "vm.unprivileged_userfaultfd is 1, which does as well";
        return Check::note(name, detail, advice);
    }
    let advice = "QEMU, which is not root, needs it: run as root; where the device is missing \
                  (a container), make it with the number that /proc/misc has for userfaultfd, \
                  `mknod /dev/userfaultfd c 10 NUMBER`, or set `sysctl vm.unprivileged_userfaultfd=1`";
    Check::fail(name, detail, advice)
}

fn kvm() -> Check {
    let kvm = Kvm::of_this_machine();
    match kvm.obstacle() {
        None => Check::ok("KVM", "works"),
        Some(Obstacle { what, remedy }) if kvm.runs_guests() => Check::note("KVM", what, remedy),
        Some(Obstacle { what, remedy }) => {
            let advice =
                format!("until then QEMU emulates the processor, many times slower: {remedy}");
            Check::note("KVM", what, advice)
        }
    }
}

fn rights() -> Check {
    const NAME: &str = "rights";
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match missing_capabilities(&status) {
        Some(missing) if missing.is_empty() => {
            Check::ok(NAME, CAPABILITIES.map(|(name, _)| name).join(", "))
        }
        Some(missing) => {
            Check::fail(NAME, format!("{} missing", missing.join(", ")), "run as root")
        }
        None => Check::fail(NAME, "/proc/self/status cannot be read", "mount /proc"),
    }
}

/// The capabilities that the text of a `/proc/PID/status` lacks.
fn missing_capabilities(status: &str) -> Option<Vec<&'static str>> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(line.trim(), 16).ok()?;
    let lacks = |(_, bit): &(&str, u32)| effective & (1 << bit) == 0;
    Some(CAPABILITIES.into_iter().filter(lacks).map(|(name, _)| name).collect())
}

fn taps() -> [Check; 2] {
    let device = match File::options().read(true).write(true).open(tap::TUN) {
        Ok(file) => file,
        Err(error) => {
            let detail = format!("cannot be opened: {error}");
            return [
                Check::fail(tap::TUN, detail, "run `modprobe tun`; run as root"),
                Check::fail("tap devices", "not tried", format!("{} comes first", tap::TUN)),
            ];
        }
    };
    let tap = match tap::try_to_create(device) {
        Ok(()) => Check::ok("tap devices", "one was created and is gone again"),
        Err(error) => {
            let detail = format!("cannot be created: {error}");
            Check::fail("tap devices", detail, "run as root, or grant CAP_NET_ADMIN")
        }
    };
    [Check::ok(tap::TUN, "opens"), tap]
}

fn bridges(interfaces: &Path) -> Check {
    let names = bridges_among(interfaces);
    if names.is_empty() {
        let advice = "VMs with network cards need one: make it with the host's network configuration, \
                      the uplink as a port of it";
        return Check::note("bridges", "none on this host", advice);
    }
    let follows = |name: &&String| {
        let kind = fs::read_to_string(interfaces.join(name).join("addr_assign_type"));
        kind.is_ok_and(|kind| kind.trim() != CHOSEN_ADDRESS)
    };
    let following: Vec<_> = names.iter().filter(follows).map(String::as_str).collect();
    if following.is_empty() {
        return Check::ok("bridges", names.join(", "));
    }
    let detail = format!(
        "{}; nobody has chosen the address of {}, so that it may change with the ports",
        names.join(", "),
        following.join(", ")
    );
    let advice = "a daemon that adds a VM's card to such a bridge has it keep the address that it \
                  has then; to choose one: `ip link set BRIDGE address ADDRESS`";
    Check::note("bridges", detail, advice)
}

fn bridges_among(interfaces: &Path) -> Vec<String> {
    let entries = fs::read_dir(interfaces).into_iter().flatten().flatten();
    let bridges = entries.filter(|entry| entry.path().join("bridge").is_dir());
    let mut names: Vec<_> =
        bridges.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A bridge has guests' taps at most: who is taken over to another host is in another network there.
fn dead_end(interfaces: &Path, bridge: &str) -> Option<Check> {
    let ports = fs::read_dir(interfaces.join(bridge).join("brif")).into_iter().flatten().flatten();
    let leads_out =
        |port: fs::DirEntry| !interfaces.join(port.file_name()).join("tun_flags").exists();
    if ports.into_iter().any(leads_out) {
        return None;
    }
    let detail = "no port of it leads out of this host";
    let advice = "a guest that is taken over by another host is cut off from its clients, unless they are guests of \
                  the same host, too: put protected guests on a bridge that has the uplink as a port";
    Some(Check::note(&format!("bridge {bridge}"), detail, advice))
}

/// A bridge with the spanning tree protocol keeps a new port silent for twice its delay.
fn silent_ports(interfaces: &Path, bridge: &str) -> Option<Check> {
    let setting = |name: &str| -> Option<u64> {
        let file = interfaces.join(bridge).join("bridge").join(name);
        fs::read_to_string(file).ok()?.trim().parse().ok()
    };
    // In hundredths of a second.
    let delay = setting("forward_delay")?;
    if setting("stp_state")? == 0 || delay == 0 {
        return None;
    }
    let detail = format!("has STP with a forward delay of {} s", delay / 100);
    let advice = format!(
        "a guest's card is silent for twice that behind each start, and behind a take-over soon after protection \
         began: `ip link set {bridge} type bridge stp_state 0`, if there is no loop"
    );
    Some(Check::note(&format!("bridge {bridge}"), detail, advice))
}

/// The host's packet filter sees what bridges carry, as Docker has it.
fn filtered_frames(settings: &Path) -> Option<Check> {
    let setting = fs::read_to_string(settings.join("bridge-nf-call-iptables")).ok()?;
    if setting.trim() == "0" {
        return None;
    }
    let detail = "bridged frames go through this host's packet filter";
    let advice = "see that FORWARD accepts guests' frames on every host, or `sysctl net.bridge.bridge-nf-call-iptables=0`";
    Some(Check::note("packet filter", detail, advice))
}

/// The daemon's service has no group below it in which the daemon is alone.
fn own_group(service: &Path) -> Option<Check> {
    if !service.is_dir() || service.join("daemon").is_dir() {
        return None;
    }
    let detail =
        "the daemon has no group of its own below its service's, which systemd 254 and later make";
    let advice = "it slows no guest down that outruns the link, and holds no QEMU to its memory and threads: \
                  `understudy status VM` says NOT LIMITED";
    Some(Check::note("control groups", detail, advice))
}

fn memory() -> Check {
    const NAME: &str = "memory";
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let (Some(total), Some(available)) =
        (bytes_in(&text, "MemTotal:"), bytes_in(&text, "MemAvailable:"))
    else {
        return Check::fail(NAME, "/proc/meminfo cannot be read", "mount /proc");
    };
    let detail = format!("{} of {} available", HumanBytes(available), HumanBytes(total));
    if available < LEAST_MEMORY {
        let advice = format!("at least {} are needed", HumanBytes(LEAST_MEMORY));
        return Check::fail(NAME, detail, advice);
    }
    Check::ok(NAME, detail)
}

/// Checks the kernel's controller for what each QEMU is held to.
fn control_groups(controller: Controller, without: &str, tried: anyhow::Result<PathBuf>) -> Check {
    let name = format!("{controller} controller");
    match tried {
        Ok(place) => Check::ok(&name, format!("control groups can be made in {}", place.display())),
        Err(error) => Check::note(&name, format!("{error:#}"), format!("without it {without}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn capabilities_are_read_from_the_status() {
        let of =
            |effective: &str| missing_capabilities(&format!("Name:\tx\nCapEff:\t{effective}\n"));
        assert_eq!(of("000001ffffffffff"), Some(vec![]));
        assert_eq!(of("0000000000000000"), Some(vec!["CAP_NET_ADMIN", "CAP_SYS_PTRACE"]));
        assert_eq!(of("0000000000001000"), Some(vec!["CAP_SYS_PTRACE"]));
        assert_eq!(missing_capabilities("Name:\tx\n"), None);
    }

    #[test]
    fn a_missing_userfaultfd_device_is_told_with_its_remedy() {
        let check = userfaultfd_device(Path::new("/nonexistent/userfaultfd"));
        assert_ne!(check.state, State::Ok);
        assert!(check.advice.unwrap().contains("unprivileged_userfaultfd"));
    }

    #[test]
    fn bridges_are_told_from_other_interfaces() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(bridges(directory.path()).state, State::Note);
        fs::create_dir_all(directory.path().join("eth0")).unwrap();
        fs::create_dir_all(directory.path().join("br1/bridge")).unwrap();
        fs::create_dir_all(directory.path().join("br0/bridge")).unwrap();
        assert_eq!(bridges(directory.path()), Check::ok("bridges", "br0, br1"));
        let assign = |bridge: &str, kind: &str| {
            fs::write(directory.path().join(bridge).join("addr_assign_type"), kind).unwrap();
        };
        assign("br0", "3\n");
        assign("br1", "1\n");
        let check = bridges(directory.path());
        assert_eq!(check.state, State::Note);
        assert!(check.detail.contains("the address of br1,"), "{}", check.detail);
        assign("br1", "3\n");
        assert_eq!(bridges(directory.path()), Check::ok("bridges", "br0, br1"));
    }

    #[test]
    fn a_bridge_that_leads_nowhere_or_keeps_silent_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        for port in ["tap0", "eth0"] {
            fs::create_dir_all(at(port)).unwrap();
        }
        fs::write(at("tap0/tun_flags"), "0x1002\n").unwrap();
        fs::create_dir_all(at("br0/bridge")).unwrap();
        assert_eq!(dead_end(directory.path(), "br0").unwrap().name, "bridge br0");
        fs::create_dir_all(at("br0/brif/tap0")).unwrap();
        assert!(dead_end(directory.path(), "br0").is_some());
        fs::create_dir_all(at("br0/brif/eth0")).unwrap();
        assert_eq!(dead_end(directory.path(), "br0"), None);

        assert_eq!(silent_ports(directory.path(), "br0"), None);
        fs::write(at("br0/bridge/forward_delay"), "1500\n").unwrap();
        fs::write(at("br0/bridge/stp_state"), "1\n").unwrap();
        let check = silent_ports(directory.path(), "br0").unwrap();
        assert!(check.detail.contains("15 s"), "{}", check.detail);
        fs::write(at("br0/bridge/stp_state"), "0\n").unwrap();
        assert_eq!(silent_ports(directory.path(), "br0"), None);
    }

    #[test]
    fn a_packet_filter_and_a_group_that_is_missing_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        assert_eq!(filtered_frames(directory.path()), None);
        fs::write(at("bridge-nf-call-iptables"), "1\n").unwrap();
        assert!(filtered_frames(directory.path()).is_some());
        fs::write(at("bridge-nf-call-iptables"), "0\n").unwrap();
        assert_eq!(filtered_frames(directory.path()), None);
        assert_eq!(own_group(&at("understudy.service")), None);
        fs::create_dir(at("understudy.service")).unwrap();
        assert!(own_group(&at("understudy.service")).is_some());
        fs::create_dir(at("understudy.service/daemon")).unwrap();
        assert_eq!(own_group(&at("understudy.service")), None);
    }

    #[test]
    fn a_missing_controller_is_told_by_name_and_no_failure() {
        let check = |tried| control_groups(Controller::Memory, "all may end", tried);
        let missing = check(Err(anyhow::anyhow!("no control group")));
        assert_eq!((missing.state, &*missing.name), (State::Note, "memory controller"));
        assert!(missing.advice.unwrap().contains("without it all may end"));
        assert_eq!(check(Ok("/sys/fs/cgroup/memory".into())).state, State::Ok);
    }
}
