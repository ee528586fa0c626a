use super::*;

const LONG: Duration = Duration::from_secs(30);

fn shell(script: &str, inherit: &[BorrowedFd<'_>], log: &Path) -> Result<Qemu, LaunchError> {
    Qemu::launch(&Launch {
        binary: Path::new("/bin/sh"),
        args: &["-c".into(), script.into()],
        env: &[("WORD".into(), "hello".into())],
        inherit,
        log,
    })
}

#[test]
fn its_end_and_last_words_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    std::fs::write(&log, "an earlier run\n").unwrap();
    let qemu = shell("echo $WORD >&2; exit 3", &[], &log).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    assert_eq!((exit.status.code(), exit.last_words.as_str()), (Some(3), "hello"));
    assert_eq!(qemu.try_wait().unwrap(), Some(exit), "asking again gives the same");
}

#[test]
fn it_inherits_what_it_is_given_and_nothing_else() {
    use std::io::Write;
    let folder = tempfile::tempdir().unwrap();
    let mut files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    files[0].write_all(b"given").unwrap();
    // A descriptor that somebody forgot to mark.
    nix::fcntl::fcntl(&files[1], nix::fcntl::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let script = format!(
        "cat /proc/self/fd/{}; cat /proc/self/fd/{} || echo closed",
        files[0].as_raw_fd(),
        files[1].as_raw_fd()
    );
    let qemu = shell(&script, &[files[0].as_fd()], &folder.path().join("log")).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    assert!(exit.last_words.starts_with("given"), "{exit}");
    assert!(exit.last_words.ends_with("closed"), "{exit}");
}

#[test]
fn dropping_it_kills_it() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = shell("exec sleep 1000", &[], &folder.path().join("log")).unwrap();
    assert_eq!(qemu.wait(Duration::ZERO).unwrap(), None);
    let pid = qemu.pid();
    drop(qemu);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_missing_program_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Qemu::launch(&Launch {
        binary: Path::new("/no/such/qemu"),
        args: &[],
        env: &[],
        inherit: &[],
        log: &folder.path().join("log"),
    })
    .unwrap_err();
    assert!(error.to_string().contains("cannot run /no/such/qemu"), "{error}");
}
