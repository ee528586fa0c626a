//! Tests of many small idle VMs, all protected from one host to the other: what each takes of
//! threads, descriptors and connections does not grow from one to the next, and all of them live on
//! when their host dies.

use crate::keepers::in_keepers;
use crate::stage::{Calm, LIMIT, options, play, vms};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};
use understudy_lab::scene::GuestKind;
use understudy_lab::{HostProcess, Scene, SceneOptions, wait_for};

/// Waits for the timer's interrupt, 18.2 times a second, counts it at 0x600, and prints each 16th count
/// as four hexadecimal digits and a newline. Nothing else.
const GUEST: &[u8] = &[
    0x31, 0xc0, // xor ax, ax
    0x8e, 0xd8, // mov ds, ax
    0x8e, 0xd0, // mov ss, ax
    0xbc, 0x00, 0x7c, // mov sp, 0x7c00
    0xa3, 0x00, 0x06, // mov [0x600], ax
    0xfb, // sti
    0xf4, // round: hlt
    0xff, 0x06, 0x00, 0x06, // inc word [0x600]
    0x8b, 0x1e, 0x00, 0x06, // mov bx, [0x600]
    0xf6, 0xc3, 0x0f, // test bl, 15
    0x75, 0xf2, // jnz round
    0xb1, 0x04, // mov cl, 4
    0xbe, 0x04, 0x00, // mov si, 4
    0xd3, 0xc3, // digit: rol bx, cl
    0x88, 0xd8, // mov al, bl
    0x24, 0x0f, // and al, 15
    0x04, 0x30, // add al, '0'
    0x3c, 0x39, // cmp al, '9'
    0x76, 0x02, // jbe $ + 4
    0x04, 0x27, // add al, 'a' - '0' - 10
    0xe8, 0x0a, 0x00, // call print
    0x4e, // dec si
    0x75, 0xec, // jnz digit
    0xb0, 0x0a, // mov al, newline
    0xe8, 0x02, 0x00, // call print
    0xeb, 0xd2, // jmp round
    0x88, 0xc4, // print: mov ah, al
    0xba, 0xfd, 0x03, // mov dx, 0x3fd
    0xec, // wait: in al, dx
    0xa8, 0x20, // test al, 0x20
    0x74, 0xfb, // jz wait
    0x88, 0xe0, // mov al, ah
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xee, // out dx, al
    0xc3, // ret
];
const SECTOR: usize = 512;
const IMAGE_BYTES: u64 = 1 << 20;
const MEMORY_MIB: u32 = 64;

const FEW: usize = 6;
const MANY: usize = 50;

/// The most that one VM adds, measured on the host that runs it and on the one that backs it up: what is
/// counted here is what must not grow. The memory is the primary's: 35 MiB before buffers for a checkpoint
/// were in proportion to the guest.
const MOST: Held = Held { threads: 11.0, descriptors: 40.0, connections: 3.0 };
const MOST_MIB: f64 = 24.0;
/// The same of a VM with a keeper, which has an API, an arbiter and an allocator of its own.
const MOST_KEPT: Held = Held { threads: 32.0, descriptors: 80.0, connections: 3.0 };
const MOST_KEPT_MIB: f64 = 40.0;
/// The descriptors that come and go: requests under way, connections of the survey.
const PASSING: f64 = 24.0;
/// The span that the figures are the mean of.
const SPAN: Duration = Duration::from_secs(10);

fn name(index: usize) -> String {
    format!("idle{index}")
}

fn start(scene: &Scene, index: usize) -> Result<()> {
    let name = name(index);
    let image = scene.lab().directory().join(format!("{name}.img"));
    let mut sector = GUEST.to_vec();
    sector.resize(SECTOR - 2, 0);
    sector.extend([0x55, 0xaa]);
    fs::write(&image, sector)?;
    fs::File::options().write(true).open(&image)?.set_len(IMAGE_BYTES)?;
    let definition = format!(
        "name = \"{name}\"\nmemory = \"{MEMORY_MIB}M\"\nvcpus = 1\naccel = \"tcg\"\n\
         [[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
        image.display()
    );
    let file = scene.lab().directory().join(format!("{name}.toml"));
    fs::write(&file, definition)?;
    scene.host("a")?.call(["vm", "start", &file.to_string_lossy()])?;
    Ok(())
}

/// The counts that a guest has printed on a host, in order.
fn counts(scene: &Scene, host: &str, index: usize) -> Result<Vec<u16>> {
    let directory = scene.host(host)?.directory().join("state").join(name(index));
    let text = fs::read(directory.join("console.log")).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let lines = text.lines().filter(|line| line.len() == 4);
    Ok(lines.filter_map(|line| u16::from_str_radix(line, 16).ok()).collect())
}

/// The VMs for which this is so, by their status on a host.
fn those(scene: &Scene, host: &str, fits: impl Fn(&serde_json::Value) -> bool) -> Result<usize> {
    Ok(vms(scene.host(host)?)?.iter().filter(|vm| fits(vm)).count())
}

