//! QEMU's own fault tolerance, COLO: two QEMUs that run the same guest, compare what
//! it sends, and checkpoint when it differs (docs/COLO-FT.txt of QEMU).
//!
//! ```text
//!  host a: primary                          host b: secondary
//!    tap ─ mirror ───────────── 9003 ─▶ redirector ─▶ guest's card
//!    tap ◀ redirector ◀ compare ◀ 9004 ─ redirector ◀ rewriter ◀ guest's card
//!    disk: quorum ─┬─ image             disk: quorum ─ replication ─ active ─ hidden
//!                  └─ replication ── 9999 ─▶ NBD ─ image ◀──────────────────────┘
//!    migration ──────────────── 9998 ─▶ incoming
//! ```
//!
//! Nothing here knows whether it works: a QEMU on which it does not is met by an error
//! with QEMU's own words. (10.0.2 never enters COLO: it does so only at the end of a
//! migration in state `active`, and since 10.0 that state is `device` by then.)

use crate::emulator::{Emulator, Parts};
use crate::lab::Lab;
use crate::migration::capability;
use crate::plain::{Home, PlainOptions};
use crate::wait::{servers_answer, wait_for};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

const MIRROR: u16 = 9003;
const COMPARE: u16 = 9004;
const MIGRATION: u16 = 9998;
const NBD: u16 = 9999;
/// The primary's own, on its loopback.
const PRIMARY_IN: u16 = 9001;
const RELEASE: u16 = 9005;

/// Time for the QEMUs to find each other.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// Time for the first copy of the guest, which has not begun to boot.
const ENTER_LIMIT: Duration = Duration::from_secs(10);
/// Time for the guest to boot, and for a checkpoint: QEMU makes one after 20 s at the latest.
const BOOT_LIMIT: Duration = Duration::from_secs(25);

/// COLO did not come to run a guest.
#[derive(Clone, Debug, thiserror::Error)]
#[error("COLO on QEMU {version} does not run: {reason}")]
pub struct ColoError {
    /// QEMU's version.
    pub version: String,
    /// Reason that it was met with, in QEMU's words.
    pub reason: String,
}

/// A guest under COLO: the primary on host a, the secondary on host b. Dropping it ends
/// both QEMUs, and removes their taps, disks and directories.
pub struct Colo {
    // Fields are dropped in order: the QEMUs first, then what they use.
    primary: Emulator,
    secondary: Emulator,
    home: Home,
    _secondary_home: Home,
}

impl Colo {
    /// Starts both, and waits until COLO runs, has made a checkpoint, and the guest's servers
    /// on `ports` answer the laboratory's client. The guest boots under COLO: the disks are
    /// the same then. Takes 40 s at most, if QEMU answers its monitor
    /// and both find each other.
    ///
    /// # Errors
    /// If QEMU refuses a step, COLO is not entered, no checkpoint comes to its end, or the
    /// guest does not answer.
    pub fn start(
        lab: &Lab,
        options: &PlainOptions,
        ports: &[u16],
    ) -> std::result::Result<Colo, ColoError> {
        let mut version = "of unknown version".to_owned();
        let started = || {
            let home = Home::make(lab, "a", options)?;
            version = home.version();
            let colo = Colo::connect(lab, home, Home::make(lab, "b", options)?)?;
            let entered = colo.enter(lab).and_then(|()| colo.await_boot(lab, ports));
            entered.map_err(|error| colo.explained(error)).map(|()| colo)
        };
        let started: Result<Colo> = { started }();
        started.map_err(|error| ColoError { version, reason: format!("{error:#}") })
    }

    /// Starts the QEMUs, the primary first, since the secondary connects to it.
    fn connect(lab: &Lab, home: Home, secondary_home: Home) -> Result<Colo> {
        let tap = &home.options.name;
        let primary = home.start(lab, tap, primary_parts(&home)?).context("the primary")?;
        let parts = secondary_parts(&secondary_home, lab.host_address("a")?)?;
        let secondary = secondary_home.start(lab, tap, parts).context("the secondary")?;
        Ok(Colo { primary, secondary, home, _secondary_home: secondary_home })
    }

    /// Steps 3 and 4 of QEMU's document.
    fn enter(&self, lab: &Lab) -> Result<()> {
        let address = lab.host_address("b")?;
        let (primary, secondary) = (&self.primary, &self.secondary);
        self.await_filters()?;
        let mirror = json!({"path": "/objects/m0", "property": "status", "value": "on"});
        primary.execute("qom-set", mirror)?;
        secondary.execute("migrate-set-capabilities", capability("x-colo"))?;
        let inet = json!({"host": address.to_string(), "port": NBD.to_string()});
        secondary.execute("nbd-server-start", json!({"addr": {"type": "inet", "data": inet}}))?;
        for n in 0..self.home.disks.len() {
            let export = json!({"device": format!("parent{n}"), "writable": true});
            secondary.execute("nbd-server-add", export)?;
            // A busy machine's network answers no question for an address in time, now and then.
            wait_for(
                "the secondary's disk server to be reached",
                CONNECT_LIMIT,
                || match monitor(primary, &add_replication(n, address)) {
                    Err(error) if error.to_string().contains("No route to host") => Ok(None),
                    added => added.map(Some),
                },
            )?;
            let child = json!({"parent": format!("disk{n}"), "node": format!("replication{n}")});
            primary.execute("x-blockdev-change", child)?;
        }
        let uri = format!("tcp:{address}:{MIGRATION}");
        secondary.execute("migrate-incoming", json!({"uri": uri}))?;
        primary.execute("migrate-set-capabilities", capability("events"))?;
        primary.execute("migrate-set-capabilities", capability("x-colo"))?;
        primary.execute("migrate", json!({"uri": uri}))?;
        self.await_colo()
    }

