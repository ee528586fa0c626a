//! `understudy vm import`.

use crate::cli::{ImportArgs, ImportSource};
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use understudy_client::{Exit, Failure, FailureKind, output};
use understudy_import::{Finding, Import, Outcome, Surroundings, Template, libvirt, proxmox, qemu};
use understudy_qemu::VmDefinition;
use understudy_report::ErrorKind;

/// The report that `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    findings: &'a [Finding],
    definition: &'a Option<VmDefinition>,
}

/// Reports what becomes of a VM, and writes its definition.
pub fn run(args: &ImportArgs, json: bool) -> Result<Exit, Failure> {
    let surroundings = Surroundings {
        name: args.name.clone(),
        bridges: args.bridge.iter().cloned().collect(),
        volumes: args.volume.iter().map(|(name, path)| (name.clone(), path.into())).collect(),
    };
    let mut import = match &args.source {
        ImportSource { libvirt: Some(domain), .. } => {
            libvirt(&text(domain, &["virsh", "dumpxml", "--inactive"])?, &surroundings)
        }
        ImportSource { proxmox: Some(id), .. } => {
            proxmox(&text(id, &["qm", "config"])?, &surroundings)
        }
        ImportSource { qemu: Some(line), .. } => qemu(line, &surroundings),
        ImportSource { .. } => return Err(invalid("name what is to be imported".to_owned())),
    };
    let mut notes: Vec<String> = import.findings.iter().map(ToString::to_string).collect();
    if import.definition.as_mut().is_some_and(begin_tpm) {
        notes.push("this host has no state of its TPM: it begins with a new one".to_owned());
    }
    if json {
        output::json(&Report { findings: &import.findings, definition: &import.definition })?;
    }
    let print = |text: &str| if json { Ok(()) } else { output::print(text) };
    let Some(definition) = &import.definition else {
        print(&(notes.join("\n") + "\n"))?;
        return Err(refusal(&import));
    };
    let toml = toml::to_string(definition)
        .map_err(|error| Failure::internal(format!("cannot write TOML: {error}")))?;
    let Some(file) = &args.output else {
        notes.extend(import.copies.iter().map(|Template { from, to }| {
            format!("first copy {} to {}, which --output does, too", from.display(), to.display())
        }));
        let comments: String = notes.iter().map(|note| format!("# {note}\n")).collect();
        print(&(comments + &toml))?;
        return Ok(Exit::Ok);
    };
    write(file, &toml, &import.copies)?;
    print(&(notes.join("\n") + "\n"))?;
    Ok(Exit::Ok)
}

/// A TPM that has not been used yet has no state to begin with.
fn begin_tpm(definition: &mut VmDefinition) -> bool {
    let absent = definition.tpm_state.take_if(|directory| !directory.is_dir());
    absent.is_some()
}

fn invalid(message: String) -> Failure {
    Failure::new(FailureKind::Host(ErrorKind::Invalid), message)
}

fn refusal(import: &Import) -> Failure {
    let refused = import.findings.iter().filter(|it| it.outcome == Outcome::Refused);
    let refused: Vec<String> =
        refused.map(|it| format!("line {}: {}: {}", it.line, it.what, it.why)).collect();
    invalid(format!("it cannot be protected as it is: {}", refused.join("; ")))
}

/// The content of a file of that name; else what the manager's own command prints of it.
fn text(what: &str, command: &[&str]) -> Result<String, Failure> {
    let path = Path::new(what);
    if path.is_file() {
        return fs::read_to_string(path).map_err(|error| invalid(format!("{what}: {error}")));
    }
    let line = format!("{} {what}", command.join(" "));
    let asked =
        Command::new(command[0]).args(&command[1..]).arg(what).output().map_err(|error| {
            let not_found = FailureKind::Host(ErrorKind::NotFound);
            Failure::new(
                not_found,
                format!("there is no file {what}, and `{line}` does not run: {error}"),
            )
        })?;
    if !asked.status.success() {
        let said = String::from_utf8_lossy(&asked.stderr).trim().replace('\n', "; ");
        let message = format!("there is no file {what}, and `{line}` failed: {said}");
        return Err(Failure::new(FailureKind::Host(ErrorKind::NotFound), message));
    }
    String::from_utf8(asked.stdout).map_err(|_| invalid(format!("`{line}` printed no UTF-8")))
}

/// Writes the definition and makes, beside it, the files that it names and that are not there.
fn write(file: &Path, toml: &str, copies: &[Template]) -> Result<(), Failure> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let fail = |path: &Path, error: std::io::Error| invalid(format!("{}: {error}", path.display()));
    for Template { from, to } in copies {
        let to = folder.join(to);
        if !to.exists() {
            fs::copy(from, &to).map_err(|error| {
                let install = "install the package ovmf";
                invalid(format!(
                    "cannot copy {} to {}: {error}: {install}",
                    from.display(),
                    to.display()
                ))
            })?;
        }
    }
    let mut created = fs::File::create_new(file).map_err(|error| fail(file, error))?;
    created.write_all(toml.as_bytes()).map_err(|error| fail(file, error))
}
