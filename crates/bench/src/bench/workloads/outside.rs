//! Programs on the client's side.

use super::Bed;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// `timeout` and `env` end so when the program is not there.
const NOT_FOUND: i32 = 127;
/// `timeout` ends so when the time is over.
const TIMED_OUT: i32 = 124;
/// Starts programs that bring their libraries along.
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Length of a program's output that an error shows.
const EXCERPT: usize = 2000;

/// Output that a program printed, and how long it ran.
pub struct Outside {
    pub output: Vec<u8>,
    pub took: Duration,
}

impl Outside {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }
}

/// Runs a program in the client's namespace to its end, at most for `limit`; `input` is
/// the file that it reads.
pub fn run(
    bed: &Bed<'_>,
    limit: Duration,
    program: &str,
    arguments: &[&str],
    input: Option<&Path>,
) -> Result<Outside> {
    let stdin = match input {
        Some(path) => Stdio::from(
            File::open(path).with_context(|| format!("cannot open {}", path.display()))?,
        ),
        None => Stdio::null(),
    };
    let mut command = bed.lab.client().command("timeout");
    command.args(["--kill-after=5", &limit.as_secs().to_string(), program]).args(arguments);
    let begun = Instant::now();
    let output = command.stdin(stdin).output().context("cannot run `ip`")?;
    let took = begun.elapsed();
    let code = output.status.code();
    ensure!(
        code != Some(NOT_FOUND),
        "the program `{program}` is missing: scripts/setup installs it"
    );
    let line = || format!("{program} {}", arguments.join(" "));
    let said = || excerpt(&output.stdout, &output.stderr);
    ensure!(
        code != Some(TIMED_OUT),
        "`{}` did not end within {limit:?}; it printed: {}",
        line(),
        said()
    );
    ensure!(
        output.status.success(),
        "`{}` failed ({}); it printed: {}",
        line(),
        output.status,
        said()
    );
    Ok(Outside { output: output.stdout, took })
}

/// [`run`] of a program that came with the bench guest (`guests/bench`), with its own libraries.
pub fn run_ours(
    bed: &Bed<'_>,
    limit: Duration,
    program: &str,
    arguments: &[&str],
) -> Result<Outside> {
    let folder = bed.guest_files.join("bench/client").join(program);
    let [loader, file] = [LOADER, "program"].map(|name| folder.join(name));
    ensure!(file.is_file(), "there is no {}: build it with `make bench-guest`", file.display());
    let [loader, file, folder] = [&loader, &file, &folder].map(|path| path.to_string_lossy());
    let words = [&["--library-path", &folder, &file][..], arguments].concat();
    run(bed, limit, &loader, &words, None)
}

fn excerpt(stdout: &[u8], stderr: &[u8]) -> String {
    let end = |bytes: &[u8]| {
        let from = bytes.len().saturating_sub(EXCERPT);
        String::from_utf8_lossy(&bytes[from..]).trim().to_owned()
    };
    format!("{}\n{}", end(stdout), end(stderr))
}
