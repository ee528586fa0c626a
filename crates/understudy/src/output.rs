//! What goes to stdout, and the log on stderr.

use crate::cli::{Cli, Command};
use crate::failure::Failure;
use serde::Serialize;
use std::io::{self, ErrorKind, IsTerminal, Write};
use tracing_subscriber::EnvFilter;

/// Prints `value` as one JSON document.
pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::internal(format!("cannot write JSON: {error}")))?;
    text.push('\n');
    print(&text)
}

/// Prints `text` as it is. A reader that has seen enough (`| head`) is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::internal(format!("cannot write to stdout: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints `value` as JSON, or what `human` makes of it.
pub fn show<T: Serialize>(
    json_wanted: bool,
    value: &T,
    human: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    if json_wanted { json(value) } else { print(&human(value)) }
}

/// Sends the log to stderr, at the level that the user or the command wants.
pub fn start_log(cli: &Cli) {
    let default = if matches!(cli.command, Command::Host { .. }) { "info" } else { "warn" };
    let level = cli.log.as_ref().map_or(default, |level| level.as_str());
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(level))
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
}
