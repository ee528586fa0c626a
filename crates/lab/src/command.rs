//! Runs of the system's own programs.

use anyhow::{Context, Result, bail};
use std::io::ErrorKind;
use std::process::{Command, Output};

/// Runs a program to its end and returns what it printed; an exit code other
/// than 0 is an error that holds its stderr.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = output(program, arguments)?;
    if !output.status.success() {
        bail!(
            "`{program} {}` failed ({}): {}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program to its end, whatever its exit code.
pub(crate) fn output(program: &str, arguments: &[&str]) -> Result<Output> {
    match Command::new(program).args(arguments).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("the program `{program}` is missing: install the package {}", package(program))
        }
        result => result.with_context(|| format!("cannot run `{program}`")),
    }
}

fn package(program: &str) -> &str {
    match program {
        "ip" | "bridge" => "iproute2",
        "e2fsck" | "debugfs" | "mke2fs" => "e2fsprogs",
        "qemu-img" => "qemu-utils",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_missing_program_and_keep_stderr() {
        let error = run("understudy-no-such-program", &[]).unwrap_err();
        assert!(error.to_string().contains("is missing: install"), "{error}");
        let error = run("ip", &["link", "show", "no-such-link"]).unwrap_err();
        assert!(error.to_string().contains("no-such-link"), "{error}");
    }
}
