//! Offers: other hosts want this one to be the backup of a VM.

use crate::arrivals::Arrival;
use crate::containment::of_vm;
use crate::host::Host;
use crate::standby;
use anyhow::bail;
use std::sync::Arc;
use understudy_link::link::Link;
use understudy_protocol::wire::Kind;
use understudy_qemu::CpuNeeds;
use understudy_qemu::command::BootFiles;
use understudy_qemu::definition::ForeignDefinition;
use understudy_replication::handshake::{FileOffer, FileRole, Hello, MOST_PATHS, Offer, Welcome};
use understudy_replication::resync::{self, Groundwork};
use understudy_report::Mode;
use understudy_report::error::{ErrorKind, HostError};
use understudy_threads::within;

/// A kernel, an initial RAM disk or the beginning of a disk: far more than any has.
const MOST_FILE_BYTES: u64 = 1 << 30;

/// Examines an offer, answers it, and becomes the VM's backup.
pub(crate) fn take(
    host: &Arc<Host>,
    link: Link,
    hello: &Hello,
    offer: &Offer,
) -> anyhow::Result<()> {
    // The primary may know that its last session here has ended before the keeper of it has.
    host.await_last_keeper(&offer.definition.name);
    // An arbiter that does not answer may take its time: nobody else waits for it.
    let proven = host.check_arbiter(&hello.host, offer);
    let expected = {
        let _adding = host.adding.lock();
        host.notice_end_of_keeper(&offer.definition.name);
        let group = offer.group.as_ref().and_then(|group| group.membership.group());
        let place = match &host.keeps {
            None => Ok(()),
            // Not for whoever does not own the VM.
            Some(_) => proven
                .clone()
                .and_then(|()| host.take_place(&offer.definition.name, group.as_ref())),
        };
        let expect = |()| Arrival::expect(&host.arrivals, &hello.host, &offer.definition);
        place.and_then(|()| examine(host, offer)).and(proven).map(expect)
    };
    // Its name is kept from here on: nobody waits for what the primary sends next.
    let arrival = match expected {
        Ok(arrival) => arrival,
        Err(error) => {
            link.refuse(&format!("host {} refuses: {error}", host.config.name));
            bail!("refused {} of {}: {error}", offer.definition.name, hello.host);
        }
    };
    if host.backs_up_in_keeper(hello, offer) {
        return host.back_up_in_keeper(arrival, offer, &link).inspect_err(|error| {
            link.refuse(&format!("host {} refuses: {error:#}", host.config.name));
        });
    }
    let directory = host.vm_directory(&offer.definition.name)?;
    let record = host.record(&offer.definition.name).map_err(|error| error.to_string());
    let groundwork = resync::examine(&host.config.name, record, offer, &directory);
    let patience_ms = Some(host.config.detection.peer.as_millis() as u64);
    let wire_version = hello.agreed();
    let mut welcome = Welcome { wire_version, patience_ms, ..Welcome::of(&host.config.name) };
    match &groundwork {
        Groundwork::Full(why) => {
            welcome.full_because = why.clone();
            match host.check_disk_room(offer, &directory) {
                Ok(note) => welcome.note = note,
                Err(error) => {
                    link.refuse(&format!("host {} refuses: {error}", host.config.name));
                    bail!("refused {} of {}: {error}", offer.definition.name, hello.host);
                }
            }
        }
        Groundwork::Resync(_, resync) => welcome.resync = Some(resync.clone()),
    }
    link.send_json(Kind::Welcome, &welcome)?;
    let scope = of_vm(host, &offer.definition.name);
    let stands_by = || standby::begin(host, link.clone(), hello, offer, groundwork);
    if let Err(error) = within(&scope, stands_by) {
        link.refuse(&format!("host {} cannot stand by: {error:#}", host.config.name));
        return Err(error);
    }
    Ok(())
}