    /// Waits until the secondary's filters are connected to the primary's.
    fn await_filters(&self) -> Result<()> {
        wait_for("the secondary's filters to connect", CONNECT_LIMIT, || {
            let devices = self.primary.execute("query-chardev", json!({}))?;
            let devices = devices.as_array().map_or(&[][..], Vec::as_slice);
            let connected = |label: &str| {
                let device = devices.iter().find(|device| device["label"] == label);
                let file = device.and_then(|device| device["filename"].as_str());
                file.is_some_and(|file| !file.starts_with("disconnected"))
            };
            Ok((connected("mirror0") && connected("compare1")).then_some(()))
        })
    }

    /// Waits until the migration has become COLO.
    fn await_colo(&self) -> Result<()> {
        wait_for("the migration to become COLO", ENTER_LIMIT, || {
            self.check()?;
            let mut states = self.primary.events().all("MIGRATION");
            let states: Vec<Value> =
                states.iter_mut().map(|event| event.data["status"].take()).collect();
            let states: Vec<&str> = states.iter().filter_map(Value::as_str).collect();
            match states.last() {
                Some(&"colo") => Ok(Some(())),
                Some(&end @ ("completed" | "failed" | "cancelled")) => {
                    let report = self.primary.execute("query-migrate", json!({}))?;
                    let reason = report["error-desc"].as_str().unwrap_or("none given");
                    let way = states.join(", ");
                    bail!("it ended as `{end}` (QEMU's states: {way}; its reason: {reason})")
                }
                _ => Ok(None),
            }
        })
    }

    fn await_boot(&self, lab: &Lab, ports: &[u16]) -> Result<()> {
        let servers: Vec<SocketAddr> = ports.iter().map(|&port| self.server(port)).collect();
        let mut answered = false;
        let waited = wait_for("the guest to answer under COLO", BOOT_LIMIT, || {
            self.check()?;
            let checkpoints = self.primary.events().pauses().len();
            let answers = servers_answer(lab, &servers)?;
            answered |= answers;
            Ok((answers && checkpoints > 0).then_some(()))
        });
        waited.with_context(|| {
            let answered = if answered { "answered at first" } else { "never answered" };
            let checkpoints = self.primary.events().pauses().len();
            format!("the guest {answered}; {checkpoints} checkpoints came to their end")
        })
    }

    /// An error, in QEMU's words, if COLO has ended.
    pub fn check(&self) -> Result<()> {
        // No questions: a QEMU that hangs would not answer them.
        for (who, qemu) in [("primary", &self.primary), ("secondary", &self.secondary)] {
            if let Some(exit) = qemu.exit()? {
                bail!("the {who} has ended: {exit}");
            }
            if let Some(exit) = qemu.events().all("COLO_EXIT").pop() {
                bail!("the {who} has left COLO: {}", exit.data);
            }
        }
        Ok(())
    }

    /// Error that has what both QEMUs said added to what went wrong.
    fn explained(&self, error: anyhow::Error) -> anyhow::Error {
        let mut words = Vec::new();
        for (who, qemu) in [("primary", &self.primary), ("secondary", &self.secondary)] {
            let said = qemu.last_words();
            if !said.is_empty() {
                words.push(format!("the {who} said: {said}"));
            }
        }
        if words.is_empty() { error } else { anyhow::anyhow!("{error:#}; {}", words.join("; ")) }
    }

    /// One of the guest's servers.
    pub fn server(&self, port: u16) -> SocketAddr {
        SocketAddr::from((self.address(), port))
    }

    /// The guest's address.
    pub fn address(&self) -> Ipv4Addr {
        self.home.options.address
    }

    /// The unix socket of the primary's console.
    pub fn console(&self) -> &Path {
        self.primary.console()
    }
}

/// A command of the human monitor, which reports errors as text.
fn monitor(qemu: &Emulator, line: &str) -> Result<()> {
    let said = qemu.execute("human-monitor-command", json!({"command-line": line}))?;
    let said = said.as_str().unwrap_or_default().trim();
    ensure!(said.is_empty() || said == "OK", "`{line}`: {said}");
    Ok(())
}

