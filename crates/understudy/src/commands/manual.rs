//! `understudy manual` and `understudy completions`: what packages ship beside the binary, made
//! from the grammar itself.

use crate::cli::Cli;
use crate::failure::{Exit, Failure, FailureKind};
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use understudy_daemon::ErrorKind;

/// Writes a page of section 1 for every command that is not hidden.
pub fn write_pages(directory: &Path) -> Result<Exit, Failure> {
    let written = fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), directory));
    written.map(|()| Exit::Ok).map_err(|error| {
        let message = format!("cannot write man pages into {}: {error}", directory.display());
        Failure::new(FailureKind::Host(ErrorKind::Invalid), message)
    })
}

/// Prints a shell's completions.
pub fn print_completions(shell: Shell) -> Result<Exit, Failure> {
    let written = io::stdout().write_all(&completions(shell));
    written
        .map(|()| Exit::Ok)
        .map_err(|error| Failure::internal(format!("cannot print the completions: {error}")))
}

fn completions(shell: Shell) -> Vec<u8> {
    let mut command = Cli::command();
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, ValueEnum};

    /// The names of the pages that a command and those below it are to have.
    fn pages(command: &Command, name: &str) -> Vec<String> {
        let below = command.get_subcommands().filter(|below| !below.is_hide_set());
        let below = below.flat_map(|below| pages(below, &format!("{name}-{}", below.get_name())));
        std::iter::once(format!("{name}.1")).chain(below).collect()
    }

    #[test]
    fn every_command_has_a_page_and_no_hidden_one_has() {
        let directory = tempfile::tempdir().unwrap();
        write_pages(&directory.path().join("new")).unwrap();
        let listed = fs::read_dir(directory.path().join("new")).unwrap();
        let mut written: Vec<String> =
            listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let mut expected = pages(&Cli::command(), "understudy");
        written.sort();
        expected.sort();
        assert_eq!(written, expected);
        assert!(expected.contains(&"understudy-vm-start.1".to_owned()), "{expected:?}");
        let page = fs::read_to_string(directory.path().join("new/understudy-host.1")).unwrap();
        assert!(page.contains("SIGTERM") && page.contains("power_off_seconds"), "{page}");
    }

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let text = String::from_utf8(completions(*shell)).unwrap();
            for command in Cli::command().get_subcommands().filter(|one| !one.is_hide_set()) {
                assert!(text.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }

    #[test]
    fn pages_that_cannot_be_written_are_named() {
        let failure = write_pages(Path::new("/dev/null/pages")).unwrap_err();
        assert!(failure.message.contains("/dev/null/pages"), "{}", failure.message);
    }
}
