//! gcc builds zlib in the guest.

use super::{Bed, Sample, Scale, aside};
use anyhow::Result;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(900);

/// A fresh copy of the sources. One file is compiled and removed again, so that the
/// compiler is in the page cache, as it is whenever it was used before.
const PREPARE: &str = "rm -rf /work/compile && cp -r /src /work/compile && cd /work/compile && \
                       make -s CC=gcc CFLAGS=-O1 zutil.o && rm zutil.o && sync";
/// The library, or a part of it.
const LIBRARY: &str = "libz.a";
const PART: &str = "adler32.o compress.o uncompr.o zutil.o gzclose.o inffast.o";

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let mut shell = bed.shell()?;
    aside(&mut shell, PREPARE)?;
    let goals = scale.of(LIBRARY, PART);
    let line = format!("cd /work/compile && make -s CC=gcc CFLAGS=-O1 {goals}");
    let output = shell.run(&line, LIMIT)?.expect_success(&line)?;
    aside(&mut shell, &format!("cd /work/compile && ls {goals} && rm -rf /work/compile && sync"))?;
    Ok(Sample::seconds(output.took))
}
