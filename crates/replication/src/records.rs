//! Records: what this host's images of each VM are (Remus 2.5, activation records).
//!
//! `STATE_DIR/VM/record.json` is replaced as a whole and synced with its directory before
//! [`Records::write`] returns (see [`reserved`]); what it means is in
//! `understudy_protocol::validity`. It also keeps the VM's definition as it is on this host, so that the VM can be started
//! again on these images when everything else is gone.
//!
//! A backup that takes over has no time for that: its record says `mirror`, and beside it
//! lies an [`Activation`], a sector made ready before, which takes one write to the
//! disk; a second one is there to find out, again and again, whether that could be done. It counts as if the
//! record said `active`, if it is of the same session.

mod reserved;

use crate::membership::GroupMembers;
use crate::sessions::{SessionName, Sessions};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_protocol::Generation;
use understudy_protocol::validity::{ImageRecord, ImageRole};
use understudy_protocol::{DiskIndex, GroupName, HostName, VmName};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::DiskDefinition;
use understudy_report::ProtectRequest;
use understudy_threads::Common;

/// Of a VM, in its directory.
pub const FILE: &str = "record.json";
const ACTIVATION: &str = "activation";
/// The bytes that are written to the device as a whole, or not at all.
const SECTOR_BYTES: usize = 512;

/// The record of what this host's images of a VM are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Record of the images.
    pub image: ImageRecord,
    /// The other host of the last protection.
    pub peer: Option<HostName>,
    /// The sessions since whose first synchronisation every change of the images is known;
    /// see [`crate::resync`].
    #[serde(default)]
    pub sessions: Sessions,
    /// The session whose mirror the images are, which its activation must be of; it stays while the images are no base
    /// for a resynchronisation. None of the version before, which has it in `sessions` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror_of: Option<String>,
    /// Whether it is in lockstep, was when it was lost, or was about to turn to it: the mirror may have
    /// writes that this host's guest began and this host did not carry out.
    #[serde(default)]
    pub in_lockstep: bool,
    /// Whether it is to run: neither its operator nor its guest has ended it.
    #[serde(default = "wanted")]
    pub wanted: bool,
    /// Request by which it was to be protected when it ran here last.
    #[serde(default)]
    pub wish: Option<ProtectRequest>,
    /// The VMs that it was to be protected with.
    #[serde(default)]
    pub group: Option<GroupMembers>,
    /// A restore of which this host does not have all yet, or that may still be taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restoring: Option<Restoring>,
    /// Its operator has named these images in the place of others, and the guest has not run on them yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<InsteadOf>,
    /// The VM as it is on this host; its disks are the images.
    pub definition: VmDefinition,
}

/// A restore that may still come to nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Restoring {
    /// Its name.
    pub id: String,
    /// All members run, and stay: nothing but this VM's own end can make it come to nothing.
    pub settled: bool,
    /// Life of its group, of which it is decided at the arbiter whether its members stay; none of an older release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<Life>,
    /// Record that counts again if it does; none if this host had no images of the VM.
    pub former: Option<Box<Record>>,
}

/// Life of a group that begins with a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// The group.
    pub group: GroupName,
    /// The number of this life.
    pub incarnation: u32,
}

/// Record that counts again if the guest does not come to run on the images that were named instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InsteadOf {
    /// It; none if this host had no images of the VM.
    pub former: Option<Box<Record>>,
}

fn wanted() -> bool {
    true
}

impl Record {
    /// The images, in the order of the VM's disks.
    pub fn images(&self) -> Vec<PathBuf> {
        self.definition.disks.iter().map(|disk| disk.path.clone()).collect()
    }

    /// Whether the images are the mirror of that session.
    fn is_mirror_of(&self, session: &str) -> bool {
        match &self.mirror_of {
            Some(own) => own == session,
            None => self.sessions[..] == [session],
        }
    }

    /// Whether it is of the restore of that name, which may still come to nothing.
    pub fn is_of_restore(&self, id: &str) -> bool {
        self.restoring.as_ref().is_some_and(|it| it.id == id)
    }

    /// The record that counts once a restore that has not ended comes to nothing.
    pub fn before_restore(self) -> Option<Record> {
        match self.restoring {
            Some(restoring) => restoring.former.map(|former| *former),
            None => Some(self),
        }
    }

    /// The record that counts unless the guest runs on images that were named instead.
    pub fn before_insistence(self) -> Option<Record> {
        match self.instead_of {
            Some(instead) => instead.former.map(|former| *former),
            None => Some(self),
        }
    }
}

/// The records of one host.
#[derive(Clone, Debug)]
pub struct Records {
    state_dir: PathBuf,
    host: HostName,
    /// Lock, held while a record is changed.
    changing: Arc<Common<()>>,
}

