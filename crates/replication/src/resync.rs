//! Resynchronisation: when two hosts have images of one disk, only what may differ is
//! copied.
//!
//! Every disk of a VM that is, or was, protected has a [`ChangeMap`] on the host that runs
//! it. A session's name stands for the moment in which both hosts had the same: the map
//! tells every block in which this host's image may differ from that of the other host at
//! the end of a session's first synchronisation. So when a host finds a session in the
//! offer that its own record knows as well, the union of both hosts' maps is all there is
//! to copy. In any doubt all is copied, and the reason is told.

use crate::handshake::Offer;
use crate::records::{Record, Records};
use crate::sessions::Sessions;
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use understudy_disk::{
    ChangeMap, Disk, DiskError, FreshMirror, GRANULE_BYTES, ImageFormat, Mirror, changes_path,
    export_bytes,
};
use understudy_machine::Machine;
use understudy_protocol::DiskIndex;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{HostName, VmName};
use understudy_qemu::definition::{DiskDefinition, DiskFormat};

/// Runs of blocks that fit well into a message; with more, a full copy costs little more.
const MOST_RUNS: usize = 50_000;

/// The blocks that the backup's images lack, as it tells the primary.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Resync {
    /// The session that both hosts know.
    pub session: String,
    /// Blocks of each disk that changed on the backup's side.
    pub changed: Runs,
}

/// Runs of blocks of each disk, ascending, none of which has part of another: to go through them takes no longer than
/// to go through the disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ListedRuns", into = "ListedRuns")]
pub struct Runs(Vec<Vec<Range<u64>>>);

/// First block of each run, and the one after the last.
type ListedRuns = Vec<Vec<(u64, u64)>>;

impl TryFrom<ListedRuns> for Runs {
    type Error = &'static str;

    fn try_from(listed: ListedRuns) -> Result<Runs, &'static str> {
        if listed.iter().map(Vec::len).sum::<usize>() > MOST_RUNS {
            return Err("too much has changed");
        }
        let ascends = |runs: &Vec<(u64, u64)>| {
            let next =
                |last, &(start, end): &(u64, u64)| (last..end).contains(&start).then_some(end);
            runs.iter().try_fold(0, next).is_some()
        };
        if !listed.iter().all(ascends) {
            return Err("the runs of changed blocks are in no order");
        }
        let runs = |runs: Vec<(u64, u64)>| runs.into_iter().map(|(start, end)| start..end);
        Ok(Runs(listed.into_iter().map(|of_disk| runs(of_disk).collect()).collect()))
    }
}

impl From<Runs> for ListedRuns {
    fn from(Runs(runs): Runs) -> ListedRuns {
        let listed = |runs: Vec<Range<u64>>| runs.iter().map(|run| (run.start, run.end)).collect();
        runs.into_iter().map(listed).collect()
    }
}

/// The basis of the first synchronisation of the disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Basis {
    /// All data is copied, for this reason.
    Full(String),
    /// The blocks are copied that may have changed since this session began.
    Changes(String),
}

/// The same, as the backup prepares it.
pub enum Groundwork {
    /// The mirrors are new ones, to be filled.
    Full(String),
    /// The images that are there are brought up to date.
    Resync(Vec<Mirror>, Resync),
}

impl Groundwork {
    /// The session since which the images are brought up to date.
    pub fn session(&self) -> Option<&str> {
        match self {
            Groundwork::Full(_) => None,
            Groundwork::Resync(_, resync) => Some(&resync.session),
        }
    }
}

/// Notes the changes of a machine's disks from now on, if nobody does yet. Returns the
/// sessions since which they were noted.
pub fn track(machine: &Machine, records: &Records, directory: &Path) -> anyhow::Result<Sessions> {
    let vm = &machine.definition().name;
    if machine.disks().iter().all(|disk| disk.changes().is_some()) {
        return Ok(records.read(vm)?.map_or_else(Sessions::default, |record| record.sessions));
    }
    // First: no session may be believed of a map that begins now.
    records.change(vm, |record| record.sessions.clear())?;
    for (disk, map) in machine.disks().iter().zip(create(&machine.disks(), directory)?) {
        disk.set_changes(Some(map));
    }
    Ok(Sessions::default())
}

/// Creates new, empty maps for these disks, in place of former ones.
pub fn create(disks: &[Arc<Disk>], directory: &Path) -> anyhow::Result<Vec<Arc<ChangeMap>>> {
    let create = |disk: &Arc<Disk>| -> anyhow::Result<Arc<ChangeMap>> {
        let path = changes_path(directory, disk.index());
        let map = ChangeMap::create(&path, disk.export_bytes(), &disk.path())?;
        map.unseal().with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Arc::new(map))
    };
    disks.iter().map(create).collect()
}

