use super::*;
use clap::CommandFactory;

#[test]
fn the_grammar_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_examples_in_the_help_are_right() {
    for help in [AFTER_HELP, SIMULATE_HELP, CHAOS_HELP, SUITE_HELP] {
        let examples: Vec<&str> =
            help.lines().filter(|line| line.starts_with("  understudy")).collect();
        assert!(!examples.is_empty(), "{help}");
        for line in examples {
            let command = line.trim_start().split("  ").next().unwrap();
            Cli::try_parse_from(command.split_whitespace())
                .unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }
}

#[test]
fn the_manual_has_a_page_for_each_measurement() {
    let pages = tempfile::tempdir().unwrap();
    let command = ManualCommand::Manual { dir: pages.path().to_owned() };
    understudy_client::manual::run(Cli::command(), &command).unwrap();
    for name in ["understudy-lab.1", "understudy-lab-demo.1", "understudy-lab-bench-pause.1"] {
        assert!(pages.path().join(name).is_file(), "{name}");
    }
}