impl Records {
    /// The records of `host`, below its state directory.
    pub fn new(state_dir: &Path, host: &HostName) -> Records {
        Records { state_dir: state_dir.to_owned(), host: host.to_owned(), changing: Arc::default() }
    }

    /// The record of a VM, if this host ever had images of it. An unreadable record is an
    /// error, never taken for none.
    pub fn read(&self, vm: &VmName) -> io::Result<Option<Record>> {
        let Some(mut record) = self.read_file(vm)? else { return Ok(None) };
        if record.image.role == ImageRole::Mirror {
            if let Some(activated) = Activation::read(&self.path(vm).with_file_name(ACTIVATION))? {
                if record.is_mirror_of(&activated.session) {
                    record.image.role = ImageRole::Active;
                    record.image.generation = activated.generation;
                }
            }
        }
        Ok(Some(record))
    }

    /// Makes an activation of a VM's mirror ready, whose record is of this session.
    pub fn prepare_activation(&self, vm: &VmName, session: &SessionName) -> io::Result<Activation> {
        let path = self.path(vm).with_file_name(ACTIVATION);
        Activation::prepare(&path, session).map_err(|error| explain("prepare", &path, error))
    }

    fn read_file(&self, vm: &VmName) -> io::Result<Option<Record>> {
        let path = self.path(vm);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(explain("read", &path, error)),
        };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| explain("read", &path, error.into()))
    }

    /// A record of this host's, to be written.
    pub fn of(&self, role: ImageRole, generation: Generation, definition: &VmDefinition) -> Record {
        let image = ImageRecord { host: self.host.clone(), role, generation, claimed_from: None };
        Record {
            image,
            peer: None,
            sessions: Sessions::default(),
            mirror_of: None,
            in_lockstep: false,
            wanted: true,
            wish: None,
            group: None,
            restoring: None,
            instead_of: None,
            definition: definition.clone(),
        }
    }

    /// Notes what this host's images of a VM are from now on; on return it is on stable
    /// storage.
    pub fn write(&self, record: &Record) -> io::Result<()> {
        let _changing = self.changing.lock();
        self.replace(record)
    }

    /// Changes the record that is there, if one is.
    pub fn change(&self, vm: &VmName, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        self.try_change(vm, |record| {
            change(record);
            Ok(())
        })
    }

    /// The same of a change that may fail: then the record stays as it was.
    fn try_change(
        &self,
        vm: &VmName,
        change: impl FnOnce(&mut Record) -> io::Result<()>,
    ) -> io::Result<()> {
        let _changing = self.changing.lock();
        let Some(mut record) = self.read(vm)? else { return Ok(()) };
        change(&mut record)?;
        self.replace(&record)
    }

    /// Notes that this host's images become a mirror of that generation's, if there is a record of them: they are not
    /// what it said, and nobody knows yet what they will be.
    pub fn note_syncing(&self, vm: &VmName, generation: Generation) -> io::Result<()> {
        self.change(vm, |record| {
            record.image.role = ImageRole::Syncing;
            record.image.generation = generation;
            record.sessions.clear();
        })
    }

    /// Notes the medium that a drive has from now on, if there is a record. An error if the VM on
    /// record has no such drive.
    pub fn note_medium(
        &self,
        vm: &VmName,
        drive: DiskIndex,
        now: DiskDefinition,
    ) -> io::Result<()> {
        self.try_change(vm, |record| {
            let noted = record.definition.disks.get_mut(usize::from(drive.0));
            let lacking = || io::Error::other(format!("{vm} has no disk{drive} on record"));
            *noted.ok_or_else(lacking)? = now;
            Ok(())
        })
    }

    /// Notes that this host, which had won the VM and could not start it, has given it back: a
    /// mirror that no record was written for stays one, and on any other the guest may have run for
    /// a moment, unseen.
    pub fn note_returned(&self, vm: &VmName) -> io::Result<()> {
        self.change(vm, |record| {
            if record.image.role == ImageRole::Active {
                record.image.role = ImageRole::Cut;
            }
        })
    }

    /// The restore of that name comes to nothing: on record is what was before it. Returns what was
    /// until now; none if no such restore is on record.
    pub fn undo_restore(&self, vm: &VmName, id: &str) -> io::Result<Option<Record>> {
        let _changing = self.changing.lock();
        let Some(record) = self.read(vm)?.filter(|it| it.is_of_restore(id)) else {
            return Ok(None);
        };
        self.put_back(vm, record.clone().before_restore())?;
        Ok(Some(record))
    }

    /// The guest has not come to run on images that its operator named: on record is what was before.
    /// Returns whether there are such.
    pub fn undo_insistence(&self, vm: &VmName) -> io::Result<bool> {
        let _changing = self.changing.lock();
        let Some(record) = self.read(vm)?.filter(|it| it.instead_of.is_some()) else {
            return Ok(false);
        };
        self.put_back(vm, record.before_insistence())?;
        Ok(true)
    }

    /// Finds out whether an activation of a VM's mirror that was made ready could be written. Nothing is
    /// allocated for that, so that it waits for nobody else's writes.
    ///
    /// # Errors
    /// Why it could not.
    pub fn prove_activation(&self, vm: &VmName) -> io::Result<()> {
        let path = self.path(vm).with_file_name(ACTIVATION);
        Activation::prove(&path).map_err(|error| explain("write", &path, error))
    }

    /// Forgets what this host's images of a VM are.
    pub fn forget(&self, vm: &VmName) -> io::Result<()> {
        let _changing = self.changing.lock();
        self.remove(vm)
    }

    /// On record is what was before; nothing if that is none.
    fn put_back(&self, vm: &VmName, former: Option<Record>) -> io::Result<()> {
        match former {
            Some(former) => self.replace(&former),
            None => self.remove(vm),
        }
    }

    fn remove(&self, vm: &VmName) -> io::Result<()> {
        let path = self.path(vm);
        fs::remove_file(&path)
            .and_then(|()| File::open(parent(&path))?.sync_all())
            .map_err(|error| explain("remove", &path, error))
    }

    fn replace(&self, record: &Record) -> io::Result<()> {
        let path = self.path(&record.definition.name);
        reserved::replace(&path, &serde_json::to_vec_pretty(record)?)
            .map_err(|error| explain("write", &path, error))
    }

    /// All records that can be read; in the log, those that cannot.
    pub fn all(&self) -> Vec<Record> {
        let entries = fs::read_dir(&self.state_dir).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.path().is_dir());
        let names = directories.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let read = |name: VmName| match self.read(&name) {
            Ok(record) => record,
            Err(error) => {
                tracing::error!(vm = %name, "{error}");
                None
            }
        };
        names.filter_map(read).collect()
    }

    /// Whether this host has no record, readable or not.
    pub fn are_none(&self) -> io::Result<bool> {
        for entry in fs::read_dir(&self.state_dir)? {
            if entry?.path().join(FILE).exists() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn path(&self, vm: &VmName) -> PathBuf {
        vm.below(&self.state_dir).join(FILE)
    }
}

/// The place for the record that the guest runs on a mirror.
#[derive(Debug)]
pub struct Activation {
    file: File,
    session: SessionName,
}

// With a generation of 20 digits, and the names of both.
const _: () = assert!(SessionName::MOST_BYTES + 64 <= SECTOR_BYTES);

#[derive(Serialize, Deserialize)]
struct Activated {
    session: String,
    generation: Generation,
}

impl Activation {
    fn prepare(path: &Path, session: &SessionName) -> io::Result<Activation> {
        let file = File::create(path)?;
        // Written, not left as a hole: later, nothing but a sector has to be synced.
        file.write_all_at(&[0; 2 * SECTOR_BYTES], 0)?;
        file.sync_all()?;
        File::open(parent(path))?.sync_all()?;
        Ok(Activation { file, session: session.to_owned() })
    }

    /// Writes the sector behind the record once more, if there is a file: what is in the first one stays,
    /// whoever writes that meanwhile.
    fn prove(path: &Path) -> io::Result<()> {
        let file = match File::options().write(true).open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        file.write_all_at(&[0; SECTOR_BYTES], SECTOR_BYTES as u64)?;
        file.sync_data()
    }

    /// The guest runs on the mirror at `generation` from now on; on return that is on
    /// stable storage.
    pub fn write(&self, generation: Generation) -> io::Result<()> {
        let activated = Activated { session: self.session.to_string(), generation };
        let mut sector = serde_json::to_vec(&activated)?;
        sector.push(b'\n');
        sector.resize(SECTOR_BYTES, 0);
        self.file.write_all_at(&sector, 0)?;
        self.file.sync_data()
    }

    fn read(path: &Path) -> io::Result<Option<Activated>> {
        let sector = match fs::read(path) {
            Ok(sector) => sector,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(explain("read", path, error)),
        };
        let Some(end) = sector.iter().position(|&byte| byte == b'\n') else { return Ok(None) };
        serde_json::from_slice(&sector[..end])
            .map(Some)
            .map_err(|error| explain("read", path, error.into()))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().expect("the name was joined to a directory")
}

fn explain(action: &str, path: &Path, error: io::Error) -> io::Error {
    let words = format!("cannot {action} the record {}: {error}", path.display());
    io::Error::new(error.kind(), words)
}

#[cfg(test)]
#[path = "records_tests.rs"]
mod tests;
