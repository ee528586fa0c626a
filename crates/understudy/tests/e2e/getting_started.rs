//! docs/getting-started.md, followed word by word: the built package, two clean Debian systems, six commands.

use crate::installed::Installed;
use crate::stage::{LIMIT, PACE, await_service, close, options, run};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;
use understudy_lab::{GUEST_ADDRESS, Lab, RecordClient, wait_for};

const PAGE: &str = include_str!("../../../../docs/getting-started.md");
const RECORDS_PORT: u16 = 7000;

/// A line of the page: on which host, and what is typed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step<'a> {
    host: &'a str,
    line: &'a str,
}

/// The commands below a heading of the page.
fn steps(heading: &str) -> Vec<Step<'static>> {
    let section = PAGE.split("\n## ").find(|section| section.starts_with(heading));
    let lines = section.unwrap_or_default().lines();
    let step = |line: &'static str| {
        let (host, line) = line.split_once("# ")?;
        host.starts_with("host-").then_some(Step { host, line })
    };
    lines.filter_map(step).collect()
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

/// Builds the packages of the binaries under test: the product's, and the laboratory's.
fn packages() -> Result<Vec<PathBuf>> {
    let profile = Path::new(env!("CARGO_BIN_EXE_understudy")).parent().context("no profile")?;
    let profile = profile.file_name().context("no profile")?.to_string_lossy().into_owned();
    let script = target().join("../scripts/deb");
    let built = run(&script.to_string_lossy(), &[&profile])?;
    Ok(built.lines().map(PathBuf::from).collect())
}

/// A clean Debian, which is made once.
fn clean_root() -> Result<PathBuf> {
    let directory = target().join("host-root");
    let script = target().join("../scripts/host-root");
    run(&script.to_string_lossy(), &[&directory.to_string_lossy()])?;
    Ok(directory.canonicalize()?.join("root"))
}

/// The definition that the page shows, with the test guest in it.
fn put_guest(host: &Installed) -> Result<()> {
    let directory = host.path("/var/lib/guest");
    fs::create_dir_all(&directory)?;
    for file in ["vmlinuz", "initrd.gz", "disk.img"] {
        fs::copy(options().guest_files.join(file), directory.join(file))?;
    }
    let at = "/var/lib/guest";
    let text = format!(
        "name = \"db\"\nmemory = \"128M\"\nvcpus = 1\nkernel = \"{at}/vmlinuz\"\n\
         initrd = \"{at}/initrd.gz\"\nappend = \"console=ttyS0 quiet no_timer_check \
         us.ip={GUEST_ADDRESS}/24\"\n[[disk]]\npath = \"{at}/disk.img\"\nformat = \"raw\"\n\
         [[card]]\nmac = \"52:54:00:75:73:01\"\nbridge = \"br0\"\n"
    );
    Ok(fs::write(host.path("/root/db.toml"), text)?)
}

/// Both hosts, and what `init` is still waiting for.
struct Site {
    a: Installed,
    b: Installed,
    init: Option<Child>,
    token: Option<String>,
}

impl Site {
    /// Boots two clean hosts, which have the packages and the guest.
    fn boot(lab: &Lab) -> Result<Site> {
        let (packages, root) = (packages()?, clean_root()?);
        let boot = |host: &str| Installed::boot(lab, host, &format!("host-{host}"), &root);
        let site = Site { a: boot("a")?, b: boot("b")?, init: None, token: None };
        for package in &packages {
            let name = package.file_name().context("a package has a name")?;
            for host in [&site.a, &site.b] {
                fs::copy(package, host.path("/root").join(name))?;
            }
        }
        put_guest(&site.a)?;
        Ok(site)
    }

    fn host(&self, name: &str) -> Result<&Installed> {
        match name {
            "host-a" => Ok(&self.a),
            "host-b" => Ok(&self.b),
            other => bail!("the page names a host {other}"),
        }
    }

