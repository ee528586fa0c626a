//! What goes to stdout, and the log on stderr.

use crate::cli::{Cli, Command};
use crate::failure::Failure;
use nix::sys::stat::fstat;
use serde::Serialize;
use std::io::{self, ErrorKind, IsTerminal, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

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

/// Sends the log to stderr, at the level that the user or the command wants. Where stderr is
/// systemd's journal, that gets the fields too: `journalctl VM=db`.
pub fn start_log(cli: &Cli) {
    let default = if matches!(cli.command, Command::Host { .. }) { "info" } else { "warn" };
    let filter = EnvFilter::new(cli.log.as_ref().map_or(default, |level| level.as_str()));
    if is_journal()
        && let Ok(journal) = tracing_journald::layer()
    {
        tracing_subscriber::registry().with(filter).with(journal.with_field_prefix(None)).init();
        return;
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
}

/// Whether stderr is what systemd has connected to the journal (sd_journal_stream_fd(3)), and was
/// not redirected since.
fn is_journal() -> bool {
    let Some(stream) = std::env::var_os("JOURNAL_STREAM") else { return false };
    fstat(io::stderr()).is_ok_and(|stat| *stream == *format!("{}:{}", stat.st_dev, stat.st_ino))
}
