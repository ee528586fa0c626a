//! Bad input: one clear error each, and nothing is changed.

use crate::peer::{self, MadeUpPeer, message};
use crate::stage::{
    Calm, LIMIT, await_forgotten, daemon, daemon_with_peers, options, play, protection, refusal,
    restart_daemon, run, vms,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{ArbiterKind, CLIENT_ADDRESS, HostOptions, Scene, SceneOptions, wait_for};
use understudy_protocol::wire::Kind;
use understudy_qemu::cache;
use understudy_qemu::programs::{agent_of, find_qemu};

/// Two hosts and the boot-sector guest, which starts at once.
pub fn quick() -> SceneOptions {
    SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..options().calm() }
}

/// A definition of a VM with a disk and a card.
pub fn definition(scene: &Scene, name: &str) -> Result<String> {
    let image = scene.lab().directory().join(format!("{name}.img"));
    fs::copy(options().guest_files.join("boot-sector.img"), &image)?;
    Ok(format!(
        "name = \"{name}\"\nmemory = \"64M\"\nvcpus = 1\n\n\
         [[disk]]\npath = \"{}\"\nformat = \"raw\"\n\n\
         [[card]]\nmac = \"52:54:00:75:73:01\"\nbridge = \"br0\"\n",
        image.display()
    ))
}

/// Writes a file into the laboratory's directory.
pub fn write(scene: &Scene, name: &str, text: &str) -> Result<PathBuf> {
    let path = scene.lab().directory().join(name);
    fs::write(&path, text)?;
    Ok(path)
}

/// An error must say all of these.
pub fn says(words: &str, expected: &[&str]) -> Result<()> {
    for expected in expected {
        ensure!(words.contains(expected), "`{expected}` is not in: {words}");
    }
    ensure!(words.trim_end().lines().count() == 1, "more than one line: {words}");
    Ok(())
}

/// All that a host's daemon has logged.
pub fn log_of(scene: &Scene, host: &str) -> Result<String> {
    let log = fs::read(scene.host(host)?.directory().join("daemon.log"))?;
    Ok(String::from_utf8_lossy(&log).into_owned())
}

/// A wrong line in place of a right one, and what the error must say.
struct Wrong {
    right: &'static str,
    wrong: &'static str,
    says: &'static [&'static str],
}

const fn wrong(right: &'static str, wrong: &'static str, says: &'static [&'static str]) -> Wrong {
    Wrong { right, wrong, says }
}

#[test]
fn wrong_definitions_are_refused() {
    let cases = [
        wrong("memory = \"64M\"", "", &["missing field `memory`"]),
        wrong("memory = \"64M\"", "memory = \"much\"", &[":2:", "memory", "\"512M\""]),
        wrong("memory = \"64M\"", "memory = \"9000G\"", &["MiB", "available"]),
        wrong("vcpus = 1", "vcpus = 0", &[":3:", "vcpus", "1 to 255"]),
        wrong("vcpus = 1", "vcpus = 1\ncpu = \"Z80\"", &["no model \"Z80\"", "qemu64"]),
        wrong("vcpus = 1", "vcpu = 1", &[":3:", "unknown field `vcpu`", "`vcpus`"]),
        wrong("vcpus = 1", "vcpus = \"one\"", &[":3:", "vcpus"]),
        wrong("vcpus = 1", "vcpus = 1 1", &[":3:"]),
        wrong("name = \"extra\"", "name = \"a b\"", &[":1:", "name", "letters"]),
        wrong("extra.img", "absent.img", &[":6:", "disk[0].path", "absent.img"]),
        wrong("\"raw\"", "\"vhd\"", &[":7:", "vhd", "raw", "qcow2"]),
        wrong("\"raw\"", "\"qcow2\"", &["extra.img", "qcow2"]),
        wrong("52:54:00:75:73:01", "52:54", &[":10:", "mac"]),
        wrong("52:54:00:75:73:01", "53:54:00:75:73:01", &[":10:", "mac"]),
        wrong("br0", "br9", &["bridge br9 does not exist on host a", "network configuration"]),
    ];
    play(quick(), |scene| {
        let good = definition(scene, "extra")?;
        let host = scene.host("a")?;
        for case in &cases {
            ensure!(good.contains(case.right), "`{}` is not in the definition", case.right);
            let path = write(scene, "wrong.toml", &good.replacen(case.right, case.wrong, 1))?;
            let path = path.to_string_lossy();
            let (code, words) = refusal(host, &["vm", "start", &path])
                .with_context(|| format!("with `{}`", case.wrong))?;
            ensure!(code == 1, "exit code {code}: {words}");
            says(&words, case.says)?;
        }
        // The guest would have seen the container instead of its disk.
        let image = scene.lab().directory().join("extra.img");
        run("qemu-img", &["create", "-q", "-f", "qcow2", &image.to_string_lossy(), "1M"])?;
        let path = write(scene, "wrong.toml", &good)?;
        let (code, words) = refusal(host, &["vm", "start", &path.to_string_lossy()])?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, &["extra.img", "declared raw", "qcow2", "correct `format`"])?;
        let (code, words) = refusal(host, &["vm", "start", "extra"])?;
        ensure!(code == 4, "exit code {code}: {words}");
        says(&words, &["no record of a VM \"extra\"", "vm start FILE"])?;
        let (code, words) = refusal(host, &["vm", "start", "/nowhere/vm.toml"])?;
        ensure!(code == 4, "exit code {code}: {words}");
        says(&words, &["/nowhere/vm.toml"])?;
        await_forgotten(scene, "a")?;
        // Beside the records of owners lies the arbiter's identity, a file.
        let entries = fs::read_dir(scene.lab().arbiter_directory())?;
        let owners = entries.filter(|entry| entry.as_ref().is_ok_and(|one| one.path().is_dir()));
        let owners = owners.count();
        ensure!(owners == 0, "a refused VM has an owner");
        Ok(())
    });
}