    /// Types a line of the page.
    fn follow(&mut self, step: Step<'_>) -> Result<()> {
        let host = self.host(step.host)?;
        if step.line.starts_with("understudy init ") {
            let mut init = host.command(step.line).stdout(Stdio::piped()).spawn()?;
            self.token = Some(printed_command(&mut init)?);
            self.init = Some(init);
            return Ok(());
        }
        let Some(command) = step.line.strip_suffix(" TOKEN") else {
            return host.call(step.line).map(drop);
        };
        let printed = self.token.clone().context("the page joins before it invites")?;
        ensure!(printed.starts_with(command), "the page says {command}, init says {printed}");
        host.call(&printed)?;
        let mut init = self.init.take().context("init does not wait")?;
        let status = wait_for("init to go on", LIMIT, || Ok(init.try_wait()?))?;
        ensure!(status.success(), "init ended with {status}");
        Ok(())
    }
}

/// The command for the other host, which `init` prints before it waits.
fn printed_command(init: &mut Child) -> Result<String> {
    let mut lines = BufReader::new(init.stdout.take().context("no output")?).lines();
    let mut said = String::new();
    for line in &mut lines {
        let line = line?;
        if line.trim().starts_with("understudy join") {
            // What it says later must find a reader.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(line.trim().to_owned());
        }
        said += &line;
    }
    bail!("init printed no command to join: {said}")
}

#[test]
fn the_page_has_six_commands() {
    let six = steps("Six commands");
    assert_eq!(six.len(), 6, "{six:?}");
    assert_eq!(six[0].host, "host-a");
    assert!(six[5].line.starts_with("understudy protect"));
    assert_eq!(steps("See it").len(), 2);
    assert_eq!(steps("If something is not as it should be").len(), 1);
}

/// Prints how long it took, from the first command to the VM that is protected.
#[test]
fn two_clean_hosts_protect_a_vm_in_six_commands() -> Result<()> {
    let lab = Lab::new(&["a", "b"])?;
    let mut site = Site::boot(&lab)?;
    let begun = Instant::now();
    for step in steps("Six commands") {
        site.follow(step).with_context(|| format!("{step:?}"))?;
    }
    println!("from nothing to a protected VM: {:.0} s", begun.elapsed().as_secs_f64());
    for step in steps("See it").into_iter().chain(steps("If something is not as it should be")) {
        site.follow(step).with_context(|| format!("{step:?}"))?;
    }
    check_unit(&site)?;
    check_confinement(&site.a)?;
    let client = client(&lab)?;
    upgrade(&site)?;
    prove_take_over(&mut site, client)?;
    check_laboratory(&site.b)?;
    remove(&site.b)?;
    drop(site);
    let left = lab.leftovers()?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}

fn client(lab: &Lab) -> Result<RecordClient> {
    let client = wait_for("the guest to boot", LIMIT, || {
        Ok(RecordClient::start(lab, (GUEST_ADDRESS, RECORDS_PORT).into(), PACE).ok())
    })?;
    await_service(&client).map(|()| client)
}

fn status(host: &Installed) -> Result<Value> {
    let status = host.call("understudy status db --json || true")?;
    Ok(serde_json::from_str(&status).unwrap_or_default())
}

/// Host-a loses its power, and the guest goes on.
fn prove_take_over(site: &mut Site, client: RecordClient) -> Result<()> {
    // A machine that stood still a moment ago may have cost it its protection, which is being restored.
    wait_for("host-a's VM to be protected", LIMIT, || {
        Ok((status(&site.a)?["protection"]["state"] == "protected").then_some(()))
    })?;
    site.a.cut_power()?;
    wait_for("host-b to run the VM", LIMIT, || {
        let status = status(&site.b)?;
        Ok((status["role"] == "primary" && status["live"] == true).then_some(()))
    })?;
    await_service(&client)?;
    close(client).map(drop)
}

/// The main process of the service, which another one is to be, or none.
fn await_service_restart(host: &Installed, before: &str) -> Result<()> {
    wait_for("the service to have another process", LIMIT, || {
        let now = host.call("systemctl show understudy -P MainPID -P ActiveState")?;
        Ok((now != before && now.contains("active\n") && !now.starts_with('0')).then_some(()))
    })
}

