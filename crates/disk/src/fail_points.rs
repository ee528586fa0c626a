//! Disks that fail or hang, for tests.

use nix::errno::Errno;
use std::io;
use std::path::Path;
use std::time::Duration;

/// A test makes reads, writes or syncs fail for as long as there is the file that the fail point names.
pub(crate) fn fail_in_a_test(_point: &str) -> io::Result<()> {
    fail::fail_point!(_point, |file| match file {
        Some(file) if Path::new(&file).exists() => Err(Errno::EIO.into()),
        _ => Ok(()),
    });
    Ok(())
}

/// A test makes writes or syncs wait for as long as there is the file that the fail point names.
pub(crate) fn hang_in_a_test(_point: &str) {
    fail::fail_point!(_point, |file| {
        let file = file.unwrap_or_default();
        while Path::new(&file).exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
