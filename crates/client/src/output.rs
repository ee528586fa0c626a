//! Output of a command: what goes to stdout, and the log on stderr.

use crate::failure::Failure;
use clap::Args;
use nix::sys::stat::fstat;
use serde::Serialize;
use std::io::{self, ErrorKind, IsTerminal, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Options for how a command answers.
#[derive(Debug, Args)]
pub struct OutputOptions {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub json: bool,

    /// What to log to stderr: error, warn, info, debug or trace, or a filter
    /// such as `warn,understudy_daemon=debug`.
    #[arg(long, global = true, env = "UNDERSTUDY_LOG", value_name = "LEVEL", value_parser = log_filter)]
    pub log: Option<String>,
}

fn log_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

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

/// Sends the log to stderr, at the level that the user wants, or at the command's. Where stderr is
/// systemd's journal, that gets the fields too: `journalctl VM=db`.
pub fn start_log(wanted: Option<&str>, default: &str) {
    let filter = EnvFilter::new(wanted.unwrap_or(default));
    if is_journal()
        && let Ok(journal) = tracing_journald::layer()
    {
        tracing_subscriber::registry().with(filter).with(journal.with_field_prefix(None)).init();
        return;
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // That a line cannot be written would be told on stderr, where it cannot be written either: a panic. Who outlives its
        // terminal, or whoever reads its log, goes on without one.
        .log_internal_errors(false)
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
