//! QEMU's own fault tolerance, which not every QEMU's COLO comes to.

use crate::stage::{LIMIT, options, play};
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use understudy_lab::scene::ECHO_PORT;
use understudy_lab::{Colo, Lab, PlainOptions, in_namespace};

fn prove_service(lab: &Lab, colo: &Colo) -> Result<()> {
    let server = colo.server(ECHO_PORT);
    let connect = || TcpStream::connect_timeout(&server, LIMIT);
    let mut connection = in_namespace(&lab.client(), connect)??;
    connection.set_read_timeout(Some(LIMIT))?;
    connection.write_all(b"both agree")?;
    let mut answer = [0; 10];
    connection.read_exact(&mut answer).context("the guest's echo under COLO")?;
    ensure!(answer == *b"both agree", "the guest answered {answer:?}");
    colo.check()
}

#[test]
fn colo_runs_a_guest_or_says_what_qemu_met_and_leaves_nothing() {
    let options = options();
    let plain = PlainOptions::test_guest(&options.guest_files);
    play(options, |scene| {
        let mut begun = Colo::start(scene.lab(), &plain, &[ECHO_PORT]);
        // A QEMU that connects to the other's disk does not come back from that, now and then:
        // both are begun anew.
        if begun.as_ref().is_err_and(|error| error.reason.contains(": none in ")) {
            begun = Colo::start(scene.lab(), &plain, &[ECHO_PORT]);
        }
        match begun {
            Ok(colo) => prove_service(scene.lab(), &colo)?,
            Err(error) => {
                println!("{error}");
                // The set-up itself is no obstacle: QEMU has gone on to the migration.
                let text = &error.reason;
                let migrated = text.contains("to become COLO") && text.contains("QEMU's states");
                let entered = text.contains("under COLO") && text.contains("checkpoints");
                ensure!(migrated || entered, "{error}");
                ensure!(error.version.starts_with(|first: char| first.is_ascii_digit()));
            }
        }
        for host in ["a", "b"] {
            let interfaces = scene.lab().host(host)?.interfaces()?;
            ensure!(!interfaces.contains(&plain.name), "a tap is left on {host}: {interfaces:?}");
        }
        Ok(())
    });
}

#[test]
fn colo_that_qemu_refuses_is_an_error_in_its_words() {
    let options = options();
    let mut plain = PlainOptions::test_guest(&options.guest_files);
    plain.kernel = "/proc/version".into();
    play(options, |scene| {
        let refused = Colo::start(scene.lab(), &plain, &[ECHO_PORT]);
        let text = refused.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(text.contains("the primary") && text.contains("QEMU ended with"), "{text}");
        Ok(())
    });
}
