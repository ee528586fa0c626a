use super::vm::VM_START_HELP;
use super::*;
use clap::CommandFactory;
use clap::error::ErrorKind;
use std::path::Path;
use understudy_daemon::config::HostConfig;
use understudy_qemu::VmDefinition;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

#[test]
fn the_grammar_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn global_options_stand_anywhere() {
    let before = parse("understudy --json --socket /x status db").unwrap();
    let after = parse("understudy status db --socket /x --json").unwrap();
    for cli in [before, after] {
        assert!(cli.output.json);
        assert_eq!(cli.socket, PathBuf::from("/x"));
        assert!(matches!(cli.command, Command::Status { vm: Some(vm) } if vm == "db"));
    }
}

#[test]
fn wrong_command_lines_are_refused() {
    let cases = [
        ("understudy", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
        ("understudy protect db", ErrorKind::MissingRequiredArgument),
        ("understudy protect db --to b --hz 0", ErrorKind::ValueValidation),
        ("understudy protect db --to b --hz 1001", ErrorKind::ValueValidation),
        ("understudy protect db --to b --policy often", ErrorKind::InvalidValue),
        ("understudy host", ErrorKind::MissingRequiredArgument),
        ("understudy vm destroy db", ErrorKind::InvalidSubcommand),
        ("understudy cluster restore shop@last", ErrorKind::ValueValidation),
        ("understudy cluster restore shop --mode fast", ErrorKind::ValueValidation),
        ("understudy cluster restore shop --working-set 3", ErrorKind::ValueValidation),
        ("understudy status --log =x= db", ErrorKind::ValueValidation),
    ];
    for (line, kind) in cases {
        assert_eq!(parse(line).unwrap_err().kind(), kind, "{line}");
    }
}

/// The indented lines of a help text.
fn example(help: &str) -> String {
    help.lines().filter_map(|line| line.strip_prefix("  ")).map(|l| format!("{l}\n")).collect()
}

#[test]
fn the_examples_in_the_help_are_right() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("db.img"), [0; 512]).unwrap();
    let file = &folder.path().join("example.toml");
    let host = HostConfig::from_toml(&example(HOST_HELP), file).unwrap();
    assert_eq!((host.peers.len(), host.arbiter.is_some()), (1, true));
    let vm = VmDefinition::from_toml(&example(VM_START_HELP), file).unwrap();
    assert_eq!((vm.disks.len(), vm.cards.len()), (1, 1));
    let helps = [AFTER_HELP, PROTECT_HELP, RECOVER_HELP, CLUSTER_HELP];
    for help in helps {
        let lines = example(help);
        for line in lines.lines().filter(|line| line.starts_with("understudy ")) {
            let command = line.split("  ").next().unwrap();
            parse(command).unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }
}

#[test]
fn the_examples_in_the_package_are_right() {
    let file = Path::new("example.toml");
    let host = include_str!("../../../../packaging/host.toml");
    let host = HostConfig::from_toml(host, file).unwrap();
    assert_eq!((host.peers.len(), host.arbiter.is_some(), host.tls.is_some()), (1, true, true));
    // The same, with a disk that is there.
    let image = tempfile::NamedTempFile::new().unwrap();
    let vm = include_str!("../../../../packaging/db.toml");
    let vm = vm.replace("/var/lib/libvirt/images/db.qcow2", image.path().to_str().unwrap());
    let vm = VmDefinition::from_toml(&vm, file).unwrap();
    assert_eq!((&*vm.name, vm.disks.len(), vm.cards.len()), ("db", 1, 1));
}

#[test]
fn the_help_documents_the_exit_codes() {
    let help = Cli::command().render_long_help().to_string();
    for code in 0..=5 {
        assert!(help.contains(&format!("\n  {code}  ")), "exit code {code} is missing:\n{help}");
    }
}

#[test]
fn the_manual_has_the_pages_that_the_help_has() {
    let pages = tempfile::tempdir().unwrap();
    let command = ManualCommand::Manual { dir: pages.path().to_owned() };
    understudy_client::manual::run(Cli::command(), &command).unwrap();
    let page = |name: &str| std::fs::read_to_string(pages.path().join(name));
    let host = page("understudy-host.1").unwrap();
    assert!(host.contains("SIGTERM") && host.contains("power_off_seconds"), "{host}");
    assert!(page("understudy-vm-start.1").is_ok() && page("understudy-manual.1").is_err());
}

#[test]
fn a_file_to_start_is_told_from_a_name() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("db");
    std::fs::write(&there, "").unwrap();
    let start = |what: &str| match parse(&format!("understudy vm start {what}")).unwrap().command {
        Command::Vm(VmCommand::Start { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    for file in ["db.toml", "./db", "vms/db", there.to_str().unwrap()] {
        assert_eq!(start(file), Startable::File(file.into()));
    }
    for name in ["db", "db.2", "toml"] {
        assert_eq!(start(name), Startable::Name(name.to_owned()));
    }
}

/// Help and README once named 7788 and 7700.
#[test]
fn help_and_readme_name_the_same_port() {
    let ports = |text: &str| -> Vec<String> {
        let quoted = text.split('"').filter_map(|part| part.rsplit_once(':'));
        let ports = quoted.filter(|(host, _)| host.starts_with("10.0.0."));
        ports.map(|(_, port)| port.to_owned()).collect()
    };
    let readme = ports(include_str!("../../../../README.md"));
    let help = ports(HOST_HELP);
    assert!(readme.len() >= 2 && help.len() >= 2, "{readme:?} {help:?}");
    assert!(readme.iter().chain(&help).all(|port| *port == help[0]), "{readme:?} {help:?}");
}

/// `/understudy` is also the beginning of `/understudy2`, another cluster's.
#[test]
fn what_the_documents_remove_from_etcd_is_of_one_prefix_alone() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut found = 0;
    for page in std::fs::read_dir(docs).unwrap().map(|page| page.unwrap().path()) {
        if page.extension().is_none_or(|ending| ending != "md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for command in text.split('`').filter(|code| code.starts_with("etcdctl del")) {
            found += 1;
            assert!(command.ends_with('/'), "{}: {command}", page.display());
        }
    }
    assert!(found > 0, "the runbook says how");
}
