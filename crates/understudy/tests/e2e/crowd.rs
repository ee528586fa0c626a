//! N to 1: two primaries, three small VMs on each, one backup for all of them.

use crate::stage::{LIMIT, await_service, close, daemon, options, play, refusal, vms};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use understudy_lab::check::check_disk;
use understudy_lab::scene::RECORDS_PORT;
use understudy_lab::{GUEST_ADDRESS, HostOptions, RecordClient, Scene, SceneOptions, wait_for};

const MEMORY_MIB: u32 = 96;
const VMS_ON_EACH: usize = 3;
/// The backup may give its VMs this much: enough for six, not for seven.
const BACKUP_MEMORY: &str = "memory = \"1600M\"\n";
/// Seven emulated guests share two processors.
const PACE: Duration = Duration::from_millis(150);
/// The memory that a QEMU that stands by may hold for itself (27 measured), and the backup's daemon
/// for eight of them (23): not enough for one copy of a guest more.
const QEMU_MIB: u64 = 40;
const DAEMON_MIB: u64 = 96;

/// The same as [`daemon`], but seven guests that boot share two processors: a host may be silent for
/// seconds, and so may a QEMU.
const SETTINGS: &str =
    "[detection]\ntimeout_ms = 6000\nqemu_timeout_ms = 10000\n[repair]\nenabled = false\n";

/// One of the VMs: a copy of the scene's.
struct Member {
    name: String,
    primary: &'static str,
    address: Ipv4Addr,
}

impl Member {
    fn new(index: usize) -> Member {
        let primary = if index < VMS_ON_EACH { "a" } else { "b" };
        let [net, work, lab, host] = GUEST_ADDRESS.octets();
        let address = Ipv4Addr::new(net, work, lab, host + index as u8);
        Member { name: format!("small{index}"), primary, address }
    }

    /// Starts it, with a name, address and disk of its own.
    fn start(&self, scene: &Scene) -> Result<()> {
        let mut definition: toml::Table = fs::read_to_string(scene.definition())?.parse()?;
        let [.., last] = self.address.octets();
        let disk = definition["disk"][0]["path"].as_str().context("no disk")?.to_owned();
        let copy = scene.lab().directory().join(format!("{}.img", self.name));
        ensure!(
            std::process::Command::new("cp")
                .args(["--sparse=always", &disk])
                .arg(&copy)
                .status()?
                .success()
        );
        let append = definition["append"].as_str().context("no kernel arguments")?;
        let append = append.replace(&GUEST_ADDRESS.to_string(), &self.address.to_string());
        definition["append"] = append.into();
        definition["name"] = self.name.clone().into();
        definition["disk"][0]["path"] = copy.to_string_lossy().into_owned().into();
        definition["card"][0]["mac"] = format!("52:54:00:75:74:{last:02x}").into();
        let file = scene.lab().directory().join(format!("{}.toml", self.name));
        fs::write(&file, definition.to_string())?;
        scene.host(self.primary)?.call(["vm", "start", &file.to_string_lossy()])?;
        Ok(())
    }

    /// Waits until the guest answers, and opens its client.
    fn client(&self, scene: &Scene) -> Result<RecordClient> {
        let guest = SocketAddr::from((self.address, RECORDS_PORT));
        wait_for(&format!("{} to boot", self.name), 2 * LIMIT, || {
            Ok(RecordClient::start(scene.lab(), guest, PACE).ok())
        })
    }

    fn await_protected(&self, scene: &Scene) -> Result<()> {
        scene.host(self.primary)?.await_protected(&self.name, |_| ()).map(drop)
    }

    fn await_live(&self, scene: &Scene, host: &str) -> Result<()> {
        wait_for(&format!("host {host} to run {}", self.name), LIMIT, || {
            let status = scene.host(host)?.status(&self.name)?;
            Ok((status["role"] == "primary" && status["live"] == true).then_some(()))
        })
    }

    /// Cuts its power and looks for every record.
    fn prove_disk(&self, scene: &Scene, host: &str, acked: u64) -> Result<()> {
        let status = scene.host(host)?.status(&self.name)?;
        let image = PathBuf::from(status["disks"][0]["path"].as_str().context("no disk")?);
        scene.host(host)?.call(["vm", "stop", &self.name, "--force"])?;
        let check = check_disk(&image, acked)?;
        ensure!(check.is_intact(), "{} after {acked} records: {check:#?}", self.name);
        Ok(())
    }
}

