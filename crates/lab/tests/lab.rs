//! The laboratory itself: reachability, failures, watchers, removal.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use understudy_lab::{
    CLIENT_ADDRESS, Lab, Mac, Namespace, UPLINK, Watcher, in_namespace, wait_for,
};

const LIMIT: Duration = Duration::from_secs(120);
/// Time that silence is listened to.
const SILENCE: Duration = Duration::from_millis(200);

/// Whether the client gets a datagram from a host within `limit`; it is sent
/// over and over, since the first ones may be lost to the switch's learning.
fn client_hears(lab: &Lab, host: &str, limit: Duration) -> bool {
    let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let receiver = in_namespace(&lab.client(), bind).unwrap();
    let sender = in_namespace(&lab.host(host).unwrap(), bind).unwrap();
    let port = receiver.local_addr().unwrap().port();
    receiver.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < limit {
        // Sending fails while the address cannot be resolved: that is silence.
        let _ = sender.send_to(b"hello", (CLIENT_ADDRESS, port));
        if receiver.recv(&mut [0; 8]).is_ok() {
            return true;
        }
    }
    false
}

fn has_carrier(lab: &Lab, host: &str) -> bool {
    let mut ip = lab.host(host).unwrap().command("ip");
    let output = ip.args(["link", "show", UPLINK]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().contains("LOWER_UP")
}

#[test]
fn hosts_and_client_reach_each_other() {
    let lab = Lab::new(&["a", "b"]).unwrap();
    assert!(client_hears(&lab, "a", LIMIT) && client_hears(&lab, "b", LIMIT));
    assert!(lab.host("c").unwrap_err().to_string().contains("no host `c`"));
    assert!(lab.leftovers().unwrap().is_empty(), "{}", lab.leftovers().unwrap());
}

/// The processors that a program in a namespace may use, and a thread.
fn processors(namespace: &Namespace) -> [String; 2] {
    let allowed = |status: String| {
        let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list:"));
        line.unwrap().split_whitespace().nth(1).unwrap().to_owned()
    };
    let output = namespace.command("cat").arg("/proc/self/status").output().unwrap();
    let program = String::from_utf8(output.stdout).unwrap();
    let thread =
        in_namespace(namespace, || fs::read_to_string("/proc/thread-self/status").unwrap());
    [allowed(program), allowed(thread.unwrap())]
}

#[test]
fn the_first_host_has_a_processor_to_itself() {
    let mut lab = Lab::new(&["a", "b"]).unwrap();
    if let Err(error) = lab.pin() {
        assert!(error.to_string().contains("two processors"), "{error}");
        return;
    }
    let [first, second] = ["a", "b"].map(|host| processors(&lab.host(host).unwrap()));
    for processor in [&first, &second] {
        assert!(processor[0].parse::<usize>().is_ok() && processor[0] == processor[1]);
    }
    assert_ne!(first, second);
    assert_eq!(processors(&lab.client()), second);
}

#[test]
fn a_cut_host_keeps_its_carrier_and_is_silent_until_healed() {
    let lab = Lab::new(&["a", "b"]).unwrap();
    lab.cut("a").unwrap();
    assert!(has_carrier(&lab, "a"));
    assert!(!client_hears(&lab, "a", SILENCE));
    assert!(client_hears(&lab, "b", LIMIT));
    lab.heal("a").unwrap();
    assert!(client_hears(&lab, "a", LIMIT));
}

#[test]
fn an_unplugged_host_loses_its_carrier_until_healed() {
    let lab = Lab::new(&["a"]).unwrap();
    lab.unplug("a").unwrap();
    assert!(!has_carrier(&lab, "a"));
    assert!(!client_hears(&lab, "a", SILENCE));
    lab.heal("a").unwrap();
    assert!(client_hears(&lab, "a", LIMIT));
}

#[test]
fn a_cable_is_cut_by_itself() {
    let lab = Lab::with_cables(&["a", "b"], 2).unwrap();
    let reach_within = |cable: usize, limit: Duration| {
        let to = lab.peer_addresses("b").unwrap()[cable];
        let listener = in_namespace(&lab.host("b").unwrap(), || TcpListener::bind(to).unwrap());
        let connect = || TcpStream::connect_timeout(&to, limit).is_ok();
        let reached = in_namespace(&lab.host("a").unwrap(), connect).unwrap();
        drop(listener);
        reached
    };
    let reach = |cable| reach_within(cable, LIMIT);
    let is_cut = |cable| !reach_within(cable, Duration::from_secs(1));
    assert!(reach(0) && reach(1));
    lab.cut_cable("a", 0).unwrap();
    assert!(is_cut(0) && reach(1));
    lab.heal_cable("a", 0).unwrap();
    lab.cut("a").unwrap();
    assert!(is_cut(0) && is_cut(1));
    lab.heal("a").unwrap();
    assert!(reach(0) && reach(1));
    assert!(lab.leftovers().unwrap().is_empty(), "{}", lab.leftovers().unwrap());
}

#[test]
fn wrong_hosts_are_refused() {
    for (hosts, complaint) in [
        (&["A"][..], "lower-case"),
        (&["averylonghostname"], "12"),
        (&["client"], "taken"),
        (&["a", "a"], "twice"),
    ] {
        let error = Lab::new(hosts).err().expect("an error").to_string();
        assert!(error.contains(complaint), "{error}");
    }
}

#[test]
fn nothing_is_left_after_a_drop_or_a_panic() {
    let one = Lab::new(&["a", "b"]).unwrap();
    let other = Lab::new(&["a"]).unwrap();
    let mut sleeper = one.host("a").unwrap().command("sleep").arg("1000").spawn().unwrap();
    let inside = || Ok(one.leftovers()?.processes.first().cloned());
    let found = wait_for("the process to be found", LIMIT, inside).unwrap();
    assert!(found.contains("sleep 1000"), "{found}");
    let name = one.name().clone();
    drop(one);
    sleeper.wait().unwrap();
    assert!(name.leftovers().unwrap().is_empty(), "{}", name.leftovers().unwrap());
    assert!(client_hears(&other, "a", LIMIT));

    let name = other.name().clone();
    assert!(!name.leftovers().unwrap().is_empty());
    let panicked = std::thread::spawn(move || {
        let _lab = other;
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    assert!(name.leftovers().unwrap().is_empty(), "{}", name.leftovers().unwrap());
}

#[test]
fn what_a_killed_process_left_is_removed_by_the_next_laboratory() {
    let mut owner = Command::new("sleep").arg("1000").spawn().unwrap();
    let stale = Namespace::named(format!("us{}-0-a", owner.id()));
    let directory = std::env::temp_dir().join(format!("us{}-0-lab-XYZ", owner.id()));
    fs::create_dir(&directory).unwrap();
    let added = Command::new("ip").args(["netns", "add", stale.name()]).status().unwrap();
    assert!(added.success());
    let mut sleeper = stale.command("sleep").arg("1000").spawn().unwrap();
    let inside = || Ok((stale.processes()?.len() == 1).then_some(()));
    wait_for("the process to be inside", LIMIT, inside).unwrap();
    drop(Lab::new(&[]).unwrap());
    assert!(stale.exists() && directory.exists(), "its process still runs");
    owner.kill().unwrap();
    owner.wait().unwrap();
    // Laboratories of other tests may be quicker to remove it than this one.
    let _lab = Lab::new(&[]).unwrap();
    sleeper.wait().unwrap();
    let gone = || Ok((!stale.exists() && !directory.exists()).then_some(()));
    wait_for("the stale laboratory to be gone", LIMIT, gone).unwrap();
}

/// Set for the process that `a_signal_removes_the_laboratory` signals.
const UNTIL_KILLED: &str = "LAB_TEST_UNTIL_KILLED";

fn laboratory_until_killed() {
    let lab = Lab::new(&["a"]).unwrap();
    println!("\nlab={}", lab.name());
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_signal_removes_the_laboratory() {
    if std::env::var_os(UNTIL_KILLED).is_some() {
        laboratory_until_killed();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "a_signal_removes_the_laboratory"])
        .env(UNTIL_KILLED, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let name = |line: String| line.strip_prefix("lab=").map(str::to_owned);
    let name = output.lines().find_map(|line| name(line.unwrap())).expect("the lab's name");
    let host = Namespace::named(format!("{name}-a"));
    assert!(host.exists());
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(!child.wait().unwrap().success());
    let of_lab = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&name);
    for directory in [Path::new("/run/netns"), &std::env::temp_dir()] {
        assert!(!fs::read_dir(directory).unwrap().flatten().any(|entry| of_lab(&entry)));
    }
}

#[test]
fn sockets_stay_where_they_were_made_and_panics_come_through() {
    let lab = Lab::new(&["a"]).unwrap();
    let a = lab.host("a").unwrap();
    let address = lab.host_address("a").unwrap();
    let listener = in_namespace(&a, || TcpListener::bind((address, 7000))).unwrap().unwrap();
    assert_eq!(listener.local_addr().unwrap().ip(), address);
    assert!(TcpListener::bind((address, 7000)).is_err(), "this thread is not inside");
    let panicked = std::panic::catch_unwind(|| in_namespace(&a, || panic!("on purpose")));
    assert!(panicked.is_err());
    let absent = in_namespace(&Namespace::named("us0-0-absent"), || ()).unwrap_err();
    assert!(absent.to_string().contains("us0-0-absent"));
}

/// A tap with this end in the test's hands, as the daemon has it.
#[allow(unsafe_code)]
fn open_tap(host: &Namespace, name: &str) -> File {
    nix::ioctl_write_int!(tun_set_iff, b'T', 202);
    let open = || {
        let tap = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        let mut request = [0u8; 40];
        request[..name.len()].copy_from_slice(name.as_bytes());
        let flags = (nix::libc::IFF_TAP | nix::libc::IFF_NO_PI) as u16;
        request[16..18].copy_from_slice(&flags.to_ne_bytes());
        // SAFETY: the argument points to 40 bytes laid out as a struct ifreq.
        unsafe { tun_set_iff(std::os::fd::AsRawFd::as_raw_fd(&tap), request.as_ptr() as u64) }
            .unwrap();
        tap
    };
    let tap = in_namespace(host, open).unwrap();
    let set = ["link", "set", name, "master", "br0", "up"];
    assert!(host.command("ip").args(set).status().unwrap().success());
    tap
}

fn frame(source: Mac) -> Vec<u8> {
    // Broadcast, of the EtherType for local experiments.
    [&[0xff; 6], &source.0[..], &[0x88, 0xb5], &[0; 46]].concat()
}

#[test]
fn watchers_see_what_the_guest_sends_and_nothing_else() {
    let lab = Lab::new(&["a", "b"]).unwrap();
    let guest: Mac = "52:54:00:00:00:50".parse().unwrap();
    let mut tap = open_tap(&lab.host("a").unwrap(), "tap0");
    assert_eq!(lab.leftovers().unwrap().interfaces.len(), 1, "{}", lab.leftovers().unwrap());
    let on_tap = Watcher::on_tap(&lab, "a", "tap0", guest).unwrap();
    let on_a = Watcher::on_uplink(&lab, "a", guest).unwrap();
    let on_b = Watcher::on_uplink(&lab, "b", guest).unwrap();

    let begun = Instant::now();
    tap.write_all(&frame(guest)).unwrap();
    // From another address, and from the guest's but received, not sent.
    tap.write_all(&frame(Mac([0x52, 0x54, 0, 0, 0, 0x51]))).unwrap();
    assert!(client_hears(&lab, "a", LIMIT));
    let between = Instant::now();
    tap.write_all(&frame(guest)).unwrap();
    let two = |watcher: &Watcher| Ok((watcher.count()? == 2).then_some(()));
    wait_for("two frames on the tap", LIMIT, || two(&on_tap)).unwrap();
    wait_for("two frames on the uplink", LIMIT, || two(&on_a)).unwrap();
    for watcher in [&on_tap, &on_a] {
        let first = watcher.first_frame_after(begun).unwrap().unwrap();
        let last = watcher.last_frame().unwrap().unwrap();
        assert!(begun < first && first < between && between < last && last < Instant::now());
        assert_eq!(watcher.first_frame_after(between).unwrap(), Some(last));
        assert_eq!(watcher.frames_after(between).unwrap(), 1);
        assert_eq!(watcher.frames_after(last).unwrap(), 0);
    }
    // Host b has received the frames and sent none.
    assert_eq!(on_b.count().unwrap(), 0);

    // A dead host's tap goes away; what was seen stays known.
    drop(tap);
    let gone = || Ok(lab.leftovers()?.is_empty().then_some(()));
    wait_for("the tap to be gone", LIMIT, gone).unwrap();
    assert_eq!(on_tap.count().unwrap(), 2);
}
