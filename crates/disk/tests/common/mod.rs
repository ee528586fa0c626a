//! A disk served to the programs that come with QEMU.
#![allow(dead_code)] // each test program uses a part

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use understudy_disk::{Disk, NbdServer};
use understudy_protocol::DiskIndex;

pub const MIB: u64 = 1 << 20;

/// One disk, its server and the directory that both live in. The server goes first.
pub struct Served {
    pub server: Option<NbdServer>,
    pub disk: Arc<Disk>,
    pub dir: tempfile::TempDir,
}

impl Served {
    /// An empty image in an export of this size.
    pub fn empty(export_bytes: u64) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, b"").unwrap();
        Served::image(dir, &image, export_bytes)
    }

    pub fn image(dir: tempfile::TempDir, image: &Path, export_bytes: u64) -> Served {
        let disk = Arc::new(Disk::open(DiskIndex(0), image, export_bytes).unwrap());
        let server = NbdServer::serve(disk.clone(), dir.path().join("nbd")).unwrap();
        Served { server: Some(server), disk, dir }
    }

    pub fn server(&self) -> &NbdServer {
        self.server.as_ref().unwrap()
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.server().socket().display())
    }

    /// Runs commands of qemu-io, which must all succeed.
    pub fn io(&self, commands: &[&str]) -> String {
        let output = qemu_io(&self.uri(), commands);
        succeeded("qemu-io", &output)
    }

    /// Stops serving and closes the image.
    pub fn close(mut self) -> (tempfile::TempDir, PathBuf) {
        drop(self.server.take());
        let path = self.disk.path();
        assert_eq!(Arc::strong_count(&self.disk), 1, "the server has let go of the disk");
        (self.dir, path)
    }
}

/// Runs qemu-io on a raw disk with these commands on its standard input.
pub fn qemu_io(target: &str, commands: &[&str]) -> Output {
    let mut child = Command::new("qemu-io")
        .args(["-f", "raw", "--cache=none", "--discard=unmap", target])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("qemu-utils is installed");
    let mut input = child.stdin.take().unwrap();
    let script = commands.join("\n") + "\n";
    // Another thread, since qemu-io may fill its output before it reads on.
    let writer = std::thread::spawn(move || input.write_all(script.as_bytes()));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join().unwrap();
    output
}

pub fn qemu_img(arguments: &[&str]) -> String {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    succeeded(&format!("qemu-img {arguments:?}"), &output)
}

pub fn succeeded(what: &str, output: &Output) -> String {
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // qemu-io's exit code says nothing of commands read from its standard input.
    let failed = ["verification failed", "failed:", "error", "denied", "No space"];
    let good = output.status.success() && !failed.iter().any(|word| said.contains(word));
    assert!(good, "{what}: {said}");
    said
}

/// Numbers that look random and are the same in every run (xorshift64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(4)).flat_map(|_| (self.below(1 << 32) as u32).to_le_bytes()).collect()
    }
}
