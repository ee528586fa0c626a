//! Tests of who is let in: hosts with certificates of one authority that name them, and
//! nobody else. That those are let in, every other test shows.

use crate::metrics::{ADDRESS, await_host};
use crate::peer::{hung_up, message};
use crate::refusals::{log_of, quick, says, unharmed};
use crate::stage::{Calm, LIMIT, alone, daemon, play, refusal};
use anyhow::{Result, ensure};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, wait_for};
use understudy_protocol::wire::Kind;

/// A case: what host a has instead of its own certificates, and what is said of it.
struct Case {
    name: &'static str,
    settings: fn(&Scene) -> Result<String>,
    peer: &'static str,
    said: &'static [&'static str],
    /// Host b's log must hold this.
    logged: &'static str,
}

const CASES: [Case; 4] = [
    Case {
        name: "certificates of another authority",
        settings: |scene| {
            let other = scene.lab().directory().join("other-pki");
            let other = other.to_string_lossy();
            pki(&["init", "--dir", &other])?;
            pki(&["issue", "a", "--dir", &other])?;
            Ok(tls(&other, &other, "a"))
        },
        peer: "b",
        said: &["another CA than the one in this host's [tls]"],
        logged: "another CA than the one in the peer's [tls]",
    },
    Case {
        name: "a certificate of another authority, and the right authority's",
        settings: |scene| {
            let directory = scene.lab().directory();
            let (own, other) = (directory.join("pki"), directory.join("other-pki"));
            Ok(tls(&own.to_string_lossy(), &other.to_string_lossy(), "a"))
        },
        peer: "b",
        said: &["another CA than the one in the peer's [tls]"],
        logged: "another CA than the one in this host's [tls]",
    },
    Case {
        name: "the wrong name for a peer",
        settings: |scene| {
            let address = scene.lab().peer_addresses("b")?[0];
            Ok(format!("[peers]\nmallory = \"{address}\"\n"))
        },
        peer: "mallory",
        said: &["it is for another host", "\"b\""],
        logged: "does not accept this host's certificate",
    },
    Case {
        name: "no certificates",
        settings: |scene| {
            let address = scene.lab().peer_addresses("b")?[0];
            Ok(format!("[peers]\nb = \"{address}\"\n"))
        },
        peer: "b",
        said: &["speaks TLS", "needs [tls], too"],
        logged: "the peer does not speak TLS",
    },
];

fn pki(arguments: &[&str]) -> Result<()> {
    let binary = env!("CARGO_BIN_EXE_understudy");
    let output = Command::new(binary).arg("pki").args(arguments).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

fn tls(ca: &str, own: &str, name: &str) -> String {
    format!(
        "[tls]\nca = \"{ca}/ca.pem\"\ncert = \"{own}/{name}.pem\"\nkey = \"{own}/{name}.key\"\n"
    )
}

#[test]
fn strangers_are_refused_with_words_on_both_sides() {
    play(quick(), |scene| {
        for case in CASES {
            let mut options = daemon().calm();
            options.settings += &(case.settings)(scene)?;
            options.insecure = case.name == "no certificates";
            scene.restart_with("a", options)?;
            scene.start_guest("a")?;
            let before = log_of(scene, "b")?.len();
            let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", case.peer])?;
            says(&words, case.said)?;
            wait_for(&format!("host b to log `{}`", case.logged), LIMIT, || {
                Ok(log_of(scene, "b")?[before..].contains(case.logged).then_some(()))
            })?;
            unharmed(scene)?;
            scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        }
        for noise in [message(Kind::Hello, b"{}"), b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![22; 99]]
        {
            hung_up(scene, "b", &noise)?;
        }
        // And the daemon of host b is none the worse for it.
        scene.restart_with("a", daemon().calm())?;
        scene.start_guest("a")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ()).map(drop)
    });
}

#[test]
fn only_its_own_user_reaches_a_host() {
    play(quick(), |scene| {
        scene.start_guest("a")?;
        let host = scene.host("a")?;
        let mode = |path: &std::path::Path| -> Result<u32> {
            Ok(std::fs::metadata(path)?.permissions().mode() & 0o777)
        };
        ensure!(mode(host.socket())? == 0o600, "the API: {:o}", mode(host.socket())?);
        let state = host.directory().join("state");
        ensure!(mode(&state)? == 0o700, "the state directory: {:o}", mode(&state)?);
        Ok(())
    });
}

#[test]
fn a_certificate_of_another_host_does_not_start_a_daemon() {
    play(quick(), |scene| {
        let pki = scene.lab().directory().join("pki");
        let pki = pki.to_string_lossy();
        let settings = daemon().calm().settings + &tls(&pki, &pki, "b");
        let options = HostOptions { settings, ..daemon().calm() };
        let error = scene.restart_with("a", options).expect_err("host a started as host b");
        let words = format!("{error:#}");
        ensure!(words.contains("b.pem is not a certificate of host \"a\""), "{words}");
        scene.restart_with("a", daemon().calm())
    });
}

/// The daemons' own threads have to notice: before, tests told them to look.
#[test]
fn a_host_that_is_revoked_loses_its_part_in_a_running_pair() {
    play(quick(), |scene| {
        let pki_directory = scene.lab().directory().join("pki");
        let directory = pki_directory.to_string_lossy().into_owned();
        for host in ["a", "b"] {
            let revoked = format!("revoked = \"{directory}/revoked.pem\"\n");
            let metrics = format!("[metrics]\nlisten = \"{ADDRESS}\"\n");
            let settings = daemon().calm().settings + &tls(&directory, &directory, host);
            let settings = settings + &revoked + &metrics;
            scene.restart_with(host, HostOptions { settings, ..daemon().calm() })?;
        }
        scene.start_guest("a")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        for host in ["a", "b"] {
            let told = scene.host(host)?.call(["status"])?;
            ensure!(told.contains("certificate expires in ") && !told.contains("WRONG"), "{told}");
            await_host(scene, host, &format!("host_problems{{host=\"{host}\"}} 0.0"))?;
        }

        pki(&["revoke", "b", "--dir", &directory])?;
        // Whoever of both hosts gets the VM has nobody to protect it to.
        let owner = wait_for("the pair to be parted", LIMIT, || {
            // One of them may have nothing of it by then.
            let is_alone = |host| {
                let status = scene.status(host);
                status.is_ok_and(|it| it["live"] == true && alone(&it).is_some())
            };
            Ok(["a", "b"].into_iter().find(|host| is_alone(host)))
        })?;
        let other = if owner == "a" { "b" } else { "a" };
        let (_, words) = refusal(scene.host(owner)?, &["protect", VM, "--to", other])?;
        ensure!(words.contains("revoked"), "{words}");
        await_host(scene, "b", "host_problems{host=\"b\"} 1.0")?;
        let told = scene.host("b")?.call(["status"])?;
        ensure!(told.contains("WRONG: the certificate") && told.contains("is revoked"), "{told}");
        await_host(scene, "a", "host_problems{host=\"a\"} 0.0")
    });
}