/// Goes on noting the changes of a VM whose guest is about to go on, and has on record, before it does, since which
/// sessions all were noted: none if there is any doubt. `former` is what was on record of its images.
pub fn go_on(
    records: &Records,
    former: &Record,
    disks: &[Arc<Disk>],
    directory: &Path,
) -> io::Result<()> {
    let sessions = reopen(former, disks, directory);
    if sessions == former.sessions {
        return Ok(());
    }
    records.change(&former.definition.name, |record| record.sessions = sessions)
}

/// The sessions since which all changes were noted, which is gone on with.
#[must_use]
pub fn reopen(record: &Record, disks: &[Arc<Disk>], directory: &Path) -> Sessions {
    let paths: Vec<_> = disks.iter().map(|disk| disk.path()).collect();
    if record.sessions.is_empty() || paths != record.images() {
        return Sessions::default();
    }
    if record.in_lockstep {
        tracing::warn!(
            vm = %record.definition.name,
            "the next synchronisation will copy all: the VM was lost in lockstep, and its mirror \
             may have what was not written here"
        );
        return Sessions::default();
    }
    let unsealed = |maps: Vec<ChangeMap>| -> Result<Vec<ChangeMap>, String> {
        maps.iter().try_for_each(ChangeMap::unseal).map_err(|error| error.to_string())?;
        Ok(maps)
    };
    match open_maps(disks, directory).and_then(unsealed) {
        Ok(maps) => {
            for (disk, map) in disks.iter().zip(maps) {
                disk.set_changes(Some(Arc::new(map)));
            }
            record.sessions.clone()
        }
        Err(doubt) => {
            tracing::warn!(
                vm = %record.definition.name,
                "the next synchronisation will copy all: {doubt}"
            );
            Sessions::default()
        }
    }
}

/// Bytes of a machine's disks in which the other host's images may differ.
pub fn differing_bytes(machine: &Machine) -> u64 {
    let disks = machine.disks();
    disks.iter().filter_map(|disk| disk.changes()).map(|map| map.changed_bytes()).sum()
}

fn open_maps(disks: &[Arc<Disk>], directory: &Path) -> Result<Vec<ChangeMap>, String> {
    disks.iter().map(|disk| open_map(disk, directory, ChangeMap::open)).collect()
}

type OpenMap = fn(&Path, u64, &Path) -> io::Result<Result<ChangeMap, String>>;

fn open_map(disk: &Disk, directory: &Path, open: OpenMap) -> Result<ChangeMap, String> {
    let path = changes_path(directory, disk.index());
    open(&path, disk.export_bytes(), &disk.path())
        .unwrap_or_else(|error| Err(format!("cannot read {}: {error}", path.display())))
}

/// Examines on the backup, before anything is changed, whether its own images can be brought up to
/// date. `name` is this host's, `record` what it knows of them.
pub fn examine(
    name: &HostName,
    record: Result<Option<Record>, String>,
    offer: &Offer,
    directory: &Path,
) -> Groundwork {
    try_resync(name, record, offer, directory).unwrap_or_else(Groundwork::Full)
}

fn try_resync(
    name: &HostName,
    record: Result<Option<Record>, String>,
    offer: &Offer,
    directory: &Path,
) -> Result<Groundwork, String> {
    let record = record?.ok_or_else(|| format!("host {name} has no images of it"))?;
    let common = offer.sessions.iter().find(|session| record.sessions.contains(session));
    let session = common.ok_or_else(|| {
        format!("what changed since the images on host {name} were made is not known")
    })?;
    let (theirs, ours) = (&offer.definition.disks, &record.definition.disks);
    if ours.len() != offer.disk_bytes.len() || theirs.len() != ours.len() {
        return Err(format!("host {name} has images of other disks"));
    }
    let open = |(i, (ours, theirs)): (usize, (&DiskDefinition, &DiskDefinition))| {
        let (index, bytes) = (DiskIndex(i as u16), offer.disk_bytes[i].into());
        let opened = if ours.has_medium_of(theirs) {
            open_image(index, ours, bytes, directory).map(Mirror::Resynced)
        } else {
            FreshMirror::create(directory, index, bytes).map(Mirror::Fresh)
        };
        opened.map_err(|error| error.to_string())
    };
    let disks: Vec<Mirror> =
        ours.iter().zip(theirs).enumerate().map(open).collect::<Result<_, _>>()?;
    let changed = own_changes(&record, &disks, directory)?;
    let changed = Runs::try_from(changed).map_err(|error| format!("on host {name} {error}"))?;
    Ok(Groundwork::Resync(disks, Resync { session: session.clone(), changed }))
}

