//! A host dies, its daemon and its QEMUs at once, while a group is snapshotted or restored: the
//! command fails and says why, nothing half done is left, and the next one works.

use crate::cluster::{Bank, await_payments, bank_of, bank_options, name, with_cluster};
use crate::refusals::{log_of, says};
use crate::stage::{Calm, LIMIT, await_forgotten, daemon, play, refusal, refused, vms};
use anyhow::{Result, ensure};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Child;
use tempfile::TempDir;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};

/// A moment of a host's, at which the thread that gets there stands still.
pub struct Moment {
    file: PathBuf,
    _directory: TempDir,
}

impl Moment {
    pub fn new() -> Moment {
        let directory = tempfile::tempdir().expect("a directory for the test");
        Moment { file: directory.path().join("reached"), _directory: directory }
    }

    /// A fail point that is this moment, at a time (`1*off->`, say) or each time.
    pub fn action(&self, point: &str, time: &str) -> String {
        format!("{point}={time}return({})", self.file.display())
    }

    /// The host that gets there.
    fn host(&self, point: &str, time: &str) -> HostOptions {
        let environment = vec![("FAILPOINTS".to_owned(), self.action(point, time))];
        HostOptions { environment, ..with_cluster(daemon()) }
    }

    pub fn is_reached(&self) -> bool {
        self.file.exists()
    }

    pub fn await_reached(&self) -> Result<()> {
        wait_for("a host to get to its moment", LIMIT, || Ok(self.is_reached().then_some(())))
    }

    /// The thread goes on.
    pub fn end(&self) -> Result<()> {
        Ok(std::fs::remove_file(&self.file)?)
    }
}

/// A command about the cluster that is under way.
fn begin(scene: &Scene, host: &str, arguments: &[&str]) -> Result<Child> {
    let store = Bank::of(scene).store;
    scene.host(host)?.begin([arguments, &["--store", &store]].concat())
}

/// The words of a command that failed.
fn failed(command: Child) -> Result<String> {
    Ok(refused(&command.wait_with_output()?, "a command about the cluster")?.1)
}

const SNAPSHOT: [&str; 5] = ["cluster", "snapshot", "bank", "--trace", "0"];

/// Fails a host as in a power failure: the others hear nothing, not even that connections end.
fn power_fails(scene: &mut Scene, host: &str) -> Result<()> {
    scene.lab().cut(host)?;
    scene.host_mut(host)?.kill_everything().map(drop)
}

/// Brings a host back, which knows nothing of before, and runs nothing.
fn comes_back(scene: &mut Scene, host: &str, options: HostOptions) -> Result<()> {
    scene.lab().heal(host)?;
    scene.restart_with(host, options)?;
    await_forgotten(scene, host)
}

fn await_running(scene: &Scene, host: &str, vm: &str) -> Result<()> {
    wait_for(&format!("{vm} to run on host {host}"), LIMIT, || {
        let known = vms(scene.host(host)?)?.into_iter().find(|known| known["name"] == vm);
        Ok(known.filter(|known| known["role"] == "primary" && known["live"] == true).map(drop))
    })
}

/// Proves that the first snapshot is the only one.
fn prove_no_other(scene: &Scene, host: &str, first: u64) -> Result<()> {
    let listed = Bank::of(scene).json(host, &["cluster", "snapshots", "bank"])?;
    let only = listed.as_array().is_some_and(|all| all.len() == 1) && listed[0]["number"] == first;
    ensure!(only, "a partial snapshot: {listed}");
    Ok(())
}

/// Proves that the restored cluster can be snapshotted at once, and restored from that.
fn prove_next(scene: &Scene, first: u64) -> Result<()> {
    let bank = Bank::of(scene);
    bank.end()?;
    bank.restore("b", first, &[])?;
    bank.await_payments()?;
    bank.audit()?;
    let next = bank.snapshot("b")?;
    ensure!(next > first, "{next} after {first}");
    bank.end()?;
    bank.restore("a", next, &[])?;
    bank.await_payments()?;
    bank.audit()?;
    bank.end()
}

/// Its guest was paused and runs on, and nothing of it is stored yet.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_members_host_dies_in_a_snapshot() {
    let moment = Moment::new();
    let mut options = bank_options();
    options.daemons.insert("b".to_owned(), moment.host("snapshot-taken", "1*off->"));
    play(options, |scene| {
        let first = Bank::found(scene)?.snapshot("a")?;
        let taking = begin(scene, "a", &SNAPSHOT)?;
        moment.await_reached()?;
        power_fails(scene, "b")?;
        says(&failed(taking)?, &["bank1 on host b", "has not answered", "given up", "run on"])?;
        prove_no_other(scene, "a", first)?;
        await_payments(scene, &[bank_of(0), bank_of(2)])?;
        comes_back(scene, "b", with_cluster(daemon()))?;
        prove_next(scene, first)
    });
}