fn add_replication(n: usize, secondary: Ipv4Addr) -> String {
    format!(
        "drive_add -n buddy driver=replication,mode=primary,file.driver=nbd,\
         file.host={secondary},file.port={NBD},file.export=parent{n},node-name=replication{n}"
    )
}

/// The quorum that a guest's disk is, with its first child.
fn quorum(n: usize, child: &str) -> String {
    format!("if=none,id=disk{n},driver=quorum,read-pattern=fifo,vote-threshold=1,{child}")
}

fn primary_parts(home: &Home) -> Result<Parts> {
    let disk = |(n, image): (usize, &std::path::PathBuf)| {
        let image = escaped(image)?;
        let child = format!("children.0.driver=raw,children.0.file.filename={image}");
        Ok(arguments(&[("-drive", &quorum(n, &child))]))
    };
    let disks = home.disks.iter().enumerate().map(disk).collect::<Result<_>>()?;
    let server = |id: &str, host: &str, port: u16| {
        format!("socket,id={id},host={host},port={port},server=on,wait=off")
    };
    let client = |id: &str, port: u16| format!("socket,id={id},host=127.0.0.1,port={port}");
    // A virtio card's frames have a header, of which every filter is to know. Nothing is
    // mirrored before the secondary listens: QEMU would complain about every frame.
    let more = arguments(&[
        ("-chardev", &server("mirror0", "0.0.0.0", MIRROR)),
        ("-chardev", &server("compare1", "0.0.0.0", COMPARE)),
        ("-chardev", &server("compare0", "127.0.0.1", PRIMARY_IN)),
        ("-chardev", &client("compare0-0", PRIMARY_IN)),
        ("-chardev", &server("compare_out", "127.0.0.1", RELEASE)),
        ("-chardev", &client("compare_out0", RELEASE)),
        (
            "-object",
            "filter-mirror,id=m0,netdev=card0,queue=tx,outdev=mirror0,vnet_hdr_support=on,status=off",
        ),
        (
            "-object",
            "filter-redirector,id=redire0,netdev=card0,queue=rx,indev=compare_out,\
             vnet_hdr_support=on",
        ),
        (
            "-object",
            "filter-redirector,id=redire1,netdev=card0,queue=rx,outdev=compare0,\
             vnet_hdr_support=on",
        ),
        ("-object", "iothread,id=iothread1"),
        (
            "-object",
            "colo-compare,id=comp0,primary_in=compare0-0,secondary_in=compare1,\
             outdev=compare_out0,iothread=iothread1,vnet_hdr_support=on",
        ),
    ]);
    Ok(Parts { disks, incoming: false, more })
}

fn secondary_parts(home: &Home, primary: Ipv4Addr) -> Result<Parts> {
    let directory = home.directory.path();
    let disk = |(n, image): (usize, &std::path::PathBuf)| {
        let size = fs::metadata(image)?.len().to_string();
        let layer = |kind: &str| {
            let path = directory.join(format!("{kind}{n}.qcow2"));
            let name = path.to_string_lossy().into_owned();
            crate::command::run("qemu-img", &["create", "-q", "-f", "qcow2", &name, &size])?;
            escaped(&path)
        };
        let (active, hidden) = (layer("active")?, layer("hidden")?);
        let parent = format!(
            "if=none,id=parent{n},driver=raw,file.driver=file,file.filename={}",
            escaped(image)?
        );
        let child = format!(
            "if=none,id=childs{n},driver=replication,mode=secondary,file.driver=qcow2,\
             top-id=disk{n},file.file.filename={active},file.backing.driver=qcow2,\
             file.backing.file.filename={hidden},file.backing.backing=parent{n}"
        );
        let top = quorum(n, &format!("children.0=childs{n}"));
        Ok(arguments(&[("-drive", &parent), ("-drive", &child), ("-drive", &top)]))
    };
    let disks = home.disks.iter().enumerate().map(disk).collect::<Result<_>>()?;
    let client = |id: &str, port: u16| {
        format!("socket,id={id},host={primary},port={port},reconnect-ms=1000")
    };
    let more = arguments(&[
        ("-chardev", &client("red0", MIRROR)),
        ("-chardev", &client("red1", COMPARE)),
        ("-object", "filter-redirector,id=f1,netdev=card0,queue=tx,indev=red0,vnet_hdr_support=on"),
        (
            "-object",
            "filter-redirector,id=f2,netdev=card0,queue=rx,outdev=red1,vnet_hdr_support=on",
        ),
        ("-object", "filter-rewriter,id=rew0,netdev=card0,queue=all,vnet_hdr_support=on"),
    ]);
    Ok(Parts { disks, incoming: true, more })
}

fn arguments(pairs: &[(&str, &str)]) -> Vec<OsString> {
    pairs.iter().flat_map(|(option, value)| [option.into(), value.into()]).collect()
}

/// Escapes a path: in QEMU's key=value options a comma in a value is written twice.
fn escaped(path: &Path) -> Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(text.replace(',', ",,"))
}
