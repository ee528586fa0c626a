//! A guest that libvirt has defined becomes one that survives its host's death, where it was on its
//! buses.

use crate::refusals::says;
use crate::stage::{Calm, PACE, await_service, options, play, prove_survival, refusal};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use toml::Table;
use understudy_lab::{GuestShell, Scene, SceneOptions};

/// A domain as `virsh dumpxml` printed it: UEFI with secure boot, a TPM, everything behind ports.
const DOMAIN: &str = include_str!("../../../import/tests/domains/debian13_secure-boot-defined.xml");
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// The text between two others.
fn between<'a>(text: &'a str, before: &str, after: &str) -> Result<&'a str> {
    let rest = text.split_once(before).with_context(|| format!("no {before}"))?.1;
    Ok(rest.split_once(after).with_context(|| format!("no {after}"))?.0)
}

/// The domain with the scene's kernel, disk and network, as XML in a file.
fn domain(scene: &Scene, folder: &Path) -> Result<PathBuf> {
    let table: Table = fs::read_to_string(scene.definition())?.parse()?;
    let text = |field: &str| table[field].as_str().with_context(|| format!("no {field}"));
    let of = |kind: &str, field: &str| {
        let value = table.get(kind).and_then(|all| all.get(0)?.get(field)?.as_str());
        value.with_context(|| format!("no {field} of a {kind}"))
    };
    let variables = folder.join("guest_VARS.fd");
    fs::copy(VARIABLES, &variables)?;
    let disk = folder.join(of("disk", "path")?).display().to_string();
    let boot = format!(
        "<kernel>{}</kernel><initrd>{}</initrd><cmdline>{}</cmdline><boot dev='hd'/>",
        text("kernel")?,
        text("initrd")?,
        text("append")?
    );
    let mac = between(DOMAIN, "<mac address='", "'")?;
    let store = between(DOMAIN, "templateFormat='raw' format='raw'>", "<")?;
    let changed = DOMAIN
        .replace("<name>debian13</name>", "<name>guest</name>")
        .replace("'KiB'>2097152<", "'KiB'>262144<")
        .replace("<boot dev='hd'/>", &boot)
        .replace("type='qcow2'", "type='raw'")
        .replace("/images/d.qcow2", &disk)
        .replace(mac, of("card", "mac")?)
        .replace("bridge='br0'", &format!("bridge='{}'", of("card", "bridge")?))
        .replace(store, &variables.display().to_string());
    let file = folder.join("guest.xml");
    fs::write(&file, changed)?;
    Ok(file)
}

#[test]
fn a_domain_of_libvirt_survives_where_it_was() {
    let shape = SceneOptions { booted: false, ..options().calm() };
    play(shape, |scene| {
        let folder = scene.definition().parent().context("a definition is in a folder")?.to_owned();
        let file = domain(scene, &folder)?;
        let (file, output) = (file.display().to_string(), folder.join("imported.toml"));
        let host = scene.host("a")?;
        let to = output.display().to_string();
        host.call(["vm", "import", "--libvirt", &file, "--output", &to])?;
        let (_, said) = refusal(host, &["vm", "import", "--libvirt", &file, "--output", &to])?;
        says(&said, &["imported.toml", "exists"])?;
        fs::rename(&output, scene.definition())?;
        scene.protected_guest("a", "b")?;
        let mut shell = scene.shell()?;
        let place = |shell: &mut GuestShell| -> Result<()> {
            let of = |device: &str| format!("readlink -f /sys/class/{device}/device");
            let said = shell.run(&format!("{}; {}", of("net/eth0"), of("block/vda")))?.text;
            ensure!(said.contains("0000:01:00.0") && said.contains("0000:04:00.0"), "{said}");
            Ok(())
        };
        place(&mut shell)?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        place(&mut shell)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn what_cannot_be_imported_is_refused_with_the_line_to_blame() {
    play(options(), |scene| {
        let folder = scene.definition().parent().context("a definition is in a folder")?.to_owned();
        let file = folder.join("bad.xml");
        let path = file.display().to_string();
        let refused = |text: &str, words: &[&str]| -> Result<()> {
            fs::write(&file, text)?;
            let output = folder.join("never.toml").display().to_string();
            let line = ["vm", "import", "--libvirt", &path, "--output", &output];
            let (_, said) = refusal(scene.host("a")?, &line)?;
            ensure!(!folder.join("never.toml").exists(), "a definition was written");
            says(&said, words)
        };
        refused(
            &DOMAIN.replace("bus='virtio'/>", "bus='nvme'/>"),
            &["line 44", "vda", "NVMe", "scsi"],
        )?;
        refused(&DOMAIN[..DOMAIN.len() / 2], &["the domain", "line 8"])?;
        refused("not XML at all", &["the domain", "no element"])?;
        let (_, said) = refusal(scene.host("a")?, &["vm", "import", "--libvirt", "nobody"])?;
        says(&said, &["no file nobody", "virsh dumpxml"])
    });
}
