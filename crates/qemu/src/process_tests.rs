use super::*;
use std::os::unix::process::ExitStatusExt;

const LONG: Duration = Duration::from_secs(30);

fn shell(script: &str, inherit: &[BorrowedFd<'_>], log: &Path) -> Result<Qemu, LaunchError> {
    Qemu::launch(&Launch {
        binary: Path::new("/bin/sh"),
        args: &["-c".into(), script.into()],
        env: &[("WORD".into(), "hello".into())],
        inherit,
        log,
        directory: None,
        user: None,
        descriptors: None,
    })
}

fn launch(binary: &str, args: &[OsString], log: &Path) -> Result<Qemu, LaunchError> {
    Qemu::launch(&Launch {
        binary: Path::new(binary),
        args,
        env: &[],
        inherit: &[],
        log,
        directory: None,
        user: None,
        descriptors: None,
    })
}

#[test]
fn its_end_and_last_words_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    std::fs::write(&log, "an earlier run\n").unwrap();
    let qemu = shell("echo $WORD >&2; exit 3", &[], &log).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    assert_eq!((exit.status.unwrap().code(), exit.last_words.as_str()), (Some(3), "hello"));
    assert_eq!(qemu.try_wait().unwrap(), Some(exit), "asking again gives the same");
}

#[test]
fn who_has_it_end_need_not_wait_and_who_waits_may_come_later() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = shell("exec sleep 600", &[], &folder.path().join("log")).unwrap();
    qemu.tell_to_end().unwrap();
    for _ in 0..2 {
        let exit = qemu.kill().unwrap();
        assert_eq!(exit.status.unwrap().signal(), Some(Signal::SIGKILL as i32));
    }
    qemu.tell_to_end().unwrap();
}

#[test]
fn one_that_is_only_asked_ends_with_who_asks() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let asked = std::thread::spawn(move || {
        Qemu::launch_for_thread(&Launch {
            binary: Path::new("/bin/sleep"),
            args: &["600".into()],
            env: &[],
            inherit: &[],
            log: &log,
            directory: None,
            user: None,
            descriptors: None,
        })
    });
    // Not dropped, which would kill it.
    let qemu = asked.join().unwrap().unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    assert_eq!(exit.status.unwrap().signal(), Some(Signal::SIGKILL as i32));
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
fn what_it_says_after_its_log_was_cut_is_heard() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    std::fs::write(&log, "an earlier run\n").unwrap();
    let script = format!("while [ -s {} ]; do :; done; echo late; exit 3", log.display());
    let qemu = shell(&script, &[], &log).unwrap();
    File::options().write(true).open(&log).unwrap().set_len(0).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    assert_eq!(exit.last_words, "late");
}

// Before, the kernel chose by size alone: the daemon, with the memory of its backups, came first.
#[test]
fn it_goes_before_its_daemon_when_memory_runs_out() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = shell("cat /proc/self/oom_score_adj", &[], &folder.path().join("log")).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    let ours = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    // Whoever started these tests may have made all of them as expendable already.
    let ours: i32 = ours.trim().parse().unwrap();
    assert_eq!(exit.last_words, ours.max(300).to_string());
}

// Before, a Ctrl-C at the daemon's terminal, which all processes get, was a power cut.
#[test]
fn what_tells_all_processes_to_end_is_not_for_it() {
    let folder = tempfile::tempdir().unwrap();
    // Not by a shell, which blocks none for what it starts.
    let args = ["SigBlk".into(), "/proc/self/status".into()];
    let qemu = launch("grep", &args, &folder.path().join("log")).unwrap();
    let exit = qemu.wait(LONG).unwrap().expect("it ends");
    let blocked = exit.last_words.strip_prefix("SigBlk:\t").unwrap_or(&exit.last_words);
    let blocked = u64::from_str_radix(blocked, 16).unwrap();
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM] {
        assert_ne!(blocked & 1 << (signal as i32 - 1), 0, "{signal}: {blocked:x}");
    }
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
    let error = launch("/no/such/qemu", &[], &folder.path().join("log")).unwrap_err();
    assert!(error.to_string().contains("cannot run /no/such/qemu"), "{error}");
}

#[test]
fn it_becomes_another_user_in_a_directory_that_this_one_cannot_reach() {
    assert!(nix::unistd::geteuid().is_root(), "needs root, as `make test` does");
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    let directory = folder.path().join("own");
    let user = crate::RunAs::OwnNumber.next();
    crate::user::give_directory(&directory, user).unwrap();
    let script = "id -u; id -g; cat /proc/self/status; echo made > here; ls ..";
    let qemu = Qemu::launch(&Launch {
        binary: Path::new("/bin/sh"),
        args: &["-c".into(), script.into()],
        env: &[],
        inherit: &[],
        log: &folder.path().join("log"),
        directory: Some(&directory),
        user,
        descriptors: None,
    })
    .unwrap();
    qemu.wait(LONG).unwrap().expect("it ends");
    let said = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let number: u32 = said.lines().next().unwrap().parse().unwrap();
    assert!(number >= 0x7000_0000, "{said}");
    for line in ["CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "Groups:\t \n"] {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert!(said.contains("Permission denied"), "{said}");
    assert_eq!(std::fs::read_to_string(directory.join("here")).unwrap(), "made\n");
}

#[test]
fn one_that_another_process_started_is_ended_too() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let started = shell("exec sleep 1000", &[], &log).unwrap();
    let pidfd = started.as_fd().try_clone_to_owned().unwrap();
    let adopted = Qemu::adopt(started.pid(), pidfd, log, started.log_start());
    signal(adopted.as_fd(), Signal::SIGSTOP).unwrap();
    adopted.go_on().unwrap();
    assert_eq!(adopted.try_wait().unwrap(), None);
    let exit = adopted.kill().unwrap();
    assert_eq!((exit.to_string().as_str(), exit.status), ("QEMU ended", None));
    assert_eq!(adopted.kill().unwrap(), exit, "a second time");
    assert_eq!(started.wait(LONG).unwrap().unwrap().status.unwrap().code(), None);
}
