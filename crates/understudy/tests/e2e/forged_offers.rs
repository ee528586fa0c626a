//! Offers that do not fit the host which they come to, and noise in their place: refused, and nothing is changed.

use crate::peer::{MadeUpPeer, hung_up, message, refusal_of};
use crate::refusals::{definition, log_of, says, with_peers, write};
use crate::stage::{LIMIT, play, refusal, vms};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use understudy_lab::scene::VM;
use understudy_lab::wait_for;
use understudy_protocol::wire::Kind;

/// A genuine offer with one thing changed, and what the refusal must say.
type Forgery = (fn(&mut Value), &'static [&'static str]);

#[test]
fn offers_that_do_not_fit_are_refused() {
    let forgeries: [Forgery; 17] = [
        (
            |hello| {
                hello["wire_version"] = json!(999);
                hello["wire_highest"] = json!(1000);
            },
            &["wire versions 999 to 1000", "17 to 18", "upgrade this host first"],
        ),
        (|hello| hello["purpose"]["qemu_version"] = json!("1.2.3"), &["QEMU", "1.2.3"]),
        (|hello| hello["purpose"]["machine_type"] = json!("pc-q35-99.9"), &["pc-q35-99.9"]),
        (|hello| definition_of(hello)["memory"] = json!("9000G"), &["MiB", "host b"]),
        (|hello| definition_of(hello)["name"] = json!("other"), &["\"other\"", "host b already"]),
        (|hello| definition_of(hello)["vcpus"] = json!(0), &["vcpus"]),
        (|hello| definition_of(hello)["card"] = json!([card("73:01", "br0")]), &["in use"]),
        (|hello| definition_of(hello)["card"] = json!([card("73:09", "br9")]), &["bridge br9"]),
        (|hello| definition_of(hello)["qemu_args"] = json!(["-monitor", "stdio"]), &["qemu_args"]),
        (
            |hello| definition_of(hello)["kernel"] = json!("/etc/shadow"),
            &["\"kernel\"", "no file comes"],
        ),
        (
            |hello| {
                definition_of(hello)["kernel"] = json!("/boot/vmlinuz");
                definition_of(hello)["initrd"] = json!("/etc/understudy/b.key");
                hello["purpose"]["files"] = json!([{ "role": "kernel", "bytes": 5 }]);
            },
            &["\"initrd\"", "no file comes"],
        ),
        (
            |hello| hello["purpose"]["files"] = json!([{ "role": "firmware", "bytes": 5 }]),
            &["\"firmware\"", "does not have"],
        ),
        (|hello| hello["purpose"]["disk_bytes"] = json!([]), &["disk"]),
        (|hello| hello["purpose"]["paths"] = json!([]), &["0 paths", "1 to 8"]),
        (|hello| hello["purpose"]["path"] = json!(1), &["path 2", "1 were offered"]),
        (|hello| *hello = heartbeat(hello), &["no session"]),
        (|hello| *hello = resumption(hello), &["no session"]),
    ];
    play(with_peers(), |scene| {
        let other = write(scene, "other.toml", &definition(scene, "other")?)?;
        scene.host("b")?.call(["vm", "start", &other.to_string_lossy()])?;
        scene.start_guest("a")?;
        let peer = MadeUpPeer::start(scene, message(Kind::Refuse, b"only asking"))?;
        refusal(scene.host("a")?, &["protect", VM, "--to", "madeup"])?;
        let genuine = peer.hello()?;
        for (index, (forge, expected)) in forgeries.iter().enumerate() {
            let mut hello = genuine.clone();
            forge(&mut hello);
            let bytes = message(Kind::Hello, &serde_json::to_vec(&hello)?);
            let words = refusal_of(scene, "b", &bytes).with_context(|| hello.to_string())?;
            says(&words, expected).with_context(|| format!("forgery {index}"))?;
        }
        // What is no name is no hello: nobody is answered, and the log says why.
        let mut nameless = genuine.clone();
        definition_of(&mut nameless)["name"] = json!("../evil");
        hung_up(scene, "b", &message(Kind::Hello, &serde_json::to_vec(&nameless)?))?;
        wait_for("host b to log what is no name", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("\"../evil\" is no name for a VM").then_some(()))
        })?;
        let noise: [Vec<u8>; 5] = [
            b"GET / HTTP/1.1\r\nHost: understudy\r\n\r\n".to_vec(),
            vec![0; 4096],
            message(Kind::Pages, &[0xff; 64]),
            message(Kind::Hello, b"{\"wire_version\": 1}"),
            message(Kind::Hello, b"not JSON"),
        ];
        for bytes in noise {
            hung_up(scene, "b", &bytes).with_context(|| bytes.escape_ascii().to_string())?;
        }
        let left = vms(scene.host("b")?)?;
        ensure!(left.len() == 1 && left[0]["name"] == "other", "host b knows more: {left:?}");
        ensure!(left[0]["live"] == true, "host b's own guest does not run: {left:?}");
        let evil = scene.host("b")?.directory().join("evil");
        ensure!(!evil.exists(), "{} was made", evil.display());
        Ok(())
    });
}

fn definition_of(hello: &mut Value) -> &mut Value {
    &mut hello["purpose"]["definition"]
}

fn card(end_of_mac: &str, bridge: &str) -> Value {
    json!({"mac": format!("52:54:00:75:{end_of_mac}"), "bridge": bridge})
}

fn heartbeat(hello: &Value) -> Value {
    let mut heartbeat = hello.clone();
    heartbeat["purpose"] = json!({"purpose": "heartbeat", "session": "a/guest/1/1", "path": 0});
    heartbeat
}

fn resumption(hello: &Value) -> Value {
    let mut resumption = heartbeat(hello);
    resumption["purpose"]["purpose"] = json!("resume");
    resumption["purpose"]["received"] = json!(0);
    resumption
}
