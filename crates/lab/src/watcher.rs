//! Senders of frames in the guest's name, and their times: the proof that two copies of
//! a VM never both answer.

use crate::lab::{Lab, UPLINK};
use crate::namespace::{Namespace, in_namespace};
use crate::packet::PacketSocket;
use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fmt;
use std::os::fd::AsFd;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// EtherType of RARP.
const ANNOUNCEMENT: u16 = 0x8035;
const STOP_INTERVAL_MS: u16 = 50;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Mac> {
        let parse = |part: &str| (part.len() == 2).then(|| u8::from_str_radix(part, 16).ok())?;
        let bytes: Option<Vec<u8>> = text.split(':').map(parse).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Mac).with_context(|| format!("`{text}` is no Ethernet address"))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// Notes every frame that a host lets out in the name of a guest.
///
/// Times are those at which the kernel saw the frames, on the clock of
/// [`Instant`], so watchers of different hosts can be compared.
pub struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    sightings: Mutex<Sightings>,
    stop: AtomicBool,
}

struct Sightings {
    socket: PacketSocket,
    guest: Mac,
    /// Direction of the guest's frames: from the guest means received on a tap, but sent on an
    /// uplink.
    outgoing: bool,
    frames: Vec<Instant>,
    /// Number of them that tell switches where the guest is.
    announced: usize,
    dropped: u64,
}

impl Watcher {
    /// Watches a VM's tap: frames that come out of the guest.
    pub fn on_tap(lab: &Lab, host: &str, tap: &str, guest: Mac) -> Result<Watcher> {
        Watcher::start(lab, host, tap, guest, false)
    }

    /// Watches a host's uplink: frames with the guest's address that leave the
    /// host. Works before the host has a tap, and sees what a cut host sends
    /// in vain.
    pub fn on_uplink(lab: &Lab, host: &str, guest: Mac) -> Result<Watcher> {
        Watcher::start(lab, host, UPLINK, guest, true)
    }

    /// Watches what a host's interface, a VM's tap for example, is given in somebody's name.
    pub fn on_way_to(lab: &Lab, host: &str, interface: &str, sender: Mac) -> Result<Watcher> {
        Watcher::start(lab, host, interface, sender, true)
    }

    /// Watches what comes to one of the client's interfaces in the guest's name.
    pub fn on_client(lab: &Lab, interface: &str, guest: Mac) -> Result<Watcher> {
        Watcher::begin(&lab.client(), interface, guest, false)
    }

    fn start(
        lab: &Lab,
        host: &str,
        interface: &str,
        guest: Mac,
        outgoing: bool,
    ) -> Result<Watcher> {
        Watcher::begin(&lab.host(host)?, interface, guest, outgoing)
            .with_context(|| format!("on host {host}"))
    }

    fn begin(
        namespace: &Namespace,
        interface: &str,
        guest: Mac,
        outgoing: bool,
    ) -> Result<Watcher> {
        let socket = in_namespace(namespace, || PacketSocket::open(interface))??;
        let poller = socket.as_fd().try_clone_to_owned().context("cannot copy the descriptor")?;
        let sightings =
            Sightings { socket, guest, outgoing, frames: Vec::new(), announced: 0, dropped: 0 };
        let shared =
            Arc::new(Shared { sightings: Mutex::new(sightings), stop: AtomicBool::new(false) });
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let mut wanted = [PollFd::new(poller.as_fd(), PollFlags::POLLIN)];
                while !shared.stop.load(Ordering::Acquire) {
                    // An interrupted poll is followed by the next. An error of
                    // the socket comes up again at the next question.
                    let _ = poll(&mut wanted, PollTimeout::from(STOP_INTERVAL_MS));
                    if shared.lock().drain().is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Watcher { shared, thread: Some(thread) })
    }

    /// Number of frames that the guest has sent.
    pub fn count(&self) -> Result<usize> {
        Ok(self.sightings()?.frames.len())
    }

    /// Number of them that tell switches where the guest is.
    pub fn announcements(&self) -> Result<usize> {
        Ok(self.sightings()?.announced)
    }

    /// The guest's last frame.
    pub fn last_frame(&self) -> Result<Option<Instant>> {
        Ok(self.sightings()?.frames.last().copied())
    }

    /// The guest's first frame after `instant`.
    pub fn first_frame_after(&self, instant: Instant) -> Result<Option<Instant>> {
        Ok(self.sightings()?.frames.iter().copied().find(|&at| at > instant))
    }

    /// Number of frames that the guest has sent after `instant`.
    pub fn frames_after(&self, instant: Instant) -> Result<usize> {
        Ok(self.sightings()?.frames.iter().filter(|&&at| at > instant).count())
    }

    /// Everything up to this call; an error if a frame went unseen, because
    /// then no answer would be a proof.
    fn sightings(&self) -> Result<MutexGuard<'_, Sightings>> {
        let mut sightings = self.shared.lock();
        sightings.drain()?;
        sightings.dropped += sightings.socket.dropped()?;
        ensure!(sightings.dropped == 0, "{} frames went unseen", sightings.dropped);
        Ok(sightings)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Sightings> {
        self.sightings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sightings {
    /// Reads what waits in the socket.
    fn drain(&mut self) -> Result<()> {
        while let Some(frame) = self.socket.next()? {
            if frame.outgoing == self.outgoing && frame.source == self.guest.0 {
                self.frames.push(frame.at);
                self.announced += usize::from(frame.kind == ANNOUNCEMENT);
            }
        }
        Ok(())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        let mac: Mac = "52:54:00:ab:0c:01".parse().unwrap();
        assert_eq!(mac, Mac([0x52, 0x54, 0, 0xab, 0x0c, 1]));
        assert_eq!(mac.to_string(), "52:54:00:ab:0c:01");
        for wrong in
            ["", "52:54:00:ab:0c", "52:54:00:ab:0c:01:02", "52:54:00:ab:0c:1", "x2:54:00:ab:0c:01"]
        {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
    }
}