/// The host that was asked for the snapshot dies, with its own member: the others give it up by
/// themselves.
fn the_coordinators_host_dies(point: &str) {
    let moment = Moment::new();
    let mut options = bank_options();
    options.daemons.insert("b".to_owned(), moment.host(point, "1*off->"));
    play(options, |scene| {
        let first = Bank::found(scene)?.snapshot("b")?;
        let taking = begin(scene, "b", &SNAPSHOT)?;
        moment.await_reached()?;
        power_fails(scene, "b")?;
        failed(taking)?;
        prove_no_other(scene, "a", first)?;
        wait_for("both members on host a to give it up", LIMIT, || {
            let words = log_of(scene, "a")?;
            Ok((words.matches("snapshot 2 is given up").count() == 2).then_some(()))
        })?;
        await_payments(scene, &[bank_of(0), bank_of(2)])?;
        comes_back(scene, "b", with_cluster(daemon()))?;
        prove_no_other(scene, "b", first)?;
        prove_next(scene, first)
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_coordinators_host_dies_in_a_snapshot() {
    the_coordinators_host_dies("snapshot-taken");
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_coordinators_host_dies_before_a_snapshot_exists() {
    the_coordinators_host_dies("snapshot-publishing");
}

/// All of a member is stored when the snapshot is given up. Before, its machine was pinned then, with
/// what guards its memory: the VM could be neither protected nor started again.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_snapshot_that_is_given_up_as_a_member_is_saved_leaves_nothing_there() {
    let moment = Moment::new();
    let mut options = bank_options();
    options.daemons.insert("b".to_owned(), moment.host("snapshot-saved", "1*"));
    play(options.calm(), |scene| {
        Bank::found(scene)?;
        let own = name(1);
        let taking = begin(scene, "a", &SNAPSHOT)?;
        moment.await_reached()?;
        power_fails(scene, "a")?;
        failed(taking)?;
        wait_for("host b to give it up", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("snapshot 1 is given up").then_some(()))
        })?;
        moment.end()?;
        comes_back(scene, "a", with_cluster(daemon()))?;
        Bank::of(scene).protect(1)?;
        let host = scene.host("b")?;
        host.call(["vm", "stop", &own, "--force"])?;
        await_forgotten(scene, "a")?;
        host.call(["vm", "start", &own])?;
        await_running(scene, "b", &own)?;
        Bank::of(scene).end()
    });
}

/// A bank, one of whose hosts gets to this moment.
fn bank_struck(moment: &Moment, host: &str, at: &str) -> SceneOptions {
    let mut options = bank_options();
    options.daemons.insert(host.to_owned(), moment.host(at, ""));
    options
}

/// Lets host b die as its member, one of three, gets to its moment in a restore in this mode. What
/// runs on host a is stopped.
fn dies_in_a_restore(scene: &mut Scene, moment: &Moment, mode: &str) -> Result<String> {
    let bank = Bank::found(scene)?;
    let which = format!("bank@{}", bank.snapshot("a")?);
    bank.end()?;
    let restoring = begin(scene, "a", &["cluster", "restore", &which, "--mode", mode])?;
    moment.await_reached()?;
    if mode == "lazy" {
        await_running(scene, "a", &name(0))?;
        await_running(scene, "a", &name(2))?;
    }
    power_fails(scene, "b")?;
    let words = failed(restoring)?;
    says(&words, &["bank1 on host b", "has not answered", "no member runs"])?;
    await_forgotten(scene, "a")?;
    Ok(which)
}

/// The other members run already.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_members_host_dies_while_it_is_loaded() {
    let moment = Moment::new();
    play(bank_struck(&moment, "b", "restore-loaded"), |scene| {
        let which = dies_in_a_restore(scene, &moment, "lazy")?;
        // Host b has never won its member from the arbiter.
        prove_restored(scene, "a", &which, &[])?;
        comes_back(scene, "b", with_cluster(daemon()))?;
        Bank::of(scene).end()
    });
}