fn crowd() -> SceneOptions {
    let mut options = SceneOptions { memory_mib: MEMORY_MIB, ..options() };
    options.hosts = ["a", "b", "c"].map(str::to_owned).to_vec();
    let patient =
        |settings: &str| HostOptions { settings: format!("{settings}{SETTINGS}"), ..daemon() };
    options.daemons = options.hosts.iter().map(|host| (host.clone(), patient(""))).collect();
    let backup = patient(BACKUP_MEMORY);
    options.daemons.insert("c".to_owned(), backup);
    options
}

#[test]
fn one_backup_serves_six_vms_of_two_primaries() {
    play(crowd(), |scene| {
        let members: Vec<Member> = (0..2 * VMS_ON_EACH).map(Member::new).collect();
        members.iter().try_for_each(|member| member.start(scene))?;
        let clients: Vec<RecordClient> =
            members.iter().map(|member| member.client(scene)).collect::<Result<_>>()?;
        for member in &members {
            scene.host(member.primary)?.call([
                "protect",
                &member.name,
                "--to",
                "c",
                "--no-wait",
            ])?;
        }
        members.iter().try_for_each(|member| member.await_protected(scene))?;
        refuse_one_more(scene)?;
        prove_memory_is_bounded(scene)?;

        // One VM fails: no other takes notice.
        scene.host("a")?.kill_qemu(&members[0].name)?;
        members[0].await_live(scene, "c")?;
        await_services(&clients)?;
        members[1..].iter().try_for_each(|member| member.await_protected(scene))?;

        // A whole primary fails: its VMs move, the other's stay protected.
        scene.host_mut("a")?.kill_everything()?;
        for member in &members[1..VMS_ON_EACH] {
            member.await_live(scene, "c")?;
        }
        await_services(&clients)?;
        members[VMS_ON_EACH..].iter().try_for_each(|member| member.await_protected(scene))?;

        for (member, client) in members.iter().zip(clients) {
            let host = if member.primary == "a" { "c" } else { "b" };
            member.prove_disk(scene, host, close(client)?)?;
        }
        Ok(())
    });
}

/// Waits until each guest has answered its client anew.
fn await_services(clients: &[RecordClient]) -> Result<()> {
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            clients.iter().map(|client| scope.spawn(|| await_service(client))).collect();
        waiting.into_iter().try_for_each(|one| one.join().expect("no panic"))
    })
}

/// A further VM runs, but its backup would not fit.
fn refuse_one_more(scene: &Scene) -> Result<()> {
    let further = Member { primary: "b", ..Member::new(2 * VMS_ON_EACH) };
    further.start(scene)?;
    let protect = ["protect", &further.name, "--to", "c", "--no-wait"];
    let (code, words) = refusal(scene.host("b")?, &protect)?;
    for part in ["needs 256 MiB", "1600 MiB", "6 have 1536 MiB"] {
        ensure!(words.contains(part), "exit code {code}, without `{part}`: {words}");
    }
    ensure!(vms(scene.host("c")?)?.len() == 2 * VMS_ON_EACH, "the backup has taken something on");
    scene.host("b")?.call(["vm", "stop", &further.name, "--force"])?;
    Ok(())
}

/// Proves that what the backup's processes hold for themselves does not grow with the guests'
/// memory, which is counted apart; no QEMU maps more of it than there is.
fn prove_memory_is_bounded(scene: &Scene) -> Result<()> {
    let host = scene.host("c")?;
    let mib = |pid: u32, field: &str| -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no field")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? / 1024)
    };
    let daemon = mib(host.pid(), "RssAnon:")?;
    let mut all = daemon;
    let known = vms(host)?;
    for vm in &known {
        let pid = u32::try_from(vm["qemu_pid"].as_u64().context("no QEMU")?)?;
        let (private, shared) = (mib(pid, "RssAnon:")?, mib(pid, "RssShmem:")?);
        eprintln!("{}: QEMU {private} MiB private, {shared} MiB of guest memory", vm["name"]);
        ensure!(private <= QEMU_MIB, "{}: QEMU has {private} MiB for itself", vm["name"]);
        ensure!(shared <= u64::from(MEMORY_MIB), "{}: QEMU maps {shared} MiB", vm["name"]);
        all += private;
    }
    eprintln!("backup's daemon: {daemon} MiB private; with all QEMUs {all} MiB");
    ensure!(daemon <= DAEMON_MIB, "the backup's daemon has {daemon} MiB for itself");
    ensure!(known.len() == 2 * VMS_ON_EACH, "{} VMs", known.len());
    Ok(())
}
