//! A protected member of a cluster that has two cards: what both say and hear is part of a snapshot.

use crate::cluster::{PACE_MS, audit, await_payments};
use crate::snapshot::{json, store};
use crate::stage::{Calm, LIMIT, await_forgotten, daemon, options, play};
use anyhow::{Context, Result, ensure};
use std::net::{Ipv4Addr, SocketAddr};
use understudy_lab::scene::{SECOND_ADDRESS, SHELL_PORT, VM};
use understudy_lab::{GUEST_ADDRESS, GuestShell, Scene, SceneOptions, Sibling, wait_for};

const OTHER: &str = "other";
const CLUSTER: &str = "[cluster.shop]\nmembers = { guest = \"a\", other = \"b\" }\n";

/// The network of one of the guest's cards, and the two banks that pay to each other there alone.
struct Network {
    guest: Ipv4Addr,
    /// The other member has both on its one card.
    other: Ipv4Addr,
    port: u16,
}

const NETWORKS: [Network; 2] = [
    Network { guest: GUEST_ADDRESS, other: Ipv4Addr::new(10, 77, 0, 61), port: 7100 },
    Network { guest: SECOND_ADDRESS, other: Ipv4Addr::new(10, 78, 0, 61), port: 7101 },
];

impl Network {
    fn banks(&self) -> [SocketAddr; 2] {
        [self.guest, self.other].map(|address| SocketAddr::from((address, self.port)))
    }
}

fn two_cards() -> SceneOptions {
    let mut options = SceneOptions { disks: 0, memory_mib: 96, cards: 2, ..options().calm() };
    for host in options.daemons.values_mut() {
        *host = daemon().calm();
        host.settings += CLUSTER;
    }
    options
}

/// Boots both members, protects the one with two cards, and has the banks pay.
fn found(scene: &Scene) -> Result<()> {
    let mac = "52:54:00:75:75:61";
    let sibling = Sibling { name: OTHER, address: NETWORKS[0].other, mac };
    let definition = sibling.define(scene)?.display().to_string();
    scene.host("b")?.call(["vm", "start", &definition])?;
    let mut other = wait_for("the other member to boot", LIMIT, || {
        let server = SocketAddr::from((NETWORKS[0].other, SHELL_PORT));
        Ok(GuestShell::connect(scene.lab(), server).ok())
    })?;
    let second = format!("ip addr add {}/24 brd + dev eth0", NETWORKS[1].other);
    ensure!(other.run(&second)?.code == 0, "the other member has no second address");
    scene.protected_guest("a", "b")?;
    let mut guest = scene.shell()?;
    for network in &NETWORKS {
        let (port, [own, peer]) = (network.port, network.banks());
        guest
            .start(&format!("BANK_PACE_MS={PACE_MS} exec guest-tools bank guest {port} {peer}"))?;
        other.start(&format!("BANK_PACE_MS={PACE_MS} exec guest-tools bank other {port} {own}"))?;
    }
    NETWORKS.iter().try_for_each(|network| await_payments(scene, &network.banks()))
}

/// Ends both members, as if their power had been cut.
fn end(scene: &Scene) -> Result<()> {
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    scene.host("b")?.call(["vm", "stop", OTHER, "--force"])?;
    await_forgotten(scene, "a")?;
    await_forgotten(scene, "b")
}

#[test]
fn a_protected_member_with_two_cards_is_restored_with_both() {
    play(two_cards(), |scene| {
        found(scene)?;
        let store = store(scene);
        let take = ["cluster", "snapshot", "shop", "--trace", "0.3", "--store", &store];
        let report = json(scene, "a", &take)?;
        ensure!(report["members"].as_array().map(Vec::len) == Some(2), "{report}");
        scene.await_protected("a", |_| ()).context("the snapshot ended it")?;
        // What is paid from here on is to be forgotten on both cards alike.
        NETWORKS.iter().try_for_each(|network| await_payments(scene, &network.banks()))?;
        end(scene)?;
        json(scene, "b", &["cluster", "restore", "shop", "--store", &store])?;
        for (card, network) in NETWORKS.iter().enumerate() {
            let proven = await_payments(scene, &network.banks())
                .and_then(|()| audit(scene, &network.banks()));
            proven.with_context(|| format!("card {card}"))?;
        }
        for server in [scene.guest(SHELL_PORT), scene.guest_second(SHELL_PORT)] {
            let text = GuestShell::connect(scene.lab(), server)?.run("echo $((6 * 7))")?.text;
            ensure!(text.trim() == "42", "{server} says {text:?} to a client outside");
        }
        end(scene)
    });
}