/// An image of this host's. A medium that an operator has put in is never written.
fn open_image(
    index: DiskIndex,
    disk: &DiskDefinition,
    bytes: u64,
    directory: &Path,
) -> Result<Arc<Disk>, DiskError> {
    let opened = if disk.cdrom && !disk.path.starts_with(directory) {
        Disk::open_medium(index, &disk.path)
    } else {
        check_size(disk, bytes)?;
        Disk::open(index, &disk.path, bytes)
    };
    opened.map(Arc::new)
}

/// A file grows; a device has the disk's size, or is not that disk's any more.
fn check_size(disk: &DiskDefinition, wanted: u64) -> Result<(), DiskError> {
    let is_device = fs::metadata(&disk.path).is_ok_and(|it| it.file_type().is_block_device());
    if !is_device || disk.format != DiskFormat::Raw {
        return Ok(());
    }
    match export_bytes(&disk.path, ImageFormat::Raw)? {
        bytes if bytes == wanted => Ok(()),
        bytes => Err(DiskError::OtherSize { path: disk.path.clone(), bytes, wanted }),
    }
}

/// The blocks that this host's guest wrote and that the other host may not have. A mirror's guest
/// never ran: what differs there is in the primary's map, unless somebody else has changed it since its
/// session has ended. One that is not whole is in no map of this host. Of a medium that this host does
/// not have it is all.
fn own_changes(
    record: &Record,
    mirrors: &[Mirror],
    directory: &Path,
) -> Result<ListedRuns, String> {
    let open: Option<OpenMap> = match record.image.role {
        ImageRole::Syncing => None,
        ImageRole::Mirror => Some(ChangeMap::open_of_mirror),
        ImageRole::Active | ImageRole::Stopped | ImageRole::Cut | ImageRole::Stale => {
            Some(ChangeMap::open)
        }
    };
    let changed = |mirror: &Mirror| match mirror {
        Mirror::Fresh(mirror) => {
            let all = (0, mirror.disk().export_bytes().div_ceil(GRANULE_BYTES));
            Ok(Some(all).filter(|(_, end)| *end > 0).into_iter().collect())
        }
        Mirror::Resynced(disk) => {
            let Some(open) = open else { return Ok(Vec::new()) };
            let map = open_map(disk, directory, open)
                .map_err(|doubt| format!("host {}: {doubt}", record.image.host))?;
            Ok(map.runs().iter().map(|run| (run.start, run.end)).collect())
        }
    };
    mirrors.iter().map(changed).collect()
}

/// Takes, on the primary, the backup's changes into its own maps.
pub fn merge(machine: &Machine, sessions: &[String], resync: &Resync) -> anyhow::Result<()> {
    ensure!(sessions.contains(&resync.session), "the backup answers to a session never offered");
    let Runs(changed) = &resync.changed;
    ensure!(changed.len() == machine.disks().len(), "the backup knows other disks");
    for (disk, runs) in machine.disks().iter().zip(changed) {
        let map = disk.changes().context("changes are tracked before an offer")?;
        map.merge(runs)
            .with_context(|| format!("the backup's changes of disk {}", disk.index()))?;
    }
    Ok(())
}

