//! Frames and news of members that come from another host.

use super::attested::Word;
use super::batch::take_first;
use super::network::{Call, Network};
use crate::host::Host;
use anyhow::ensure;
use crossbeam_channel::Sender;
use understudy_link::link::{Link, read_json};
use understudy_protocol::HostName;
use understudy_protocol::wire::{Kind, Message};
use understudy_replication::handshake::Welcome;

/// Reads what `peer` sends to the members of a cluster, until the connection ends.
pub(crate) fn serve(
    host: &Host,
    network: &Network,
    peer: &HostName,
    link: &Link,
) -> anyhow::Result<()> {
    let _reading = take_turn(network, peer, link);
    link.send_json(Kind::Welcome, &Welcome::of(&host.config.name))?;
    link.set_read_timeout(None)?;
    // It ends when the last member there is gone, or that host is.
    let read = || link.receive().ok();
    let taken =
        std::iter::from_fn(read).try_for_each(|message| take(host, network, peer, &message));
    network.state().forget(peer);
    taken
}

/// Ends the host's last connection, if there is one, and waits until what came over it is all through:
/// nothing of this one is before. What is returned is to be dropped when this one is at its end.
fn take_turn(network: &Network, peer: &HostName, link: &Link) -> Sender<()> {
    let (reading, end) = crossbeam_channel::bounded(0);
    let former = network.state().incoming.insert(peer.to_owned(), (link.clone(), end));
    if let Some((last, end)) = former {
        last.close();
        // Nothing is ever said: its thread lets go of the other end, and has waited for those before.
        let _ = end.recv();
    }
    reading
}

fn take(host: &Host, network: &Network, peer: &HostName, message: &Message) -> anyhow::Result<()> {
    match message.header.kind {
        Kind::Presence => {
            let presence = read_json(message, Kind::Presence)?;
            // Here, as what the host sends next counts only then.
            network.learn(peer, presence, &Word::of(host));
        }
        kind => {
            ensure!(kind == Kind::Frames, "unexpected {kind:?} message between members");
            let mut batch = &message.payload[..];
            while let Some(message) = take_first(&mut batch)? {
                let calls = network.state().received(peer, message)?;
                calls.into_iter().for_each(Call::make);
            }
        }
    }
    Ok(())
}
