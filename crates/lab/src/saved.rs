//! Means that QEMU itself offers to save a machine and have it back: `migrate file:`, and
//! `-incoming` from there; savevm and loadvm.

use crate::command;
use crate::lab::Lab;
use crate::plain::PlainGuest;
use crate::wait::wait_for;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Time for a guest to be saved, or to be back.
const LIMIT: Duration = Duration::from_secs(240);
const SOCKET: &str = "saved";
/// The image that savevm writes to, and its node.
const INSIDE: &str = "inside";
/// Room for all of a guest's memory.
const INSIDE_SIZE: &str = "64G";
/// Bytes that are read at once from a slow store.
const PIECE: usize = 64 * 1024;

/// A guest that was saved.
#[derive(Debug)]
pub struct Saved {
    /// Time for which it stood still.
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

/// The guest, saved by savevm.
#[derive(Debug)]
pub struct SavedInside {
    /// Time that it took: the guest stood still.
    pub took: Duration,
    /// Bytes of the image.
    pub bytes: u64,
}

impl PlainGuest {
    /// Saves the guest as savevm does (QMP `snapshot-save`), into an image beside its disks: of a
    /// guest whose disks are raw, only the machine's state. It runs on afterwards. Once.
    pub fn save_inside(&self) -> Result<SavedInside> {
        let image = self.home.directory.path().join(INSIDE);
        let path = image.display().to_string();
        command::run("qemu-img", &["create", "-q", "-f", "qcow2", &path, INSIDE_SIZE])?;
        let file = json!({"driver": "file", "filename": path});
        let node = json!({"driver": "qcow2", "node-name": INSIDE, "file": file});
        self.emulator.execute("blockdev-add", node)?;
        let began = Instant::now();
        self.run_job("snapshot-save")?;
        Ok(SavedInside { took: began.elapsed(), bytes: image.metadata()?.len() })
    }

    /// Has it back as loadvm does, in the QEMU that is there. It must stand still, and does so
    /// afterwards. Returns how long that took.
    pub fn load_inside(&self) -> Result<Duration> {
        let began = Instant::now();
        self.run_job("snapshot-load")?;
        Ok(began.elapsed())
    }

    fn run_job(&self, command: &str) -> Result<()> {
        let arguments =
            json!({"job-id": command, "tag": INSIDE, "vmstate": INSIDE, "devices": [INSIDE]});
        self.emulator.execute(command, arguments)?;
        let error = wait_for(&format!("{command} to end"), LIMIT, || {
            let jobs = self.emulator.execute("query-jobs", json!({}))?;
            let own = jobs.as_array().into_iter().flatten().find(|job| job["id"] == command);
            let own = own.with_context(|| format!("there is no job {command}"))?;
            Ok((own["status"] == "concluded").then(|| own["error"].clone()))
        })?;
        self.emulator.execute("job-dismiss", json!({"id": command}))?;
        match error {
            Value::Null => Ok(()),
            error => bail!("{command}: {error}"),
        }
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
