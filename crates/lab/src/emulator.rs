//! A QEMU of the laboratory's own, in a host's namespace: the machine that the
//! product would make of a definition, with QEMU's own parts where the product
//! has its data plane.

use crate::in_namespace;
use crate::lab::{BRIDGE, Lab};
use crate::qmp::{Events, Qmp};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use understudy_qemu::command::{BootFiles, Console, ConsoleSocket, Lockstep};
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::process::{Exit, Launch};
use understudy_qemu::{Capabilities, ClockBase, Qemu, Resources, Role, VmDefinition, command_line};

/// Time for a QEMU that has closed its monitor to be gone.
const END_LIMIT: Duration = Duration::from_secs(60);
const CONSOLE: &str = "console";
const LOG: &str = "qemu.log";

/// Description of what to start.
pub(crate) struct Blueprint<'a> {
    /// QEMU.
    pub qemu: &'a Capabilities,
    /// The machine. Its one card goes to the tap.
    pub definition: &'a VmDefinition,
    /// Whether its time is counted in instructions, as in lockstep.
    pub counted: bool,
    /// The tap that QEMU makes; it becomes a port of the host's bridge.
    pub tap: &'a str,
    /// Parts that it has in the place of the product's.
    pub parts: Parts,
    /// Directory for QEMU's log and its sockets; must exist.
    pub directory: &'a Path,
}

/// Parts of a machine that the product has not.
pub(crate) struct Parts {
    /// Arguments for each disk that make the block node or drive `disk0`, `disk1`, …
    pub disks: Vec<Vec<OsString>>,
    /// Whether it waits for a migration, after which its guest runs by itself.
    pub incoming: bool,
    /// Further arguments.
    pub more: Vec<OsString>,
}

/// A running QEMU. Its guest stands still until [`Emulator::cont`], or until it has
/// come by a migration. Dropping it ends it.
pub(crate) struct Emulator {
    process: Qemu,
    qmp: Mutex<Qmp>,
    events: Events,
    console: PathBuf,
}

impl Emulator {
    /// Starts it on a host of `lab`.
    pub(crate) fn start(lab: &Lab, host: &str, blueprint: &Blueprint<'_>) -> Result<Emulator> {
        let pairs = [UnixStream::pair()?, UnixStream::pair()?, UnixStream::pair()?];
        let [(commands, a), (events, b), (_unused, c)] = &pairs;
        let args = arguments(blueprint, [a, b, c].map(AsRawFd::as_raw_fd))?;
        let namespace = lab.host(host)?;
        let launch = Launch {
            binary: &blueprint.qemu.binary,
            args: &args,
            env: &[],
            inherit: &[a, b, c].map(AsFd::as_fd),
            log: &blueprint.directory.join(LOG),
            directory: None,
            user: None,
            descriptors: None,
        };
        let process = in_namespace(&namespace, || Qemu::launch(&launch))??;
        let (commands, events) = (commands.try_clone()?, events.try_clone()?);
        // With them go this process's copies of QEMU's ends: its end is seen.
        drop(pairs);
        let greeted = Qmp::open(commands).and_then(|qmp| Ok((qmp, Events::watch(events)?)));
        let (qmp, events) = greeted.map_err(|error| explained(&process, error))?;
        // As the product's taps: a bridge takes its lowest port's address for its own.
        let address = format!("fe{}", &blueprint.definition.cards[0].mac.to_string()[2..]);
        namespace.ip(&[
            "link",
            "set",
            blueprint.tap,
            "address",
            &address,
            "master",
            BRIDGE,
            "up",
        ])?;
        let console = blueprint.directory.join(CONSOLE);
        Ok(Emulator { process, qmp: Mutex::new(qmp), events, console })
    }

