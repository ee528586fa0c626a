//! A flood of datagrams for the guest.

use anyhow::Result;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use understudy_lab::{Scene, in_namespace};

/// Datagrams that the guest receives until this is dropped: much log, which takes little time to be executed.
pub struct Datagrams {
    ends: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
}

impl Datagrams {
    pub fn start(scene: &Scene) -> Result<Datagrams> {
        let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
        let socket = in_namespace(&scene.lab().client(), bind)??;
        // Nobody listens there.
        socket.connect(scene.guest(9))?;
        let ends = Arc::new(AtomicBool::new(false));
        let told = ends.clone();
        let sender = thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                for _ in 0..8 {
                    // Refused by the guest now and then.
                    let _ = socket.send(&[7; 1400]);
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Ok(Datagrams { ends, sender: Some(sender) })
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(sender) = self.sender.take() {
            let _ = sender.join();
        }
    }
}
