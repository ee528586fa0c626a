//! The first synchronisation while the guest writes: the mirror must become the image.

mod common;

use common::{MIB, Numbers, Served, qemu_img};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use understudy_disk::{Disk, FreshMirror, Mirror, Synced, WriteSink, copy_out};
use understudy_protocol::DiskIndex;

const EXPORT_BYTES: u64 = 64 * MIB;

/// Declares the mirror whole, as a backup does.
fn complete(fresh: FreshMirror) -> Arc<Disk> {
    let disk = fresh.disk().clone();
    Synced::of(vec![Mirror::Fresh(fresh)], || ()).unwrap().take_names().unwrap();
    disk
}

/// Applies the stream to the mirror, as the backup does with whole epochs.
struct Stream {
    mirror: Arc<Disk>,
    sent: AtomicU64,
}

impl WriteSink for Stream {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}

    fn write(&self, _: DiskIndex, offset: u64, data: &[u8]) {
        self.mirror.write(offset, data).unwrap();
        self.sent.fetch_add(data.len() as u64, Ordering::Relaxed);
        // Gives other writers the chance to come in between.
        std::thread::yield_now();
    }

    fn zero(&self, _: DiskIndex, offset: u64, len: u64) {
        self.mirror.zero(offset, len).unwrap();
        std::thread::yield_now();
    }
}

/// A disk with some data, holes and zeroes, and a fresh mirror that its writes go to.
fn set_up() -> (Served, FreshMirror, Arc<Stream>) {
    let served = Served::empty(EXPORT_BYTES);
    let mut numbers = Numbers(99);
    for at in 0..40 {
        served.disk.write(at * MIB, &numbers.bytes(400_000)).unwrap();
    }
    served.disk.write(50 * MIB, &vec![0; 4 * MIB as usize]).unwrap();
    let fresh = FreshMirror::create(served.dir.path(), DiskIndex(0), EXPORT_BYTES).unwrap();
    let stream = Arc::new(Stream { mirror: fresh.disk().clone(), sent: AtomicU64::new(0) });
    (served, fresh, stream)
}

fn assert_same(served: &Served, mirror: &Disk) {
    let (image, mirror) = (served.disk.path(), mirror.path());
    let (image, mirror) = (image.to_str().unwrap(), mirror.to_str().unwrap());
    qemu_img(&["compare", "-U", "-f", "raw", "-F", "raw", image, mirror]);
}

#[test]
fn a_copy_at_rest_sends_data_and_skips_holes_and_zeroes() {
    let (served, fresh, stream) = set_up();
    served.disk.set_sink(Some(stream.clone()));
    let estimate = served.disk.data_bytes().unwrap();
    let mut seen = Vec::new();
    let never = AtomicBool::new(false);
    let sent = copy_out(&served.disk, &*stream, &mut |bytes| seen.push(bytes), &never).unwrap();
    assert_eq!(sent, stream.sent.load(Ordering::Relaxed));
    assert_eq!(seen.last(), Some(&estimate), "progress ends at the estimate");
    assert!(seen.is_sorted());
    assert!(estimate >= 20_000_000, "data and zeroes are looked at: {estimate}");
    assert!(sent < 17 * MIB, "zeroes are not sent: {sent}");
    let mirror = complete(fresh);
    assert_same(&served, &mirror);
    assert!(mirror.data_bytes().unwrap() <= sent, "the mirror is sparse");
}

#[test]
fn a_copy_under_random_writes_ends_in_the_same_disk() {
    let (served, fresh, stream) = set_up();
    served.disk.set_sink(Some(stream.clone()));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (1..=3)
            .map(|client| {
                let served = &served;
                scope.spawn(move || served.io(&as_strs(&random_commands(client, 400))))
            })
            .collect();
        // Chunk by chunk the copy waits for some writes, so that the two run side by side.
        let mut expected_writes = 0;
        let mut progress = |_| {
            expected_writes += 7;
            while served.server().traffic().writes < expected_writes
                && !clients.iter().all(|client| client.is_finished())
            {
                std::thread::yield_now();
            }
        };
        let never = AtomicBool::new(false);
        copy_out(&served.disk, &*stream, &mut progress, &never).unwrap();
    });
    let mirror = complete(fresh);
    assert_same(&served, &mirror);
    let traffic = served.server().traffic();
    assert!(traffic.writes > 0 && traffic.zeroes > 0, "{traffic:?}");
}

/// Overlapping writes, zeroes and discards all over the disk, many under way at once.
fn random_commands(seed: u64, count: usize) -> Vec<String> {
    let mut numbers = Numbers(seed * 0x9e37_79b9);
    let mut commands: Vec<String> = (0..count)
        .map(|_| {
            let len = 512 * (1 + numbers.below(400));
            let at = 512 * numbers.below((EXPORT_BYTES - len) / 512);
            match numbers.below(10) {
                0 => format!("aio_write -q -z {at} {len}"),
                1 => format!("aio_write -q -z -u {at} {len}"),
                2 => format!("discard -q {at} {len}"),
                3 => "aio_flush".into(),
                4 => format!("write -q -f -P {} {at} {len}", numbers.below(256)),
                _ => format!("aio_write -q -P {} {at} {len}", numbers.below(256)),
            }
        })
        .collect();
    commands.push("aio_flush".into());
    commands
}

fn as_strs(commands: &[String]) -> Vec<&str> {
    commands.iter().map(String::as_str).collect()
}

#[test]
fn a_copy_without_a_sink_is_refused() {
    let (served, _fresh, stream) = set_up();
    let never = AtomicBool::new(false);
    let refused = copy_out(&served.disk, &*stream, &mut |_| (), &never).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::NotConnected);
}

#[test]
fn a_copy_can_be_cancelled() {
    let (served, _fresh, stream) = set_up();
    served.disk.set_sink(Some(stream.clone()));
    let cancel = AtomicBool::new(false);
    let mut steps = 0;
    let mut progress = |_| {
        steps += 1;
        cancel.store(true, Ordering::Relaxed);
    };
    let cancelled = copy_out(&served.disk, &*stream, &mut progress, &cancel).unwrap_err();
    assert_eq!(cancelled.kind(), io::ErrorKind::Interrupted);
    assert_eq!(steps, 1);
}

#[test]
fn a_promoted_mirror_serves_what_the_primary_wrote() {
    let (served, fresh, stream) = set_up();
    served.disk.set_sink(Some(stream.clone()));
    let never = AtomicBool::new(false);
    copy_out(&served.disk, &*stream, &mut |_| (), &never).unwrap();
    let mirror = complete(fresh);
    mirror.set_read_only(true);
    // The warm QEMU is connected while the epochs come in.
    let socket = served.dir.path().join("warm");
    let server = understudy_disk::NbdServer::serve(mirror.clone(), &socket).unwrap();
    served.io(&["write -P 0x5a 3M 1M", "discard 4M 1M"]);

    served.disk.set_sink(None);
    mirror.set_read_only(false);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let output = common::qemu_io(
        &uri,
        &["read -P 0x5a 3M 1M", "read -P 0 4M 1M", "write -P 1 0 4k", "read -P 1 0 4k"],
    );
    common::succeeded("qemu-io", &output);
    drop(server);
}
