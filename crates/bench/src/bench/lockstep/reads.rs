//! A file is read from the guest's disk, past its page cache: what it costs to read it on both
//! hosts, or to send what was read with the log.

use crate::bench::workloads::{Bed, Sample, Scale, aside};
use anyhow::Result;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);

/// Amount that is read, in MiB.
const MEBIBYTES: (u64, u64) = (256, 64);

/// Read at once.
const BLOCK_BYTES: u64 = 64 << 10;

const FILE: &str = "/work/reads";

/// Makes the file, of bytes that cannot be compressed. Before the guest is protected: it is no
/// part of what is measured.
pub fn prepare(bed: &Bed<'_>, scale: Scale) -> Result<()> {
    let blocks = blocks(scale);
    let line = format!(
        "[ \"$(stat -c %s {FILE} 2> /dev/null)\" = {} ] || {{ mkdir -p /work && dd \
         if=/dev/urandom of={FILE} bs={BLOCK_BYTES} count={blocks} 2> /dev/null && sync; }}",
        blocks * BLOCK_BYTES
    );
    aside(&mut bed.shell()?, &line).map(drop)
}

/// Millions of bytes that were read in a second.
pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let line = format!(
        "echo 3 > /proc/sys/vm/drop_caches && dd if={FILE} of=/dev/null bs={BLOCK_BYTES} \
         iflag=direct 2> /dev/null"
    );
    let took = bed.shell()?.run(&line, LIMIT)?.expect_success(&line)?.took;
    let megabytes = (blocks(scale) * BLOCK_BYTES) as f64 / 1e6;
    Ok(Sample { value: megabytes / took.as_secs_f64(), more: Vec::new() })
}

fn blocks(scale: Scale) -> u64 {
    (scale.of(MEBIBYTES.0, MEBIBYTES.1) << 20) / BLOCK_BYTES
}
