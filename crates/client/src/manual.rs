//! Files that packages ship beside a program, made from its own grammar: man pages and completions.

use crate::failure::{Exit, Failure, FailureKind};
use clap::{Command, Subcommand};
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use understudy_report::ErrorKind;

/// The commands that packages are made with.
#[derive(Debug, Subcommand)]
pub enum ManualCommand {
    /// Write the man pages of all commands into a directory; for packages.
    #[command(hide = true)]
    Manual {
        /// The directory.
        dir: PathBuf,
    },
    /// Print what completes command lines in a shell.
    #[command(hide = true)]
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Writes what a program's package needs of its `grammar`.
pub fn run(grammar: Command, command: &ManualCommand) -> Result<Exit, Failure> {
    match command {
        ManualCommand::Manual { dir } => write_pages(grammar, dir),
        ManualCommand::Completions { shell } => print_completions(grammar, *shell),
    }
}

/// Writes a page of section 1 for every command that is not hidden.
fn write_pages(grammar: Command, directory: &Path) -> Result<Exit, Failure> {
    let written =
        fs::create_dir_all(directory).and_then(|()| clap_mangen::generate_to(grammar, directory));
    written.map(|()| Exit::Ok).map_err(|error| {
        let message = format!("cannot write man pages into {}: {error}", directory.display());
        Failure::new(FailureKind::Host(ErrorKind::Invalid), message)
    })
}

fn print_completions(grammar: Command, shell: Shell) -> Result<Exit, Failure> {
    let written = io::stdout().write_all(&completions(grammar, shell));
    written
        .map(|()| Exit::Ok)
        .map_err(|error| Failure::internal(format!("cannot print the completions: {error}")))
}

fn completions(mut grammar: Command, shell: Shell) -> Vec<u8> {
    let name = grammar.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut grammar, name, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    /// A program with a command below another, and one that is hidden.
    fn grammar() -> Command {
        let restore = Command::new("restore").after_help("It must not be running.");
        let vm = Command::new("vm").subcommand(restore);
        Command::new("stage").subcommand(vm).subcommand(Command::new("ghost").hide(true))
    }

    #[test]
    fn every_command_has_a_page_and_no_hidden_one_has() {
        let directory = tempfile::tempdir().unwrap();
        let pages = directory.path().join("new");
        write_pages(grammar(), &pages).unwrap();
        let listed = fs::read_dir(&pages).unwrap();
        let mut written: Vec<String> =
            listed.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        written.sort();
        assert_eq!(written, ["stage-vm-restore.1", "stage-vm.1", "stage.1"]);
        let page = fs::read_to_string(pages.join("stage-vm-restore.1")).unwrap();
        assert!(page.contains("It must not be running."), "{page}");
    }

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let text = String::from_utf8(completions(grammar(), *shell)).unwrap();
            for name in ["stage", "vm", "restore"] {
                assert!(text.contains(name), "{shell}: {name}");
            }
        }
    }

    #[test]
    fn pages_that_cannot_be_written_are_named() {
        let failure = write_pages(grammar(), Path::new("/dev/null/pages")).unwrap_err();
        assert!(failure.message.contains("/dev/null/pages"), "{}", failure.message);
    }
}