/// A member whose memory was there was protected while its group could still be given up; when that was, its backup had
/// what nobody was to have.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_member_is_not_protected_before_its_group_is_restored() {
    let moment = Moment::new();
    play(bank_struck(&moment, "b", "restore-loaded"), |scene| {
        let (bank, own) = (Bank::found(scene)?, name(0));
        let which = format!("bank@{}", bank.snapshot("a")?);
        bank.end()?;
        let restoring = begin(scene, "a", &["cluster", "restore", &which, "--mode", "lazy"])?;
        moment.await_reached()?;
        await_running(scene, "a", &own)?;
        wait_for("its memory to be there", LIMIT, || {
            Ok(scene.host("a")?.status(&own)?["filling"].is_null().then_some(()))
        })?;
        let words = refusal(scene.host("a")?, &["protect", &own, "--to", "b"])?.1;
        says(&words, &["is being restored with its group"])?;
        moment.end()?;
        let restored = restoring.wait_with_output()?;
        ensure!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        bank.protect(0)?;
        bank.end()
    });
}

/// Images of restores that a host has of a VM.
fn restored_images(scene: &Scene, host: &str, vm: &str) -> Result<BTreeSet<OsString>> {
    let directory = scene.host(host)?.directory().join("state").join(vm);
    let names = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<Result<Vec<_>>>()?;
    let is_restored = |name: &OsString| name.to_string_lossy().starts_with("restored-");
    Ok(names.into_iter().filter(is_restored).collect())
}

/// The first member that started once removed the images on which it had run since an earlier
/// restore, and nothing could be started on what was left. The same if the daemon dies then.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_restore_that_fails_leaves_the_images_of_the_one_before() {
    let moment = Moment::new();
    let mut options = SceneOptions { disks: 1, ..bank_options() };
    // The first restore is not its moment.
    options.daemons.insert("b".to_owned(), moment.host("restore-loaded", "1*off->"));
    play(options, |scene| {
        let (bank, own) = (Bank::found(scene)?, name(0));
        let which = format!("bank@{}", bank.snapshot("a")?);
        bank.end()?;
        bank.json("a", &["cluster", "restore", &which, "--wait"])?;
        bank.shell(0)?.run("echo later > /data/later; sync")?;
        bank.end()?;
        let former = restored_images(scene, "a", &own)?;
        ensure!(former.len() == 1, "{former:?}");
        let again = ["cluster", "restore", &which, "--mode", "lazy"];
        let restoring = begin(scene, "a", &again)?;
        moment.await_reached()?;
        await_running(scene, "a", &own)?;
        power_fails(scene, "b")?;
        says(&failed(restoring)?, &["bank1 on host b", "no member runs", "had before"])?;
        await_forgotten(scene, "a")?;
        prove_former(scene, &former)?;

        // Its own host dies, when nobody knows yet whether it stays.
        moment.end()?;
        comes_back(scene, "b", moment.host("restore-loaded", ""))?;
        let restoring = begin(scene, "a", &again)?;
        moment.await_reached()?;
        await_running(scene, "a", &own)?;
        let both = restored_images(scene, "a", &own)?;
        ensure!(both.is_superset(&former) && both != former, "{both:?}");
        power_fails(scene, "a")?;
        failed(restoring)?;
        moment.end()?;
        await_forgotten(scene, "b")?;
        comes_back(scene, "a", with_cluster(daemon()))?;
        prove_former(scene, &former)
    });
}

/// Host a's first member starts on these images, with all that it has written there, and ends.
fn prove_former(scene: &Scene, former: &BTreeSet<OsString>) -> Result<()> {
    let own = name(0);
    let left = restored_images(scene, "a", &own)?;
    ensure!(left == *former, "there is {left:?}, and was {former:?}");
    scene.host("a")?.call(["vm", "start", &own])?;
    let read = Bank::of(scene).shell(0)?.run("cat /data/later")?.text;
    ensure!(read.trim() == "later", "{read}");
    scene.host("a")?.call(["vm", "stop", &own, "--force"])?;
    await_forgotten(scene, "a")
}

/// The member runs, and the coordinator has not heard so.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_members_host_dies_when_it_has_started_it() {
    let moment = Moment::new();
    play(bank_struck(&moment, "b", "restore-started"), |scene| {
        let which = dies_in_a_restore(scene, &moment, "hot")?;
        prove_restored_by_force(scene, "a", &which, "bank1 may run on host b")?;
        comes_back(scene, "b", with_cluster(daemon()))?;
        Bank::of(scene).end()
    });
}

