//! A card in a VLAN of bridges that filter them: before and after a take-over the guest hears its own
//! network and no other, and its announcement goes there.

use crate::refusals::says;
use crate::stage::{Calm, PACE, await_service, options, play, prove_survival, refusal, run};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;
use toml::{Table, Value};
use understudy_lab::scene::VM;
use understudy_lab::{
    BRIDGE, GUEST_ADDRESS, Mac, Scene, SceneOptions, UPLINK, Watcher, in_namespace, wait_for,
};

/// The guest's VLAN, and another one.
const OWN: &str = "20";
const OTHER: &str = "30";
/// The client's addresses in both.
const IN_OWN: &str = "10.77.0.120";
const IN_OTHER: &str = "10.77.0.130";
const NOBODY_IN_OWN: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 221);
const NOBODY_IN_OTHER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 231);
const DISCARD_PORT: u16 = 9;
const MAC_IN_OWN: &str = "02:00:00:00:00:20";
const MAC_IN_OTHER: &str = "02:00:00:00:00:30";

const LIMIT: Duration = Duration::from_secs(120);

/// Lays bridges on both hosts that filter, and let both VLANs through to the switch, where the
/// client is in both.
fn lay(scene: &Scene) -> Result<()> {
    for host in ["a", "b"] {
        let namespace = scene.lab().host(host)?;
        namespace.ip(&["link", "set", BRIDGE, "type", "bridge", "vlan_filtering", "1"])?;
        for vlan in [OWN, OTHER] {
            let name = namespace.name();
            run("bridge", &["-n", name, "vlan", "add", "vid", vlan, "dev", UPLINK])?;
        }
    }
    let client = scene.lab().client();
    for (vlan, address, mac) in [(OWN, IN_OWN, MAC_IN_OWN), (OTHER, IN_OTHER, MAC_IN_OTHER)] {
        let end = format!("net.{vlan}");
        let link = ["link", "add", "link", "net", "name", &end, "address", mac];
        client.ip(&[&link[..], &["type", "vlan", "id", vlan]].concat())?;
        client.ip(&["addr", "add", &format!("{address}/32"), "dev", &end])?;
        client.ip(&["link", "set", &end, "up"])?;
    }
    for (address, vlan, from) in [
        (GUEST_ADDRESS, OWN, IN_OWN),
        (NOBODY_IN_OWN, OWN, IN_OWN),
        (NOBODY_IN_OTHER, OTHER, IN_OTHER),
    ] {
        let (to, end) = (address.to_string(), format!("net.{vlan}"));
        client.ip(&["route", "add", &to, "dev", &end, "src", from])?;
    }
    Ok(())
}

/// The guest's card has these fields from now on.
fn put_card(scene: &Scene, fields: &[(&str, Value)]) -> Result<()> {
    let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
    let card = table.get_mut("card").and_then(|cards| cards.get_mut(0)?.as_table_mut());
    let card = card.context("no card")?;
    for (field, value) in fields {
        card.insert((*field).to_owned(), value.clone());
    }
    fs::write(scene.definition(), table.to_string())?;
    Ok(())
}

fn vlans() -> SceneOptions {
    SceneOptions { booted: false, ..options().calm() }
}

/// The frames that the host that runs the guest lets through to it.
struct Ears {
    own: Watcher,
    other: Watcher,
    /// The frames that come to the host at all.
    arrived: Watcher,
}

impl Ears {
    fn at(scene: &Scene, host: &str) -> Result<Ears> {
        let status = scene.status(host)?;
        let tap = status["cards"][0]["tap"].as_str().context("no tap")?;
        let lab = scene.lab();
        Ok(Ears {
            own: Watcher::on_way_to(lab, host, tap, MAC_IN_OWN.parse()?)?,
            other: Watcher::on_way_to(lab, host, tap, MAC_IN_OTHER.parse()?)?,
            arrived: Watcher::on_tap(lab, host, UPLINK, MAC_IN_OTHER.parse()?)?,
        })
    }

