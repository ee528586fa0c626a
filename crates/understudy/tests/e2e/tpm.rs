//! A guest's TPM is the same one on whichever host it begins again.

use crate::recover::lose;
use crate::replaced_keepers::{Dying, answered, await_protected_again, replace};
use crate::sick_disks::Failing;
use crate::stage::{Calm, LIMIT, await_degraded, options, play, protect_when_taken, refusal};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use toml::Table;
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, SceneOptions, wait_for};

/// An index that outlives a power-off, with an empty password: `TPM2_NV_DefineSpace`.
const DEFINE: &str = "8002 0000002d 0000012a 40000001 00000009 40000009 0000 00 0000 0000 \
                      000e 01500000 000b 02020002 0000 0008";
/// `TPM2_NV_ReadPublic` of that index.
const READ_PUBLIC: &str = "8001 0000000e 00000169 01500000";

/// Has the TPM carry out a command; the number that it answers with, 0 if it did.
fn tpm_says(shell: &mut GuestShell, command: &str) -> Result<String> {
    let hex: Vec<u8> = command.bytes().filter(u8::is_ascii_hexdigit).collect();
    let bytes = hex.chunks(2).map(|byte| format!("\\x{}", String::from_utf8_lossy(byte)));
    let command: String = bytes.collect();
    // The answer is the descriptor's that has sent the command.
    let line = format!(
        "printf '{command}' > /tmp/command; exec 3<>/dev/tpm0; cat /tmp/command >&3; \
         dd bs=4096 count=1 <&3 2>/dev/null | hexdump -v -e '1/1 \"%02x\"'; exec 3>&-"
    );
    let said = shell.run(&line)?.text;
    let code = said.trim().get(12..20).map(str::to_owned);
    code.with_context(|| format!("the TPM says {said:?}"))
}

/// The state that a host has of the guest's TPM.
fn state_of(scene: &Scene, host: &str, file: &str) -> Result<Vec<u8>> {
    let path = scene.host(host)?.directory().join("state").join(VM).join(file);
    fs::read(&path).with_context(|| path.display().to_string())
}

/// Protects the scene's guest with a TPM, from host a to host b.
fn protected_with_tpm(scene: &mut Scene) -> Result<GuestShell> {
    let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
    table.insert("tpm".into(), "crb".into());
    for (field, file) in [("kernel", "vmlinuz-devices"), ("initrd", "initrd-devices.gz")] {
        let path = scene.guest_files().join(file).display().to_string();
        table.insert(field.into(), path.into());
    }
    fs::write(scene.definition(), table.to_string())?;
    scene.protected_guest("a", "b")?;
    scene.shell()
}

/// Defines an index, and waits until host a's file has it.
fn define(scene: &Scene, shell: &mut GuestShell) -> Result<()> {
    let before = state_of(scene, "a", "tpm/tpm2-00.permall")?;
    let defined = tpm_says(shell, DEFINE)?;
    ensure!(defined == "00000000", "the TPM refuses: {defined}");
    wait_for("the TPM to write its state", LIMIT, || {
        Ok((state_of(scene, "a", "tpm/tpm2-00.permall")? != before).then_some(()))
    })
}