/// Notes, on the backup, that its primary has noted what changed here since this session: the copy can be taken up
/// again by it. Of no other session: another host that knows one has not heard of these changes.
pub fn note_merged(records: &Records, vm: &VmName, session: String) -> io::Result<()> {
    records.change(vm, |record| record.sessions = Sessions::since(session))
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{Generation, literal};
    use understudy_qemu::VmDefinition;

    /// A VM of host b, in a directory with its image and its record.
    struct Known {
        directory: tempfile::TempDir,
        records: Records,
        image: std::path::PathBuf,
    }

    impl Known {
        fn of(role: ImageRole) -> Known {
            let directory = tempfile::tempdir().unwrap();
            let (of_vm, image) =
                (directory.path().join("db"), directory.path().join("db/disk0.img"));
            fs::create_dir(&of_vm).unwrap();
            fs::write(&image, vec![1; 1 << 20]).unwrap();
            let text = format!(
                "name = 'db'\nmemory = '64M'\nvcpus = 1\n[[disk]]\npath = {image:?}\nformat = 'raw'"
            );
            let definition = VmDefinition::from_toml(&text, Path::new("/vm.toml")).unwrap();
            let records = Records::new(directory.path(), &literal("b"));
            let record = records.of(role, Generation(1), &definition);
            records
                .write(&Record { sessions: Sessions::since("s1".to_owned()), ..record })
                .unwrap();
            Known { directory, records, image }
        }

        fn record(&self) -> Record {
            self.records.read(&literal("db")).unwrap().unwrap()
        }

        fn open(&self) -> Vec<Arc<Disk>> {
            vec![Arc::new(Disk::open(DiskIndex(0), &self.image, 1 << 20).unwrap())]
        }

        fn of_vm(&self) -> std::path::PathBuf {
            self.directory.path().join("db")
        }
    }

    /// What was found in doubt was forgotten, and the next start believed a list that lacked what the guest had
    /// changed until then.
    #[test]
    fn that_changes_were_not_noted_is_on_record_before_the_guest_goes_on() {
        let known = Known::of(ImageRole::Active);
        let disks = known.open();
        create(&disks, &known.of_vm()).unwrap();
        go_on(&known.records, &known.record(), &disks, &known.of_vm()).unwrap();
        assert!(disks[0].changes().is_some());
        assert_eq!(known.record().sessions[..], ["s1"]);
        drop(disks);
        fs::remove_file(changes_path(&known.of_vm(), DiskIndex(0))).unwrap();
        let disks = known.open();
        go_on(&known.records, &known.record(), &disks, &known.of_vm()).unwrap();
        assert!(disks[0].changes().is_none());
        assert!(known.record().sessions.is_empty());
    }

    /// The copy was interrupted, and all sessions that this host knew were on record again: a third host that knew another
    /// one, and had never heard what changed here, took the images for a base.
    #[test]
    fn after_a_merge_only_its_session_counts() {
        let known = Known::of(ImageRole::Active);
        let record = known.record();
        let sessions = ["s1", "s2"].map(str::to_owned).to_vec().into();
        known.records.write(&Record { sessions, ..record }).unwrap();
        let resync = Resync { session: "s2".to_owned(), changed: Runs::default() };
        let groundwork = Groundwork::Resync(Vec::new(), resync);
        let session = groundwork.session().unwrap().to_owned();
        note_merged(&known.records, &literal("db"), session).unwrap();
        assert_eq!(known.record().sessions[..], ["s2"]);
        assert_eq!(Groundwork::Full("why".to_owned()).session(), None);
    }

    /// Each was gone through while the guest's writes waited: for hours, if a backup listed the whole disk as often as a
    /// message has room for.
    #[test]
    fn no_block_is_listed_twice() {
        let read = |listed: &str| serde_json::from_str::<Runs>(listed);
        let listed = "[[[0,3],[3,4],[9,20]],[],[[2,5]]]";
        assert_eq!(serde_json::to_string(&read(listed).unwrap()).unwrap(), listed);
        for wrong in
            ["[[[0,9],[0,9]]]", "[[[0,9],[8,10]]]", "[[[5,6],[1,2]]]", "[[[3,3]]]", "[[[3,2]]]"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        let many = |runs: usize| {
            Runs::try_from(vec![(0..runs as u64).map(|n| (2 * n, 2 * n + 1)).collect()])
        };
        assert!(many(MOST_RUNS).is_ok());
        assert_eq!(many(MOST_RUNS + 1), Err("too much has changed"));
    }

    /// It was brought up to date by the primary's list alone, which knows nothing of that.
    #[test]
    fn a_mirror_that_somebody_has_changed_since_its_session_is_no_base_for_the_next() {
        let known = Known::of(ImageRole::Mirror);
        let disks = known.open();
        disks[0].set_changes(create(&disks, &known.of_vm()).unwrap().pop());
        let mirrors = || known.open().into_iter().map(Mirror::Resynced).collect::<Vec<_>>();
        let own = || own_changes(&known.record(), &mirrors(), &known.of_vm());
        drop(disks);
        assert_eq!(own(), Ok(vec![Vec::new()]), "its session has ended in order");
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&known.image, vec![2; 1 << 20]).unwrap();
        let why = own().unwrap_err();
        assert!(why.contains("host b") && why.contains("changed by other means"), "{why}");
        // Its daemon is killed in the next session: the list stays open.
        let disks = known.open();
        std::mem::forget(create(&disks, &known.of_vm()).unwrap());
        drop(disks);
        assert_eq!(own(), Ok(vec![Vec::new()]));
        fs::copy(&known.image, known.of_vm().join("other")).unwrap();
        fs::rename(known.of_vm().join("other"), &known.image).unwrap();
        let why = own().unwrap_err();
        assert!(why.contains("host b") && why.contains("another image"), "{why}");
    }
}