#[test]
fn what_is_in_use_is_refused() {
    play(quick(), |scene| {
        let first = write(scene, "first.toml", &definition(scene, "first")?)?;
        let host = scene.host("a")?;
        host.call(["vm", "start", &first.to_string_lossy()])?;
        let start = |text: &str| -> Result<String> {
            let path = write(scene, "second.toml", text)?;
            Ok(refusal(host, &["vm", "start", &path.to_string_lossy()])?.1)
        };
        let second = definition(scene, "second")?;
        says(&start(&definition(scene, "first")?)?, &["\"first\"", "host a", "already"])?;
        says(&start(&second)?, &["52:54:00:75:73:01", "in use", "\"first\""])?;
        let same_image = second.replace("73:01", "73:02").replace("second.img", "first.img");
        says(&start(&same_image)?, &["first.img"])?;
        // On another host the name is taken too: the arbiter knows its owner.
        let elsewhere = refusal(scene.host("b")?, &["vm", "start", &first.to_string_lossy()])?;
        says(&elsewhere.1, &["first", "host a"])?;
        let left = vms(host)?;
        ensure!(left.len() == 1 && left[0]["live"] == true, "not only the first VM: {left:?}");
        await_forgotten(scene, "b")
    });
}

/// Host a with peers that exist and peers that do not.
/// Host a has a made-up peer, and one that nobody listens for; nothing is encrypted.
pub fn with_peers() -> SceneOptions {
    let mut options = quick();
    let peers = format!(
        "b = \"10.77.0.2:7700\"\nmadeup = \"{CLIENT_ADDRESS}:{}\"\ndeaf = \"10.77.0.2:7999\"",
        peer::PORT
    );
    let daemon = HostOptions { insecure: true, ..daemon_with_peers(&peers).calm() };
    options.daemons.insert("a".to_owned(), daemon);
    options
}

/// The guest of host a runs on as if nobody had asked for anything.
pub fn unharmed(scene: &Scene) -> Result<()> {
    let status = scene.status("a")?;
    ensure!(status["live"] == true, "the guest does not run: {status}");
    ensure!(protection(&status).0 == "off", "protection is not off: {status}");
    await_forgotten(scene, "b")
}

#[test]
fn protection_that_cannot_be_is_refused() {
    play(with_peers(), |scene| {
        scene.start_guest("a")?;
        let protect = |to: &str, expected: &[&str]| -> Result<()> {
            let (code, words) = refusal(scene.host("a")?, &["protect", VM, "--to", to])?;
            ensure!(code == 1, "exit code {code}: {words}");
            says(&words, expected).with_context(|| format!("protecting to {to}"))?;
            unharmed(scene)
        };
        protect("nobody", &["\"nobody\" is not a peer", "b, deaf, madeup"])?;
        protect("deaf", &["deaf", "10.77.0.2:7999", "is its daemon running?"])?;
        let answers: [(Vec<u8>, &[&str]); 5] = [
            (message(Kind::Refuse, b"version 9 is too new"), &["version 9 is too new"]),
            (message(Kind::Welcome, b"{\"host\": \"mallory\"}"), &["\"mallory\"", "[peers]"]),
            (message(Kind::Welcome, b"{]"), &["malformed"]),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), &["does not speak Understudy"]),
            (Vec::new(), &["closed the connection"]),
        ];
        for (answer, expected) in answers {
            let peer = MadeUpPeer::start(scene, answer)?;
            protect("madeup", expected)?;
            peer.hello()?;
        }
        let a = scene.host("a")?;
        let (code, words) = refusal(a, &["protect", "ghost", "--to", "b"])?;
        ensure!(code == 4, "exit code {code}: {words}");
        says(&words, &["ghost", "host a"])?;
        for command in ["unprotect", "failover"] {
            says(&refusal(a, &[command, VM])?.1, &["is not protected"])?;
        }
        scene.host_mut("b")?.kill_everything()?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        says(&words, &["cannot connect to 10.77.0.2:7700", "is its daemon running?"])?;
        scene.restart("b")?;
        // None of it stands in the way of what is right.
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        says(&words, &["is protected to b already", "unprotect"])?;
        Ok(())
    });
}

