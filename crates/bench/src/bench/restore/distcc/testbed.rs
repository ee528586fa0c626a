//! The guests of the distcc section, and one restore of them.

use super::super::members::{Members, Shape, address, name};
use super::super::stage::ms;
use super::report::Restored;
use crate::cli::BenchRestoreArgs;
use anyhow::{Context, Result, ensure};
use std::time::Instant;
use understudy_lab::GuestShell;
use understudy_lab::scene::GuestKind;
use understudy_report::cluster::{Backoff, RestoreRequest, SnapshotRequest};
use understudy_snapshot::{Mode, SnapshotNumber};

const HOSTS: [&str; 2] = ["a", "b"];
const MEMBERS: usize = 3;
const MEMORY_MIB: u32 = 256;
/// Member that builds; all others compile for it.
const BUILDER: usize = 0;
/// Jobs that each of the others takes at once.
const JOBS: usize = 2;
/// File where the builder has a line for each build that has ended: the library's hash, or `failed`
/// and why.
const BUILDS: &str = "/tmp/builds";
/// Seconds for a build to end.
const BUILD_LIMIT: u32 = 240;

/// The guests, which build over and over.
pub struct Testbed {
    members: Members,
    /// Snapshot that is restored, and how many builds had ended then.
    taken: Option<(SnapshotNumber, usize)>,
}

impl Testbed {
    /// Boots them, and has them build.
    pub fn start(args: &BenchRestoreArgs) -> Result<Testbed> {
        let kind = GuestKind::Bench;
        let shape = Shape { kind, members: MEMBERS, memory_mib: MEMORY_MIB, hosts: &HOSTS };
        let members = Members::boot(args, &shape)?;
        for helper in helpers() {
            members.run(
                helper,
                &format!(
                    "exec distccd --daemon --no-detach --user www-data --allow 10.77.0.0/24 \
                     --jobs {JOBS} --log-level info --log-file /tmp/distccd.log"
                ),
            )?;
        }
        members.run(BUILDER, &build_line())?;
        Ok(Testbed { members, taken: None })
    }

    /// Takes the snapshot that is restored from then on, in a build. Returns how long one takes.
    pub fn prepare(&mut self) -> Result<f64> {
        let mut shell = self.members.shell(BUILDER)?;
        await_builds(&mut shell, 1)?;
        let began = Instant::now();
        await_builds(&mut shell, 2)?;
        let build_ms = ms(began.elapsed());
        for helper in helpers() {
            let done = "grep -q COMPILE_OK /tmp/distccd.log";
            let output = self.members.shell(helper)?.run(done)?;
            ensure!(output.code == 0, "{} has compiled nothing: {}", name(helper), output.text);
        }
        let before = await_builds(&mut shell, 2)?;
        let request = SnapshotRequest { recency: true, ..Default::default() };
        let snapshot = self.members.snapshot(request)?.0.number;
        // Otherwise nobody could tell which one was under way.
        let after = await_builds(&mut shell, before)?;
        ensure!(after == before, "a build of {build_ms:.0} ms was over before the snapshot was");
        self.taken = Some((snapshot, before));
        // Who was snapshotted goes on as well.
        await_builds(&mut shell, before + 1)?;
        Ok(build_ms)
    }

    /// Ends all and has them back: the build that was under way ends, and so does the next one.
    pub fn restore(&self, mode: Mode) -> Result<Restored> {
        self.members.end_guests()?;
        let (number, before) = self.taken.context("there is no snapshot")?;
        let request = RestoreRequest { number: Some(number), mode, ..Default::default() };
        let (report, began) = self.members.restore(request)?;
        let mut shell = self.members.shell(BUILDER)?;
        await_builds(&mut shell, before + 1)?;
        let finished_ms = ms(began.elapsed());
        await_builds(&mut shell, before + 2)?;
        let next_build_ms = ms(began.elapsed()) - finished_ms;
        let started_ms: Vec<f64> = report.members.iter().map(|member| member.started_ms).collect();
        let differences = helpers().map(|helper| (started_ms[helper] - started_ms[BUILDER]).abs());
        let backoff_ms = Backoff::of(differences.collect());
        Ok(Restored { started_ms, backoff_ms, finished_ms, next_build_ms })
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.members.diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        self.members.end()
    }
}

/// Waits in the guest until so many builds have ended, all with the same library; returns how many
/// have.
fn await_builds(shell: &mut GuestShell, count: usize) -> Result<usize> {
    let line = format!(
        "exec 2> /dev/null; n=0; until [ $(wc -l < {BUILDS}) -ge {count} ] || grep -q failed \
         {BUILDS}; do [ $((n += 1)) -lt {} ] || exit 1; sleep 0.1; done; cat {BUILDS}",
        BUILD_LIMIT * 10
    );
    let output = shell.run(&line)?;
    let ended = output.code == 0;
    ensure!(ended, "no {count} builds after {BUILD_LIMIT} s: {}", output.text);
    right_builds(&output.text)
}

fn right_builds(text: &str) -> Result<usize> {
    let builds: Vec<&str> = text.lines().collect();
    for build in &builds {
        ensure!(!build.starts_with("failed"), "a build {build}");
        ensure!(
            build == &builds[0],
            "a build made the library {build}, the first one {}",
            builds[0]
        );
    }
    Ok(builds.len())
}

fn helpers() -> impl Iterator<Item = usize> {
    (0..MEMBERS).filter(|&member| member != BUILDER)
}

/// Builds for ever. What fails on another guest fails here: nothing is compiled here instead.
fn build_line() -> String {
    let hosts: Vec<String> =
        helpers().map(|helper| format!("{}/{JOBS}", address(helper))).collect();
    let jobs = JOBS * hosts.len();
    format!(
        ": > {BUILDS}; mkdir -p /tmp/distcc; export DISTCC_DIR=/tmp/distcc DISTCC_FALLBACK=0 \
         DISTCC_HOSTS='{}'; cp -r /src /work/distcc && cd /work/distcc && while make -s clean && \
         make -s -j{jobs} CC='distcc gcc' CFLAGS=-O1 libz.a; do md5sum < libz.a >> {BUILDS}; done \
         > /tmp/make.log 2>&1; echo failed: $(tail -n 3 /tmp/make.log) >> {BUILDS}",
        hosts.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_failed_or_made_something_else_is_an_error() {
        assert_eq!(right_builds("ab\nab\n").unwrap(), 2);
        let refuse = |text| right_builds(text).unwrap_err().to_string();
        let failed = refuse("ab\nfailed: make: *** [zutil.o] Error 1\n");
        assert!(failed.contains("build failed") && failed.contains("zutil.o"), "{failed}");
        assert!(refuse("ab\nac\n").contains("library ac"));
    }
}
