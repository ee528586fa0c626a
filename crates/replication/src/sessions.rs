//! The sessions that a host knows of its images: see [`crate::resync`].

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::ops::Deref;
use understudy_protocol::{HostName, VmName};

/// The first sessions, which are kept. Once all of a session is on the other host, it is the only one: what follows is attempts.
const FIRST: usize = 16;
/// The last sessions, which are kept: one attempt among them may have come so far that the other host has noted it, too.
const LAST: usize = 16;

/// Names a session: no longer than the sector has room for that a take-over writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionName(String);

impl SessionName {
    /// More than the names of a host and a VM have, and a UUID.
    pub const MOST_BYTES: usize = 160;

    /// One that no session ever had.
    pub fn fresh(host: &HostName, vm: &VmName) -> io::Result<SessionName> {
        let unique = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        SessionName::try_from(format!("{host}/{vm}/{}", unique.trim())).map_err(io::Error::other)
    }
}

impl TryFrom<String> for SessionName {
    type Error = String;

    fn try_from(text: String) -> Result<SessionName, String> {
        // None that JSON writes longer than it is.
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\');
        match (1..=Self::MOST_BYTES).contains(&text.len()) && text.bytes().all(is_plain) {
            true => Ok(SessionName(text)),
            false => {
                Err(format!("a session's name has 1 to {} plain characters", Self::MOST_BYTES))
            }
        }
    }
}

impl From<SessionName> for String {
    fn from(name: SessionName) -> String {
        name.0
    }
}

impl Deref for SessionName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// The sessions since whose first synchronisation every change of the images is known, oldest first: as many as fit into an offer,
/// however many attempts come to nothing. By one that is left out nothing is found to be the same, and all is copied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<String>")]
pub struct Sessions(Vec<String>);

impl Sessions {
    /// The one since which all is known.
    pub fn since(session: String) -> Sessions {
        Sessions(vec![session])
    }

    /// Notes a session that begins.
    pub fn note(&mut self, session: String) {
        self.0.push(session);
        self.shorten();
    }

    /// Forgets all: nothing is known of the images.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn shorten(&mut self) {
        if self.0.len() > FIRST + LAST {
            self.0.drain(FIRST..self.0.len() - LAST);
        }
    }
}

/// A release before noted all.
impl From<Vec<String>> for Sessions {
    fn from(sessions: Vec<String>) -> Sessions {
        let mut sessions = Sessions(sessions);
        sessions.shorten();
        sessions
    }
}

impl Deref for Sessions {
    type Target = [String];

    fn deref(&self) -> &[String] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    #[test]
    fn a_fresh_name_is_one_whoever_it_is_of() {
        let host = HostName::try_from("h".repeat(63)).unwrap();
        let name = SessionName::fresh(&host, &literal("db")).unwrap();
        assert!(name.starts_with("hhh") && name.contains("/db/"), "{name:?}");
        for wrong in ["", "a b", "a\"b", "a\\b", "ä", "a\n", &"x".repeat(161)] {
            assert!(SessionName::try_from(wrong.to_owned()).is_err(), "{wrong:?}");
        }
    }

    /// Each attempt at a first copy left one for good, and in the end no offer fitted into a message.
    #[test]
    fn attempts_that_come_to_nothing_leave_a_few_sessions() {
        let mut sessions = Sessions::since("joined".to_owned());
        let all: Vec<String> = (0..1_000).map(|attempt| attempt.to_string()).collect();
        all.iter().for_each(|attempt| sessions.note(attempt.clone()));
        assert_eq!(sessions.len(), FIRST + LAST);
        assert!(sessions[0] == "joined" && sessions[1..FIRST] == all[..FIRST - 1]);
        assert_eq!(sessions[FIRST..], all[1_000 - LAST..]);
        let noted = serde_json::to_string(&[&["joined".to_owned()][..], &all].concat()).unwrap();
        assert_eq!(serde_json::from_str::<Sessions>(&noted).unwrap(), sessions);
        assert_eq!(
            serde_json::to_value(&sessions).unwrap()[0],
            "joined",
            "a list of names, as ever"
        );
    }
}