#[test]
fn a_bridge_that_only_one_host_has_is_refused() {
    play(quick(), |scene| {
        let bridge = |verb: &str| -> Result<()> {
            let mut command = scene.lab().host("a")?.command("ip");
            let output = command.args(["link", verb, "br1", "type", "bridge"]).output()?;
            ensure!(output.status.success(), "ip link {verb}: {output:?}");
            Ok(())
        };
        bridge("add")?;
        let text = definition(scene, "extra")?.replace("br0", "br1");
        let path = write(scene, "extra.toml", &text)?;
        let host = scene.host("a")?;
        host.call(["vm", "start", &path.to_string_lossy()])?;
        let (_, words) = refusal(host, &["protect", "extra", "--to", "b"])?;
        says(&words, &["bridge br1 does not exist on host b"])?;
        ensure!(protection(&host.status("extra")?).0 == "off", "something has begun");
        await_forgotten(scene, "b")?;
        host.call(["vm", "stop", "extra", "--force"])?;
        bridge("del")
    });
}

#[test]
fn without_an_arbiter_nothing_is_protected() {
    let nobody = HostOptions { arbiter: ArbiterKind::None, ..daemon().calm() };
    let mut options = quick();
    options.hosts.push("c".to_owned());
    options.daemons.insert("c".to_owned(), nobody);
    play(options, |scene| {
        scene.start_guest("a")?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "c"])?;
        says(&words, &["host c refuses", "[arbiter]"])?;
        unharmed(scene)?;
        let text = definition(scene, "extra")?;
        let path = write(scene, "extra.toml", &text)?;
        let host = scene.host("c")?;
        host.call(["vm", "start", &path.to_string_lossy()])?;
        let (_, words) = refusal(host, &["protect", "extra", "--to", "a"])?;
        says(&words, &["[arbiter]"])?;
        ensure!(host.status("extra")?["live"] == true, "the guest does not run");
        Ok(())
    });
}

/// A directory of programs that QEMU's user, too, may run.
fn open_directory() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    place
}

/// The usual hosts, host a with these settings, too.
fn with_on_a(own: &str) -> SceneOptions {
    let mut options = quick();
    let daemon = daemon().calm();
    let settings = format!("{own}{}", daemon.settings);
    options.daemons.insert("a".to_owned(), HostOptions { settings, ..daemon });
    options
}

/// The installed QEMU at a path of its own, where it can be upgraded underneath a daemon.
struct OwnQemu {
    place: tempfile::TempDir,
    installed: PathBuf,
    program: PathBuf,
}

impl OwnQemu {
    fn new() -> OwnQemu {
        let (place, installed) = (open_directory(), find_qemu().expect("no QEMU in PATH"));
        let program = place.path().join("qemu-system-x86_64");
        std::os::unix::fs::symlink(&installed, &program).unwrap();
        OwnQemu { place, installed, program }
    }

    /// The setting that has a daemon use it.
    fn setting(&self) -> String {
        format!("qemu = {:?}\n", self.program)
    }

    fn upgrade(&self) -> Result<()> {
        fs::remove_file(&self.program)?;
        fs::copy(&self.installed, &self.program).map(drop)?;
        Ok(())
    }
}