/// A VM in keepers, whatever systemd, an operator or an upgrade does to the service.
#[test]
fn under_systemd_a_vm_with_keepers_outlives_restarts_kills_and_upgrades_of_the_service()
-> Result<()> {
    let lab = Lab::new(&["a", "b"])?;
    let mut site = Site::boot(&lab)?;
    let (set_up, vm): (Vec<_>, Vec<_>) =
        steps("Six commands").into_iter().partition(|step| !step.line.contains(" db"));
    for step in set_up {
        site.follow(step).with_context(|| format!("{step:?}"))?;
    }
    for host in [&site.a, &site.b] {
        // Of a machine that stands still for a second nothing is asked here.
        let calm = "[detection]\\ntimeout_ms = 3000\\nqemu_timeout_ms = 10000\\n";
        host.call(&format!("printf '{calm}' >> /etc/understudy/host.toml"))?;
        host.call("systemctl restart understudy && systemctl reset-failed understudy")?;
    }
    for step in vm {
        site.follow(step).with_context(|| format!("{step:?}"))?;
    }
    let client = client(&lab)?;
    let kept = |host: &Installed| -> Result<(u64, Value)> {
        let status = status(host)?;
        Ok((status["keeper_pid"].as_u64().context("no keeper")?, status["qemu_pid"].clone()))
    };
    let before = [kept(&site.a)?, kept(&site.b)?];
    for blow in [
        "systemctl restart understudy",
        "systemctl kill --kill-whom=main --signal=KILL understudy",
        "dpkg -i ./understudy_*.deb && systemctl restart understudy",
    ] {
        for host in [&site.a, &site.b] {
            let process = host.call("systemctl show understudy -P MainPID -P ActiveState")?;
            host.call(blow).with_context(|| blow.to_owned())?;
            await_service(&client).with_context(|| blow.to_owned())?;
            await_service_restart(host, &process).with_context(|| blow.to_owned())?;
        }
        wait_for("both daemons to find their keepers", LIMIT, || {
            let [a, b] = [status(&site.a)?, status(&site.b)?];
            let is_found = a["protection"]["state"] == "protected" && b["role"] == "backup";
            Ok(is_found.then_some(()))
        })
        .with_context(|| blow.to_owned())?;
        let now = [kept(&site.a)?, kept(&site.b)?];
        ensure!(now == before, "after {blow}: {before:?} became {now:?}");
    }
    // It was refused: a backup's keeper comes with its VM's.
    let said = site.b.call("understudy upgrade --keepers")?;
    ensure!(said.contains("gets a new keeper here when that on host host-a"), "{said}");
    let events = site.a.call("understudy events --json")?;
    ensure!(!events.contains("protection-lost"), "protection was lost: {events}");
    end_in_order(&site, before[0].0, client)?;
    // Keepers do not outlive the package.
    remove(&site.b)?;
    let left = site.b.call("pgrep -x understudy-keep || true")?;
    ensure!(left.trim().is_empty(), "a keeper outlived the package: {left}");
    drop(site);
    let left = lab.leftovers()?;
    ensure!(left.is_empty(), "{left}");
    Ok(())
}

/// Does what an orderly shutdown of host-a does before its daemon, its network and its storage go.
fn end_in_order(site: &Site, keeper: u64, client: RecordClient) -> Result<()> {
    let unit = "understudy-keepers.service";
    let order = site.a.call(&format!("systemctl show {unit} -P After"))?;
    for earlier in ["understudy.service", "network-online.target", "remote-fs.target"] {
        ensure!(
            order.split_whitespace().any(|name| name == earlier),
            "it ends after {earlier}: {order}"
        );
    }
    site.a.call(&format!("systemctl stop {unit}"))?;
    // Its keeper there may take longer for an answer than the daemon waits.
    wait_for("host-b to have been handed the VM", LIMIT, || {
        let status = status(&site.b)?;
        let planned = status["takeover"]["planned"] == true;
        Ok((status["role"] == "primary" && planned).then_some(()))
    })?;
    // It may back the VM up by now, in a keeper that is another one.
    let left = site.a.call("pgrep -x understudy-keep || true")?;
    ensure!(!left.lines().any(|pid| pid == keeper.to_string()), "its keeper is left: {left}");
    site.a.call("systemctl is-active understudy")?;
    await_service(&client)?;
    close(client).map(drop)
}

/// Checks what the service finds of its host, with the first process of it in view.
fn check_confinement(host: &Installed) -> Result<()> {
    let pid = host.call("systemctl show understudy -P MainPID")?;
    let inside = |what: &str| {
        let line = format!("nsenter --mount --root --target {} -- {what}", pid.trim());
        Ok::<_, anyhow::Error>(host.command(&line).output()?.status.success())
    };
    ensure!(inside("test -w /proc/sys/net/ipv6/conf/all/disable_ipv6")?, "nothing is to be had");
    for file in ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/run/systemd/system"] {
        ensure!(!inside(&format!("test -w {file}"))?, "it can write {file}");
    }
    host.call("systemctl is-active understudy")?;
    ensure!(!inside("systemctl is-active understudy")?, "it has systemd's ear");
    Ok(())
}

