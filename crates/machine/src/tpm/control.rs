//! The commands that swtpm gets over its control connection (swtpm's `tpm_ioctl.h`) before QEMU has
//! that.

use anyhow::{Context, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const INIT: u32 = 0x02;
const SET_STATE_BLOB: u32 = 0x0d;
/// The part of the state that outlives a power-off.
const PERMANENT: u32 = 1;
/// Time for swtpm, which has just been started, to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Has a swtpm that was not initialised yet begin with this state, as swtpm itself once gave it.
pub(super) fn set_permanent(swtpm: &UnixStream, state: &[u8]) -> anyhow::Result<()> {
    let length = u32::try_from(state.len()).context("it is too long")?;
    let plain = 0u32;
    let head = [SET_STATE_BLOB, plain, PERMANENT, length].map(u32::to_be_bytes);
    command(swtpm, &[head.as_flattened(), state].concat())
}

/// Has a swtpm begin with the state that it finds, or with a new one, as QEMU does.
pub(super) fn initialise(swtpm: &UnixStream) -> anyhow::Result<()> {
    let plain = 0u32;
    command(swtpm, [INIT, plain].map(u32::to_be_bytes).as_flattened())
}

fn command(mut swtpm: &UnixStream, request: &[u8]) -> anyhow::Result<()> {
    swtpm.set_read_timeout(Some(PATIENCE))?;
    swtpm.write_all(request)?;
    let mut result = [0; 4];
    swtpm.read_exact(&mut result)?;
    // QEMU has the same end of the connection.
    swtpm.set_read_timeout(None)?;
    let result = u32::from_be_bytes(result);
    ensure!(result == 0, "it answers {result:#x}");
    Ok(())
}