fn await_protected(scene: &Scene, number: usize) -> Result<()> {
    wait_for(&format!("{number} VMs to be protected"), 2 * LIMIT, || {
        let protected = those(scene, "a", |vm| vm["protection"]["state"] == "protected")?;
        let ready = those(scene, "b", |vm| vm["protection"]["state"] == "protected")?;
        Ok((protected == number && ready == number).then_some(()))
    })
}

/// The things that a host has open and running, without its QEMUs.
#[derive(Clone, Copy, Debug)]
struct Held {
    threads: f64,
    descriptors: f64,
    connections: f64,
}

/// The daemon of a host, and its keepers.
fn daemons(host: &HostProcess) -> Result<Vec<u32>> {
    let is_keeper = |pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name == "understudy-keep\n")
    };
    let keepers = host.namespace().processes()?.into_iter().filter(is_keeper);
    Ok(std::iter::once(host.pid()).chain(keepers).collect())
}

impl Held {
    fn by(host: &HostProcess) -> Result<Held> {
        let pids = daemons(host)?;
        let entries = |of: &str| -> Result<f64> {
            let count = |pid: &u32| Ok(fs::read_dir(format!("/proc/{pid}/{of}"))?.count() as f64);
            pids.iter().map(count).sum()
        };
        // Field 4 of each line is the state; 01 is established.
        let table = fs::read_to_string(format!("/proc/{}/net/tcp", host.pid()))?;
        let is_open = |line: &&str| line.split_whitespace().nth(3) == Some("01");
        let connections = table.lines().filter(is_open).count() as f64;
        Ok(Held { threads: entries("task")?, descriptors: entries("fd")?, connections })
    }

    /// The part that each of so many VMs has added since.
    fn each(&self, before: &Held, vms: usize) -> Held {
        let each = |now: f64, before: f64| (now - before) / vms as f64;
        Held {
            threads: each(self.threads, before.threads),
            descriptors: each(self.descriptors, before.descriptors),
            connections: each(self.connections, before.connections),
        }
    }

    fn is_within(&self, most: &Held) -> bool {
        self.threads <= most.threads
            && self.descriptors <= most.descriptors
            && self.connections <= most.connections
    }
}

/// The time that a host's processes have used so far, and the memory that they hold.
struct Used {
    at: Instant,
    daemon: Duration,
    qemus: Duration,
    daemon_pss: u64,
    qemus_pss: u64,
    switches: u64,
}

impl Used {
    fn by(host: &HostProcess) -> Result<Used> {
        let daemons = daemons(host)?;
        let mut used = Used {
            at: Instant::now(),
            daemon: daemons.iter().map(|pid| processor_time(*pid)).sum::<Result<_>>()?,
            qemus: Duration::ZERO,
            daemon_pss: daemons.iter().map(|pid| pss(*pid)).sum::<Result<_>>()?,
            qemus_pss: 0,
            switches: daemons.iter().map(|pid| switches(*pid)).sum::<Result<_>>()?,
        };
        for pid in host.namespace().processes()?.into_iter().filter(|pid| !daemons.contains(pid)) {
            // What is only passing may have ended since.
            let (Ok(time), Ok(bytes)) = (processor_time(pid), pss(pid)) else { continue };
            used.qemus += time;
            used.qemus_pss += bytes;
        }
        Ok(used)
    }
}

/// The times that its threads have waited.
fn switches(pid: u32) -> Result<u64> {
    let of_task = |task: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let line = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
        Ok(line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0))
    };
    fs::read_dir(format!("/proc/{pid}/task"))?.map(of_task).sum()
}

fn processor_time(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(") ").context("no stat")?.1.split(' ');
    // utime and stime, in hundredths of a second.
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(Duration::from_millis(10 * ticks))
}