/// The host that was asked for the restore dies when its own members run, and the other host's
/// has not started. Then when only the other host's has. Both times nothing is left.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_coordinators_host_dies_between_the_starts() {
    let (theirs, own) = (Moment::new(), Moment::new());
    let mut options = bank_options();
    options.daemons.insert("b".to_owned(), theirs.host("restore-loaded", "1*"));
    play(options, |scene| {
        let bank = Bank::found(scene)?;
        let which = format!("bank@{}", bank.snapshot("a")?);
        bank.end()?;
        let lazily = ["cluster", "restore", &which, "--mode", "lazy"];
        let restoring = begin(scene, "a", &lazily)?;
        theirs.await_reached()?;
        await_running(scene, "a", &name(0))?;
        await_running(scene, "a", &name(2))?;
        power_fails(scene, "a")?;
        failed(restoring)?;
        theirs.end()?;
        // Nobody told it to.
        await_forgotten(scene, "b")?;
        comes_back(scene, "a", own.host("restore-loaded", ""))?;

        let restoring = begin(scene, "a", &lazily)?;
        own.await_reached()?;
        await_running(scene, "b", &name(1))?;
        power_fails(scene, "a")?;
        failed(restoring)?;
        // It runs, but not all did.
        await_forgotten(scene, "b")?;
        ensure!(log_of(scene, "b")?.contains("GivenUp"), "nobody asked the arbiter");
        prove_restored_by_force(scene, "b", &which, "may run on host a")?;
        comes_back(scene, "a", with_cluster(daemon()))?;
        Bank::of(scene).end()
    });
}

/// The host that was asked for the restore is cut off when all members run, and nobody but itself
/// was told that they stay. They do.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_coordinators_host_is_cut_off_when_all_are_to_stay() {
    let moment = Moment::new();
    play(bank_struck(&moment, "a", "restore-settled"), |scene| {
        let bank = Bank::found(scene)?;
        let which = format!("bank@{}", bank.snapshot("a")?);
        bank.end()?;
        let restoring = begin(scene, "a", &["cluster", "restore", &which])?;
        moment.await_reached()?;
        await_running(scene, "b", &name(1))?;
        scene.lab().cut("a")?;
        wait_for("host b to ask whether its member stays", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("bank: Settled").then_some(()))
        })?;
        scene.lab().heal("a")?;
        moment.end()?;
        let restored = restoring.wait_with_output()?;
        ensure!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        bank.await_payments()?;
        bank.audit()?;
        bank.end()
    });
}

/// The host on which it was decided that all stay dies before it has written that down, and before anybody was told: its own
/// members stay as the other host's does. They were what they had been before, without their group.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn members_stay_whose_host_dies_when_all_are_to_stay() {
    let moment = Moment::new();
    let mut options = SceneOptions { disks: 1, ..bank_options() };
    options.daemons.insert("a".to_owned(), moment.host("restore-settled", ""));
    play(options, |scene| {
        let bank = Bank::found(scene)?;
        let which = format!("bank@{}", bank.snapshot("a")?);
        bank.end()?;
        let restoring = begin(scene, "a", &["cluster", "restore", &which])?;
        moment.await_reached()?;
        for own in [0, 2].map(name) {
            wait_for("all of it to be there", LIMIT, || {
                Ok(scene.host("a")?.status(&own)?["filling"].is_null().then_some(()))
            })?;
        }
        power_fails(scene, "a")?;
        failed(restoring)?;
        wait_for("host b to ask whether its member stays", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("bank: Settled").then_some(()))
        })?;
        comes_back(scene, "a", with_cluster(daemon()))?;
        for own in [0, 2].map(name) {
            let images = restored_images(scene, "a", &own)?;
            ensure!(images.len() == 1, "{own} has {images:?}");
            scene.host("a")?.call(["vm", "start", &own])?;
            await_running(scene, "a", &own)?;
        }
        Bank::of(scene).end()
    });
}

/// A restore of all onto one host.
fn onto<'a>(host: &'a str, which: &'a str) -> [&'a str; 5] {
    ["cluster", "restore", which, "--onto", host]
}

fn refused_restore(scene: &Scene, host: &str, which: &str, more: &[&str]) -> Result<String> {
    let store = Bank::of(scene).store;
    let arguments = [&onto(host, which)[..], &["--store", &store], more].concat();
    Ok(refusal(scene.host(host)?, &arguments)?.1)
}

/// Proves that the operator has to say whether the other host runs something still, which nobody
/// knows.
fn prove_restored_by_force(scene: &Scene, host: &str, which: &str, why: &str) -> Result<()> {
    says(&refused_restore(scene, host, which, &[])?, &[why, "does not answer", "--force"])?;
    prove_restored(scene, host, which, &["--force"])
}

fn prove_restored(scene: &Scene, host: &str, which: &str, more: &[&str]) -> Result<()> {
    let bank = Bank::of(scene);
    bank.json(host, &[&onto(host, which)[..], more].concat())?;
    (0..3).try_for_each(|member| await_running(scene, host, &name(member)))?;
    bank.await_payments()?;
    bank.audit()
}
