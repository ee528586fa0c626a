//! Choice of who goes first when the host's memory runs out.
//!
//! The kernel ends the process with the highest score. A QEMU that it ends costs one VM a
//! take-over; the daemon, with its backups' memory, would cost all of them. So the daemon is the
//! last to go, and each QEMU (`understudy_qemu`) more likely than other programs.

use std::fs;
use tracing::warn;

/// Score for the daemon; not -1000, which exempts: when nothing else is left, a host without memory
/// is worse.
const DAEMON_SCORE: &str = "-900";
const FILE: &str = "/proc/self/oom_score_adj";

/// Makes this process one that the kernel spares.
pub(crate) fn spare_daemon() {
    if let Err(error) = fs::write(FILE, DAEMON_SCORE) {
        warn!(
            "cannot write {FILE}: {error}; when memory runs out, the kernel may end this daemon, and \
             all its VMs and backups with it, before a QEMU: run it as root, or with CAP_SYS_RESOURCE"
        );
    }
}