    /// Executes a QMP command. When QEMU has ended, the error has its last words.
    pub(crate) fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = qmp.execute(command, arguments);
        if qmp.is_closed() {
            return answer.map_err(|error| explained(&self.process, error));
        }
        answer
    }

    /// Lets the guest run.
    pub(crate) fn cont(&self) -> Result<()> {
        self.execute("cont", json!({})).map(drop)
    }

    /// Makes the guest stand still.
    pub(crate) fn stop(&self) -> Result<()> {
        self.execute("stop", json!({})).map(drop)
    }

    /// Events that happened.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Exit of the process, if it has ended.
    pub(crate) fn exit(&self) -> Result<Option<Exit>> {
        Ok(self.process.try_wait()?)
    }

    /// The end of what it has said on its standard output and error.
    pub(crate) fn last_words(&self) -> String {
        self.process.last_words()
    }

    /// The unix socket of the guest's console.
    pub(crate) fn console(&self) -> &Path {
        &self.console
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// End of a QEMU that has closed its monitor, which is the reason of `error`.
fn explained(process: &Qemu, error: anyhow::Error) -> anyhow::Error {
    match process.wait(END_LIMIT) {
        Ok(Some(exit)) => error.context(exit),
        _ => error,
    }
}

/// The product's command line for this machine, with its parts exchanged.
fn arguments(blueprint: &Blueprint<'_>, monitors: [i32; 3]) -> Result<Vec<OsString>> {
    let Blueprint { qemu, definition, counted, directory, ref parts, .. } = *blueprint;
    let resources = Resources {
        machine_type: qemu.machine_type(&definition.machine)?.to_owned(),
        accelerator: qemu.accelerator(definition.accel)?,
        kvm: None,
        boot: BootFiles {
            kernel: definition.kernel.clone(),
            initrd: definition.initrd.clone(),
            ..BootFiles::default()
        },
        monitors,
        console: Some(Console {
            socket: ConsoleSocket::Listen(directory.join(CONSOLE)),
            log: Some(directory.join(format!("{CONSOLE}.log"))),
        }),
        tpm: None,
        awaits_disks: false,
        role: Role::Fresh,
        lockstep: counted.then(|| Lockstep { role: LogRole::Record, clock: ClockBase::now() }),
        // Exchanged below.
        ram: -1,
        disks: vec![PathBuf::new(); definition.disks.len()],
        cards: vec![-1; definition.cards.len()],
    };
    let mut args = command_line(definition, &resources);
    if counted {
        without_log(&mut args, definition)?;
    }
    let bytes = definition.memory.bytes();
    let memory = format!("memory-backend-ram,id=ram,size={bytes}");
    exchange(&mut args, "-object", "id=ram", &["-object".into(), memory.into()])?;
    for (n, disk) in parts.disks.iter().enumerate() {
        exchange(&mut args, "-blockdev", &format!("node-name=disk{n}"), disk)?;
    }
    let card = format!("tap,id=card0,ifname={},script=no,downscript=no,vhost=off", blueprint.tap);
    exchange(&mut args, "-netdev", "id=card0", &["-netdev".into(), card.into()])?;
    if parts.incoming {
        // Without -S, or the guest would stand still after its migration.
        args.retain(|arg| arg != "-S");
        args.extend(["-incoming", "defer"].map(OsString::from));
    }
    args.extend(parts.more.iter().cloned());
    Ok(args)
}

/// Takes the log out of a machine in lockstep, and all that is there for the log.
fn without_log(args: &mut Vec<OsString>, definition: &VmDefinition) -> Result<()> {
    let at = args.iter().position(|arg| arg == "-icount").context("no `-icount`")? + 1;
    let clock = args[at].to_string_lossy().into_owned();
    let (clock, _log) = clock.split_once(",rr=").context("`-icount` without a log")?;
    args[at] = clock.into();
    for n in 0..definition.cards.len() {
        exchange(args, "-object", &format!("id=replay{n}"), &[])?;
    }
    for n in 0..definition.disks.len() {
        let (above, image) = (format!("node-name=disk{n}"), format!("node-name=disk{n}-image"));
        exchange(args, "-blockdev", &above, &[])?;
        exchange(args, "-blockdev", &image, &["-blockdev".into(), above.into()])?;
    }
    Ok(())
}

/// Puts `new` in the place of the one `option` whose value has the word `mark`.
fn exchange(args: &mut Vec<OsString>, option: &str, mark: &str, new: &[OsString]) -> Result<()> {
    let has_mark = |value: &OsString| value.to_string_lossy().split(',').any(|word| word == mark);
    let found = args.windows(2).position(|pair| pair[0] == option && has_mark(&pair[1]));
    let at = found.with_context(|| {
        format!("the product's command line has no `{option} …{mark}…` to be exchanged")
    })?;
    args.splice(at..at + 2, new.iter().cloned());
    Ok(())
}

/// The arguments that make the block node `diskN` of a local raw image.
///
/// The cache is the product's: writes go to the host's page cache, and the guest's
/// flush is an fdatasync. (With `cache.direct=on` plain QEMU would wait for the
/// device at every write, and be compared with something else.)
pub(crate) fn raw_disk(n: usize, image: &Path) -> Result<Vec<OsString>> {
    let image = image.to_str().context("the image's path is not UTF-8")?;
    let node = json!({
        "driver": "file", "node-name": format!("disk{n}"), "filename": image, "aio": "threads",
        "cache": {"direct": false, "no-flush": false},
        "discard": "unmap", "detect-zeroes": "off",
    });
    Ok(vec!["-blockdev".into(), node.to_string().into()])
}

/// Refuses names of taps that the kernel would refuse, or that others have.
pub(crate) fn check_tap(lab: &Lab, host: &str, tap: &str) -> Result<()> {
    let plain = tap.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    ensure!((1..16).contains(&tap.len()) && plain, "`{tap}` cannot be the name of a tap");
    let taken = lab.host(host)?.interfaces()?.iter().any(|name| name == tap);
    ensure!(!taken, "host {host} has an interface `{tap}` already");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_in_lockstep_is_left_with_its_clock() {
        let definition = "name = \"a\"\nmemory = \"64M\"\nvcpus = 1\n\
                          [[disk]]\npath = \"a\"\nformat = \"raw\"\n\
                          [[card]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"b\"";
        let definition: VmDefinition = toml::from_str(definition).unwrap();
        let lockstep = Lockstep { role: LogRole::Record, clock: ClockBase::now() };
        let resources = Resources {
            machine_type: "pc".to_owned(),
            accelerator: understudy_qemu::Accelerator::Tcg,
            kvm: None,
            boot: BootFiles::default(),
            ram: 3,
            monitors: [4, 5, 6],
            disks: vec!["nbd".into()],
            cards: vec![7],
            console: None,
            tpm: None,
            awaits_disks: false,
            role: Role::Fresh,
            lockstep: Some(lockstep),
        };
        let mut args = command_line(&definition, &resources);
        without_log(&mut args, &definition).unwrap();
        let text: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
        let text = text.join(" ");
        assert!(text.contains("-icount shift=") && text.contains("hpet=off"), "{text}");
        assert!(!text.contains("replay") && !text.contains("rr="), "{text}");
        assert!(text.contains("-blockdev node-name=disk0 "), "{text}");
    }

    #[test]
    fn parts_are_exchanged_whole_and_a_missing_one_is_an_error() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let mut args = words("-object a,id=ram0 -object b,id=ram,size=1 -S");
        exchange(&mut args, "-object", "id=ram", &words("-object c -object d")).unwrap();
        assert_eq!(args, words("-object a,id=ram0 -object c -object d -S"));
        let error = exchange(&mut args, "-netdev", "id=card0", &[]).unwrap_err().to_string();
        assert!(error.contains("-netdev") && error.contains("id=card0"), "{error}");
    }
}
