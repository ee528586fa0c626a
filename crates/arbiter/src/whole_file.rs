//! Files that are replaced whole.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Puts a file with this text and these rights at a path. Whoever reads it meanwhile, or after a
/// power failure, finds the old or the new one, whole.
pub fn replace(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    // An attempt that failed may have left it with other rights.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_with_its_rights_and_nothing_is_left_beside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.key");
        fs::write(directory.path().join("host.key.new"), "of an attempt that failed").unwrap();
        for text in ["one", "two"] {
            replace(&path, text, 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
