//! Progress of the first synchronisation, on stderr.

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};
use understudy_report::Protection;

/// Time between two lines that are printed where a bar cannot be drawn.
const LINE_INTERVAL: Duration = Duration::from_secs(2);
const TEMPLATE: &str = "{msg}\n[{bar:40}] {percent} %";

/// Shows how far a synchronisation has come.
pub enum SyncProgress {
    /// Bar on a terminal.
    Bar(ProgressBar),
    /// Lines in a log, one now and then.
    Lines {
        /// Time at which the last line was printed.
        last: Option<Instant>,
    },
    /// No progress.
    Hidden,
}

impl SyncProgress {
    /// Progress as it fits stderr; nothing when `hidden`.
    pub fn new(hidden: bool) -> SyncProgress {
        if hidden {
            return SyncProgress::Hidden;
        }
        if !io::stderr().is_terminal() {
            return SyncProgress::Lines { last: None };
        }
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
        SyncProgress::Bar(ProgressBar::new(0).with_style(style.progress_chars("=> ")))
    }

    /// Shows the newest state.
    pub fn update(&mut self, protection: &Protection) {
        let Protection::Syncing { peer, done_bytes, total_bytes, remaining_seconds } = protection
        else {
            return;
        };
        let text = || syncing(peer, *done_bytes, *total_bytes, *remaining_seconds);
        match self {
            SyncProgress::Bar(bar) => {
                bar.set_length(*total_bytes);
                bar.set_position(*done_bytes);
                bar.set_message(text());
            }
            SyncProgress::Lines { last } => {
                if last.is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
                    eprintln!("{}", text());
                    *last = Some(Instant::now());
                }
            }
            SyncProgress::Hidden => {}
        }
    }

    /// Clears the bar away.
    pub fn finish(self) {
        if let SyncProgress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

/// Progress of the first synchronisation, in one line.
pub fn syncing(peer: &str, done: u64, total: u64, seconds: Option<f64>) -> String {
    // Nobody knows how much there is to copy before the backup's QEMU stands.
    if total == 0 {
        return format!("syncing to {peer}: {peer} prepares");
    }
    let left = match seconds {
        Some(seconds) => format!(", about {:.0} s left", seconds.max(0.0).ceil()),
        None => String::new(),
    };
    format!("syncing to {peer}: {} of {}{left}", HumanBytes(done), HumanBytes(total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_under_way_shows_bytes_and_an_estimate() {
        let mebibyte = 1024 * 1024;
        let text = syncing("b", 10 * mebibyte, 40 * mebibyte, Some(2.2));
        assert_eq!(text, "syncing to b: 10.00 MiB of 40.00 MiB, about 3 s left");
        assert_eq!(syncing("b", 0, mebibyte, None), "syncing to b: 0 B of 1.00 MiB");
        assert_eq!(syncing("b", 0, 0, None), "syncing to b: b prepares");
    }
}
