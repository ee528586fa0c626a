//! 50 MB over one TCP connection, by netcat at both ends.
//!
//! A transfer is over when the side that waits for it knows: for an upload, when the
//! guest has closed the connection, which it does once it has read everything; for a
//! download, when the client has read the end. What is sent is random, since zeros would
//! be replicated for nothing.

use super::{Bed, Sample, Scale, aside, outside};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{Read, copy};
use std::path::PathBuf;
use std::time::Duration;

/// Megabytes that are sent.
pub const MEGABYTES: (u64, u64) = (50, 20);
const MEGABYTE: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(600);
const PORT: &str = "9000";
/// The port as `/proc/net/tcp` has it, listening.
const LISTENING: &str = ":2328 00000000:0000 0A";

pub fn upload(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let bytes = scale.of(MEGABYTES.0, MEGABYTES.1) * MEGABYTE;
    let file = noise(bed, bytes)?;
    let mut shell = bed.shell()?;
    aside(
        &mut shell,
        &format!(
            "rm -f /tmp/received; {{ nc.openbsd -4 -d -l {PORT} 2> /tmp/nc | wc -c > /tmp/count; \
             mv /tmp/count /tmp/received; }} > /dev/null 2>&1 & {}",
            await_listener()
        ),
    )?;
    let address = bed.address.to_string();
    let sent = outside::run(bed, LIMIT, "nc.openbsd", &["-N", &address, PORT], Some(&file))?;
    let line = "while [ ! -e /tmp/received ]; do sleep 0.05; done; cat /tmp/received /tmp/nc; \
                rm /tmp/received /tmp/nc";
    let received = aside(&mut shell, line)?.text;
    ensure!(
        received.trim() == bytes.to_string(),
        "the guest received `{}` of {bytes} bytes",
        received.trim()
    );
    Ok(Sample::seconds(sent.took))
}

pub fn download(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let megabytes = scale.of(MEGABYTES.0, MEGABYTES.1);
    let mut shell = bed.shell()?;
    aside(
        &mut shell,
        &format!(
            "dd if=/dev/urandom of=/tmp/noise bs={MEGABYTE} count={megabytes} && \
             {{ nc.openbsd -4 -N -l {PORT} < /tmp/noise > /dev/null 2>&1 & {}; }}",
            await_listener()
        ),
    )?;
    let address = bed.address.to_string();
    let got = outside::run(bed, LIMIT, "nc.openbsd", &["-d", &address, PORT], None)?;
    aside(&mut shell, "rm /tmp/noise")?;
    let (bytes, wanted) = (got.output.len() as u64, megabytes * MEGABYTE);
    ensure!(bytes == wanted, "the client received {bytes} of {wanted} bytes");
    Ok(Sample::seconds(got.took))
}

/// Shell that waits until the guest's netcat listens.
fn await_listener() -> String {
    format!("while ! grep -q '{LISTENING}' /proc/net/tcp; do sleep 0.05; done")
}

/// A file of that many random bytes in the laboratory's directory.
fn noise(bed: &Bed<'_>, bytes: u64) -> Result<PathBuf> {
    let path = bed.lab.directory().join("noise");
    let write = || -> std::io::Result<u64> {
        let mut random = File::open("/dev/urandom")?.take(bytes);
        copy(&mut random, &mut File::create(&path)?)
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
