//! Loads of the guest while its accesses are noted: the papers' programs, as far as Debian has
//! them in small.

use clap::ValueEnum;
use serde::Serialize;

/// A program that runs for ever in the bench guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    /// gcc builds zlib, over and over.
    Compile,
    /// gzip packs 48 MiB of the root file system.
    Gzip,
    /// sysbench writes a buffer of 64 MiB, from its beginning to its end.
    Memory,
    /// bc computes pi.
    Pi,
    /// SQLite changes and reads rows of a table of some 30 MiB.
    Database,
    /// Redis, and ten clients in the same guest that read and write 50 000 keys at random.
    Redis,
}

impl Load {
    /// Lines of shell: preparations, and the one that runs for ever.
    pub fn lines(self) -> (&'static [&'static str], &'static str) {
        match self {
            Load::Compile => (
                &[
                    "rm -rf /work/compile && cp -r /src /work/compile && cd /work/compile && make -s CC=gcc \
                   CFLAGS=-O1 zutil.o",
                ],
                "cd /work/compile && while :; do make -s clean; make -s CC=gcc CFLAGS=-O1 libz.a; \
                 done",
            ),
            Load::Gzip => (
                &[
                    "dd if=/dev/vda of=/tmp/plain bs=1M count=48 2>/dev/null && gzip -c < /etc/passwd > \
                   /tmp/packed",
                ],
                "while :; do gzip -c < /tmp/plain > /tmp/packed; done",
            ),
            Load::Memory => (
                &["sysbench --version"],
                "exec sysbench memory --memory-block-size=64M --memory-total-size=100T --time=0 run",
            ),
            Load::Pi => (
                &["echo 'scale=3; 4*a(1)' | bc -l | grep 3.14"],
                "while :; do echo 'scale=2000; 4*a(1)' | bc -l > /tmp/pi; done",
            ),
            Load::Database => (
                &["rm -f /work/rows && sqlite3 /work/rows \"CREATE TABLE rows(id INTEGER PRIMARY \
                   KEY, value TEXT); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n \
                   WHERE i < 100000) INSERT INTO rows SELECT i, hex(randomblob(150)) FROM n;\""],
                "(echo 'PRAGMA synchronous = OFF; PRAGMA cache_size = -40000;'; yes \"UPDATE rows \
                 SET value = hex(randomblob(150)) WHERE id = (SELECT 1 + abs(random()) % 100000); \
                 SELECT length(value) FROM rows WHERE id = (SELECT 1 + abs(random()) % 100000);\") | \
                 sqlite3 /work/rows > /dev/null",
            ),
            Load::Redis => (
                &[
                    "redis-server --save '' --dir /work --daemonize yes",
                    "n=0; until redis-cli ping; do [ $((n += 1)) -lt 100 ] || exit 1; sleep 0.1; \
                     done",
                    "redis-benchmark -q -t set -r 50000 -n 100000 -d 300 -P 16",
                ],
                "exec redis-benchmark -q -l -t get,set -r 50000 -d 300 -c 10",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_lines_for_the_guests_shell() {
        for load in Load::value_variants() {
            let (first, last) = load.lines();
            assert!(first.iter().chain([&last]).all(|line| !line.contains('\n')), "{load:?}");
            // It runs for ever, or until its power is cut.
            let endless = ["while :", "yes ", "--time=0", " -l "];
            assert!(endless.iter().any(|words| last.contains(words)), "{load:?}");
        }
    }
}
