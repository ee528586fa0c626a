//! A load shaped like a compilation: per round it writes sources, starts one
//! short process per source that reads it, computes and writes an object,
//! links the objects into one file, and deletes everything.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

/// The hidden command of one "compiler" process: `SOURCE OBJECT`.
pub const COMPILE: &str = "load-compile";

const UNITS: usize = 16;
const PARALLEL: usize = 4;
const SOURCE_LINES: usize = 400;
/// Passes over a source: sets how much arithmetic goes with each file.
const PASSES: u64 = 200;

/// Builds in `directory` for ever; rests so long after every few sources.
pub fn build_forever(directory: &Path, pause_ms: u64) -> Result<(), String> {
    for round in 0.. {
        build_once(directory, round, Duration::from_millis(pause_ms))
            .map_err(|error| format!("load in {}: {error}", directory.display()))?;
    }
    Ok(())
}

fn build_once(directory: &Path, round: u64, pause: Duration) -> io::Result<()> {
    let tree = directory.join(format!("build-{}-{round}", std::process::id()));
    fs::create_dir_all(&tree)?;
    let units: Vec<(PathBuf, PathBuf)> = (0..UNITS)
        .map(|unit| (tree.join(format!("{unit}.c")), tree.join(format!("{unit}.o"))))
        .collect();
    for batch in units.chunks(PARALLEL) {
        let compilers: Vec<Child> = batch
            .iter()
            .map(|(source, object)| {
                fs::write(source, source_text(round))?;
                start_compiler(source, object)
            })
            .collect::<io::Result<_>>()?;
        for mut compiler in compilers {
            if !compiler.wait()?.success() {
                return Err(io::Error::other("a compiler process failed"));
            }
        }
        thread::sleep(pause);
    }
    link(&units, &tree.join("program"))?;
    fs::remove_dir_all(&tree)
}

fn source_text(round: u64) -> String {
    (0..SOURCE_LINES)
        .map(|line| {
            format!("static int value_{line} = {};\n", round.wrapping_mul(31) + line as u64)
        })
        .collect()
}

fn start_compiler(source: &Path, object: &Path) -> io::Result<Child> {
    Command::new("/proc/self/exe").arg(COMPILE).args([source, object]).spawn()
}

fn link(units: &[(PathBuf, PathBuf)], program: &Path) -> io::Result<()> {
    let objects: Vec<Vec<u8>> =
        units.iter().map(|(_, object)| fs::read(object)).collect::<io::Result<_>>()?;
    fs::write(program, objects.concat())?;
    fs::File::open(program)?.sync_all()
}

/// Reads `source`, hashes it many times, and writes the hashes to `object`.
pub fn compile(source: &Path, object: &Path) -> Result<(), String> {
    let text = fs::read(source).map_err(|error| format!("{}: {error}", source.display()))?;
    let hashes: Vec<u8> = (0..PASSES).flat_map(|pass| hash(pass, &text).to_le_bytes()).collect();
    fs::write(object, hashes).map_err(|error| format!("{}: {error}", object.display()))
}

/// FNV-1a, seeded.
fn hash(seed: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325 ^ seed, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