/// systemd finds nothing wrong with the unit, and the daemon has the confinement that it asks for.
fn check_unit(site: &Site) -> Result<()> {
    let found = site
        .a
        .call("systemd-analyze verify --man=no understudy.service understudy-keepers.service")?;
    ensure!(found.trim().is_empty(), "{found}");
    wait_for("the unit to have a status", LIMIT, || {
        let shown = site.a.call("systemctl show understudy -p Type -p NRestarts -p StatusText")?;
        ensure!(shown.contains("NRestarts=0"), "{shown}");
        Ok(shown.contains("in keepers: 1").then_some(()))
    })?;
    // However often it fails, it is started again: its VMs wait for it.
    let limit = site.a.call("systemctl show understudy -P StartLimitIntervalUSec")?;
    ensure!(limit.trim() == "0", "{limit}");
    // needrestart would restart it behind an upgrade of a library.
    let snippet = "/etc/needrestart/conf.d/understudy.conf";
    site.a.call(&format!("grep -qF 'override_rc}}{{qr(^understudy)}} = 0;' {snippet}"))?;
    let kept = site.a.call("dpkg-query -W -f '${Conffiles}' understudy")?;
    ensure!(kept.contains(snippet), "{kept}");
    let delegated = site.a.call("systemctl show understudy -p Delegate -p DelegateControllers")?;
    ensure!(delegated == "Delegate=yes\nDelegateControllers=cpu memory pids\n", "{delegated}");
    let protected = |line: &Value| {
        line["VM"] == "db"
            && line["MESSAGE"].as_str().is_some_and(|said| said.contains("protected"))
    };
    wait_for("the journal to have these fields", LIMIT, || {
        let logged = site.a.call("journalctl -u understudy VM=db -p info -o json --no-pager")?;
        let lines: Vec<Value> =
            logged.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        Ok(lines.iter().any(protected).then_some(()))
    })?;
    site.a
        .call("systemctl is-enabled understudy && test -e /usr/share/man/man1/understudy.1.gz")?;
    for page in ["operating.md.gz", "runbook.md.gz", "monitoring/understudy.rules.yml"] {
        site.a.call(&format!("test -s /usr/share/doc/understudy/{page}"))?;
    }
    Ok(())
}

/// The laboratory's package, which only that of the product of this very version lets in.
fn check_laboratory(host: &Installed) -> Result<()> {
    host.call("dpkg -i ./understudy-lab_*.deb")?;
    host.call("test -e /usr/share/man/man1/understudy-lab-demo.1.gz")?;
    let simulated = host.call("understudy-lab simulate --seeds 50")?;
    ensure!(simulated.contains("50 schedules, 0 broke an invariant"), "{simulated}");
    let demo = host.command("understudy-lab demo").output()?;
    let said = String::from_utf8_lossy(&demo.stderr);
    let told = said.contains("target/guest/vmlinuz") && said.contains("`make guests`");
    ensure!(demo.status.code() == Some(4) && told, "{said}");
    Ok(())
}

/// The daemon that runs, and its VM, are what they were.
fn upgrade(site: &Site) -> Result<()> {
    let pid = || site.a.call("systemctl show understudy -p MainPID && pgrep -x qemu-system-x86");
    let before = pid()?;
    let said = site.a.call("dpkg -i ./understudy_*.deb")?;
    ensure!(said.contains("nothing was restarted") && said.contains("failover"), "{said}");
    ensure!(pid()? == before, "it was restarted: {before}");
    Ok(())
}

/// The daemon ends in order, and what is the operator's stays.
fn remove(host: &Installed) -> Result<()> {
    let said = host.call("apt-get purge -y understudy")?;
    ensure!(said.contains("/etc/understudy stays"), "{said}");
    host.call("test -e /etc/understudy/host.toml && test ! -e /usr/bin/understudy")?;
    host.call("test ! -e /usr/bin/understudy-lab")?;
    let running = host.command("pgrep -x qemu-system-x86").output()?;
    ensure!(!running.status.success(), "a QEMU outlived the package");
    Ok(())
}