    /// Frames for everybody go out in both VLANs; the guest gets those of its own.
    fn prove(&self, scene: &Scene) -> Result<()> {
        // Nobody has the addresses: the question for each is for everybody.
        let cry = || {
            in_namespace(&scene.lab().client(), || {
                let socket = UdpSocket::bind("0.0.0.0:0")?;
                let ask = |address| socket.send_to(b"?", (address, DISCARD_PORT)).map(drop);
                ask(NOBODY_IN_OTHER).and_then(|()| ask(NOBODY_IN_OWN))
            })
        };
        wait_for("frames of both VLANs to come to the host", LIMIT, || {
            cry()??;
            Ok((self.own.count()? > 0 && self.arrived.count()? > 2).then_some(()))
        })?;
        let heard = self.other.count()?;
        ensure!(heard == 0, "the guest got {heard} frames of another VLAN");
        Ok(())
    }
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_guest_in_a_vlan_hears_and_is_heard_there_alone_on_both_hosts() {
    play(vlans(), |scene| {
        lay(scene)?;
        put_card(scene, &[("vlan", 20.into())])?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        Ears::at(scene, "a")?.prove(scene)?;
        let guest: Mac = mac(scene)?;
        let (own, other) = (format!("net.{OWN}"), format!("net.{OTHER}"));
        let heard = Watcher::on_client(scene.lab(), &own, guest)?;
        let astray = Watcher::on_client(scene.lab(), &other, guest)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        wait_for("the guest to be announced in its VLAN", LIMIT, || {
            Ok((heard.announcements()? > 0).then_some(()))
        })?;
        ensure!(astray.count()? == 0, "the guest was heard in another VLAN");
        Ears::at(scene, "b")?.prove(scene)?;
        prove_survival(scene, client, "b")
    });
}

fn mac(scene: &Scene) -> Result<Mac> {
    let table: Table = fs::read_to_string(scene.definition())?.parse()?;
    table["card"][0]["mac"].as_str().context("no address")?.parse()
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_guest_that_tags_its_frames_itself_keeps_its_trunk() {
    play(vlans(), |scene| {
        lay(scene)?;
        put_card(scene, &[("vlans", "10,20-21".into()), ("vlan", 20.into())])?;
        scene.protected_guest("a", "b")?;
        for host in ["a", "b"] {
            let namespace = scene.lab().host(host)?;
            let status = scene.status(host)?;
            let tap = status["cards"][0]["tap"].as_str().context("no tap")?.to_owned();
            let shown = run("bridge", &["-n", namespace.name(), "vlan", "show", "dev", &tap])?;
            let words: Vec<&str> = shown.split_whitespace().skip(3).collect();
            ensure!(words.join(" ") == "10 20 PVID Egress Untagged 21", "{host}: {shown}");
        }
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let guest = mac(scene)?;
        scene
            .lab()
            .client()
            .ip(&["link", "add", "link", "net", "name", "net.21", "type", "vlan", "id", "21"])?;
        for host in ["a", "b"] {
            let namespace = scene.lab().host(host)?;
            run("bridge", &["-n", namespace.name(), "vlan", "add", "vid", "21", "dev", UPLINK])?;
        }
        scene.lab().client().ip(&["link", "set", "net.21", "up"])?;
        let tagged = Watcher::on_client(scene.lab(), "net.21", guest)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        wait_for("the guest to be announced in a VLAN of its trunk", LIMIT, || {
            Ok((tagged.announcements()? > 0).then_some(()))
        })?;
        prove_survival(scene, client, "b")
    });
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_bridge_that_filters_no_vlans_is_refused_by_name_on_both_hosts() {
    play(vlans(), |scene| {
        put_card(scene, &[("vlan", 20.into())])?;
        let definition = scene.definition().to_string_lossy().into_owned();
        let (code, said) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        ensure!(code == 1, "exit code {code}: {said}");
        says(&said, &["bridge br0 on host a does not filter VLANs", "vlan_filtering 1"])?;
        let filter = ["link", "set", BRIDGE, "type", "bridge", "vlan_filtering", "1"];
        scene.lab().host("a")?.ip(&filter)?;
        scene.host("a")?.call(["vm", "start", &definition])?;
        let (code, said) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        ensure!(code == 1, "exit code {code}: {said}");
        says(&said, &["bridge br0 on host b does not filter VLANs", "vlan_filtering 1"])?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        put_card(scene, &[("vlan", 4095.into())])?;
        let (code, said) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        ensure!(code == 1 && said.contains("card[0].vlan"), "exit code {code}: {said}");
        put_card(scene, &[("vlan", 20.into()), ("vlans", "1-x".into())])?;
        let (code, said) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        ensure!(code == 1 && said.contains("no list of VLANs"), "exit code {code}: {said}");
        Ok(())
    });
}