/// Everything that speaks against the offer, before anything is changed.
fn examine(host: &Host, offer: &Offer) -> Result<(), HostError> {
    let refuse = |message: String| Err(HostError::new(ErrorKind::Invalid, message));
    let definition = &offer.definition;
    if host.is_going_down() {
        return refuse("it is shutting down".to_owned());
    }
    if host.arbiter.is_none() {
        return refuse("its configuration has no [arbiter]".to_owned());
    }
    if let Some(problem) = &host.kernel_problem {
        return refuse(problem.clone());
    }
    host.check_emulator(&offer.qemu, &offer.machine_type, definition.cpu.as_deref())?;
    let cpu = CpuNeeds::of(definition, offer.accelerator)
        .with_tsc(offer.tsc)
        .with_vendor(offer.vendor.clone());
    if let Err(error) = host.check_cpu_needs(&cpu) {
        return refuse(error.to_string());
    }
    let paths = offer.paths.len();
    if !(1..=MOST_PATHS).contains(&paths) {
        return refuse(format!("{paths} paths were offered; 1 to {MOST_PATHS} are possible"));
    }
    if usize::from(offer.path.0) >= paths {
        return refuse(format!("this is path {}; {paths} were offered", offer.path.0 + 1));
    }
    if offer.disk_bytes.len() != definition.disks.len() {
        return refuse("the offer does not name every disk's size".to_owned());
    }
    if let Err(problem) = check_files(&offer.files, definition) {
        return refuse(problem);
    }
    if let Some(problem) = definition.validate().first() {
        return refuse(format!("the offered VM's definition is wrong: {problem}"));
    }
    if offer.mode == Mode::Lockstep && offer.clock.is_none() {
        return refuse("the primary's QEMU does not record".to_owned());
    }
    if offer.mode == Mode::Lockstep {
        host.check_build(offer.qemu_build.as_deref())?;
    }
    if offer.clock.is_some() {
        host.check_lockstep(definition, offer.accelerator)?;
    }
    host.check_cluster(&definition.name, offer.cluster.as_ref())?;
    host.check_free(definition)?;
    host.check_older(offer)?;
    host.check_bridges(&definition.cards)?;
    host.check_memory(definition.memory.bytes())
}

/// Refuses files that do not fit the definition. They are written before anything else is known of
/// them, and must not fill the disk.
fn check_files(files: &[FileOffer], definition: &ForeignDefinition) -> Result<(), String> {
    let most = definition.disks.len() + 3;
    if files.len() > most {
        return Err(format!("{} files were offered; {most} are possible", files.len()));
    }
    if let Some(large) = files.iter().find(|file| file.bytes > MOST_FILE_BYTES) {
        let bytes = large.bytes;
        return Err(format!("a file of {bytes} bytes was offered; {MOST_FILE_BYTES} are possible"));
    }
    let of = |role| files.iter().find(|file| file.role == role);
    let again = |(at, file): (usize, &FileOffer)| files[..at].iter().any(|it| it.role == file.role);
    if files.iter().enumerate().any(again) {
        return Err("a file was offered twice".to_owned());
    }
    let boot = BootFiles {
        firmware: of(FileRole::Firmware),
        kernel: of(FileRole::Kernel),
        initrd: of(FileRole::Initrd),
    };
    definition.check_boot(&boot).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use understudy_protocol::DiskIndex;

    fn check(files: &[(FileRole, u64)], kernel: bool) -> Result<(), String> {
        let disk = json!({ "path": "/srv/db.img", "format": "raw" });
        let mut definition = json!({ "name": "db", "memory": "64M", "vcpus": 1, "disk": [disk] });
        if kernel {
            definition["kernel"] = json!("/etc/shadow");
        }
        let file = |&(role, bytes)| FileOffer { role, bytes };
        let files: Vec<FileOffer> = files.iter().map(file).collect();
        check_files(&files, &serde_json::from_value(definition).unwrap())
    }

    const HEAD: FileRole = FileRole::DiskHead(DiskIndex(0));

    /// A primary could announce a kernel that fills the backup's disk.
    #[test]
    fn files_that_would_fill_the_disk_are_refused() {
        assert_eq!(check(&[(FileRole::Kernel, 8 << 20), (HEAD, 64 << 10)], true), Ok(()));
        assert!(check(&[(HEAD, 1 << 40)], false).unwrap_err().contains("1099511627776 bytes"));
        assert!(check(&[(HEAD, 1); 5], false).unwrap_err().contains("5 files"));
        assert!(check(&[(HEAD, 1); 2], false).unwrap_err().contains("twice"));
    }

    /// The backup opened what a primary named and did not send: its own file of that name.
    #[test]
    fn files_are_those_of_the_definition() {
        assert_eq!(check(&[], false), Ok(()));
        assert!(check(&[], true).unwrap_err().contains("no file comes for it"));
        assert!(
            check(&[(FileRole::Kernel, 1)], false)
                .unwrap_err()
                .contains("which the definition does not have")
        );
    }
}