/// The daemon's knowledge is of the QEMU that was there when it began: another was once started as
/// if it were that.
#[test]
fn a_qemu_that_was_upgraded_underneath_is_not_started() {
    let qemu = OwnQemu::new();
    play(with_on_a(&qemu.setting()), |scene| {
        scene.start_guest("b")?;
        qemu.upgrade()?;
        let second = definition(scene, "second")?.replace("73:01", "73:02");
        let path = write(scene, "second.toml", &second)?;
        let upgraded = ["QEMU was upgraded", "restart the daemon"];
        let (_, words) = refusal(scene.host("a")?, &["vm", "start", &path.to_string_lossy()])?;
        says(&words, &upgraded)?;
        let (_, words) = refusal(scene.host("b")?, &["protect", VM, "--to", "a"])?;
        says(&words, &upgraded)?;
        let told = scene.host("a")?.call(["status"])?;
        ensure!(told.contains("WRONG: QEMU was upgraded"), "{told}");
        scene.restart("a")?;
        let told = scene.host("a")?.call(["status"])?;
        ensure!(!told.contains("WRONG"), "{told}");
        scene.host("a")?.call(["vm", "start", &path.to_string_lossy()]).map(drop)
    });
}

/// Once its daemon was restarted nobody said that a keeper which began before starts nothing any more.
#[test]
fn a_keeper_that_began_before_qemu_was_upgraded_is_told_of_until_it_is_replaced() {
    let qemu = OwnQemu::new();
    play(with_on_a(&format!("{}keepers = true\n", qemu.setting())), |scene| {
        scene.start_guest("a")?;
        qemu.upgrade()?;
        restart_daemon(scene, "a")?;
        let is_told = |scene: &Scene| -> Result<bool> {
            let told = scene.host("a")?.call(["status"])?;
            let remedy = format!("the keeper of {VM} began before: `understudy upgrade --keepers");
            Ok(told.contains("WRONG: QEMU was upgraded") && told.contains(&remedy))
        };
        wait_for("host a to tell of the keeper", LIMIT, || Ok(is_told(scene)?.then_some(())))?;
        scene.host("a")?.call(["upgrade", "--keepers", VM])?;
        wait_for("host a to tell of it no more", LIMIT, || {
            let answers = scene.host("a")?.known(VM)?.is_some_and(|it| it["live"] == true);
            Ok((answers && !is_told(scene)?).then_some(()))
        })?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Its own was no file any more: what was preloaded into QEMU was the next release's, which may speak another version.
#[test]
fn an_agent_that_was_replaced_underneath_is_used_as_it_was() {
    let place = open_directory();
    let library = place.path().join("agent.so");
    for keepers in ["", "keepers = true\n"] {
        let options = with_on_a(&format!("agent = {library:?}\n{keepers}"));
        fs::copy(agent_of(&options.binary).unwrap(), &library).unwrap();
        play(options, |scene| {
            let next = place.path().join("next");
            fs::write(&next, "no library")?;
            fs::rename(&next, &library)?;
            let second = definition(scene, "second")?.replace("73:01", "73:02");
            let path = write(scene, "second.toml", &second)?;
            scene.host("a")?.call(["vm", "start", &path.to_string_lossy()])?;
            scene.host("a")?.call(["vm", "stop", "second", "--force"])?;
            await_forgotten(scene, "a")?;
            scene.start_guest("b")?;
            scene.protect("b", "a")?;
            scene.await_protected("b", |_| ()).map(drop)
        });
    }
}

/// The plan compared the QEMU that the daemon had asked; the next one runs that which is installed.
#[test]
fn the_plan_of_an_upgrade_is_about_the_qemu_that_is_installed() {
    let qemu = OwnQemu::new();
    let (program, cache) = (&qemu.program, qemu.place.path().join("cache"));
    fs::create_dir(&cache).unwrap();
    let mut options = with_on_a(&qemu.setting());
    let own = (cache::VARIABLE.to_owned(), cache.display().to_string());
    options.daemons.get_mut("a").expect("host a").environment.push(own);
    // Host b may answer late, on a busy machine.
    let plan = |scene: &Scene, code: i32, words: &[&str]| {
        wait_for(&format!("the plan to have {words:?}"), LIMIT, || {
            let output = scene.host("a")?.cli(["upgrade", "--plan"])?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let has_all = words.iter().all(|words| said.contains(words));
            Ok((output.status.code() == Some(code) && has_all).then_some(said))
        })
    };
    play(options, |scene| {
        qemu.upgrade()?;
        let said =
            plan(scene, 0, &["QEMU was upgraded: a restart runs QEMU ", "may be restarted"])?;
        ensure!(!said.contains("DOES NOT TAKE"), "{said}");
        // What it answered just now becomes the answer of one of another series.
        let files = fs::read_dir(&cache)?.collect::<std::io::Result<Vec<_>>>()?;
        ensure!(files.len() == 1, "{files:?}");
        let file = files[0].path();
        let mut kept: Value = serde_json::from_slice(&fs::read(&file)?)?;
        kept["capabilities"]["version"]["minor"] = json!(99);
        fs::write(&file, serde_json::to_vec(&kept)?)?;
        plan(scene, 1, &[".99.", "and DOES NOT TAKE it after a restart", "NOT YET"])?;
        fs::remove_file(program)?;
        plan(scene, 1, &["WRONG: a restart does not run with it"]).map(drop)
    });
}

#[test]
fn hosts_that_are_configured_wrongly_do_not_start() {
    let cases = [
        wrong("name = \"a\"", "name = \"\"", &[":1:", "name"]),
        wrong("name = \"a\"", "", &["missing field `name`", "name = \"a\""]),
        wrong("10.77.0.1:7701", "10.77.0.1", &[":2:", "listen", "IP:port"]),
        wrong("10.77.0.1:7701", "10.77.0.1:7700", &["cannot listen on 10.77.0.1:7700"]),
        wrong("insecure = true", "", &[":2:", "listen", "[tls]", "understudy pki"]),
        wrong("kind = \"file\"", "kind = \"oracle\"", &[":7:", "arbiter.kind", "\"file\""]),
        wrong("kind = \"file\"", "kin = \"file\"", &[":7:", "unknown field `kin`"]),
        wrong("[arbiter]", "qemu = \"/nowhere/qemu\"\n[arbiter]", &["qemu", "/nowhere/qemu"]),
        wrong("[arbiter]", "agent = \"/nowhere/a.so\"\n[arbiter]", &["agent", "/nowhere/a.so"]),
        wrong("[arbiter]", "qemu = \"/bin/true\"\n[arbiter]", &["/bin/true"]),
    ];
    play(quick(), |scene| {
        let directory = scene.lab().directory();
        let good = format!(
            "name = \"a\"\nlisten = \"10.77.0.1:7701\"\nstate_dir = \"{0}\"\nsocket = \"{0}.sock\"\
             \ninsecure = true\n[arbiter]\nkind = \"file\"\npath = \"{1}\"\n",
            directory.join("second").display(),
            scene.lab().arbiter_directory().display(),
        );
        for case in &cases {
            ensure!(good.contains(case.right), "`{}` is not in the file", case.right);
            let path = write(scene, "wrong.toml", &good.replacen(case.right, case.wrong, 1))?;
            let output =
                start_daemon(scene, &path).with_context(|| format!("with `{}`", case.wrong))?;
            let words = String::from_utf8_lossy(&output.stderr);
            let last = words.trim_end().lines().last().unwrap_or_default();
            ensure!(matches!(output.status.code(), Some(1 | 4)), "{output:?}");
            says(last, case.says)?;
        }
        // The socket of a daemon that runs.
        let socket = scene.host("a")?.socket().display().to_string();
        let second = good.replace(&format!("{}.sock", directory.join("second").display()), &socket);
        let output = start_daemon(scene, &write(scene, "wrong.toml", &second)?)?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        says(String::from_utf8_lossy(&output.stderr).trim_end(), &[&socket])?;
        ensure!(vms(scene.host("a")?)?.is_empty(), "the first daemon was harmed");
        Ok(())
    });
}

/// The second one has addresses and a socket of its own: before, it took what was there for the last daemon's remains.
#[test]
fn a_state_directory_has_one_daemon() {
    play(quick(), |scene| {
        scene.start_guest("a")?;
        let before = scene.status("a")?;
        let state = scene.host("a")?.directory().join("state");
        let second = format!(
            "name = \"a\"\nlisten = \"10.77.0.1:7701\"\nstate_dir = \"{}\"\nsocket = \"{}\"\ninsecure = true\n",
            state.display(),
            scene.lab().directory().join("second.sock").display(),
        );
        let output = start_daemon(scene, &write(scene, "second.toml", &second)?)?;
        ensure!(output.status.code() == Some(1), "{output:?}");
        let holder = format!("another daemon's (process {})", scene.host("a")?.pid());
        let words = String::from_utf8_lossy(&output.stderr);
        let last = words.trim_end().lines().last().unwrap_or_default();
        says(last, &[&state.to_string_lossy(), &holder, "`state_dir`"])?;
        let after = scene.status("a")?;
        ensure!(after["live"] == true && after["qemu_pid"] == before["qemu_pid"], "{after}");
        // What a daemon leaves that was killed keeps no other from starting.
        scene.restart("a")
    });
}

/// Runs another daemon on host a, which must end by itself.
fn start_daemon(scene: &Scene, config: &std::path::Path) -> Result<Output> {
    let mut command: Command = scene.lab().host("a")?.command("timeout");
    command.arg(LIMIT.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_understudy"));
    let output = command.args(["host", "--config"]).arg(config).output()?;
    ensure!(output.status.code() != Some(124), "it runs: {output:?}");
    Ok(output)
}
