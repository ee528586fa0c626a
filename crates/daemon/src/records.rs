//! Records: what this host's images of each VM are (Remus 2.5, activation records).
//!
//! `STATE_DIR/VM/record.json` is replaced as a whole and synced with its directory before
//! [`Records::write`] returns; what it means is in `understudy_protocol::validity`. It
//! also keeps the VM's definition as it is on this host, so that the VM can be started
//! again on these images when everything else is gone.

use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use understudy_protocol::Generation;
use understudy_protocol::validity::{ImageRecord, ImageRole};
use understudy_qemu::VmDefinition;

const FILE: &str = "record.json";

/// What this host's images of a VM are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What they are.
    pub image: ImageRecord,
    /// The other host of the last protection.
    pub peer: Option<String>,
    /// The VM as it is on this host; its disks are the images.
    pub definition: VmDefinition,
}

impl Record {
    /// The images, in the order of the VM's disks.
    pub fn images(&self) -> Vec<PathBuf> {
        self.definition.disks.iter().map(|disk| disk.path.clone()).collect()
    }
}

/// The records of one host.
#[derive(Clone, Debug)]
pub struct Records {
    state_dir: PathBuf,
    host: String,
}

impl Records {
    /// The records of `host`, below its state directory.
    pub fn new(state_dir: &Path, host: &str) -> Records {
        Records { state_dir: state_dir.to_owned(), host: host.to_owned() }
    }

    /// The record of a VM, if this host ever had images of it. An unreadable record is an
    /// error, never taken for none.
    pub fn read(&self, vm: &str) -> io::Result<Option<Record>> {
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

    /// Notes what this host's images of a VM are from now on; on return it is on stable
    /// storage.
    pub fn write(
        &self,
        role: ImageRole,
        generation: Generation,
        peer: Option<String>,
        definition: &VmDefinition,
    ) -> io::Result<()> {
        let image = ImageRecord { host: self.host.clone(), role, generation };
        let record = Record { image, peer, definition: definition.clone() };
        let path = self.path(&definition.name);
        replace(&path, &serde_json::to_vec_pretty(&record)?)
            .map_err(|error| explain("write", &path, error))
    }

    /// Changes role and generation of the record that is there.
    pub fn change(&self, vm: &str, role: ImageRole, generation: Generation) -> io::Result<()> {
        let Some(record) = self.read(vm)? else { return Ok(()) };
        self.write(role, generation, record.peer, &record.definition)
    }

    /// All records that can be read; in the log, those that cannot.
    pub fn all(&self) -> Vec<Record> {
        let entries = fs::read_dir(&self.state_dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let read = |name: String| match self.read(&name) {
            Ok(record) => record,
            Err(error) => {
                tracing::error!(vm = name, "{error}");
                None
            }
        };
        names.filter_map(read).collect()
    }

    fn path(&self, vm: &str) -> PathBuf {
        self.state_dir.join(vm).join(FILE)
    }
}

fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let finished = path.with_extension("json.new");
    let mut file = File::create(&finished)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&finished, path)?;
    let directory = path.parent().expect("the name was joined to a directory");
    File::open(directory)?.sync_all()
}

fn explain(action: &str, path: &Path, error: io::Error) -> io::Error {
    let words = format!("cannot {action} the record {}: {error}", path.display());
    io::Error::new(error.kind(), words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition() -> VmDefinition {
        let text =
            "name = 'db'\nmemory = '64M'\nvcpus = 1\n[[disk]]\npath = '/dev/zero'\nformat = 'raw'";
        VmDefinition::from_toml(text, Path::new("/vm.toml")).unwrap()
    }

    #[test]
    fn a_record_comes_back_as_it_was_written_and_changes() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::new(directory.path(), "a");
        assert_eq!(records.read("db").unwrap(), None);
        fs::create_dir(directory.path().join("db")).unwrap();
        let peer = Some("b".to_owned());
        records.write(ImageRole::Mirror, Generation(1), peer.clone(), &definition()).unwrap();
        records.change("db", ImageRole::Active, Generation(2)).unwrap();
        let record = records.read("db").unwrap().unwrap();
        assert_eq!(record.image.role, ImageRole::Active);
        assert_eq!(record.image.generation, Generation(2));
        assert_eq!((record.peer, record.definition), (peer, definition()));
        let left = fs::read_dir(directory.path().join("db")).unwrap().count();
        assert_eq!(left, 1, "nothing but the record");
        assert_eq!(records.all().len(), 1);
    }

    #[test]
    fn a_damaged_record_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::new(directory.path(), "a");
        fs::create_dir(directory.path().join("db")).unwrap();
        fs::write(directory.path().join("db/record.json"), b"{").unwrap();
        let words = records.read("db").unwrap_err().to_string();
        assert!(words.contains("db/record.json"), "{words}");
    }
}
