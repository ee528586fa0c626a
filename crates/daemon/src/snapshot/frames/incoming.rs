//! Frames and news of members that come from another host.

use super::Fabric;
use super::batch::take_first;
use super::network::{Call, Network};
use anyhow::ensure;
use std::sync::{Arc, PoisonError};
use understudy_link::link::{Link, read_json};
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{GroupName, HostName};
use understudy_replication::handshake::Welcome;
use understudy_threads::Mutex;

/// Reads what `peer` sends to the members of a cluster, until the connection ends.
pub(crate) fn serve(
    fabric: &Fabric,
    own: &HostName,
    peer: &HostName,
    cluster: &GroupName,
    link: &Link,
) -> anyhow::Result<()> {
    let network = fabric.network(cluster);
    let turn = take_turn(&network, peer, link);
    // What came over an earlier connection is all through before anything of this one is.
    // It guards nothing but the order.
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    link.send_json(Kind::Welcome, &Welcome::of(own))?;
    link.set_read_timeout(None)?;
    loop {
        let message = match link.receive() {
            Ok(message) => message,
            // As it ends when the last member there is gone, or that host is.
            Err(_) => return Ok(()),
        };
        take(&network, peer, &message)?;
    }
}

/// Ends the host's last connection, if there is one; gives whose turn it is to read.
fn take_turn(network: &Network, peer: &HostName, link: &Link) -> Arc<Mutex<()>> {
    let mut state = network.state();
    let turn = match state.incoming.remove(peer) {
        Some((last, turn)) => {
            last.close();
            turn
        }
        None => Arc::default(),
    };
    state.incoming.insert(peer.to_owned(), (link.clone(), turn.clone()));
    turn
}

fn take(network: &Network, peer: &HostName, message: &Message) -> anyhow::Result<()> {
    match message.header.kind {
        Kind::Presence => {
            let presence = read_json(message, Kind::Presence)?;
            network.state().learn(peer, presence);
        }
        kind => {
            ensure!(kind == Kind::Frames, "unexpected {kind:?} message between members");
            let mut batch = &message.payload[..];
            while let Some(message) = take_first(&mut batch)? {
                let calls = network.state().received(message)?;
                calls.into_iter().for_each(Call::make);
            }
        }
    }
    Ok(())
}