/// Host b does not know any more what its images lack: it gets others beside them.
fn forget_sessions(scene: &Scene) -> Result<()> {
    let path = scene.host("b")?.directory().join("state").join(VM).join("record.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&path)?)?;
    record["sessions"] = Value::Array(Vec::new());
    Ok(fs::write(&path, record.to_string())?)
}

/// The state of the new session's TPM was there at once: with a backup whose disk failed then the images before had it,
/// and a guest whose disk is locked with its own TPM was locked out.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn images_keep_their_tpm_until_others_have_their_place() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut shape = SceneOptions { booted: false, memory_mib: 256, ..options().calm() };
    shape.daemons.insert("b".to_owned(), failing.daemon());
    play(shape, |scene| {
        let mut shell = protected_with_tpm(scene)?;
        let mirror = |scene: &Scene| state_of(scene, "b", "tpm.mirror");
        let mirrored = wait_for("the backup's TPM", LIMIT, || Ok(mirror(scene).ok()))?;
        scene.host("a")?.call(["unprotect", VM])?;
        define(scene, &mut shell)?;
        forget_sessions(scene)?;
        failing.begin()?;
        // It may be over before the command has seen that it began.
        scene.host("a")?.cli(["protect", VM, "--to", "b"])?;
        let reason = await_degraded(scene, "a")?;
        // The proof that it could take over meets the disk, too, and may be the first.
        ensure!(reason.contains("cannot sync"), "{reason}");
        ensure!(mirror(scene)? == mirrored, "the former images have a new TPM");
        failing.end()?;
        protect_when_taken(scene, "a", "b")?;
        wait_for("the new images' TPM", LIMIT, || Ok((mirror(scene)? != mirrored).then_some(())))?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// The backup's TPM was in memory alone: after the loss of both hosts its mirror began with another one, and a
/// guest whose disk is locked with its own was locked out.
#[test]
fn a_guest_that_begins_on_its_mirror_has_its_tpm() {
    let shape = SceneOptions { booted: false, memory_mib: 256, ..options().calm() };
    play(shape, |scene| {
        let mut shell = protected_with_tpm(scene)?;
        ensure!(tpm_says(&mut shell, READ_PUBLIC)? != "00000000", "there is an index already");
        let defined = tpm_says(&mut shell, DEFINE)?;
        ensure!(defined == "00000000", "the TPM refuses: {defined}");
        wait_for("the backup's disk to have the TPM", LIMIT, || {
            let own = state_of(scene, "a", "tpm/tpm2-00.permall")?;
            // It is written when the first epoch is applied.
            let Ok(mirror) = state_of(scene, "b", "tpm.mirror") else { return Ok(None) };
            // Behind swtpm's header, which is another one for what it gives away.
            Ok(mirror.ends_with(&own[10..]).then_some(()))
        })?;
        lose(scene, &["a", "b"])?;
        scene.restart("a")?;
        scene.restart("b")?;
        let b = scene.host("b")?;
        let mirror = b.directory().join("state").join(VM).join("tpm.mirror");
        let aside = mirror.with_extension("aside");
        fs::rename(&mirror, &aside)?;
        let (_, words) = refusal(b, &["recover", VM, "--force"])?;
        ensure!(words.contains("another TPM") && words.contains("tpm.kept"), "{words}");
        fs::rename(&aside, &mirror)?;
        b.call(["recover", VM, "--force"])?;
        scene.await_guest()?;
        let found = tpm_says(&mut scene.shell()?, READ_PUBLIC)?;
        ensure!(found == "00000000", "it is another TPM: {found}");
        ensure!(!mirror.exists(), "what was mirrored would count before what the guest does now");
        b.call(["vm", "stop", VM, "--force"])?;
        // It is the host's own from then on.
        b.call(["recover", VM, "--force"])?;
        scene.await_guest()?;
        ensure!(tpm_says(&mut scene.shell()?, READ_PUBLIC)? == "00000000", "another TPM");
        b.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// A keeper's process alone had the TPM's: it was not replaced while the guest ran.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guests_tpm_goes_on_while_its_keeper_is_replaced_and_where_the_next_one_dies() {
    let (dying, options) = Dying::at("adopt").expect("a file");
    play(SceneOptions { booted: false, ..options }, |scene| {
        let mut shell = protected_with_tpm(scene)?;
        let defined = tpm_says(&mut shell, DEFINE)?;
        ensure!(defined == "00000000", "the TPM refuses: {defined}");
        let before = answered(scene)?;
        let output = scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(words.contains("the next one does not go on with the guest"), "{words}");
        dying.no_more()?;
        await_protected_again(scene, "a")?;
        ensure!(answered(scene)?.qemu == before.qemu, "another QEMU");
        replace(scene)?;
        await_protected_again(scene, "a")?;
        let found = tpm_says(&mut scene.shell()?, READ_PUBLIC)?;
        ensure!(found == "00000000", "it is another TPM: {found}");
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        let found = tpm_says(&mut scene.shell()?, READ_PUBLIC)?;
        ensure!(found == "00000000", "it is another TPM on the backup: {found}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}
