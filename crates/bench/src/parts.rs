//! Parts that a laboratory is made of, and where that is found: the product's program and the test
//! guest.

use std::env;
use std::path::{Path, PathBuf};
use understudy_client::{Failure, FailureKind, ModeKind};
use understudy_lab::SceneOptions;
use understudy_qemu::programs::on_path;
use understudy_report::ErrorKind;

/// The product, whose daemons run on the laboratory's hosts.
const PRODUCT: &str = "understudy";
/// Directory where `make guests` puts its files.
const GUEST_FILES: &str = "target/guest";

/// The usual scene of the product, for whoever may build one; `guest` is where the test guest's
/// files are, if not in the usual place.
pub fn scene_options(guest: Option<&Path>) -> Result<SceneOptions, Failure> {
    if !nix::unistd::geteuid().is_root() {
        let message = "this makes network namespaces and taps, which needs root: run it as root";
        return Err(Failure::new(FailureKind::Host(ErrorKind::Invalid), message));
    }
    let options = SceneOptions::new(&product()?, &guest.map_or_else(guest_files, Path::to_owned));
    options.check().map_err(|error| not_found(format!("{error:#}")))?;
    Ok(options)
}

/// The scene's guest is protected in that mode.
pub fn in_mode(mut options: SceneOptions, mode: ModeKind) -> SceneOptions {
    if mode == ModeKind::Lockstep {
        options.accel = Some("tcg".to_owned());
        options.lockstep = true;
    }
    options
}

/// The product's program: the one beside this one, of the same build or package, else the first on
/// the PATH, which is said.
pub fn product() -> Result<PathBuf, Failure> {
    let own = this_program()?;
    let product = find_product(&own, on_path(PRODUCT))?;
    if product.parent() != own.parent() {
        tracing::warn!("the hosts run {}: there is none beside this program", product.display());
    }
    Ok(product)
}

fn find_product(own: &Path, on_path: Option<PathBuf>) -> Result<PathBuf, Failure> {
    let beside = own.with_file_name(PRODUCT);
    let found = if beside.is_file() { Some(beside.clone()) } else { on_path };
    found.ok_or_else(|| {
        not_found(format!(
            "there is no program `{PRODUCT}`, whose daemons run on the laboratory's hosts: it is neither {} \
             nor on the PATH; install the package {PRODUCT}, or build both with `make build`",
            beside.display()
        ))
    })
}

/// Path of this program's own file.
pub fn this_program() -> Result<PathBuf, Failure> {
    env::current_exe()
        .map_err(|error| Failure::internal(format!("cannot find this program: {error}")))
}

/// Directory beside the build that this program is part of, else below where it was called.
pub fn guest_files() -> PathBuf {
    let build = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.join("guest")));
    build.filter(|path| path.is_dir()).unwrap_or_else(|| GUEST_FILES.into())
}

fn not_found(message: String) -> Failure {
    Failure::new(FailureKind::Host(ErrorKind::NotFound), message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use understudy_client::Exit;

    #[test]
    fn the_product_beside_the_laboratory_comes_before_that_of_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let (own, beside) = (folder.path().join("understudy-lab"), folder.path().join(PRODUCT));
        let elsewhere = PathBuf::from("/elsewhere/understudy");
        assert_eq!(find_product(&own, Some(elsewhere.clone())), Ok(elsewhere.clone()));
        let failure = find_product(&own, None).unwrap_err();
        assert_eq!(failure.exit(), Exit::NotFound);
        for word in [beside.to_str().unwrap(), "PATH", "package understudy", "`make build`"] {
            assert!(failure.message.contains(word), "{word}: {}", failure.message);
        }
        fs::write(&beside, "").unwrap();
        assert_eq!(find_product(&own, Some(elsewhere)), Ok(beside));
    }
}
