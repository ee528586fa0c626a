//! Commands inside the guest, through the run server of its tools.

use crate::lab::Lab;
use crate::namespace::in_namespace;
use crate::wait::connect_patiently;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Time for a command to end, or to start when it runs in the background.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
const CONNECT_LIMIT: Duration = Duration::from_secs(120);
/// More output than any test asks for.
const MOST_OUTPUT: usize = 64 * 1024 * 1024;

/// Output that a command in the guest printed, and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestOutput {
    /// The exit code, or 128 plus the signal that ended the shell.
    pub code: i32,
    /// Its stdout, then its stderr.
    pub text: String,
}

/// A connection to the guest's run server.
pub struct GuestShell {
    connection: BufReader<TcpStream>,
}

impl GuestShell {
    /// Connects from the laboratory's client.
    pub fn connect(lab: &Lab, guest: SocketAddr) -> Result<GuestShell> {
        let connection = in_namespace(&lab.client(), || {
            let connection = connect_patiently(guest, CONNECT_LIMIT)?;
            connection.set_nodelay(true)?;
            connection.set_read_timeout(Some(ANSWER_LIMIT))?;
            anyhow::Ok(connection)
        })?
        .with_context(|| format!("cannot connect to the guest's run server at {guest}"))?;
        Ok(GuestShell { connection: BufReader::new(connection) })
    }

    /// Starts a line of shell in the background; returns its pid in the guest.
    pub fn start(&mut self, line: &str) -> Result<u32> {
        let answer = self.ask(line)?;
        let pid = answer.strip_prefix("started ").and_then(|pid| pid.parse().ok());
        pid.with_context(|| format!("the guest cannot start `{line}`: {answer}"))
    }

    /// Runs a line of shell to its end.
    pub fn run(&mut self, line: &str) -> Result<GuestOutput> {
        let answer = self.ask(&format!("wait {line}"))?;
        let Some((code, length)) = parse_exit(&answer) else {
            bail!("the guest cannot run `{line}`: {answer}");
        };
        ensure!(length <= MOST_OUTPUT, "`{line}` printed {length} bytes in the guest");
        let mut text = vec![0; length];
        self.connection.read_exact(&mut text).with_context(|| format!("output of `{line}`"))?;
        Ok(GuestOutput { code, text: String::from_utf8_lossy(&text).into_owned() })
    }

    fn ask(&mut self, request: &str) -> Result<String> {
        ensure!(!request.contains('\n'), "a command for the guest is one line: `{request}`");
        let asked = self.connection.get_mut().write_all(format!("{request}\n").as_bytes());
        asked.with_context(|| format!("cannot send `{request}` to the guest"))?;
        let mut answer = String::new();
        let read = self.connection.read_line(&mut answer);
        read.with_context(|| format!("no answer of the guest to `{request}`"))?;
        let line = answer.strip_suffix('\n').map(str::to_owned);
        line.with_context(|| format!("the guest closed the connection at `{request}`"))
    }
}

/// `exit CODE LENGTH`
fn parse_exit(answer: &str) -> Option<(i32, usize)> {
    let (code, length) = answer.strip_prefix("exit ")?.split_once(' ')?;
    Some((code.parse().ok()?, length.parse().ok()?))
}