/// Bytes of memory, what is shared counted in parts.
fn pss(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("no Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// Prints what each VM costs, for docs/sizing.md, and bounds what it holds.
fn check_costs(scene: &Scene, vms: usize, most_mib: f64) -> Result<()> {
    let before = [Used::by(scene.host("a")?)?, Used::by(scene.host("b")?)?];
    thread::sleep(SPAN);
    for (host, before) in ["a", "b"].into_iter().zip(before) {
        let now = Used::by(scene.host(host)?)?;
        let span = (now.at - before.at).as_secs_f64();
        let percent = |now: Duration, before: Duration| {
            100.0 * now.saturating_sub(before).as_secs_f64() / span / vms as f64
        };
        let mib = |bytes: u64| bytes as f64 / vms as f64 / (1 << 20) as f64;
        eprintln!(
            "COSTS host {host}, {vms} VMs, for each: daemon and keeper {:.2} % of a processor, QEMU {:.2} %; daemon and \
             keeper {:.1} MiB, QEMU {:.1} MiB (PSS); their threads wait {:.0} times a second",
            percent(now.daemon, before.daemon),
            percent(now.qemus, before.qemus),
            mib(now.daemon_pss),
            mib(now.qemus_pss),
            (now.switches - before.switches) as f64 / span / vms as f64,
        );
        let held = mib(now.daemon_pss);
        ensure!(
            held <= most_mib,
            "host {host}'s daemon and keepers hold {held:.1} MiB for each VM"
        );
    }
    Ok(())
}

/// Protects so many, one after the other, and counts what each adds.
fn protect_all(scene: &Scene, number: usize, most: &Held) -> Result<()> {
    let hosts = ["a", "b"];
    let held = || -> Result<BTreeMap<&str, Held>> {
        hosts.iter().map(|host| Ok((*host, Held::by(scene.host(host)?)?))).collect()
    };
    let before = held()?;
    for index in 0..number {
        start(scene, index)?;
        scene.host("a")?.call(["protect", &name(index), "--to", "b", "--no-wait"])?;
        await_protected(scene, index + 1)?;
        let vms = index + 1;
        let passing = PASSING / vms as f64;
        let most = Held {
            threads: most.threads + passing,
            descriptors: most.descriptors + passing,
            connections: most.connections + passing,
        };
        // What only passes has a moment to end.
        wait_for(&format!("{vms} VMs to hold no more than {most:?} each"), LIMIT / 6, || {
            let now = held()?;
            let each = hosts.map(|host| now[host].each(&before[host], vms));
            if vms == 1 || vms == number {
                eprintln!("with {vms} VMs, each holds {each:?}");
            }
            Ok(each.iter().all(|each| each.is_within(&most)).then_some(()))
        })
        .with_context(|| format!("{:?} before, {:?} now", before, held()))?;
    }
    Ok(())
}

/// Waits until three checkpoints of each VM are over: what was printed before is committed.
fn await_committed(scene: &Scene) -> Result<()> {
    let checkpoints = || -> Result<Option<Vec<u64>>> {
        let all = vms(scene.host("a")?)?;
        // For a keeper that has not answered just now its daemon says what it knows, which is less.
        if all.iter().any(|vm| vm["qemu_pid"].is_null()) {
            return Ok(None);
        }
        let each = all.iter().map(|vm| vm["checkpoints"].as_u64().context("no checkpoints"));
        each.collect::<Result<_>>().map(Some)
    };
    let before = wait_for("each keeper to answer", LIMIT, checkpoints)?;
    wait_for("three checkpoints of each VM", LIMIT, || {
        let Some(now) = checkpoints()? else { return Ok(None) };
        let mut pairs = before.iter().zip(now);
        Ok(pairs.all(|(before, now)| now >= before + 3).then_some(()))
    })
}

fn live_on(scene: &mut Scene, number: usize, (most, most_mib): (Held, f64)) -> Result<()> {
    protect_all(scene, number, &most)?;
    check_costs(scene, number, most_mib)?;
    await_protected(scene, number)?;
    let committed: Vec<u16> = (0..number)
        .map(|index| Ok(*counts(scene, "a", index)?.last().context("it counts nothing")?))
        .collect::<Result<_>>()?;
    await_committed(scene)?;
    scene.host_mut("a")?.kill_everything()?;
    wait_for("host b to run all of them", 2 * LIMIT, || {
        let live = |vm: &serde_json::Value| vm["role"] == "primary" && vm["live"] == true;
        Ok((those(scene, "b", live)? == number).then_some(()))
    })?;
    for (index, committed) in committed.into_iter().enumerate() {
        wait_for(&format!("{} to count on", name(index)), LIMIT, || {
            let counts = counts(scene, "b", index)?;
            let [first, .., last] = counts[..] else { return Ok(None) };
            ensure!(first > committed, "it counts from {first:x}; {committed:x} was committed");
            Ok((last > first).then_some(()))
        })?;
        // A keeper would outlive the laboratory's daemon.
        scene.host("b")?.call(["vm", "stop", &name(index), "--force"])?;
    }
    Ok(())
}

fn idle() -> SceneOptions {
    // Guests of their own; the scene's is not started.
    SceneOptions {
        kind: GuestKind::BootSector,
        memory_mib: MEMORY_MIB,
        booted: false,
        ..options().calm()
    }
}

/// A hundred QEMUs share the processors of this machine.
fn patient(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        let settings = daemon.settings.lines().filter(|line| !line.contains("timeout_ms"));
        daemon.settings = settings.map(|line| format!("{line}\n")).collect::<String>()
            + "timeout_ms = 10000\nqemu_timeout_ms = 15000\nepoch_timeout_ms = 60000\n";
    }
    options
}

#[test]
fn idle_vms_take_little_and_all_live_on() {
    play(idle(), |scene| live_on(scene, FEW, (MOST, MOST_MIB)));
}

#[test]
fn idle_vms_in_keepers_take_little_and_all_live_on() {
    play(in_keepers(idle()), |scene| live_on(scene, FEW, (MOST_KEPT, MOST_KEPT_MIB)));
}

#[test]
#[ignore = "long: fifty VMs, some minutes; `make test-long`"]
fn fifty_idle_vms_live_on() {
    play(patient(idle()), |scene| live_on(scene, MANY, (MOST, MOST_MIB)));
}

#[test]
#[ignore = "long: fifty VMs, some minutes; `make test-long`"]
fn fifty_idle_vms_in_keepers_live_on() {
    let options = in_keepers(patient(idle()));
    play(options, |scene| live_on(scene, MANY, (MOST_KEPT, MOST_KEPT_MIB)));
}
