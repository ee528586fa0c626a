//! What QEMU itself offers to save a machine and have it back: `migrate file:`, and `-incoming`
//! from there.

use crate::lab::Lab;
use crate::plain::PlainGuest;
use crate::wait::wait_for;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// For a guest to be saved, or to be back.
const LIMIT: Duration = Duration::from_secs(120);
const SOCKET: &str = "saved";
/// Bytes that are read at once from a slow store.
const PIECE: usize = 64 * 1024;

/// A guest that was saved.
#[derive(Debug)]
pub struct Saved {
    /// For how long it stood still.
    pub took: Duration,
    /// Bytes of the file.
    pub bytes: u64,
    file: PathBuf,
}

impl PlainGuest {
    /// Stops the guest and writes all of it to a file.
    pub fn save(&self) -> Result<Saved> {
        let file = self.home.directory.path().join("saved");
        let began = Instant::now();
        self.emulator.stop()?;
        self.emulator.execute("migrate-set-parameters", json!({"max-bandwidth": 1u64 << 40}))?;
        self.emulator.execute("migrate", json!({"uri": format!("file:{}", file.display())}))?;
        wait_for("the guest to be saved", LIMIT, || {
            let report = self.emulator.execute("query-migrate", json!({}))?;
            match report["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed") => bail!("the guest was not saved: {}", report["error-desc"]),
                _ => Ok(None),
            }
        })?;
        Ok(Saved { took: began.elapsed(), bytes: file.metadata()?.len(), file })
    }

    /// Puts a fresh QEMU in place of the former, which has ended, and loads the guest from where
    /// it was saved, at so many bytes a second. Returns how long that took until it ran.
    pub fn load(
        &mut self,
        lab: &Lab,
        saved: &Saved,
        bytes_per_second: Option<f64>,
    ) -> Result<Duration> {
        self.emulator.execute("quit", json!({})).context("the former QEMU")?;
        self.hops += 1;
        let tap = format!("{}-{}", self.home.options.name, self.hops);
        let target = self.home.start_plain(lab, &tap, true).context("the restored guest")?;
        let socket = self.home.directory.path().join(format!("{tap}/{SOCKET}"));
        let began = Instant::now();
        target.execute("migrate-incoming", json!({"uri": format!("unix:{}", socket.display())}))?;
        feed(&saved.file, &socket, bytes_per_second)?;
        wait_for("the guest to be loaded", LIMIT, || {
            let report = target.execute("query-status", json!({}))?;
            Ok((report["status"] != "inmigrate").then_some(()))
        })?;
        target.cont()?;
        let took = began.elapsed();
        self.emulator = target;
        Ok(took)
    }
}

/// Sends a file, as a store of that speed would.
fn feed(file: &Path, socket: &Path, bytes_per_second: Option<f64>) -> Result<()> {
    let mut file = File::open(file)?;
    let mut stream = UnixStream::connect(socket)?;
    let (began, mut sent) = (Instant::now(), 0);
    let mut piece = vec![0; PIECE];
    loop {
        let length = file.read(&mut piece)?;
        if length == 0 {
            return Ok(());
        }
        sent += length;
        if let Some(bytes_per_second) = bytes_per_second {
            let due = Duration::from_secs_f64(sent as f64 / bytes_per_second);
            thread::sleep(due.saturating_sub(began.elapsed()));
        }
        match stream.write_all(&piece[..length]) {
            // QEMU does not read on once it has the end of the state.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
    }
}
