//! A host of its own: a clean Debian with its own systemd, in a namespace of the laboratory, where the
//! built package is installed as an administrator would.

use crate::stage::{LIMIT, run};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use understudy_lab::{Lab, wait_for};

/// Starts systemd as the first process of a Debian. Its arguments: the clean root, a directory for
/// what changes, the shared storage, the host's name, a control group of its own.
const BOOT: &str = r#"
set -e
base=$1 own=$2 shared=$3 name=$4 group=$5
root=$own/root
mkdir "$own/upper/etc"
echo "$name" > "$own/upper/etc/hostname"
mount --make-rprivate /
mount -t overlay -o "lowerdir=$base,upperdir=$own/upper,workdir=$own/work" overlay "$root"
mount -t cgroup2 none "$own/groups"
mkdir -p "$own/groups$group"
echo 0 > "$own/groups$group/cgroup.procs"
exec unshare --cgroup sh -c '
set -e
root=$1
mount -t proc proc "$root/proc"
mount -t sysfs sys "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 none "$root/dev"
mkdir -p "$root/dev/net" "$root/dev/pts" "$root/dev/shm" "$root/mnt/shared"
for device in null zero full random urandom tty net/tun userfaultfd kvm; do
    [ -e "/dev/$device" ] || continue
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for at in dev/shm run tmp; do mount -t tmpfs -o mode=1777 none "$root/$at"; done
chmod 755 "$root/run"
mount --bind "$2" "$root/mnt/shared"
hostname "$3"
exec chroot "$root" /usr/bin/env -i container=laboratory /lib/systemd/systemd
' sh "$root" "$shared" "$name"
"#;

/// A Debian that has booted. Dropping it cuts its power.
pub struct Installed {
    machine: Child,
    init: u32,
    directory: PathBuf,
    group: String,
}

impl Installed {
    /// Boots host `host` of the laboratory under this name, from the clean `root`.
    pub fn boot(lab: &Lab, host: &str, name: &str, root: &Path) -> Result<Installed> {
        let directory = lab.host_directory(host)?;
        for part in ["upper", "work", "root", "groups"] {
            fs::create_dir(directory.join(part))?;
        }
        let group = format!("/{}{host}", lab.name());
        let log = fs::File::create(directory.join("daemon.log"))?;
        let machine = lab
            .host(host)?
            .command("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"])
            .args(["sh", "-c", BOOT, "boot"])
            .args([root, &directory, &lab.arbiter_directory(), Path::new(name), Path::new(&group)])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let mut booted = Installed { machine, init: 0, directory, group };
        booted.init = wait_for("the first process", LIMIT, || booted.first_process())?;
        wait_for(&format!("{name} to boot"), LIMIT, || {
            let state = booted.command("systemctl is-system-running").output()?.stdout;
            let state = String::from_utf8_lossy(&state).trim().to_owned();
            Ok(["running", "degraded"].contains(&&*state).then_some(()))
        })
        .with_context(|| booted.log())?;
        Ok(booted)
    }

    /// `unshare` has forked it.
    fn first_process(&mut self) -> Result<Option<u32>> {
        let pid = self.machine.id();
        ensure!(self.machine.try_wait()?.is_none(), "it has ended: {}", self.log());
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        Ok(children.split_whitespace().next().and_then(|pid| pid.parse().ok()))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.join("daemon.log")).unwrap_or_default()
    }

    /// A path of the host's, as this machine sees it from its first process on.
    pub fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{inside}", self.init))
    }

    /// A command as root would type it on the host, in root's directory.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new("timeout");
        let init = self.init.to_string();
        command.args(["--signal=KILL", "300", "nsenter", "--target", &init]);
        command.args(["--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--root", "--wd"]);
        command.args(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C"]);
        command.args(["sh", "-c", &format!("cd /root && {line}")]).stdin(Stdio::null());
        command
    }

    /// Types a command that must succeed; returns all that it said.
    pub fn call(&self, line: &str) -> Result<String> {
        let Output { status, stdout, stderr } = self.command(line).output()?;
        let said = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let said = said.concat();
        ensure!(status.success(), "`{line}` failed ({status}): {said}\n{}", self.journal());
        Ok(said)
    }

    fn journal(&self) -> String {
        let output = self.command("journalctl --no-pager -n 60 -u understudy").output();
        output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default()
    }

    /// Cuts its power: all processes end at once.
    pub fn cut_power(&mut self) -> Result<()> {
        if self.machine.try_wait()?.is_none() {
            run("kill", &["-KILL", &self.init.to_string()])?;
            self.machine.wait()?;
        }
        Ok(())
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = self.cut_power();
        let _ = self.machine.kill();
        let _ = self.machine.wait();
        remove_groups(&self.group);
    }
}

/// systemd leaves the control groups of its services behind when it is killed.
fn remove_groups(group: &str) {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let point = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (point, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(format!("{point}{group}")))
    });
    if let Some(directory) = point.filter(|directory| directory.is_dir()) {
        let _ = run("find", &[&directory.to_string_lossy(), "-depth", "-type", "d", "-delete"]);
    }
}
