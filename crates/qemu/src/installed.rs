//! The QEMU that a daemon has asked what it can do, told from another that was installed in its place since.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The program as it was.
#[derive(Clone, Debug)]
pub struct Installed {
    program: PathBuf,
    mark: Option<Mark>,
}

/// A file, told from any that may stand in its place.
type Mark = (u64, u64, u64, i64, i64);

fn mark(program: &Path) -> Option<Mark> {
    let file = fs::metadata(program).ok()?;
    Some((file.dev(), file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
}

impl Installed {
    /// The program as it is now. To be looked at before it is asked.
    pub fn now(program: &Path) -> Installed {
        Installed { program: program.to_owned(), mark: mark(program) }
    }

    /// The reason why nothing may be started in it any more, for people: what is known of it was
    /// another's. What to do about that depends on who knows it.
    pub fn obstacle(&self) -> Option<String> {
        let program = self.program.display();
        match mark(&self.program) {
            None => Some(format!("{program} is gone (install QEMU)")),
            now if now != self.mark => Some(format!("QEMU was upgraded ({program})")),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_replaced_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let [program, next] = ["qemu", "next"].map(|name| directory.path().join(name));
        fs::write(&program, "1").unwrap();
        let installed = Installed::now(&program);
        assert_eq!(installed.obstacle(), None);
        fs::write(&next, "1").unwrap();
        fs::rename(&next, &program).unwrap();
        assert!(installed.obstacle().unwrap().contains("was upgraded"));
        fs::remove_file(&program).unwrap();
        assert!(installed.obstacle().unwrap().contains("is gone"));
    }
}
