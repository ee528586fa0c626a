//! A configuration's text: where each error stands, and the checks that fields share.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;
use understudy_protocol::NameError;
use understudy_replication::handshake::MOST_PATHS;
use understudy_report::error::{ErrorKind, HostError};

/// Words of the TOML reader about each field that must be there, and an example.
const EXAMPLES: [(&str, &str); 3] = [
    ("missing field `name`", "name = \"a\""),
    ("missing field `listen`", "listen = \"10.0.0.1:7700\""),
    ("missing field `kind`", "kind = \"file\""),
];

/// The text under check; places every error in it.
pub struct Source<'a> {
    text: &'a str,
    file: &'a Path,
}

impl<'a> Source<'a> {
    pub fn new(text: &'a str, file: &'a Path) -> Source<'a> {
        Source { text, file }
    }

    /// File that the text is from.
    pub fn file(&self) -> &Path {
        self.file
    }

    pub fn wrong(&self, field: &str, span: Range<usize>, message: &str) -> HostError {
        let line = self.line_of(span.start);
        let message = format!("{}:{line}: {field}: {message}", self.file.display());
        HostError::new(ErrorKind::Invalid, message)
    }

    /// An error of the TOML reader. Where its words do not name the field, the
    /// line that it stands on does.
    pub fn syntax(&self, error: &toml::de::Error) -> HostError {
        let mut message = error.message().trim().replace('\n', ", ");
        message = message.replace("expected i64", "expected a whole number");
        if let Some((_, example)) = EXAMPLES.iter().find(|(missing, _)| message == *missing) {
            message = format!("{message}; write for example {example}");
        }
        let file = self.file.display();
        let line = self.line_of(error.span().map_or(0, |span| span.start));
        let key = self.text.lines().nth(line - 1).and_then(|line| line.split_once('='));
        let message = match key {
            Some((key, _)) if !message.contains(" field ") => {
                format!("{file}:{line}: {}: {message}", key.trim())
            }
            _ => format!("{file}:{line}: {message}"),
        };
        HostError::new(ErrorKind::Invalid, message)
    }

    pub fn line_of(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
    }

    pub fn name<T: FromStr<Err = NameError>>(
        &self,
        field: &str,
        name: &Spanned<String>,
    ) -> Result<T, HostError> {
        let parsed = name.get_ref().parse();
        parsed.map_err(|error: NameError| self.wrong(field, name.span(), &error.to_string()))
    }

    /// One address, or a list of them: one for each path.
    pub fn addresses(
        &self,
        field: &str,
        raw: &Spanned<toml::Value>,
    ) -> Result<Vec<SocketAddr>, HostError> {
        let list = match raw.get_ref() {
            toml::Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let wrong = |message: String| Err(self.wrong(field, raw.span(), &message));
        if !(1..=MOST_PATHS).contains(&list.len()) {
            return wrong(format!("{} addresses; 1 to {MOST_PATHS} are possible", list.len()));
        }
        let mut addresses = Vec::new();
        for value in list {
            let Some(address) = address(value) else {
                return wrong(format!(
                    "{value} is not an address; write \"IP:port\" with a port of 1 to 65535, \
                     for example \"10.0.0.1:7700\", or a list of these"
                ));
            };
            if addresses.contains(&address) {
                return wrong(format!("{address} is there twice"));
            }
            addresses.push(address);
        }
        Ok(addresses)
    }

    pub fn absolute(&self, field: &str, raw: Spanned<PathBuf>) -> Result<PathBuf, HostError> {
        if raw.get_ref().is_absolute() {
            return Ok(raw.into_inner());
        }
        let message =
            format!("\"{}\" is not an absolute path; start it with /", raw.get_ref().display());
        Err(self.wrong(field, raw.span(), &message))
    }
}

fn address(value: &toml::Value) -> Option<SocketAddr> {
    value.as_str()?.parse().ok().filter(|address: &SocketAddr| address.port() != 0)
}
