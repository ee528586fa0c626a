//! The API's tokens: the lines of the files that `[api.tokens]` names, which nobody else may read.

use crate::config::{Access, ApiConfig};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use understudy_report::error::{ErrorKind, HostError};

/// A token of fewer characters could be guessed.
const SHORTEST: usize = 20;

/// A token, of which the digest is kept: how long a comparison takes says nothing about how much is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(blake3::Hash);

impl Token {
    fn of(text: &str) -> Token {
        Token(blake3::hash(text.trim().as_bytes()))
    }
}

impl ApiConfig {
    /// The most that a token entitles to now. A file that cannot be used takes nothing from the other roles.
    pub fn access_of(&self, token: &str) -> Option<Access> {
        let shown = Token::of(token);
        let has = |path: &Path| read(path).is_ok_and(|tokens| tokens.contains(&shown));
        self.tokens.iter().rev().find(|(_, path)| has(path)).map(|(access, _)| *access)
    }

    /// What is wrong with the files of tokens: nobody gets such a role by a token.
    pub fn problems_of_tokens(&self) -> Vec<String> {
        let wrong = |(access, path): (&Access, &PathBuf)| {
            let error = read(path).err()?;
            Some(format!("{error}; until then no token has the role {access}"))
        };
        self.tokens.iter().filter_map(wrong).collect()
    }
}

/// Reads a file of tokens, a line each.
fn read(path: &Path) -> Result<Vec<Token>, HostError> {
    let wrong = |words: String| {
        HostError::new(ErrorKind::Invalid, format!("[api.tokens]: {} {words}", path.display()))
    };
    let unread = |error: io::Error| {
        wrong(format!("cannot be read: {error}; make it, with a token of `openssl rand -hex 32`"))
    };
    let mut file = File::open(path).map_err(unread)?;
    let mode = file.metadata().map_err(unread)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let words = format!("holds secrets that others may read (mode {mode:04o}): `chmod 600` it");
        return Err(wrong(words));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(unread)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let token = |line: &str| (line.chars().count() >= SHORTEST).then(|| Token::of(line));
    lines.map(token).collect::<Option<_>>().ok_or_else(|| {
        wrong(format!(
            "has a token of fewer than {SHORTEST} characters: put one of `openssl rand -hex 32` \
             there, on a line of its own"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs::{self, Permissions};

    const TOKEN: &str = "0123456789abcdef0123";

    fn put(directory: &Path, access: Access, text: &str, mode: u32) {
        let path = directory.join(access.to_string());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }

    fn config(directory: &Path) -> ApiConfig {
        let file = |access: Access| (access, directory.join(access.to_string()));
        let tokens = [Access::Read, Access::Admin].map(file).into();
        ApiConfig { listen: Vec::new(), tokens, certificates: BTreeMap::new() }
    }

    /// One that the file of a higher role spoiled was void, and the daemon did not start.
    #[test]
    fn a_file_of_tokens_that_cannot_be_used_is_its_own_roles_alone() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let config = config(directory);
        put(directory, Access::Read, &format!("\n{TOKEN}\n\n"), 0o600);
        let said = config.problems_of_tokens();
        assert!(said.len() == 1 && said[0].contains("cannot be read"), "{said:?}");
        assert!(said[0].ends_with("no token has the role admin"), "{said:?}");
        assert_eq!(config.access_of(TOKEN), Some(Access::Read), "there is no file of admins");
        let other = "another-0123456789abcdef";
        for (text, mode, words) in [
            ("short\n".to_owned(), 0o600, "openssl rand"),
            (format!("{other}\nshort\n"), 0o600, "openssl rand"),
            (other.to_owned(), 0o640, "chmod 600"),
        ] {
            put(directory, Access::Admin, &text, mode);
            let said = config.problems_of_tokens();
            assert!(said.len() == 1 && said[0].contains(words), "{said:?}");
            assert_eq!(config.access_of(other), None);
            assert_eq!(config.access_of(TOKEN), Some(Access::Read));
        }
        put(directory, Access::Admin, other, 0o600);
        assert_eq!(config.access_of(other), Some(Access::Admin));
    }

    /// As somebody leaves a file who takes the last token out of it.
    #[test]
    fn an_empty_file_has_no_tokens_and_blank_lines_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let config = config(directory);
        put(directory, Access::Read, TOKEN, 0o600);
        for empty in ["", "\n", " \n\n"] {
            put(directory, Access::Admin, empty, 0o600);
            assert_eq!(config.problems_of_tokens(), Vec::<String>::new());
            assert_eq!(config.access_of(TOKEN), Some(Access::Read));
            assert_eq!(config.access_of(""), None);
        }
    }
}
